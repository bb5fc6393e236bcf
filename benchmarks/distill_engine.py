"""Tokens per second of one engine of `distill`, for section `engines` of benchmarks/distill.py.

    python distill_engine.py REQUEST.json      # the last line is one JSON object

Runs in the engine's own environment: `path` of the request is searched for this project first (`root`), and for what
that environment lacks last. Other keys: `config` of `distill`, `prompts` (texts, one list per round).
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path


def main() -> None:
    """Load, warm up, time every round."""
    request = json.loads(Path(sys.argv[1]).read_text())
    # vLLM's processes log to standard output, also after the answer.
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = [request["root"], *sys.path, *request["path"]]
    from distill.config import DistillConfig
    from distill.engines import ENGINES, Answer, AnswerRequest, Failed
    from draftsmith_core.sampling import row_seed
    from draftsmith_core.tokenization import encode_text, load_tokenizer

    config = DistillConfig(**request["config"])
    tokenizer = load_tokenizer(config.target)
    engine = ENGINES[config.engine](config, tokenizer)
    speeds = []
    for number, texts in enumerate([request["prompts"][0][:4], *request["prompts"]]):
        ids = [tuple(encode_text(tokenizer, text)) for text in texts]
        asked = [AnswerRequest((row, 0, 0), each, row_seed(number, str(row))) for row, each in enumerate(ids)]
        answers: list[Answer | Failed] = []
        began = time.perf_counter()
        engine.run(iter([asked]), lambda request, answer, answers=answers: answers.append(answer))  # type: ignore[misc]
        seconds = time.perf_counter() - began
        assert len(answers) == len(asked) and all(isinstance(answer, Answer) for answer in answers)
        speeds.append(sum(len(answer.response_ids) for answer in answers if isinstance(answer, Answer)) / seconds)
    found = {"tokens_per_s": statistics.median(speeds[1:]), "by_round": speeds[1:]}
    answer_to.write("\n" + json.dumps(found) + "\n")
    answer_to.close()


if __name__ == "__main__":
    main()
