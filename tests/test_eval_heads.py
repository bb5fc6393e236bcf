"""Heads and padded drafts in an evaluation: measured on what decoding drafts from; a run with
them.
"""

import importlib.util
import json
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from draftsmith.core.errors import RunError
from draftsmith.core.hidden_states import forward_with_states
from draftsmith.core.models import load_model
from draftsmith.core.sampling import Sampling, acceptance, probs
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode.method import Method
from draftsmith.drafts.doctor import examine
from draftsmith.drafts.heads import save_head
from draftsmith.drafts.heads.eagle import EagleHead
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.drafts.load import check_tokens_agree
from draftsmith.eval.alpha import Reader
from draftsmith.eval.config import EvalConfig
from draftsmith.eval.formulas import Continuation, draft_logits
from draftsmith.eval.run import evaluate
from draftsmith.eval.summary import summary as summarise
from tests.tiny_models import HEADS, V, alpha_sums, stirred_head, tiny_llama

SAMPLING = Sampling(temperature=1.0)
SAMPLINGS = [Sampling(temperature=0.0), SAMPLING, Sampling(temperature=0.7, top_k=5, top_p=0.9)]


@pytest.fixture(scope="module")
def target():
    return tiny_llama(0, layers=3, spread=0.5)


def texts(vocabulary=V):
    """Prompts of one, two, six and three tokens, and what follows."""
    random = torch.Generator().manual_seed(2)

    def draw(count):
        return torch.randint(0, vocabulary, (count,), generator=random).tolist()

    sizes = [(1, 6), (2, 3), (6, 5), (3, 1)]
    return [
        Continuation(f"p{i}", draw(prompt), draw(output))
        for i, (prompt, output) in enumerate(sizes)
    ]


def read(target, draft, row):
    """The target's and the draft's distributions `[T, V]` along a whole text, and the target's
    forward.
    """
    ids = torch.tensor([[*row.prompt_ids, *row.output_ids]])
    with torch.inference_mode():
        out, states = forward_with_states(target, draft.hidden_layers, input_ids=ids)
        read = dict(zip(draft.hidden_layers, states, strict=True))
        alone_B = torch.tensor([len(row.prompt_ids) == 1])
        at = torch.zeros(ids.shape[1], dtype=torch.long), torch.arange(ids.shape[1])
        logits_TV, _ = next(draft_logits(draft, read, ids, alone_B, 1, at))
        return probs(out.logits[0], SAMPLING), probs(logits_TV, SAMPLING), out


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("max_logits", [1, 2 * 4 * V * 3, 10**9])
def test_alpha_of_a_head_is_its_first_law_against_the_targets(name, max_logits, target):
    head, rows = stirred_head(name, target), texts()
    expected = []
    for row in rows:
        p_TV, q_TV, _ = read(target, head, row)
        where = slice(len(row.prompt_ids) - 1, len(row.prompt_ids) - 1 + len(row.output_ids))
        expected.append(float(acceptance(p_TV[where], q_TV[where]).sum()))
    cell = alpha_sums(target, head, rows, SAMPLING, batch_size=4, max_logits=max_logits)
    assert cell["alpha"] == pytest.approx(expected, abs=1e-4)
    assert cell["positions"] == [6, 3, 5, 1]


def test_a_head_that_breaks_at_its_second_depth_is_named_with_the_prompt(target, golden):
    head: Any = stirred_head("medusa", target)
    with torch.no_grad():
        head[1][-1].weight.fill_(torch.nan)
    method = Method.of("chain:2", "speculative")
    with golden.raises(RunError):
        Reader(target, {"mine": head}, SAMPLING, [method], batch_size=4).read(texts())


@pytest.mark.parametrize("own", [V - 6, V + 9])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_alpha_of_a_padded_vocabulary_by_hand(own, sampling, target):
    """Tokens that the draft lacks have q = 0; its padding does not count; unknown ones are read as
    its last.
    """
    draft, rows = tiny_llama(4, own, spread=0.5), texts()
    expected = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.output_ids][:-1]])
        with torch.inference_mode():
            p_TV = probs(target(input_ids=ids).logits[0], sampling)
            logits = draft(input_ids=ids.clamp(max=own - 1)).logits[0]
        q_TV = torch.zeros_like(p_TV)
        q_TV[:, : min(own, V)] = probs(logits[:, : min(own, V)], sampling)
        torch.testing.assert_close(q_TV.sum(-1), torch.ones(len(q_TV)))
        expected.append(float(torch.minimum(p_TV, q_TV)[len(row.prompt_ids) - 1 :].sum()))
    cell = alpha_sums(target, draft, rows, sampling, batch_size=3)
    assert cell["alpha"] == pytest.approx(expected, abs=1e-4)


def test_a_draft_that_calls_tokens_otherwise_is_refused(
    target_dir, draft_dir, other_vocabulary_dir, tmp_path, golden
):
    big, tokenizer = load_model(target_dir, device="cpu"), load_tokenizer(target_dir)
    tokenizer.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    words = values["model"]["vocab"]
    words["A"], words["B"] = words["B"], words["A"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    for source in (draft_dir, other_vocabulary_dir):
        draft = load_model(source, device="cpu")
        check_tokens_agree(source, draft, big, tokenizer)
        with golden.raises():
            check_tokens_agree(str(tmp_path), draft, big, tokenizer)


@pytest.fixture(scope="module")
def world(target_dir, draft_dir, other_vocabulary_dir, prompts_file, tmp_path_factory):
    """A language model, one of a padded vocabulary, and two heads; a chain, a tree from a file and
    one that grows.
    """
    root = tmp_path_factory.mktemp("heads")
    model = load_model(target_dir, device="cpu")
    save_head(EagleHead.fresh(model), root / "eagle")
    save_head(MedusaHeads.fresh(model, num_heads=2), root / "medusa")
    (root / "tree.json").write_text('{"parents": [-1, -1, 0]}')
    return EvalConfig(
        target=target_dir,
        draft=[
            f"base={draft_dir}",
            f"padded={other_vocabulary_dir}",
            f"eagle={root / 'eagle'}",
            f"medusa={root / 'medusa'}",
        ],
        id=[f"prose={prompts_file}"],
        out=str(root / "out"),
        tree=["chain:2", f"static:{root / 'tree.json'}", "eagle2:depth=2,beam=2,nodes=4"],
        max_prompts=3,
        max_new_tokens=6,
        speed_prompts=1,
        bootstrap=100,
        device="cpu",
    )


def evaluated(config):
    return evaluate(config).document


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_every_kind_of_draft_and_tree_goes_through_one_evaluation(world):
    found = evaluate(world)
    summary, results = summarise(found), cast(Any, found.document)
    assert [method["verifier"] for method in results["methods"]] == ["speculative", "mcsd", "exact"]
    assert results["methods"][1]["shape"] == {"parents": [-1, -1, 0], "stop": 0.0}
    assert [
        results["models"][name]["kind"] for name in ("target", "padded", "eagle", "medusa")
    ] == [
        "draft",
        "draft",
        "eagle",
        "medusa",
    ]
    assert results["models"]["padded"]["vocabulary"] == 300
    for source in world.draft:
        name, _, draft = source.partition("=")
        known = examine(target=world.target, draft=draft)["verdicts"]
        runs = [each["engine"] for each in known if each["serves"] and not each["gpu_only"]]
        assert results["models"][name]["engine"] == next(iter(runs), None)
    rows = [row for row in results["rows"] if row["set"] is not None and row["part"] is None]
    values: dict[str, list[Any]] = {}
    for row in rows:
        values.setdefault(row["figure"], []).append(row["value"])
    assert len(values["tau"]) == 4 * 3 * 2
    # Lossless, whatever drafts: at temperature 0 the target's own outputs.
    assert (
        all(method["lossless"] for method in results["methods"])
        and values["identical"] == [1.0] * 4 * 3
    )
    assert all(
        0 < row["value"] < 1 for row in rows if row["figure"] == "alpha" and row["temperature"]
    )
    assert results["clock"]["peak_memory_bytes"] > sum(
        m["memory_bytes"] for m in results["models"].values()
    )
    assert summary["peak_memory_bytes"] == results["clock"]["peak_memory_bytes"]
    assert all(seconds > 0 for seconds in values["latency_s_per_token"])


@pytest.mark.usefixtures("undrawn")
def test_a_lossy_rule_says_so_and_a_changed_file_is_another_tree(world, tmp_path):
    tree = tmp_path / "tree.json"
    tree.write_text('{"parents": [-1]}')
    config = replace(
        world,
        draft=world.draft[:1],
        out=str(tmp_path / "out"),
        tree=[f"static:{tree}"],
        verifier=["typical", "exact"],
        speed_prompts=1,
        temperature=[1.0],
    )
    results = evaluated(config)
    assert [method["lossless"] for method in results["methods"]] == [False, True]
    assert evaluated(config)["clock"]["cells_measured"] == 0
    tree.write_text('{"parents": [-1, 0]}')
    results = evaluated(config)
    # The target's outputs are kept; predictions (with alpha), decoding, twice, and the clock are of
    # another tree.
    assert results["clock"]["cells_measured"] == 4
    assert {row["depth"] for row in results["rows"] if row["figure"] == "accept"} == {1, 2}


def test_a_head_is_refused_a_tree_that_it_cannot_draft_before_anything_runs(
    world, tmp_path, golden
):
    config = replace(world, out=str(tmp_path / "out"), tree=["chain:3"])
    with golden.raises():
        evaluate(config)
    assert not (tmp_path / "out" / "cells").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
@pytest.mark.usefixtures("undrawn")
def test_a_target_in_four_bits_is_measured_as_itself(world, tmp_path):
    config = replace(
        world,
        draft=[world.draft[0], world.draft[2]],
        out=str(tmp_path / "out"),
        tree=["chain:2"],
        temperature=[0.0],
        speed_prompts=0,
        quantize="nf4",
        quantize_draft="none",
        require=["tau >= 0"],  # else nothing is decoded with drafts that cannot pay
    )
    results = evaluated(config)
    whole = results["models"]
    assert {key: row["quantize"] for key, row in whole.items()} == {
        "target": "nf4",
        "base": "none",
        "eagle": "none",
    }
    same = [(row["value"], row["n"]) for row in results["rows"] if row["figure"] == "identical"]
    assert same and set(same) == {(1.0, 3)}
    results = evaluated(replace(config, quantize_draft=None))
    small = results["models"]
    assert (
        small["base"]["quantize"] == "nf4"
        and small["base"]["fingerprint"] != whole["base"]["fingerprint"]
    )
    assert small["base"]["parameters"] == whole["base"]["parameters"]
    # What does not depend on the draft's precision is kept: the target's outputs, and the head's
    # alpha and decoding.
    assert results["clock"]["cells_reused"] == 3
    assert evaluated(replace(config, quantize="none"))["clock"]["cells_reused"] == 0
