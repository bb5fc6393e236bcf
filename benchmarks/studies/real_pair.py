r"""What alignment buys on a real chat model: which draft, alignment, how much data, speed.

    python -m benchmarks.studies.real_pair --target DIR_OR_HUB_NAME --data DIR --out DIR \
        [--only PIECE ...] [--budget HOURS]

--data holds alpaca.jsonl, gsm8k_train.jsonl, gsm8k_test.jsonl, humaneval.jsonl, c4.jsonl and
wiki.jsonl. The pieces:

data          prompts, and the target's answers: `chat` and `own` (chats whose prompts the target
              writes itself), `maths`
which         drafts of about equal trained parameters on equal tokens of chat
align         pruned layers and the best head of chat, aligned to maths, plain and with replay
longest       three of these on 2.7 million tokens more, with Muon in steps of 16 rows, one of them
              then aligned to maths; asks for a GPU (--device cuda)
speed         tokens per second of the best two, and of other engines (`real_speed.py`)
drafts-speed  tokens per second of every draft, with the same trees

Every step is a command of draftsmith with an --out of its own, so that the same call continues a
run that was killed. Prints the tables of docs/evidence/. With --keep, finished sets go to
benchmarks/studies/real/ and results to docs/results/.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.lib.places import ROOT
from benchmarks.lib.study_command import main
from benchmarks.studies import figures, real_speed, real_tables
from benchmarks.studies.real_study import (
    COMMAND,
    FULL,
    TINY,
    Options,
    Study,
    data,
    more_answers,
    take_or_make,
)
from draftsmith.config import InitConfig
from draftsmith.core.errors import InputError
from draftsmith.core.io import JsonObject, atomic_dir
from draftsmith.core.models import load_model
from draftsmith.drafts.heads import write_head
from draftsmith.drafts.heads.eagle import EagleConfig, EagleHead, draw
from draftsmith.eval.results import Results
from draftsmith.eval.run import evaluate
from draftsmith.init_run import init
from draftsmith.train.config import DraftKind, Optim, TrainConfig
from draftsmith.train.training_run import train

# Piece: which. Every draft has 8 to 14 million trained parameters on SmolLM2-135M, the target's
# embedding not counted.


def pruned(study: Study) -> TrainConfig:
    """Two of the target's layers."""
    start = _started(study, "pruned", method="prune", num_layers=2)
    return study.training(
        "pruned", "lm", draft=start, lr=6e-4, draft_vocab_size=study.sizes.draft_vocab
    )


def _started(study: Study, name: str, **options: Any) -> str:
    start = study.out / "starts" / study.seeded(name)
    if not start.exists():
        asked = study.options
        config = InitConfig(
            target=asked.target, out=str(start), device="cpu", seed=asked.seed - 1, **options
        )
        init(config)
    return str(start)


def eagle(study: Study) -> TrainConfig:
    """EAGLE-1 with a wider feed-forward: as published it would have 4 million parameters on
    SmolLM2-135M.
    """
    start = study.out / "starts" / study.seeded("eagle")
    if not start.exists():
        target = load_model(study.options.target, device="cpu", dtype="float32")
        shape = replace(EagleConfig.like(target), intermediate_size=study.sizes.eagle_feed_forward)
        head = EagleHead(shape, target)
        draw(head.fc, head.layers, seed=study.options.seed)
        with atomic_dir(start) as made:
            write_head(head, made)
    return study.training("eagle", "eagle", draft=str(start))


def eagle3(study: Study) -> TrainConfig:
    """EAGLE-3, trained on its own features for four steps: as deep as the chains that are
    decoded.
    """
    return study.training(
        "eagle3", "eagle3", head={"test_steps": 4}, draft_vocab_size=study.sizes.draft_vocab
    )


def hydra(study: Study) -> TrainConfig:
    """Four heads on the target's own projection."""
    return study.training("hydra", "hydra")


def block(kind: DraftKind, study: Study) -> TrainConfig:
    """A block drafter of four tokens; DSpark has one layer, because its Markov head has as much as
    two.
    """
    shape = (
        {"block_size": 4, "num_layers": 1}
        if kind == "dspark"
        else {"block_size": 5, "num_layers": 2}
    )
    return study.training(
        kind, kind, head={**shape, "anchors": 64}, draft_vocab_size=study.sizes.draft_vocab
    )


Training = Callable[[Study], TrainConfig]
# In the order in which they are trained.
DRAFTS: dict[str, Training] = {
    "eagle3": eagle3,
    "pruned": pruned,
    "hydra": hydra,
    "eagle": eagle,
    "dflash": partial(block, "dflash"),
    "jetspec": partial(block, "jetspec"),
    "dspark": partial(block, "dspark"),
}
BASE = "pruned"


def which(study: Study) -> None:
    """Train every draft on chat, or those of --drafts, and measure all that are there."""
    drafts: dict[str, str] = {}
    for name, config_of in DRAFTS.items():
        asked = not study.options.drafts or name in study.options.drafts
        if asked or study.has_draft(study.seeded(name)):
            drafts[name] = trained(config_of(study))
    first = {BASE: drafts[BASE]} if BASE in drafts else {}
    results = _measured(study, study.seeded("which"), first | drafts, "chat")
    _print_drafts(results)


def _measured(study: Study, name: str, drafts: Mapping[str, str], id_set: str) -> Results:
    """Evaluate drafts as OUT/NAME, and keep it."""
    results = evaluate(study.evaluation(name, drafts, id_set))
    _keep(study, name)
    return results


def trained(config: TrainConfig) -> str:
    """The directory of a draft, which is trained unless it is there."""
    if not (Path(config.out) / "config.json").exists():
        train(config, COMMAND)
    return config.out


def _print_drafts(results: Results) -> None:
    """Alpha by domain, and the predicted tau of chains of 4, by temperature."""
    for at in results.temperatures:
        title = f"draft, T = {at:g}"
        _print(real_tables.acceptance(results, title, at))


def _print(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")


def best(study: Study, kinds: Sequence[str]) -> str:
    """The draft among these that --drafts names; else that of question 1 with the highest predicted
    tau on chat at temperature 1.
    """
    if len(asked := [name for name in kinds if name in study.options.drafts]) == 1:
        return asked[0]
    results = Results.load(study.out / "which")
    known = [name for name in results.drafts if name in kinds]
    if not known:
        raise InputError(f"{study.out / 'which'}: has none of {', '.join(kinds)}; run --only which")
    rows = {name: real_tables.predicted_tau(results, name, "id", 1.0) for name in known}
    taus = {name: (row and row["value"]) or 0.0 for name, row in rows.items()}
    return max(known, key=lambda name: taus[name])


def trained_longest(study: Study, name: str) -> str:
    """Name the longest training of this draft that OUT/drafts holds."""
    run = study.seeded(f"{name}-longest")
    return run if study.has_draft(run) else name


LANGUAGE_MODELS = ("pruned",)
HEADS = [name for name in DRAFTS if name not in LANGUAGE_MODELS]


# Piece: align.

# Replay beside the answers to maths. The target's own chats are the anchor; with replay there are
# twice the steps.
REPLAY: dict[str, list[str]] = {"plain": [], "balanced": ["own"], "all chats": ["chat", "own"]}
SEEDED = ("plain", "balanced")


def align(study: Study) -> None:
    """Align the best language model and the best head of chat to maths; what each gains and
    loses.
    """
    # Epochs are over data and replay; steps count the answers alone, so that these are equal.
    maths = study.sets(["maths"])
    steps = _steps(study, maths)
    for base in (best(study, LANGUAGE_MODELS), best(study, HEADS)):
        drafts = {"base": study.draft(base)}
        first = DRAFTS[base](study)
        assert first.optim.lr is not None
        for way, replayed in REPLAY.items():
            for seed in range(study.options.seeds if way in SEEDED else 1):
                name = f"{base}-maths-{way.replace(' ', '-')}-{seed}"
                more: JsonObject = {"steps": steps}
                if replayed:
                    more = {"steps": 2 * steps, "replay": study.sets(replayed)}
                    more["replay_fraction"] = 0.5
                if first.kind == "eagle3":
                    more["head"] = {"test_steps": first.head.test_steps}
                config = study.training(
                    name,
                    first.kind,
                    data=maths,
                    draft=drafts["base"],
                    lr=first.optim.lr / 2,
                    seed=seed + 1,
                    **more,
                )
                drafts[name] = trained(config)
        results = _measured(study, f"align-{base}", drafts, "maths")
        _print(real_tables.changes_over_seeds(results, base))


def _steps(study: Study, sets: list[str]) -> int:
    rows = 0
    for place in sets:
        parts = Path(place).glob("part-*")
        rows += sum(pq.read_metadata(part).num_rows for part in parts)
    sizes = study.sizes
    steps = sizes.epochs * rows * 0.95 / sizes.step_rows
    return max(1, round(steps))


# Piece: longest.

MUON = Optim(name="muon", lr=1e-3, warmup_steps=10)
# Steps of each draft on all answers: 150 seconds of a shared GPU at most. Then of EAGLE-3 on maths.
LONGEST = {"pruned": 751, "eagle3": 611, "eagle": 382}
LONGEST_MATHS = 400


def longest(study: Study) -> None:
    """Two language-model layers, EAGLE-3, and EAGLE-1 on three of its own depths, on all answers to
    chats; EAGLE-3 then aligned to maths.
    """
    more = more_answers(study)
    take_or_make(study, more)
    *chats, maths = more
    chat_sets = [each.out for each in chats]
    rows = study.sizes.step_rows
    drafts = {}
    for name, steps in LONGEST.items():
        config = DRAFTS[name](study)
        depths = 3 if name == "eagle" else config.head.test_steps
        config = replace(
            config,
            data=[*config.data, *chat_sets],
            head=replace(config.head, features=None, test_steps=depths),
            optim=MUON,
            batch_size=4 * rows,
        )
        drafts[name] = _trained_for(study, f"{name}-longest", config, steps, steps // 10)
    config = eagle3(study)
    config = replace(
        config,
        draft=drafts["eagle3"],
        draft_vocab_size=None,
        data=[maths.out],
        replay=chat_sets,
        replay_fraction=0.5,
        head=replace(config.head, features=None),
        optim=Optim(),
        batch_size=2 * rows,
    )
    drafts["aligned"] = _trained_for(
        study, "eagle3-longest-maths", config, LONGEST_MATHS, LONGEST_MATHS // 4
    )
    _print_drafts(_measured(study, study.seeded("longest"), drafts, "chat"))
    speeds = real_speed.every_draft(
        study,
        ["eagle3-longest", "eagle3-longest-maths"],
        "longest-speed",
        domains=("chat", "maths", "code"),
        trees=("kary:4", "chain:3"),
        behind_lookup=("chain:3",),
    )
    _timed(study, "longest-speed", speeds)


def _trained_for(study: Study, name: str, config: TrainConfig, steps: int, every: int) -> str:
    """Train a draft as OUT/drafts/NAME, for so many steps. every: steps between evaluations."""
    tiny = study.options.tiny
    config = replace(
        config,
        out=study.draft(study.seeded(name)),
        heldout_fraction=0.02,
        accumulation=1,
        steps=2 if tiny else steps,
        eval_every=1 if tiny else every,
    )
    return trained(config)


def _timed(study: Study, piece: str, rows: Sequence[JsonObject]) -> None:
    _keep(study, piece)
    _print(real_tables.draft_speeds(rows))


# Piece: speed.


def speed(study: Study) -> None:
    """Time the best language model and the best head, as they were trained longest, with planned
    trees, then the other engines.
    """
    language_model, head = (
        trained_longest(study, best(study, kinds)) for kinds in (LANGUAGE_MODELS, HEADS)
    )
    found = real_speed.measure(study, language_model, head)
    _keep(study, "speed")
    sys.stdout.write(real_speed.speed_tables(found))


def drafts_speed(study: Study) -> None:
    """Time every draft that is there with the same trees."""
    rows = real_speed.every_draft(study, list(DRAFTS), "drafts-speed")
    _timed(study, "drafts-speed", rows)


def _keep(study: Study, name: str) -> None:
    if study.options.keep:
        figures.keep(ROOT, f"real-{name}", study.out / name / "results.json", study.public)


Piece = Callable[[Study], None]
PIECES: dict[str, Piece] = {
    "data": data,
    "which": which,
    "align": align,
    "longest": longest,
    "speed": speed,
    "drafts-speed": drafts_speed,
}


def run(options: Options) -> None:
    """Run the pieces."""
    for key, names, known in (("only", options.only, PIECES), ("drafts", options.drafts, DRAFTS)):
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"--{key} {unknown[0]}: use any of {', '.join(known)}")
    study = Study(options, TINY if options.tiny else FULL)
    for name in options.only or PIECES:
        sys.stderr.write(f"{COMMAND}: {name}\n")
        PIECES[name](study)


if __name__ == "__main__":
    main(Options, COMMAND, run)
