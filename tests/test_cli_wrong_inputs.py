"""Law 8: what a stranger may type wrongly, by command: one line that says what to do, exit code 2, nothing written."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

Door = Callable[..., tuple[int, str, str]]

DECODE = "decode --target {target} --prompt a"
DISTILL = "distill --target {target} --prompts {prompts} --out out"
TRAIN = "train --target {target} --draft {draft} --data {prompts} --out out"
EVAL = "eval --target {target} --draft a={draft} --id b={prompts} --out out"
ALIGN = "align --target {target} --draft {draft} --prompts {prompts} --out out"
INIT = "init --target {target} --method prune --out out"
EXPORT = "export --draft {draft} --format hf --out out"
MERGE = "merge --base {target} --draft {draft}=0.5 --out out"

# The command line, and what its one line must say.
WRONG = [
    # draftsmith itself
    ("", "usage"),
    ("distil", "did you mean distill?"),
    ("--print_shtab fish", "expected one of bash, zsh, tcsh"),
    ("--print_shtab", "expected one of bash, zsh, tcsh"),
    # any command
    ("train -c x.yaml", "unexpected word"),
    ("train --config none.yaml", "cannot be read"),
    ("train --config {torn}", "not valid YAML"),
    ("train --config {unknown}", "did you mean"),
    ("eval --config {twice}", "stands twice"),
    ("decode --target", "--target: needs a value"),
    (DECODE + " more words", "unexpected word"),
    (DECODE + " --temperature warm", "--temperature"),
    (DECODE + " --device tpu", "--device tpu"),
    (DECODE + " --dtype int8", "--dtype int8"),
    (DECODE + " --json maybe", "unexpected word"),
    *(
        (f"{each} --out=", "is empty; name where to write")
        for each in (DECODE, DISTILL, TRAIN, EVAL, ALIGN, INIT, "demo")
    ),
    *((f"{each} --out=~/a", "the shell has not expanded ~") for each in (DECODE, DISTILL, TRAIN, ALIGN, EXPORT)),
    *((f"{each} --out .", "is where this command runs") for each in (INIT, EXPORT, MERGE)),
    # decode
    ("decode --target {target}", "give either --prompt TEXT or --prompts FILE"),
    (DECODE + " --prompts {prompts}", "give either --prompt TEXT or --prompts FILE"),
    ("decode --target {draft}/model.safetensors --prompt a", "is a file"),
    ("decode --target none/of/these --prompt a", "no such directory"),
    ("decode --target https://huggingface.co/a/b --prompt a", "https://huggingface.co/a/b"),
    (DECODE + " --max_new_tokens 0", "must be at least 1"),
    (DECODE + " --max_new_tokens 100", "leaves no room in a context of 96"),
    (DECODE + " --top_p 1.5", "top_p: must be at most 1"),
    (DECODE + " --min_p 2", "min_p: must be at most 1"),
    (DECODE + " --temperature nan", "nan"),
    (DECODE + " --num_samples 2.5", "--num_samples"),
    (DECODE + " --draft {draft} --tree chain:0", "chain:0"),
    (DECODE + " --draft {draft} --tree kary:2,x", "kary:2,x"),
    (DECODE + " --draft {draft} --proposer draught", "did you mean draft?"),
    (DECODE + " --tree chain:4", "add --draft"),
    (DECODE + " --verifier exact", "add --draft"),
    (DECODE + " --draft {prompts}", "is a file"),
    (DECODE + " --out {here}", "is a directory"),
    (DECODE + " --out /dev/null", "is no ordinary file, and what is written would take its place"),
    ("decode --target {target} --prompts {prompts} --out {prompts}", "is read as well, and would be overwritten"),
    ("plan --target {target} --draft {draft} --prompts {prompts} --out /dev/stdout", "is no ordinary file"),
    ("decode --target {target} --max_new_tokens 8 --prompts {here} --out rows.jsonl", "is no file"),
    ("decode --target {target} --max_new_tokens 8 --prompts none.jsonl --out rows.jsonl", "no such file"),
    ("decode --target {target} --max_new_tokens 8 --prompts {empty} --out rows.jsonl", "holds no rows"),
    ("decode --target {target} --max_new_tokens 8 --prompts {keyless} --out rows.jsonl", "needs one of the keys"),
    ("decode --target {target} --max_new_tokens 8 --prompts {torn_rows} --out rows.jsonl", "not valid JSON"),
    # distill
    ("distill --target {target} --prompts {prompts}", "--out: is missing"),
    ("distill --target {target} --prompts {prompts} --out {prompts}", "is a file"),
    (DISTILL + " --engine vllmm", "engine"),
    (DISTILL + " --num_samples 0", "num_samples: 0"),
    (DISTILL + " --max_new_tokens 96", "leaves no room"),
    (DISTILL + " --teacher_top_k -1", "teacher_top_k: -1"),
    (DISTILL + " --max_prompts 0", "max_prompts: 0"),
    # train
    (TRAIN + " --objective jsdd", "jsd"),
    (TRAIN + " --objective jsd:beta=2", "beta"),
    (TRAIN + " --optim.lr 0", "optim.lr"),
    (TRAIN + " --kind eagl", "eagle"),
    (TRAIN + " --kind medusa --head.noise 0.1", "no such option"),
    (TRAIN + " --steps 0", "steps: 0"),
    ("train --target {target} --draft {draft} --data none --out out --max_length 64", "none"),
    ("train --target {target} --data {prompts} --out out", "draft"),
    # eval
    (EVAL + " --require alhpa>0", "did you mean alpha?"),
    (EVAL + " --require alpha[code]>0", "domain 'code' is not measured; there are b, id"),
    ("eval --target {target} --draft {draft} --id b={prompts} --out out", "expected NAME=VALUE"),
    (EVAL + " --base c", "no draft has this name"),
    (EVAL + " --ood b={prompts}", "either ID or OOD"),
    (EVAL + " --tree chian:4", "write chain:4"),
    (EVAL + " --verifier spec", "unknown"),
    (EVAL + " --temperature -1", "temperature: must be at least 0"),
    (EVAL + " --draft target={draft}", "target"),
    (EVAL + " --bootstrap 1", "at least 100"),
    # align
    ("align --target {target} --out out", "--prompts: is missing"),
    (ALIGN + " --objective jsdd", "jsdd"),
    (ALIGN + " --ood {prompts}", "expected NAME=VALUE"),
    (ALIGN + " --id a={prompts} --ood a={prompts}", "either ID or OOD"),
    (ALIGN + " --train.lr 1 2", "2 rates for 1 objectives"),
    (ALIGN + " --train.stesp 3", "did you mean --train.steps?"),
    (ALIGN + " --eval.tree chian:4", "did you mean chain?"),
    (ALIGN + " --distill.max_new_tokens 96", "leaves no room"),
    (ALIGN + " --train.max_length 1000", "leaves no room"),
    (ALIGN + " --ood a=none.jsonl", "none.jsonl: no such file"),
    ("align --target {target} --draft {draft} --prompts {one} --out out", "prompts: 1 usable ones are too few"),
    ("align --target {target} --draft {draft} --prompts {prompts} --out {prompts}", "--out"),
    # demo
    ("demo --shrot", "did you mean --short?"),
    ("demo --short 3", "expected true or false"),
    ("demo --out {prompts}", "--out"),
]


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory,
    target_dir: str,
    draft_dir: str,
    prompts_file: str,
) -> dict[str, str]:
    """Every file that a command line may name, by what stands for it in braces."""
    root = tmp_path_factory.mktemp("wrong")
    texts = {
        "torn.yaml": "out: [a\nb",
        "unknown.yaml": "out: a\nobjectiv: ce\n",
        "twice.yaml": "out: a\nout: b\n",
        "empty.jsonl": "",
        "keyless.jsonl": '{"question": "Why?"}\n',
        "torn_rows.jsonl": '{"prompt": "a"}\n{"prompt": \n',
        "one.jsonl": '{"prompt": "a single prompt"}\n',
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    models = {"target": target_dir, "draft": draft_dir, "prompts": prompts_file}
    return models | {name.partition(".")[0]: str(root / name) for name in texts} | {"here": str(root)}


@pytest.mark.parametrize(("words", "told"), WRONG, ids=[re.sub(r"{\w+}", "X", words) for words, _ in WRONG])
def test_one_line_exit_code_2_and_nothing_written(
    door: Door, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = door(*words.format(**files).split())
    assert (code, out) == (2, ""), (out, err)
    assert told in err, err
    if words:
        (line,) = err.strip().splitlines()
        assert line.startswith("draftsmith") and "Traceback" not in line
        assert len(line) < 600
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(), left
