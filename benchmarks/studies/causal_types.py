"""Try a tiny random model of every causal architecture of transformers: what works with it, and why
not.

    python -m benchmarks.studies.causal_types [TYPE ...] [--out FILE.json]

Each check is a function of `Subject`. It raises an error if the check fails; the first line of the
error is the reason in the table. Results are exact in fp32: tokens are compared for equality, sums
to 1e-4.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.lib.tiny_types import VOCABULARY, causal_types, tiny_config, tiny_model
from draftsmith.core.io import JsonObject
from draftsmith.core.models import load_model
from draftsmith.core.sampling import Sampling, generator
from draftsmith.core.teacher_rows import unpack
from draftsmith.decode import DraftModelProposer, SpeculativeDecoder
from draftsmith.decode.propose.text_proposer import TextProposer, TextRow, Trie
from draftsmith.distill.score import score
from draftsmith.drafts.heads import HEADS, Head
from draftsmith.drafts.load import Draft
from draftsmith.eval.alpha import measure_alphas
from draftsmith.eval.counts import of_method
from draftsmith.eval.formulas import Continuation
from draftsmith.train.batch import IGNORE, Batch
from draftsmith.train.objective import parse_objective
from draftsmith.train.trainee import Trainee
from draftsmith.train.trainees import TRAINEES

PROMPTS = [[7, 31, 24, 11, 45, 9, 22, 16, 15], [27], [22, 17, 51, 28]]
NEW_TOKENS = 12
TOLERANCE = 1e-4


class Wrong(Exception):
    """A check found another result than it should."""


def require(holds: bool, why: str) -> None:
    """Raise `Wrong` unless it holds."""
    if not holds:
        raise Wrong(why)


@dataclass
class Subject:
    """A type, its tiny model, and the model's own greedy continuations without a cache."""

    name: str
    model: PreTrainedModel
    draft: PreTrainedModel = field(default_factory=lambda: tiny_llama(5))

    @cached_property
    def greedy(self) -> list[list[int]]:
        return [own_greedy(self.model, prompt) for prompt in PROMPTS]

    @cached_property
    def texts(self) -> list[Continuation]:
        found = []
        for row, (prompt, output) in enumerate(zip(PROMPTS, self.greedy, strict=True)):
            # Continuations differ in length, so that rows of a batch are padded.
            shorter = output[: len(output) - 2 * row]
            found.append(Continuation(str(row), prompt, shorter))
        return found


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """A language model with the vocabulary of all."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_attention_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """`[T, V]` of one text by the model's own forward, without a cache."""
    ids_1T = torch.tensor([list(ids)])
    output = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


@torch.inference_mode()
def own_greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """The continuation by the model's own forward, without a cache."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        last_V = logits_of(model, ids)[-1]
        ids.append(int(last_V.argmax()))
    return ids[len(prompt) :]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding in fp32."""
    allowed = TOLERANCE * max(largest(b), 1e-6)
    return a.shape == b.shape and largest(a - b) <= allowed


def largest(values: Tensor) -> float:
    """The largest absolute value."""
    return float(values.abs().max())


def finite(values: Tensor) -> bool:
    """Whether all values are finite."""
    return bool(values.isfinite().all())


@torch.inference_mode()
def runs_alike(subject: Subject) -> None:
    """The model gives the same logits twice, and later tokens do not change them."""
    ids = [*PROMPTS[0], *PROMPTS[2], *PROMPTS[1]]
    first = logits_of(subject.model, ids)
    require(finite(first), "its logits are not finite")
    require(torch.equal(first, logits_of(subject.model, ids)), "gives other logits the second time")
    for length in (5, 9):
        part = logits_of(subject.model, ids[:length])
        require(same(part, first[:length]), "its logits depend on later tokens")


def loads(subject: Subject) -> None:
    """A saved model is loaded and accepted."""
    with tempfile.TemporaryDirectory() as directory:
        subject.model.save_pretrained(directory)
        # Of a composite model's text part, transformers reads the composite config only.
        tiny_config(subject.name).save_pretrained(directory)
        loaded = load_model(directory, device="cpu", dtype="float32")
    with torch.inference_mode():
        found = logits_of(loaded, PROMPTS[0])
        require(same(found, logits_of(subject.model, PROMPTS[0])), "is another model when loaded")
    subject.model = loaded


def distils(subject: Subject) -> None:
    """Plain decoding in a batch that is refilled gives the model's own greedy outputs."""
    waiting = list(enumerate(PROMPTS))

    def source(free: int) -> list[tuple[int, list[int], torch.Generator]]:
        count = min(free, len(waiting))
        taken = [waiting.pop() for _ in range(count)]
        return [(row, prompt, generator(row)) for row, prompt in taken]

    decoder = SpeculativeDecoder(subject.model)
    outputs = dict(decoder.continuous(source, 2, Sampling(temperature=0.0), NEW_TOKENS, ()))
    found = [outputs[row].output_ids for row in range(len(PROMPTS))]
    require(found == subject.greedy, "other tokens than its own greedy decoding")


def scores(subject: Subject) -> None:
    """Teacher rows hold the model's own log-probabilities."""
    for text in subject.texts:
        ids = [*text.prompt_ids, *text.output_ids]
        packed = score(subject.model, text.prompt_ids, text.output_ids, 4)
        rows = unpack(packed)
        with torch.inference_mode():
            logits = logits_of(subject.model, ids).double()
        first = len(text.prompt_ids) - 1
        own = logits.log_softmax(-1)[first:-1]
        wanted = own.gather(1, torch.tensor(rows.ids_RK))
        stored = torch.tensor(rows.logprobs_RK).double()
        # Stored values have 16 bits.
        require(largest(stored - wanted) < 0.05, "other log-probabilities")


def trains(subject: Subject) -> None:
    """The model teaches a language model and every kind of head: a padded batch gives the sums of
    its rows, and a step has a finite gradient.
    """
    _trains(subject, "lm", subject.draft)
    for kind in HEADS.keys() - {"mtp"}:
        _trains(subject, kind, fresh_head(kind, subject.model))


def gets_mtp(subject: Subject) -> None:
    """The model teaches an MTP head, a layer of its own kind."""
    _trains(subject, "mtp", fresh_head("mtp", subject.model))


def fresh_head(kind: str, target: PreTrainedModel) -> Head:
    """A small untrained head of a kind."""
    options: JsonObject = {}
    if kind in ("medusa", "hydra"):
        options = {"num_heads": 2}
    if kind in ("dflash", "dspark", "jetspec"):
        options = {"num_layers": 1, "block_size": 4}
    return HEADS[kind].fresh(target, **options)


def _trains(subject: Subject, kind: str, draft: Draft) -> None:
    draft.train()
    trainee = TRAINEES[kind](draft, parse_objective("fkl"), subject.model)
    _one_step(trainee, subject.texts, kind)
    draft.eval()


def _one_step(trainee: Trainee, texts: Sequence[Continuation], kind: str) -> None:
    trainee.eval()
    whole = trainee(batch_of(texts))
    rows = [trainee(batch_of([text])) for text in texts]
    for key in ("loss", "tokens", "depth_alpha_D"):
        found, *parts = (getattr(sums, key).detach().double() for sums in (whole, *rows))
        together = torch.stack(parts).sum(0)
        require(same(found, together), f"{kind}: a padded batch has another {key} than its rows")
    trainee.train()
    loss = trainee(batch_of(texts)).loss
    loss.backward()
    gradients = [p.grad for p in trainee.parameters() if p.grad is not None]
    require(bool(gradients), f"{kind}: no gradient")
    require(all(map(finite, gradients)), f"{kind}: a gradient is not finite")
    moving = [gradient for gradient in gradients if gradient.any()]
    require(bool(moving), f"{kind}: all gradients are zero")
    trainee.zero_grad()


def batch_of(texts: Sequence[Continuation]) -> Batch:
    """The texts as a training batch, padded on the right."""
    width = max(len(text.prompt_ids) + len(text.output_ids) for text in texts)
    ids_BT = torch.zeros(len(texts), width, dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, IGNORE)
    for row, text in enumerate(texts):
        ids_T = torch.tensor([*text.prompt_ids, *text.output_ids])
        ids_BT[row, : len(ids_T)] = ids_T
        first = len(text.prompt_ids)
        labels_BT[row, first - 1 : len(ids_T) - 1] = ids_T[first:]
    seeds_B = torch.arange(len(texts))
    return Batch(ids_BT, labels_BT, seeds_B=seeds_B)


def is_trained(subject: Subject) -> None:
    """The model itself is trained as a draft language model."""
    other = tiny_llama(9)
    trainee = TRAINEES["lm"](tiny_model(subject.name, seed=1), parse_objective("fkl"), other)
    _one_step(trainee, subject.texts, "lm")


def measures(subject: Subject) -> None:
    """The acceptance of three drafts, one of this type, is that of each text alone."""
    head = fresh_head("eagle3", subject.model).eval()
    drafts: dict[str, Draft] = {"lm": subject.draft, "itself": subject.model, "eagle3": head}
    sampling = Sampling(temperature=1.0)
    together = measure_alphas(subject.model, drafts, subject.texts, sampling, batch_size=3)
    for name in drafts:
        alone: list[float] = []
        for text in subject.texts:
            only = {name: drafts[name]}
            each = measure_alphas(subject.model, only, [text], sampling, batch_size=1)
            alone += of_method(each[name])["alpha"]
        equal = same(torch.tensor(of_method(together[name])["alpha"]), torch.tensor(alone))
        require(equal, f"{name}: a batch has another alpha than its rows")
    itself = of_method(together["itself"])
    positions = torch.tensor(itself["positions"]).float()
    require(same(torch.tensor(itself["alpha"]), positions), "alpha of the target itself is not 1")


class Scripted(TextProposer):
    """Drafts known continuations with every third token wrong."""

    name = "scripted"

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self.known = [[*p, *o] for p, o in zip(PROMPTS, outputs, strict=True)]

    def row(self, prompt: Sequence[int]) -> "ScriptedRow":
        known = next(text for text in self.known if text[: len(prompt)] == list(prompt))
        return ScriptedRow(known, len(prompt))


class ScriptedRow(TextRow):
    """A row whose continuation is known."""

    def __init__(self, known: list[int], at: int) -> None:
        self.known = known
        self.at = at

    def draft(self, trie: Trie) -> None:
        following = self.known[self.at : self.at + 4]
        wrong = [
            (token + 1) % VOCABULARY if at % 3 == 0 else token
            for at, token in enumerate(following, self.at)
        ]
        trie.add(wrong)
        trie.add(following)

    def read(self, tokens: Sequence[int]) -> None:
        self.at += len(tokens)


def _decodes(subject: Subject, tree: str) -> None:
    decoder = SpeculativeDecoder(subject.model, Scripted(subject.greedy), tree)
    output = decoder.generate(PROMPTS, Sampling(temperature=0.0), NEW_TOKENS, eos_ids=())
    found = [row.output_ids for row in output.generations]
    require(found == subject.greedy, "other tokens than its own greedy decoding")
    accepted = sum(row.stats.accepted for row in output.generations)
    require(accepted > 0, "no token was accepted")


def decodes_chains(subject: Subject) -> None:
    """Chains with some wrong tokens, in a batch, give the model's own greedy outputs."""
    _decodes(subject, "chain:3")


def decodes_trees(subject: Subject) -> None:
    """Trees too."""
    _decodes(subject, "kary:2,2,1")


def drafts_chains(subject: Subject) -> None:
    """The model drafts for another target."""
    target = tiny_llama(9)
    wanted = [own_greedy(target, prompt) for prompt in PROMPTS]
    decoder = SpeculativeDecoder(target, DraftModelProposer(subject.model), "chain:3")
    output = decoder.generate(PROMPTS, Sampling(temperature=0.0), NEW_TOKENS, eos_ids=())
    found = [row.output_ids for row in output.generations]
    require(found == wanted, "other tokens than the target's own greedy decoding")


Check = Callable[[Subject], None]
# In the order of the table's columns.
CHECKS: dict[str, Check] = {
    "runs alike": runs_alike,
    "load": loads,
    "distil": distils,
    "score": scores,
    "train": trains,
    "be trained": is_trained,
    "teach MTP": gets_mtp,
    "measure": measures,
    "chain": decodes_chains,
    "tree": decodes_trees,
    "draft chains": drafts_chains,
}


def why(error: BaseException) -> str:
    """The first line of an error, with its kind unless it is ours."""
    text = str(error).strip()
    lines = text.splitlines() or [""]
    # The error of a strict config says what is wrong in its last line.
    line = lines[-1].strip() if "validat" in lines[0] else lines[0]
    kind = type(error)
    known = isinstance(error, Wrong) or kind.__module__.startswith("draftsmith")
    return line if known else f"{kind.__name__}: {line}"


def examine(name: str, checks: Sequence[str] = tuple(CHECKS)) -> dict[str, str]:
    """Return, for each check of a type, "" or why it fails. A type that cannot be made, or that
    does not run twice alike, has one entry.
    """
    try:
        subject = Subject(name, tiny_model(name))
    except Exception as error:  # the reason is the result
        return {"tiny": why(error)}
    found: dict[str, str] = {"tiny": ""}
    for check in checks:
        try:
            CHECKS[check](subject)
            found[check] = ""
        except Exception as error:  # the reason is the result
            found[check] = why(error)
            if check == "runs alike":
                break
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Try the types and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = {}
    for name in options.types or causal_types():
        found = examine(name)
        results[name] = found
        failed = {check: reason for check, reason in found.items() if reason}
        sys.stdout.write(f"{name}: {failed or 'all'}\n")
        sys.stdout.flush()
    if options.out:
        document = {"transformers": transformers.__version__, "types": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
