"""Ask a running server every prompt: alone, again, and many at once."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.config import ServedConfig
from draftsmith.core.errors import InputError
from draftsmith.core.models import eos_ids
from draftsmith.core.progress import track
from draftsmith.core.prompts import Prompt, read_prompts, room_for_prompts
from draftsmith.core.sampling import Sampling
from draftsmith.distill.engines.server import Completion
from draftsmith.eval.formulas import Continuation
from draftsmith.eval.groups import groups_of
from draftsmith.pair import Pair
from draftsmith.serving.running_server import RunningServer, ServedAnswer


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt with the server's answer."""

    prompt: Prompt
    answer: ServedAnswer

    @property
    def text(self) -> Continuation:
        """The answer after its first token, which engines take from the prompt's forward."""
        first, *rest = self.answer.output_ids
        return Continuation(f"row {self.prompt.row}", [*self.prompt.ids, first], rest, answered=1)


@dataclass(frozen=True)
class Load:
    """All prompts with their answers, so many asked at once. groups: of equal prompts; of those
    asked at once, if the server only counts them together.
    """

    name: str
    asked: list[ServedPrompt]
    groups: list[int]
    tokens_per_s: float


def ask(server: RunningServer, pair: Pair, config: ServedConfig, sampling: Sampling) -> list[Load]:
    """Ask every prompt one by one, then again, then for each `concurrency` in a drawn order."""
    read = read_prompts(
        config.prompts,
        pair.tokenizer,
        prompt_tokens=config.prompt_tokens,
        max_tokens=room_for_prompts(pair.context, config.max_new_tokens),
        limit=config.max_prompts,
    )
    read.say_skipped()
    completion = Completion(
        model=server.model,
        tokenizer=pair.tokenizer,
        sampling=sampling,
        max_new_tokens=config.max_new_tokens,
        eos_ids=eos_ids(pair.target),
        ignore_eos=False,
        vocabulary=len(pair.tokenizer),
    )

    def load(name: str, prompts: Sequence[Prompt], at_once: int) -> Load:
        answers: list[ServedAnswer] = []
        begin = time.monotonic()
        for first in track(range(0, len(prompts), at_once), name, -(-len(prompts) // at_once)):
            together = prompts[first : first + at_once]
            answers += server.answers(together, completion, config.temperature is not None)
        speed = sum(len(answer.output_ids) for answer in answers) / (time.monotonic() - begin)
        asked = []
        groups = []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if len(answer.output_ids) > 1:
                asked.append(ServedPrompt(prompt, answer))
                groups.append(index // at_once)
        if all(answer.counted == 1 for answer in answers):
            groups = groups_of([each.prompt for each in asked])
        return Load(name, asked, groups, speed)

    alone = load("alone", read.prompts, 1)
    if not alone.asked:
        raise InputError(
            f"--prompts {config.prompts}: every answer ends with its first token; nothing can be "
            "drafted"
        )
    prompts = [each.prompt for each in alone.asked]
    loads = [alone, load("alone, again", prompts, 1)]
    for at_once in config.concurrency:
        drawn = random.Random(at_once).sample(prompts, len(prompts))
        loads.append(load(f"{at_once} at once", drawn, at_once))
    return loads
