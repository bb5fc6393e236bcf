"""The pairs of `reproduction.py`: prompts, answers, drafts aligned on them, tuned targets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lib.shipped_pair import LARGER_DRAFT, PAIR, ROOT
from benchmarks.studies.objectives_data import ENDS, STARTS, pieces
from draftsmith.core.errors import InputError
from draftsmith.core.io import read_json, write_json_atomic, write_rows
from draftsmith.demo import corpus
from draftsmith.distill.config import DistillConfig
from draftsmith.distill.generate import distill
from draftsmith.train.config import Optim, TrainConfig
from draftsmith.train.training_run import train

COMMAND = "benchmarks/studies/reproduction.py"
STORIES = ROOT.parent / "shared" / "models" / "stories260k"
SUBJECTS = (
    *STARTS,
    "In the park",
    "A small bird",
    "Ben had a",
    "The old man",
    "Her friend",
    "It was a sunny day",
)
ENDINGS = (*ENDS, " went", " had", " with")
# Drafts from nothing take this many times the steps of others.
LONGER = 20
# Beginnings of texts, in characters.
LENGTH = 300


@dataclass(frozen=True, kw_only=True)
class Options:
    """Test the claims."""

    out: str
    """Directory for everything."""
    stories: str = str(STORIES)
    """The stories260k checkpoint; left out where there is none."""
    real: str | None = None
    """The directory that benchmarks/studies/real_pair.py has filled: its prompts and its drafts of
    SmolLM2-135M-Instruct.
    """
    real_target: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """The target of that study."""
    prompts: int = 40
    """Prompts of every set."""
    max_new_tokens: int = 48
    """Tokens per prompt."""
    steps: int = 120
    """Optimizer steps of every training."""
    bootstrap: int = 2000
    """Resamples behind every interval."""
    page: str | None = None
    """A page whose rows are written anew."""


@dataclass(frozen=True)
class Pair:
    """A target, its drafts and prompts, and the papers whose claims are tested on it.

    `larger` is set beside `aligned`, `alike` if both were trained so. `tuned` is the target after
    fine-tuning on text of the first of `other`, of which `other` has other pieces. `judge`: the
    draft that is measured under it. Claims about `larger` and `tuned` are left out where there is
    none.
    """

    name: str
    target: str
    base: str
    aligned: str
    sizes: str
    id: dict[str, str]
    other: dict[str, str]
    larger: str | None = None
    alike: bool = True
    tuned: str | None = None
    judge: str = "base"
    papers: tuple[str, ...] = ("MCSD", "EAGLE-2")
    dtype: str = "auto"


def demo_pair(out: Path, options: Options) -> Pair:
    """The demo's pair, aligned on prose; the larger draft is the benchmarks' one, trained on all
    three domains.
    """
    target, base = str(PAIR / "target"), str(PAIR / "base")
    held = {
        name: corpus.passages(name, corpus.split(name).heldout, LENGTH) for name in corpus.DOMAINS
    }
    prompts = {
        name: _rows(out / f"{name}.jsonl", rows[: options.prompts]) for name, rows in held.items()
    }
    asked = corpus.passages("prose", corpus.split("prose").train, LENGTH)[:384]
    answers = _answers(out, target, _rows(out / "train.jsonl", asked))
    # Text that the target has not seen, so that training on it changes the target.
    code = _rows(out / "tuning.jsonl", held["code"][options.prompts :][:2400])
    return Pair(
        name="demo",
        target=target,
        tuned=_trained(out / "tuned", options, code, "ce", 1e-3, draft=target),
        base=base,
        aligned=_trained(
            out / "aligned", options, answers, "jsd:beta=0.5", 3e-3, draft=base, target=target
        ),
        larger=str(LARGER_DRAFT),
        judge="base",
        sizes="target 3.4 M; drafts .4 M, and a larger one of 1.2 M that was trained longer and "
        "on all domains",
        alike=False,
        id={"prose": prompts["prose"]},
        other={"code": prompts["code"], "unicode": prompts["unicode"]},
    )


def stories_pair(out: Path, options: Options) -> Pair:
    """stories260k; both drafts are trained from nothing on its answers, alike; the base has an
    eighth of the steps.
    """
    target = options.stories
    openings = [{"prompt": subject + ending} for subject, ending in product(SUBJECTS, ENDINGS)]
    answers = _answers(out, target, _rows(out / "train.jsonl", openings[::2]), num_samples=8)
    passages = pieces(Path(target).parents[1] / "data" / "wiki.jsonl", LENGTH)
    apart = max(2, len(passages) // options.prompts)
    held, unseen = passages[::apart], [row for index, row in enumerate(passages) if index % apart]
    wiki = _rows(out / "tuning.jsonl", unseen)

    def fresh(name: str, width: int, layers: int, steps: int) -> str:
        shape = {
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": width,
            "intermediate_size": 2 * width,
        }
        shape |= {"num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2}
        shape |= {
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        write_json_atomic(out / f"{name}.json", shape)
        models = {"draft_config": str(out / f"{name}.json"), "target": target}
        return _trained(out / name, options, answers, "jsd:beta=0.5", 4e-3, steps, **models)

    return Pair(
        name="stories",
        target=target,
        tuned=_trained(out / "tuned", options, wiki, "ce", 1e-3, draft=target),
        base=fresh("base", 32, 1, max(1, options.steps // 8)),
        aligned=fresh("aligned", 32, 1, LONGER * options.steps),
        larger=fresh("larger", 64, 2, LONGER * options.steps),
        judge="aligned",
        sizes="target .26 M; drafts .03 M and .1 M, from nothing, trained alike on its answers",
        alike=True,
        id={"stories": _rows(out / "stories.jsonl", openings[1::2])},
        other={"wiki": _rows(out / "wiki.jsonl", held)},
    )


def real_pairs(options: Options) -> list[Pair]:
    """Two drafts of SmolLM2-135M-Instruct, trained on its chats and then on maths alone: a language
    model for the claims of MCSD, a head for those of EAGLE-2.
    """
    if options.real is None:
        return []
    study = Path(options.real)
    prompts = {
        name: str(study / "prompts" / f"{name}.jsonl")
        for name in ("maths", "chat", "code", "c4", "wiki")
    }

    def pair(draft: str, paper: str, what: str) -> Pair:
        base, aligned = (study / "drafts" / name for name in (draft, f"{draft}-maths-plain-0"))
        if missing := [
            str(place) for place in (base, aligned) if not (place / "config.json").is_file()
        ]:
            raise InputError(
                f"--real: {missing[0]} is not there; benchmarks/studies/real_pair.py trains it"
            )
        return Pair(
            name=f"SmolLM2, {what}",
            target=options.real_target,
            base=str(base),
            aligned=str(aligned),
            sizes=f"target 134.5 M; {what}",
            id={"maths": prompts["maths"]},
            other={name: file for name, file in prompts.items() if name != "maths"},
            papers=(paper,),
            dtype="bfloat16",
        )

    return [pair("pruned", "MCSD", "two pruned layers"), pair("eagle", "EAGLE-2", "EAGLE-1")]


def _rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, rows)
    return str(path)


def _answers(out: Path, target: str, prompts: str, num_samples: int = 2) -> str:
    """The target's answers at temperature 1."""
    if not (out / "answers").is_dir():
        config = DistillConfig(
            target=target,
            prompts=prompts,
            out=str(out / "answers"),
            num_samples=num_samples,
            max_new_tokens=96,
            temperature=1.0,
            batch_size=64,
            seed=5,
            device="cpu",
        )
        distill(config, COMMAND)
    return str(out / "answers")


def _trained(
    out: Path,
    options: Options,
    data: str,
    objective: str,
    rate: float,
    steps: int | None = None,
    **models: str,
) -> str:
    """Six held-out evaluations choose the weights that are kept, because training on few texts can
    go too far.
    """
    steps = steps or options.steps
    if not (out / "model.safetensors").is_file():
        config = TrainConfig(
            out=str(out),
            data=[data],
            objective=objective,
            max_length=128,
            batch_size=16,
            steps=steps,
            eval_every=max(1, steps // 6),
            save_every=10 * steps,
            heldout_fraction=0.03,
            optim=Optim(name="adamw", lr=rate, warmup_steps=max(1, steps // 20)),
            seed=3,
            device="cpu",
            **models,  # type: ignore[arg-type]
        )
        train(config, COMMAND)
    return str(out)


def unchanged(checkpoint: str) -> bool:
    """Whether training ended with the weights that it began with, because no later ones did better
    on held-out data.
    """
    return bool(
        read_json(Path(checkpoint) / "draftsmith.json", "the record of a draft checkpoint")[
            "best_step"
        ]
        == 0
    )
