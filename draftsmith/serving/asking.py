"""Ask a running server the prompts: each one new to it, again, and with a cached first half."""

import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftsmith.config import ServedConfig
from draftsmith.core.errors import InputError
from draftsmith.core.models import eos_ids
from draftsmith.core.progress import track
from draftsmith.core.prompts import Prompt, read_prompts, room_for_prompts
from draftsmith.core.sampling import Sampling
from draftsmith.distill.engines.server import Completion
from draftsmith.eval.acceptance import Continuation
from draftsmith.pair import Pair
from draftsmith.serving.running_server import Reading, RunningServer, ServedAnswer

AGAIN = "of the same prompts"
_WATCHED = 16
SHARED = "of prompts that share their first half"


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt with the server's answers. order: of asking, from 0. later: answers to further
    readings, by what was cached.
    """

    prompt: Prompt
    answer: ServedAnswer
    order: int
    later: dict[str, ServedAnswer]

    def text(self, output_ids: Sequence[int]) -> Continuation:
        """Return an answer after its first token, which engines take from the prompt's forward."""
        prompt_ids = [*self.prompt.ids, output_ids[0]]
        return Continuation(self.prompt.id, prompt_ids, output_ids[1:], answered=1)


@dataclass(frozen=True)
class Asker:
    """How prompts are asked."""

    server: RunningServer
    completion: Completion
    states_sampling: bool

    @classmethod
    def of(
        cls, server: RunningServer, pair: Pair, config: ServedConfig, sampling: Sampling
    ) -> "Asker":
        completion = Completion(
            model=server.model,
            tokenizer=pair.tokenizer,
            sampling=sampling,
            max_new_tokens=config.max_new_tokens,
            eos_ids=eos_ids(pair.target),
            ignore_eos=False,
            vocabulary=len(pair.tokenizer),
        )
        return cls(server, completion, config.temperature is not None)

    def answer(self, prompt: Prompt, reading: Reading) -> ServedAnswer:
        return self.server.answer(prompt, self.completion, self.states_sampling, reading)

    def readings(self, prompts: Sequence[Prompt]) -> list[ServedPrompt]:
        """Ask every prompt three times. The order is drawn, because files may be sorted."""
        places = random.Random(0).sample(range(len(prompts)), len(prompts))
        asked = {}
        for order, place in enumerate(track(places, "prompts served", len(places))):
            prompt = prompts[place]
            first = _new_reading()
            answer = self.answer(prompt, first)
            later = {AGAIN: self.answer(prompt, replace(first, reuses=True))}
            if half_ids := answer.prompt_ids[: len(answer.prompt_ids) // 2]:
                shared = _new_reading()
                self._cache(Prompt(prompt.id, prompt.domain, tuple(half_ids)), shared)
                later[SHARED] = self.answer(prompt, replace(shared, reuses=True))
            asked[place] = ServedPrompt(prompt, answer, order, later)
        return [asked[place] for place in sorted(asked)]

    def _cache(self, half: Prompt, reading: Reading) -> None:
        completion = replace(self.completion, max_new_tokens=2)
        self.server.answer(half, completion, self.states_sampling, reading)


def ask(asker: Asker, pair: Pair, config: ServedConfig) -> list[ServedPrompt]:
    """Ask every prompt. Return those whose answer has at least two tokens."""
    read = read_prompts(
        config.prompts,
        pair.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=room_for_prompts(pair.context, config.max_new_tokens),
        limit=config.max_prompts,
    )
    read.say_skipped()
    asked = [each for each in asker.readings(read.prompts) if len(each.answer.output_ids) > 1]
    if not asked:
        raise InputError(
            f"--prompts {config.prompts}: every answer ends with its first token; nothing can be "
            "drafted"
        )
    return asked


def watch(asker: Asker, asked: Sequence[ServedPrompt], config: ServedConfig) -> None:
    """Ask the first prompts again, later."""
    first = asked[:_WATCHED]
    for number in range(1, config.watch + 1):
        time.sleep(60 * config.watch_minutes)
        name = f"after {number * config.watch_minutes:g} minutes"
        for each in track(first, f"prompts served {name}", len(first)):
            each.later[name] = asker.answer(each.prompt, _new_reading())


def _new_reading() -> Reading:
    return Reading(secrets.token_hex(8))
