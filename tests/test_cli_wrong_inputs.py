"""Law 8: what a stranger may type wrongly, by command: one line that says what to do, exit code 2,
nothing written.
"""

import re
from pathlib import Path

import pytest
import yaml

from draftsmith.cli.commands import COMMANDS
from draftsmith.core import option_names
from draftsmith.core.option_names import meant
from draftsmith.core.options import options_of

# By the beginning of a command line: what follows it, and what its one line must say.
WRONG: dict[str, list[tuple[str, str]]] = {
    "": [
        ("", "usage"),
        ("distil", "did you mean distill?"),
        ("zzz", "the commands are"),
        ("serve", "doctor prints the command with which each engine serves a pair"),
        ("generate", "did you mean decode?"),
        ("export --to vllm", "--to: unknown option; did you mean --format?"),
        ("train --ttt-length 7", "did you mean --head.test_steps?"),
        ("train --precision bfloat16", "; that is bf16"),
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
        ("--target {other}", "--target: is given twice; keep one"),
        ("--device gpu", "--device: a GPU is called cuda, or cuda:N by number, got 'gpu'"),
        ("--dtype int8", "--dtype: must be one of auto, bfloat16, float16, float32, got 'int8'"),
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
        ("--target {target} --prompt a --tree chain:2", "tree: is not read: nothing drafts"),
        ("--target {target} --prompt a --proposer none --draft {draft}", "draft: is not read"),
        ("--target {target} --prompt a --quantize_draft nf4", "there is no --draft"),
        ("--target {target} --prompts {prompts} --raw", "raw: is not read: it is for --prompt"),
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
        ("--out out --max_requests 9", "max_requests: is not read: it is for --engine openai"),
        (
            "--out out --tensor_parallel_size 2",
            "tensor_parallel_size: is not read: it is for --engine vllm",
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
        ("--data {prompts} --kind eagle-3", "; that is eagle3"),
        ("--config {prompts}", "holds rows, not options; --data or --prompts takes it"),
        ("--data {prompts} --loss_temperature 2", "loss_temperature: is not read: `ce` has none"),
        ("--data {prompts} --head.features_gib 2", "head.features_gib: is not read: it limits"),
        ("--data {prompts} --optim.muon_lr 0.1", "optim.muon_lr: is not read"),
        ("--data {prompts} --bf16", "did you mean --precision=bf16?"),
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
        ("--tree none --verifier mcsd", "verifier: is not read: --tree none decodes nothing"),
        ("--tree none --speed_prompts 2", "speed_prompts: is not read: --tree none decodes"),
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
        ("--draft {draft} --tree chain:2", "plan tries trees and picks the fastest; eval --tree"),
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
        ("--prompts {one}", "--prompts: is given twice; keep one"),
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
    ("words", "meant"),
    [
        ("train --learning_rate", "--optim.lr"),
        ("train --num_train_epochs", "--epochs"),
        ("train --max_steps", "--steps"),
        ("train --max_seq_length", "--max_length"),
        ("train --warmup_ratio", "--optim.warmup_steps"),
        ("train --gradient_accumulation_steps", "--accumulation"),
        ("train --dataset_name", "--data"),
        ("train --teacher_model_name_or_path", "--target"),
        ("align --epochs", "--train.epochs"),
        ("align --num_epochs", "--train.epochs"),
        ("align --num_train_epochs", "--train.epochs"),
        ("align --per_device_train_batch_size", "--train.batch_size"),
        ("align --per_device_eval_batch_size", "--eval.batch_size"),
        ("align --gradient_accumulation_steps", "--train.accumulation"),
        ("align --dataset_name", "--prompts"),
        ("align --model_name_or_path", "--target"),
        ("align --max_prompts", "--distill.max_prompts or --eval.max_prompts"),
        ("align --distil.max_prompts", "--distill.max_prompts"),
        ("distill --output-dir", "--out"),
        ("distill --max_length", "--max_new_tokens"),
        ("distill --n", "--num_samples"),
        ("decode --num_draft_tokens", "--tree"),
        ("decode --torch_dtype", "--dtype"),
        ("eval --dataset", "--id"),
        ("eval --assistant-model", "--draft"),
    ],
)
def test_an_option_of_another_tool_is_known_by_its_meaning(door, words, meant):
    command, typed = words.split()
    assert f"unknown option; did you mean {meant}?" in door.refused(command, typed, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("distill --num_train_epochs", "unknown option; --help=all lists them"),
        ("decode --url", "unknown option; --help=all lists them"),
        ("train --resume_from_checkpoint", "leave it out: the same command goes on"),
        ("train --model_name_or_path", "--draft names what is trained, --target its teacher"),
    ],
)
def test_an_option_without_its_like_is_not_led_astray(door, words, told):
    assert told in door.refused(*words.split(), 3)


def test_names_of_other_tools_lead_to_options_that_there_are():
    keys = {f".{option.key}" for each in COMMANDS.values() for option in options_of(each.options)}
    keys |= {
        f".{option.key}" for option in options_of(COMMANDS["doctor"].instead["served"].options)
    }
    keys.add(".config")
    for ours in meant().values():
        for name in (each.partition("=")[0] for each in ours):
            assert any(key.endswith(f".{name}") for key in keys), name
    text = Path(option_names.__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    names = [name for theirs in yaml.safe_load(text).values() for name in theirs.split()]
    assert len(names) == len(set(names)) == len(meant())
