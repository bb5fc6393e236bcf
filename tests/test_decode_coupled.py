"""The rule `coupled`: one text per seed and place, with any draft, any tree and none.

Worlds of five tokens, as in `tests.test_decode_lossless`, whose tables hold the rule too.
"""

from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import draftsmith as ds
from draftsmith.core.sampling import Sampling, generator, gumbel, noised, probs
from draftsmith.decode import VERIFIERS, DraftModelProposer, Proposer, SpeculativeDecoder, reference
from draftsmith.decode.propose.protocol import Proposal
from draftsmith.decode.verify.exact import exact
from draftsmith.decode.verify.tree_walk import Verdict
from tests.test_decode_lossless import PROMPTS, TREES, VARIANTS, VOCAB, decoder, llama

SAMPLINGS = {
    "T=0.7": Sampling(temperature=0.7),
    "T=1": Sampling(),
    "top_p": Sampling(top_p=0.8),
    "penalties": Sampling(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4),
}
ROWS = [0, 1, 2, 3]


def texts(
    made: SpeculativeDecoder, sampling: Sampling, rows: list[int] = ROWS, new: int = 20
) -> list[list[int]]:
    generators = [generator(row) for row in rows]
    prompts = [PROMPTS[row] for row in rows]
    batch = made.generate(prompts, sampling, new, generators, eos_ids=())
    return [row.output_ids for row in batch.generations]


def alone(compile: bool | str = False) -> SpeculativeDecoder:  # noqa: A002
    return SpeculativeDecoder(llama(2), verifier="coupled", compile=compile)


@cache
def own(name: str) -> list[list[int]]:
    return texts(alone(), SAMPLINGS[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_text_is_the_same_whatever_drafts(variant):
    tried = 0
    for tree, name in zip(TREES, cycle(SAMPLINGS)):  # noqa: B905 (endless)
        try:
            made = decoder(variant, tree, "coupled")
        except ValueError:
            continue  # not every proposer takes every tree
        tried += 1
        assert texts(made, SAMPLINGS[name]) == own(name)
        assert texts(made, SAMPLINGS[name], [2, 0]) == [own(name)[2], own(name)[0]]
    assert tried and len({tuple(text) for text in own("T=1")}) == len(ROWS)


def own_choice(row: int, sampling: Sampling, draft: bool) -> reference.Model:
    """A model's own choice at each place, as a one-hot distribution."""
    model = llama(7 if draft else 2)

    @torch.inference_mode()
    def choice(text: Any) -> Tensor:
        place = torch.tensor(len(text) - len(PROMPTS[row]))
        noise_V = gumbel(torch.tensor(generator(row).initial_seed()), place, VOCAB)
        scores_V = noised(model(torch.tensor([text])).logits[0, -1], sampling, noise_V)
        return torch.nn.functional.one_hot(scores_V.argmax(), VOCAB).float()

    return choice


@pytest.mark.parametrize("sampling", [SAMPLINGS["T=0.7"], SAMPLINGS["top_p"]], ids=str)
def test_calls_are_those_of_the_reference(sampling):
    for row in ROWS:
        expected = reference.decode(
            own_choice(row, sampling, draft=False),
            own_choice(row, sampling, draft=True),
            PROMPTS[row],
            widths=(1, 1, 1),
            max_new_tokens=20,
            generator=generator(0),
        )
        steps: list[tuple[int, ...]] = []
        SpeculativeDecoder(llama(2), DraftModelProposer(llama(7)), "chain:3", "coupled").generate(
            [PROMPTS[row]],
            sampling,
            20,
            [generator(row)],
            eos_ids=(),
            on_tokens=lambda _, ids, __, steps=steps: steps.append(tuple(ids)),  # type: ignore[misc]
        )
        assert steps == expected


def test_no_rule_sees_shared_noise_and_q():
    """A rule of one's own with shared noise decides about the target's choices, as at temperature
    0.
    """
    seen: list[tuple[Proposal, Tensor, Tensor | None]] = []

    def run(proposal: Proposal, p_BMV: Tensor, u_BU: Tensor | None) -> Verdict:
        seen.append((proposal, p_BMV, u_BU))
        return exact(proposal, p_BMV, u_BU)

    rule = replace(VERIFIERS["coupled"], name="mine", run=run)
    drafting: Proposer = DraftModelProposer(llama(7))
    made = SpeculativeDecoder(llama(2), drafting, "kary:2,2", rule)
    assert texts(made, Sampling()) == own("T=1")
    for proposal, p_BMV, u_BU in seen:
        assert u_BU is None and proposal.q_BEV is None
        assert torch.equal(p_BMV, probs(p_BMV, Sampling(temperature=0.0)))
    assert [name for name, rule in VERIFIERS.items() if rule.shared_noise] == ["coupled"]


def test_a_pair_writes_it_with_and_without_its_draft(target_dir, draft_dir):
    pair = ds.load_pair(target_dir, draft=draft_dir, device="cpu", dtype="float32")
    options: dict[str, Any] = {
        "verifier": "coupled",
        "temperature": 0.9,
        "num_samples": 2,
        "max_new_tokens": 24,
        "seed": 7,
    }
    prompts = ["The quick", "12 + 5"]
    expected = [output.output_ids for output in pair.generate(prompts, draft=[], **options)]
    assert len({tuple(ids) for ids in expected}) == 4
    for tree in ("chain:3", "kary:3,2", "eagle2:depth=3,beam=2,nodes=5"):
        outputs = pair.generate(prompts, tree=tree, **options)
        assert [output.output_ids for output in outputs] == expected
    options.pop("num_samples")
    text = "".join(pair.stream(prompts[0], **options))
    assert text == pair.generate(prompts[0], draft=[], **options).text
