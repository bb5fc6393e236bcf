"""Every kind of draft from its options to its checkpoint, and the checkpoint through the decoder.

Legend: T tokens, V vocabulary.
"""

import json

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.core.models import load_model
from draftsmith.core.sampling import Sampling, generator
from draftsmith.decode.engine import SpeculativeDecoder
from draftsmith.decode.propose import PROPOSERS
from draftsmith.drafts.heads import HEADS, head_kind
from draftsmith.drafts.heads.block import BlockHead
from draftsmith.drafts.heads.eagle3 import Eagle3Head
from draftsmith.drafts.heads.medusa import MedusaHeads
from draftsmith.drafts.load import load_draft
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainees import TRAINEES
from tests.train_laws import metrics

DEPTH = 3
# What each kind is trained with here; every kind of draft that there is stands in it.
OPTIONS = {
    "lm": "",
    "eagle": "--objective fkl",
    "eagle3": f"--objective fkl --draft_vocab_size 120 --head.norms eagle31 --head.num_layers 2 "
    f"--head.test_steps {DEPTH}",
    "mtp": f"--objective fkl --head.test_steps {DEPTH}",
    "medusa": f"--objective lk_hybrid:eta=10 --head.num_heads {DEPTH} --head.num_layers 2",
    "hydra": f"--objective fkl --head.num_heads {DEPTH} --head.step_decay 1.0",
    "dflash": f"--objective ce@dpace --head.num_layers 2 --head.block_size {DEPTH + 1}",
    "dspark": f"--objective 0.1*ce+1.8*tvd --head.block_size {DEPTH} --head.anchors 5",
    "jetspec": "--objective fkl --draft_vocab_size 120 --head.num_layers 1 --head.block_size 4 "
    "--head.window 9",
}
PARTS = ("eagle3", "jetspec")
every_kind = pytest.mark.parametrize("kind", TRAINEES)
every_head = pytest.mark.parametrize("kind", HEADS)


def words(kind, target_dir, draft_dir, distilled):
    run = (
        f"train --kind {kind} --target {target_dir} --data {distilled} --max_length 48 --steps "
        "24 --batch_size 8 "
        "--eval_every 6 --save_every 4 --heldout_fraction 0.2 --optim.lr 0.01 --device cpu"
    ).split()
    return [*run, *OPTIONS[kind].split(), *(["--draft", draft_dir] if kind == "lm" else [])]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def trained(kind, checkpoints, target_dir, draft_dir, distilled, door):
    """A checkpoint of this kind, made by the command."""
    out = checkpoints / kind
    if not out.exists():
        door.ok(*words(kind, target_dir, draft_dir, distilled), "--out", out)
    yield out


@every_kind
def test_training_raises_acceptance(kind, trained):
    judged = metrics(trained, "heldout_loss")
    record = json.loads((trained / "draftsmith.json").read_text())
    assert record["heldout_alpha"] > judged[0]["heldout_alpha"] + 0.02
    assert record["kind"] == ("draft-lm" if kind == "lm" else kind)
    assert head_kind(trained) == (None if kind == "lm" else kind)
    assert ("heldout_alpha_2" in judged[0]) == (kind != "lm")
    assert ("heldout_missing_mass" in judged[0]) == (kind in PARTS)
    assert ("confidence_error" in record) == (kind == "dspark")


class Listening:
    """A proposer that keeps, for every draft of a row, the text it began from, its tokens and their
    distributions.
    """

    def __init__(self, proposer):
        self._proposer = proposer
        self.drafts, self.hidden_layers = proposer.drafts, proposer.hidden_layers
        self.heard: list[tuple[list[int], list[int], Tensor]] = []

    def __getattr__(self, name):
        return getattr(self._proposer, name)

    def start(self, setup):
        assert len(setup.prompts) == 1
        session, text, heard = self._proposer.start(setup), list(setup.prompts[0]), self.heard

        class Heard:
            def propose(self, u_BN):
                proposal = session.propose(u_BN)
                assert proposal.q_BEV is not None
                heard.append(
                    (list(text), proposal.tokens_BM[0, 1:].tolist(), proposal.q_BEV[0].clone())
                )
                return proposal

            def commit(self, outcome):
                text.extend(outcome.tokens[0])
                session.commit(outcome)

            def select_rows(self, rows):
                session.select_rows(rows)

        return Heard()


@torch.no_grad()
def training_distributions(trainee, text, drafted):
    """Distributions `[V]` that training gives the drafted tokens behind `text`, all in one
    forward.
    """
    ids_T = torch.tensor(text + drafted)
    labels_T = torch.full_like(ids_T, IGNORE)
    labels_T[len(text) - 1 : -1] = ids_T[len(text) :]
    batch = Batch(ids_T[None], labels_T[None])
    draft = trainee.draft
    if isinstance(draft, PreTrainedModel):
        logits_TV = draft(batch.ids_BT).logits[0, len(text) - 1 : -1]
        return list(logits_TV.float().softmax(-1))
    states, _ = trainee.target.read(batch)
    found = []
    for depth, (pairs, hidden_NH) in zip(
        range(len(drafted)), trainee.drafts(batch, states), strict=False
    ):
        (place,) = (pairs.at_N == len(text) - 2).nonzero()[0].tolist()
        hidden_H = hidden_NH[place]
        if isinstance(draft, BlockHead):
            logits_V = draft.logits(draft.raw_logits(hidden_H), ids_T[len(text) - 1 + depth])
        elif isinstance(draft, Eagle3Head):
            logits_V = draft.to_target(draft.borrowed.projection.finish(draft.lm_head(hidden_H)))
        elif isinstance(draft, MedusaHeads):
            projection = draft[depth][-1]  # type: ignore[index]
            logits_V = draft.borrowed.projection.finish(projection(hidden_H))
        else:
            logits_V = draft.borrowed.project(hidden_H)
        found.append(logits_V.float().softmax(-1))
    return found


@every_kind
def test_the_checkpoint_drafts_as_it_was_trained(kind, trained, target_dir):
    """Law 5, through the files and the decoder: every distribution that a token was drafted from is
    training's.
    """
    target = load_model(target_dir, device="cpu", dtype="float32")
    draft = load_draft(str(trained), target, device="cpu", dtype="float32")
    name = "draft" if kind == "lm" else kind
    proposer = Listening(PROPOSERS[name].make([draft] if kind == "lm" else draft))
    decoder = SpeculativeDecoder(target, proposer, f"chain:{DEPTH}", "speculative")
    prompt = [0, 40, 7, 33, 90, 12]
    decoded = decoder.generate([prompt], Sampling(temperature=1.0), 40, [generator(3)], eos_ids=())
    assert sum(row.stats.accepted for row in decoded.generations) > 0
    # Evaluation of EAGLE-1 goes on its own features, as decoding does.
    trainee = TRAINEES[kind](draft, parse_objective("fkl"), target)
    trainee.eval()
    assert len(proposer.heard) >= 10
    compared = 0
    for text, drafted, q_EV in proposer.heard:
        for law_V, q_V in zip(training_distributions(trainee, text, drafted), q_EV, strict=True):
            torch.testing.assert_close(law_V, q_V, atol=1e-4, rtol=0)
            compared += 1
    assert compared == DEPTH * len(proposer.heard)


@every_head
def test_training_goes_on_from_a_head(
    kind, trained, target_dir, draft_dir, distilled, tmp_path, door
):
    run = words(kind, target_dir, draft_dir, distilled)[: -len(OPTIONS[kind].split())]
    run += f"--draft {trained} --out {tmp_path}/more --objective tvd --steps 2".split()
    if kind == "eagle3":
        door.refused(*run, "--head.norms", "eagle3")
    door.ok(*run)
    before = json.loads((trained / "draftsmith.json").read_text())["heldout_alpha"]
    assert metrics(tmp_path / "more")[0]["heldout_alpha"] == pytest.approx(before, abs=1e-6)
