"""Ask a running server every prompt."""

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
from draftsmith.pair import Pair
from draftsmith.serving.running_server import RunningServer, ServedAnswer


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt with the server's answer."""

    prompt: Prompt
    answer: ServedAnswer

    def text(self, output_ids: Sequence[int]) -> Continuation:
        """Return an answer after its first token, which engines take from the prompt's forward."""
        prompt_ids = [*self.prompt.ids, output_ids[0]]
        return Continuation(self.prompt.id, prompt_ids, output_ids[1:], answered=1)


def ask(
    server: RunningServer, pair: Pair, config: ServedConfig, sampling: Sampling
) -> list[ServedPrompt]:
    """Ask every prompt. Return those whose answer has at least two tokens."""
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
    states_sampling = config.temperature is not None
    asked = []
    for prompt in track(read.prompts, "prompts served", len(read.prompts)):
        answer = server.answer(prompt, completion, states_sampling)
        if len(answer.output_ids) > 1:
            asked.append(ServedPrompt(prompt, answer))
    if not asked:
        raise InputError(
            f"--prompts {config.prompts}: every answer ends with its first token; nothing can be "
            "drafted"
        )
    return asked
