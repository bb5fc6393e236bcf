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
class Load:
    """All prompts with their answers, so many asked at once. groups: of equal prompts; of those
    asked at once, if the server only counts them together.
    """

    name: str
    prompts: list[Prompt]
    answers: list[ServedAnswer]
    groups: list[int]
    tokens_per_s: float

    @property
    def texts(self) -> list[Continuation]:
        """The answers after their first tokens, which engines take from the prompts' forward."""
        texts = []
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            first, *rest = answer.output_ids
            ids = [*prompt.ids, first]
            texts.append(Continuation(f"row {prompt.row}", ids, rest, answered=1))
        return texts


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
        firsts = range(0, len(prompts), at_once)
        for first in track(firsts, name, len(firsts)):
            together = prompts[first : first + at_once]
            answers += server.answers(together, completion, config.temperature is not None)
        speed = sum(len(answer.output_ids) for answer in answers) / (time.monotonic() - begin)
        drafted = [index for index, answer in enumerate(answers) if len(answer.output_ids) > 1]
        kept = [prompts[index] for index in drafted]
        groups = [index // at_once for index in drafted]
        if all(answer.counted == 1 for answer in answers):
            groups = groups_of(kept)
        if not drafted:
            raise InputError(
                f"--prompts {config.prompts}: every answer ends with its first token ({name}); "
                "nothing can be drafted"
            )
        return Load(name, kept, [answers[index] for index in drafted], groups, speed)

    alone = load("alone", read.prompts, 1)
    loads = [alone, load("alone, again", alone.prompts, 1)]
    for at_once in config.concurrency:
        drawn = random.Random(at_once).sample(alone.prompts, len(alone.prompts))
        loads.append(load(f"{at_once} at once", drawn, at_once))
    return loads
