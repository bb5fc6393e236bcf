"""Law 8: what a stranger may type wrongly, by command: one line that says what to do, exit code 2,
nothing written.
"""

import re
from pathlib import Path

import pytest

# By the beginning of a command line: what follows it, and what its one line must say.
WRONG: dict[str, list[tuple[str, str]]] = {
    "": [
        ("", "usage"),
        ("distil", "did you mean distill?"),
        ("zzz", "the commands are"),
        ("--print_shtab fish", "expected one of bash, zsh, tcsh"),
        (
            "train --config {unknown}",
            "unknown.yaml:2: objectiv: unknown key; did you mean objective?",
        ),
        ("decode --target", "--target: expected one argument"),
        ("align --target {target} --out out", "--prompts: is missing"),
        ("demo --shrot", "did you mean --short?"),
    ],
    "decode --target {target} --prompt a": [
        ("more words", "unexpected word"),
        ("--out=", "at least 1 character"),
        ("--out {here}", "is not a regular file"),
        ("--out {prompts}/rows.jsonl", "is not a writable directory"),
        ("--temperature warm", "--temperature: must be a valid number, got 'warm'"),
        ("--device tpu", "--device tpu"),
        ("--max_new_tokens 100", "exceed the target's context of 96 tokens"),
        ("--chat_template gone.jinja", "gone.jinja: cannot be read"),
        ("--device gpu", "--device gpu: "),
        ("--dtype int8", "--dtype: invalid choice: 'int8' (choose from 'auto', 'float32', "),
        ("--draft org/nothing", "org/nothing: no such directory here, none in the hub's cache"),
        ("--draft org/some-GGUF", "llama.cpp runs GGUF, and transformers does not"),
        ("--date 27.11.2026", "date: must be YYYY-MM-DD"),
        ("--date 2026-11-27", "date: is not read: the chat template prints none"),
        ("--draft {draft} --tree chain:0", "chain:0"),
        ("--draft {draft} --tree kary:2 --verifier speculative", "is valid on chains only"),
        ("--draft {draft} --proposer draught", "did you mean draft?"),
        ("--draft promptlookup", "did you mean prompt_lookup?"),
        ("--draft {pair}", "is no model itself; it holds {draft}: name one"),
        ("--tree chain:4", "add --draft"),
        ("--draft {prompts}", "is a file"),
        ("--draft {other} --max_new_tokens 8", "to the target; use a draft"),
        ("--draft {draft} {draft} --tree auto", "auto reads the plan of a draft"),
        ("--draft {draft} --tree auto:none.json", "none.json"),
        ("--config none.yaml", "--config none.yaml: cannot be read"),
    ],
    "align --target {target} --draft {draft} --out out": [("--prompts {one}", "too few")],
    "decode --max_new_tokens 8": [
        ("--target {target}", "give either --prompt TEXT or --prompts FILE"),
        ("--target none/of/these --prompt a", "no such directory"),
        ("--target {target} --prompt a --tree chain:2", "tree: nothing drafts"),
        ("--target {target} --prompt a --proposer none --draft {draft}", "draft: nothing drafts"),
        (
            "--target {target} --prompt a --quantize_draft nf4",
            "quantize_draft: is for --draft; leave it out",
        ),
        ("--target {target} --prompts {prompts} --raw", "raw: is for --prompt; leave it out"),
        (
            "--target {target} --prompts {prompts} --out {prompts}",
            "is read as well, and would be overwritten",
        ),
        ("--target {target} --prompts none.jsonl --out rows.jsonl", "no such file"),
        ("--target {target} --prompts {empty} --out rows.jsonl", "holds no rows"),
        ("--target {target} --prompts {keyless} --out rows.jsonl", "needs one of the keys"),
        (
            "--target {target} --prompts @mt-bench:{keyless}",
            "lacks 'prompt', which suite mt-bench reads; name a file",
        ),
        (
            "--target {target} --prompts {torn_rows} --out rows.jsonl",
            "torn_rows.jsonl: none of its 1 rows can be used (row 1: not valid JSON",
        ),
    ],
    "distill --target {target} --prompts {prompts}": [
        ("--out out --temperatures 0.7:0", "expected TEMPERATURE:SHARE"),
        ("--out out --max_requests 9", "max_requests: is for --engine openai; leave it out"),
        (
            "--out out --tensor_parallel_size 2",
            "tensor_parallel_size: is for --engine vllm; leave it out",
        ),
        ("", "--out: is missing"),
        ("--max_new_tokens 8 --out {prompts}", "{prompts}"),
        (
            "--out out --engine vllmm",
            "--engine: invalid choice: 'vllmm' (choose from 'hf', 'openai', 'vllm', 'ray')",
        ),
        ("--out out --max_new_tokens 96", "leaves no room"),
    ],
    "distill --target {target} --out out --max_new_tokens 8": [
        ("--prompts magpie:0", "expected magpie:N, such as magpie:1000"),
        ("--prompts {empty}", "none of its 0 rows can be used"),
        ("--prompts {keyless}", "none of its 1 rows can be used (row 1"),
    ],
    "train --out out --draft {draft} --target {target}": [
        ("--data {prompts} --objective jsdd", "jsd"),
        ("--data {prompts} --epochs inf", "epochs: must be a finite number"),
        ("--data {prompts} --kind eagl", "eagle"),
        ("--config {prompts}", "holds rows, not options; --data or --prompts takes it"),
        ("--data {prompts} --loss_temperature 2", "loss_temperature: `ce` has none"),
        (
            "--data {prompts} --head.features_gib 2",
            "head.features_gib: is for --head.features; leave",
        ),
        ("--data {prompts} --optim.name sgd --optim.muon_lr 1", "optim.muon_lr: is for"),
        ("--data {prompts} --lrr 3", "did you mean --optim.lr?"),
        ("--data {prompts} --zzzz 3", "--help=all lists them"),
        ("--data {prompts} --head.draft_vocab_size 9", "did you mean --draft_vocab_size?"),
        ("--data {prompts} --kind dflash --head.target_layers []", "target_layers"),
        (
            "--data {prompts} --kind medusa --draft_vocab_size 9",
            "size: is for lm, eagle3, dflash, dspark, jetspec",
        ),
        (
            "--data out/nowhere",
            "data: out/nowhere: no such file, and no dataset owner/name:split on the hub",
        ),
    ],
    "eval --target {target} --draft a={draft} --id b={prompts} --out out": [
        ("--require alhpa>0", "did you mean alpha?"),
        ("--require alpha[code]>0", "'code' is not measured"),
        ("--base c", "no draft has this name"),
        ("--tree none --verifier mcsd", "verifier: --tree none decodes nothing"),
        ("--tree none --require tau>1", "nothing is decoded so"),
        ("--ood b={prompts}", "b"),
        ("--tree auto", "plan.json is missing"),
        ("--tree auto:", "needs a file"),
        ("--max_new_tokens 95", "and 95 new ones exceed a context of"),
    ],
    "plan --target {target} --prompts {prompts}": [
        ("--draft {draft} --out .", "is not a regular file"),
        ("--draft owner/name", "name a file with --out"),
        ("--draft lookahed --out plan.json", "did you mean lookahead?"),
        ("--draft {draft} --tree chain:2", "--tree: unknown option"),
        ("--draft {pair} --out plan.json", "is no model itself; it holds {draft}: name one"),
    ],
    "align --target {target} --draft {draft} --prompts {prompts} --out out": [
        ("--ood =", "write NAME="),
        ("--eval.tree 4x", "align: tree 4x, verifier default: "),
        ("--ood a=none.jsonl", "none.jsonl: no such file"),
        ("--ood a/x.jsonl b/x.jsonl", "the name 'x' is used twice; write NAME="),
        ("--init prune", "draft: give one of --draft, --init and --kind"),
        ("--eval.bootstrap 3", "eval.bootstrap: must be greater than or equal to 100"),
        ("--train.lr 3", "did you mean --train.optim.lr?"),
        ("--distill.max_new_tokens 96", "leaves no room"),
        ("--ood far={long}", "long.jsonl: none of its 9 rows can be used"),
    ],
    "init --target {target} --method prune": [("--out .", "is where this command runs")],
    "export --draft {draft} --format hf": [("--out .", "is where this command runs")],
    "export --format hf --out out": [
        ("--draft {pair}", "is no model itself; it holds {draft}: name one")
    ],
    "doctor --target {target}": [
        ("--drft {draft}", "did you mean --draft?"),
        ("--draft {pair}", "is no model itself; it holds {draft}: name one"),
    ],
}
CASES = [
    (f"{start} {words}".strip(), told) for start, cases in WRONG.items() for words, told in cases
]


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


@pytest.mark.parametrize(
    ("words", "told"), CASES, ids=[re.sub(r"{\w+}", "X", words) for words, _ in CASES]
)
def test_one_line_exit_code_2_and_nothing_written(door, files, tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    code, out, err = door(*words.format(**files).split())
    assert (code, out) == (2, ""), (out, err)
    assert told.format(**files) in err, err
    if words:
        (line,) = err.strip().splitlines()
        assert line.startswith("draftsmith") and "Traceback" not in line
        assert len(line) < 600
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == set(), left


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("align --epochs", "; did you mean --train.epochs?"),
        ("align --distil.max_prompts", "; did you mean --distill.max_prompts?"),
        ("align --max_prompts", "; did you mean --distill.max_prompts or --eval.max_prompts?"),
        ("decode --url", "; --help=all lists them"),
    ],
)
def test_an_unknown_option_names_the_nearest(door, words, told):
    assert f"unknown option{told}" in door.refused(*words.split(), 3)
