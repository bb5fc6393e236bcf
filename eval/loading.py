"""Read the prompt sets of an evaluation and load its models.

A suite may ask second questions, behind the target's own answers to the first.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from draftsmith.core.asked_hash import asked_in_chat
from draftsmith.core.chats import Chat, encode_messages
from draftsmith.core.errors import at
from draftsmith.core.io import read_json
from draftsmith.core.prompt_rows import iterate_suite, parse_record
from draftsmith.core.prompts import Prompt, PromptSet, content_id
from draftsmith.core.ranks import say
from draftsmith.core.records import read_record
from draftsmith.core.sampling import Sampling
from draftsmith.core.settings import loading, tokenizing
from draftsmith.core.suites import load_suite, suite_name
from draftsmith.core.template_date import fix_date
from draftsmith.core.tokenization import Tokenizer, decode_text, load_tokenizer
from draftsmith.decode import take_over
from draftsmith.drafts.load import LoadedModels, load_models
from draftsmith.eval.config import EvalConfig, PlanConfig
from draftsmith.eval.other_templates import read_set
from draftsmith.eval.schema import SuiteKind
from draftsmith.eval.suites import Suite, fit
from draftsmith.eval.timing import answers

_BATCH = 16


def load(
    config: EvalConfig | PlanConfig,
    drafts: dict[str, str],
    id_sets: dict[str, str],
    ood_sets: dict[str, str],
) -> tuple[list[Suite], LoadedModels]:
    """Read the prompts, ID sets first, then load the models."""
    tokenizer = load_tokenizer(config.target, **tokenizing(config))
    fix_date(tokenizer, config.date, _kept_date(config.out, drafts))
    reads: list[PromptSet] = []
    suites: list[Suite] = []
    for name, source in (id_sets | ood_sets).items():
        if _asks_again(source):
            read = _read_questions(source, tokenizer, name, config.max_prompts)
        else:
            read = read_set(
                source,
                tokenizer,
                domain=name,
                prompt_tokens=config.prompt_tokens,
                limit=config.max_prompts,
            )
        skipped = tuple((f"row {skip.row}", skip.reason) for skip in read.skipped)
        kind: SuiteKind = "id" if name in id_sets else "ood"
        suites.append(Suite(name, kind, source, read.prompts, skipped, read.rows, read.more))
        reads.append(read)
    options: dict[str, Any] = loading(config) | {"quantize": config.quantize}
    if isinstance(config, EvalConfig):
        options["quantize_draft"] = config.quantize_draft
        options["heterogeneous_vocab"] = config.heterogeneous_vocab
    pair = load_models(config.target, drafts, tokenizer=tokenizer, **options)
    take_over(pair.target, *pair.drafts.values())
    suites = fit(suites, config.max_new_tokens, pair.context)
    for index, suite in enumerate(suites):
        if _asks_again(suite.source):
            say(f"{suite.name}: {len(suite.prompts)} first answers by the target")
            again = _ask_again(pair.target, pair.tokenizer, suite.prompts, config.max_new_tokens)
            suites[index] = replace(suite, prompts=again)
    # Second questions are longer.
    suites = fit(suites, config.max_new_tokens, pair.context)
    # Last, so that a refusal above stands alone.
    for read in reads:
        read.say_skipped()
    return suites, pair


def _kept_date(out: str | None, drafts: Mapping[str, str]) -> str | None:
    """Return the date of the data that a draft was trained on, else of the results in `out`."""
    for source in drafts.values():
        date: str | None = read_record(Path(source)).get("date")
        if date is not None:
            return date
    file = Path(str(out)) / "results.json"
    results = read_json(file, "results") if file.is_file() else {}
    date = results.get("config", {}).get("date")
    return date


def _asks_again(source: str) -> bool:
    return source.startswith("@") and load_suite(suite_name(source)).asks_again


def _read_questions(source: str, tokenizer: Tokenizer, domain: str, limit: int) -> PromptSet:
    """Read the first questions of a suite as prompts, whose chats hold the later ones too.

    Raise InputError if the suite cannot be read or the tokenizer has no chat template.
    """
    prompts = []
    records = list(islice(iterate_suite(source), limit + 1))
    for record in records[:limit]:
        with at(f"{source}:{record.number}"):
            chat = Chat(tuple(parse_record(record)["messages"]))
            ids = encode_messages(tokenizer, chat.first(1))
        prompt = Prompt(
            content_id(ids),
            domain,
            tuple(ids),
            record.number,
            chat=chat,
            asked=asked_in_chat(chat.first(1)),
        )
        prompts.append(prompt)
    return PromptSet(source, tuple(prompts), (), len(prompts), len(records) > limit)


def _ask_again(
    target: PreTrainedModel, tokenizer: Tokenizer, prompts: tuple[Prompt, ...], max_new_tokens: int
) -> tuple[Prompt, ...]:
    """Let the target answer first questions greedily; return the prompts of the second ones.

    An answer that is cut off at `max_new_tokens` stands in the chat as it is.
    """
    answered = answers(
        target,
        prompts,
        Sampling(temperature=0.0),
        max_new_tokens=max_new_tokens,
        batch_size=_BATCH,
        seed=0,
    )
    again = []
    for prompt, row in zip(prompts, answered, strict=True):
        assert prompt.chat is not None
        first, second = prompt.chat.messages
        text = decode_text(tokenizer, list(row.output_ids))
        chat = Chat((first, {"role": "assistant", "content": text}, second))
        with at(f"row {prompt.row}"):
            ids = encode_messages(tokenizer, chat)
        asked = asked_in_chat(chat)
        again.append(replace(prompt, id=content_id(ids), ids=tuple(ids), chat=chat, asked=asked))
    return tuple(again)
