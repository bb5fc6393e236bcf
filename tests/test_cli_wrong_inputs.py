"""Law 8: what a stranger may type wrongly, by command: one line that says what to do, exit code 2,
nothing written.
"""

import re
from pathlib import Path

import pytest

# By the beginning of a command line: what follows it.
WRONG = {
    "": [
        "",
        "distil",
        "zzz",
        "--print_shtab fish",
        "train --config {unknown}",
        "decode --target",
        "align --target {target} --out out",
        "demo --shrot",
    ],
    "decode --target {target} --prompt a": [
        "more words",
        "--out=",
        "--out {here}",
        "--out {prompts}/rows.jsonl",
        "--temperature warm",
        "--device tpu",
        "--max_new_tokens 100",
        "--chat_template gone.jinja",
        "--device gpu",
        "--dtype int8",
        "--draft org/nothing",
        "--draft org/some-GGUF",
        "--date 27.11.2026",
        "--date 2026-11-27",
        "--draft {draft} --tree chain:0",
        "--draft {draft} --tree kary:2 --verifier speculative",
        "--draft {draft} --proposer draught",
        "--draft promptlookup",
        "--draft {pair}",
        "--tree chain:4",
        "--draft {prompts}",
        "--draft {other} --max_new_tokens 8",
        "--draft {draft} --tree auto:none.json",
        "--config none.yaml",
    ],
    "align --target {target} --draft {draft} --out out": [
        "--prompts {one}",
    ],
    "decode --max_new_tokens 8": [
        "--target {target}",
        "--target none/of/these --prompt a",
        "--target {target} --prompt a --tree chain:2",
        "--target {target} --prompt a --proposer none --draft {draft}",
        "--target {target} --prompt a --quantize_draft nf4",
        "--target {target} --prompts {prompts} --raw",
        "--target {target} --prompts {prompts} --out {prompts}",
        "--target {target} --prompts none.jsonl --out rows.jsonl",
        "--target {target} --prompts {empty} --out rows.jsonl",
        "--target {target} --prompts {keyless} --out rows.jsonl",
        "--target {target} --prompts @mt-bench:{keyless}",
        "--target {target} --prompts {torn_rows} --out rows.jsonl",
    ],
    "distill --target {target} --prompts {prompts}": [
        "--out out --temperatures 0.7:0",
        "--out out --max_requests 9",
        "--out out --tensor_parallel_size 2",
        "",
        "--max_new_tokens 8 --out {prompts}",
        "--out out --engine vllmm",
        "--out out --max_new_tokens 96",
    ],
    "distill --target {target} --out out --max_new_tokens 8": [
        "--prompts magpie:0",
        "--prompts {empty}",
        "--prompts {keyless}",
    ],
    "train --out out --draft {draft} --target {target}": [
        "--data {prompts} --objective jsdd",
        "--data {prompts} --epochs inf",
        "--data {prompts} --kind eagl",
        "--config {prompts}",
        "--data {prompts} --loss_temperature 2",
        "--data {prompts} --head.features_gib 2",
        "--data {prompts} --optim.name sgd --optim.muon_lr 1",
        "--data {prompts} --lrr 3",
        "--data {prompts} --zzzz 3",
        "--data {prompts} --head.draft_vocab_size 9",
        "--data {prompts} --kind dflash --head.target_layers []",
        "--data {prompts} --kind medusa --draft_vocab_size 9",
        "--data out/nowhere",
    ],
    "eval --target {target} --draft a={draft} --id b={prompts} --out out": [
        "--require alhpa>0",
        "--require alpha[code]>0",
        "--base c",
        "--tree none --verifier mcsd",
        "--tree none --require tau>1",
        "--ood b={prompts}",
        "--tree auto:",
        "--max_new_tokens 95",
    ],
    "plan --target {target} --prompts {prompts}": [
        "--draft {draft} --out .",
        "--draft owner/name",
        "--draft lookahed --out plan.json",
        "--draft {draft} --tree chain:2",
        "--draft {pair} --out plan.json",
    ],
    "align --target {target} --draft {draft} --prompts {prompts} --out out": [
        "--ood =",
        "--eval.tree 4x",
        "--ood a=none.jsonl",
        "--ood a/x.jsonl b/x.jsonl",
        "--init prune",
        "--eval.bootstrap 3",
        "--train.lr 3",
        "--distill.max_new_tokens 96",
        "--ood far={long}",
    ],
    "init --target {target} --method prune": [
        "--out .",
    ],
    "export --draft {draft} --format hf": [
        "--out .",
    ],
    "export --format hf --out out": [
        "--draft {pair}",
    ],
    "doctor --target {target}": [
        "--drft {draft}",
        "--draft {pair}",
    ],
}
CASES = [f"{start} {words}".strip() for start, cases in WRONG.items() for words in cases]


@pytest.fixture(scope="module")
def files(tmp_path_factory, target_dir, draft_dir, prompts_file, donor_dir):
    """Every file that a command line may name, by what stands for it in braces."""
    root = tmp_path_factory.mktemp("wrong")
    texts = {
        "unknown.yaml": "out: a\nobjectiv: ce\n",
        "empty.jsonl": "",
        "keyless.jsonl": '{"question": "Why?"}\n',
        "torn_rows.jsonl": '{"prompt": \n',
        "one.jsonl": '{"prompt": "a single prompt"}\n',
        "long.jsonl": "".join(f'{{"prompt": "{number} {"dog " * 100}"}}\n' for number in range(9)),
    }
    for name, text in texts.items():
        (root / name).write_text(text)
    models = {"target": target_dir, "draft": draft_dir, "prompts": prompts_file, "other": donor_dir}
    models["pair"] = str(Path(draft_dir).parent)
    return (
        models | {name.partition(".")[0]: str(root / name) for name in texts} | {"here": str(root)}
    )


@pytest.mark.parametrize("words", CASES, ids=[re.sub(r"{\w+}", "X", words) for words in CASES])
def test_one_line_exit_code_2_and_nothing_written(door, files, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    err = door.refused(*words.format(**files).split())
    if words:
        (line,) = err.strip().splitlines()
        assert line.startswith("draftsmith") and len(line) < 600
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(), left


@pytest.mark.parametrize(
    "words",
    ["align --epochs", "align --distil.max_prompts", "align --max_prompts", "decode --url"],
)
def test_an_unknown_option_names_the_nearest(door, words):
    door.refused(*words.split(), 3)
