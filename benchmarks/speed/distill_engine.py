"""One engine of `distill`, timed round by round, for section `engines` of `distill.py`.

    python distill_engine.py REQUEST.json

Runs in the engine's own environment: `path` of the request is searched for this project first
(`root`), and for what that environment lacks last; `config` is that of `distill`. For each line of
standard input, `prompts` (token ids) and `seed`, writes one with `rows`, `tokens` and `seconds`.
"""

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Load, then answer."""
    file = Path(sys.argv[1])
    request = json.loads(file.read_text())
    # vLLM's processes log to standard output.
    answer_to = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[:] = [request["root"], *sys.path, *request["path"]]
    from draftsmith.core.sampling import row_seed
    from draftsmith.core.tokenization import load_tokenizer
    from draftsmith.distill.config import DistillConfig
    from draftsmith.distill.engines import ENGINES, Answer, AnswerRequest, Failed, Key

    config = DistillConfig(**request["config"])
    engine = ENGINES[config.engine](config, load_tokenizer(config.target))
    for line in sys.stdin:
        asked = json.loads(line)
        requests = []
        for row, ids in enumerate(asked["prompts"]):
            seed = row_seed(asked["seed"], str(row))
            requests.append(
                AnswerRequest(Key(row, 0, 0), tuple(ids), seed, engine.sampling.sampling)
            )
        answers: list[Answer | Failed] = []

        def done(
            request: AnswerRequest,
            answer: Answer | Failed,
            answers: list[Answer | Failed] = answers,
        ) -> None:
            answers.append(answer)

        began = time.perf_counter()
        engine.run(iter([requests]), done)
        seconds = time.perf_counter() - began
        made = [answer for answer in answers if isinstance(answer, Answer)]
        assert len(made) == len(requests), answers
        tokens = sum(len(answer.response_ids) for answer in made)
        found = {"rows": len(made), "tokens": tokens, "seconds": seconds}
        answer_to.write(json.dumps(found) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
