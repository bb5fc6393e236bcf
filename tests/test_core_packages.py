"""What is optional, what it is installed with, and how much memory was held."""

import mmap
import resource
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from draftsmith_core.errors import EXTRAS, DraftsmithError, InputError, RunError, is_installed, require_package
from draftsmith_core.models import peak_memory, reset_peak_memory


def test_a_missing_package_is_one_line_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("json", "--json")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not is_installed("wandb")
    with pytest.raises(InputError) as refused:
        require_package("bitsandbytes", "--quantize nf4", "use --quantize none")
    assert str(refused.value) == (
        "--quantize nf4: needs bitsandbytes, which is not installed; "
        "pip install 'draftsmith[bnb]', or use --quantize none"
    )
    with pytest.raises(
        InputError, match=r"^deepspeed.json: needs deepspeed, .*; pip install 'draftsmith\[deepspeed\]'$"
    ):
        require_package("deepspeed", "deepspeed.json")


def test_every_extra_of_the_table_installs_its_package() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    published = project["optional-dependencies"]
    assert {"bitsandbytes", "deepspeed", "tensorboard", "wandb"} <= EXTRAS.keys()
    for package, extra in EXTRAS.items():
        assert any(requirement.startswith(package) for requirement in published[extra]), (package, extra)


def test_the_family_of_errors() -> None:
    assert issubclass(InputError, DraftsmithError) and issubclass(InputError, ValueError)
    assert issubclass(RunError, DraftsmithError) and issubclass(RunError, RuntimeError)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is reset through /proc")
def test_peak_memory_sees_what_was_held_since_the_reset() -> None:
    reset_peak_memory("cpu")
    before, kind = peak_memory(torch.device("cpu"))
    assert kind == "process_rss"
    size = 200 * 2**20
    # Pages of its own: what tests before this one have freed may be kept, and would be used again.
    with mmap.mmap(-1, size) as held:
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
    risen = peak_memory("cpu")[0]
    assert risen - before > size * 0.9
    reset_peak_memory("cpu")
    assert peak_memory("cpu")[0] < risen - size * 0.9
    assert peak_memory("cpu")[0] == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
