"""Second questions of a suite, behind the target's own answers to the first."""

from dataclasses import replace
from itertools import islice

from transformers import PreTrainedModel

from draftsmith.core.asked_hash import asked_in_chat
from draftsmith.core.chats import Chat, encode_messages
from draftsmith.core.errors import at
from draftsmith.core.prompt_rows import iterate_suite, parse_record
from draftsmith.core.prompts import Prompt, PromptSet, content_id
from draftsmith.core.sampling import Sampling
from draftsmith.core.tokenization import Tokenizer, decode_text
from draftsmith.eval.measuring import answers

_BATCH = 16


def read_questions(source: str, tokenizer: Tokenizer, domain: str, limit: int) -> PromptSet:
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


def ask_again(
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
