"""`merge --greedy`: only drafts whose average is at least as good as without them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import draftsmith as ds
from draftsmith.soup import greedy_soup

Door = Callable[..., tuple[int, str, str]]


def test_from_the_best_on_each_joins_that_does_not_lower_the_average() -> None:
    worth = {"a": 0.5, "b": 0.6, "c": 0.55, "d": 0.1}
    asked: list[tuple[str, ...]] = []

    def together(sources: Sequence[str]) -> float:
        asked.append(tuple(sources))
        return {("b", "c"): 0.6, ("b", "c", "a"): 0.59, ("b", "c", "d"): 0.7}[tuple(sources)]

    assert greedy_soup(worth, together) == ["b", "c", "d"]
    # In the order of their own worth; one that was refused is not in the later averages.
    assert asked == [("b", "c"), ("b", "c", "a"), ("b", "c", "d")]
    assert greedy_soup({"a": 0.2, "b": 0.3}, lambda sources: 0.29) == ["b"]


@pytest.fixture
def drafts(target_dir: str, tmp_path: Path) -> list[str]:
    """The target itself moved a little in two directions, and far in a third."""
    made = []
    for name, seed, size in (("near", 1, 0.05), ("other", 2, 0.05), ("far", 3, 0.6)):
        model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=size)
        model.save_pretrained(tmp_path / name)
        made.append(str(tmp_path / name))
    return made


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"The quick brown fox jumps {i}"}) + "\n" for i in range(12)))
    return str(path)


def test_the_soup_is_the_mean_of_what_was_chosen(
    drafts: list[str], prompts: str, target_dir: str, tmp_path: Path, door: Door
) -> None:
    words = ["--greedy", prompts, "--target", target_dir, "--max_new_tokens", 12]
    code, out, err = door("merge", "--draft", *drafts, "--out", tmp_path / "soup", *words, "--json")
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    chosen, alone = list(found["weights"]), found["greedy"]
    assert set(alone) == set(drafts) and chosen[0] == max(alone, key=alone.get)
    # Two small errors in different directions average out; the far one would not.
    assert set(chosen) == set(drafts[:2])
    parts = [load_file(Path(each) / "model.safetensors") for each in chosen]
    for name, tensor in load_file(tmp_path / "soup" / "model.safetensors").items():
        torch.testing.assert_close(tensor, (parts[0][name] + parts[1][name]) / 2)
    # Where no average is as good as the best, the soup is that draft.
    config = ds.MergeConfig(
        out=str(tmp_path / "one"), draft=[drafts[0], drafts[2]], greedy=prompts, target=target_dir, max_new_tokens=12
    )
    assert ds.merge(config)["weights"] == {drafts[0]: 1}
    near, one = (load_file(Path(each) / "model.safetensors") for each in (drafts[0], tmp_path / "one"))
    for name, tensor in near.items():
        torch.testing.assert_close(one[name], tensor)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"greedy": "p.jsonl"}, "target: --greedy needs it"),
        ({"target": "t"}, "target: --greedy needs it"),
        ({"greedy": "p.jsonl", "target": "t", "base": "c"}, "greedy: chooses among several"),
        ({"greedy": "p.jsonl", "target": "t", "draft": ["a=0.5", "b=0.5"]}, "greedy: chooses among several"),
        ({"greedy": "p.jsonl", "target": "t", "draft": ["a", "a"]}, "--draft a: is named twice"),
        ({"draft": ["a=0.3", "a=0.7"]}, "--draft a: is named twice"),
        ({"draft": ["a=0.5"], "base": "a"}, "--draft a: is named twice"),
        ({"greedy": "p.jsonl", "target": "t", "max_prompts": 0}, "max_prompts: 0 must be at least 1"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], told: str) -> None:
    with pytest.raises(ds.InputError, match=told):
        ds.MergeConfig(out="o", **{"draft": ["a", "b"], **options})  # type: ignore[arg-type]
