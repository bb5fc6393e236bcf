"""The Python door: the same cases as the command line, typed names that resolve lazily, parts of
one's own.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, assert_type, cast

import numpy as np
import pandas as pd
import pytest
import torch

import draftsmith as ds
from draftsmith.core.models import load_model
from draftsmith.core.tokenization import load_tokenizer
from draftsmith.decode import VERIFIERS, DraftModelProposer, Tree
from draftsmith.outputs import Piece
from draftsmith.pair import Pair
from tests.conftest import ROOT
from tests.distilled import write_rows


@pytest.fixture(scope="module")
def pair(target_dir, draft_dir):
    return ds.load_pair(target_dir, draft=draft_dir, device="cpu")


def decoded(door, *words):
    """The outputs of `draftsmith decode` with these words."""
    outputs: list[dict[str, Any]] = door.summary("decode", *words)["outputs"]
    return outputs


def test_every_public_name_is_what_type_checkers_are_told():
    """The table of names and the imports that only type checkers read say the same."""
    source = ast.parse(Path(ds.__file__).read_text(encoding="utf-8"))
    block = next(node for node in source.body if isinstance(node, ast.If))
    told = set()
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            name = alias.asname or alias.name
            told.add(name)
            public = getattr(ds, name)
            # The packages `distill` and `train` are called as these functions.
            found = getattr(public, "function", public)
            assert found is getattr(importlib.import_module(node.module), alias.name), name
    assert told == set(ds.__all__) - {"__version__"}
    assert dir(ds) == sorted(ds.__all__)
    assert (Path(ds.__file__).parent / "py.typed").is_file()


def public_functions():
    """Every public function and method by name."""
    found = {"distill": ds.distill.function, "train": ds.train.function}  # type: ignore[attr-defined]
    for name in ds.__all__:
        value = getattr(ds, name)
        if inspect.isfunction(value):
            found[name] = value
    for kind in (ds.Pair, ds.SpeculativeDecoder):
        for name, value in inspect.getmembers(kind, inspect.isroutine):
            if not name.startswith("_"):
                found[f"{kind.__name__}.{name}"] = value
    for name in ("load", "require", "to_frame", "plot"):
        found[f"Results.{name}"] = getattr(ds.Results, name)
    return found


@pytest.mark.parametrize("function", public_functions().values(), ids=list(public_functions()))
def test_a_public_function_names_its_errors(function):
    assert re.search(r"\bRaises?\s", inspect.getdoc(function) or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "ds.train",
        "import draftsmith.train.config as c",
    ],
)
def test_train_is_a_package_and_a_function(first, golden):
    code = (
        f"import draftsmith as ds, inspect; {first}; import draftsmith.train.loop as loop; "
        "print(loop.__name__, ds.train.__name__, *inspect.signature(ds.train).parameters); "
        "ds.train(nosuch=1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    golden(done.stdout)
    golden(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("room", ["decode", "distill", "eval", "train"])
def test_a_room_has_one_name(room, golden):
    code = f"import {room}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    golden(done.stderr.splitlines()[-1])


def test_type_checkers_see_names_and_types(pair: Pair, golden) -> None:
    """mypy reads this test too (`make check`): a wrong type or an ignore that is not needed fails
    there.
    """
    assert_type(pair, ds.Pair)
    assert_type(pair.generate("a", max_new_tokens=2), ds.Output)
    assert_type(pair.generate(["a", "b"], max_new_tokens=2, tree="kary:3,2"), list[ds.Output])
    assert_type(pair.generate("a", max_new_tokens=2, num_samples=2), list[ds.Output])
    assert_type(ds.TrainConfig(out="o", data=["d"], draft="d").optim.clip_norm, float)
    pair.generate("a", stop=["b"], eos_token_id=[1], max_new_tokens=2)
    assert_type(next(pair.stream("a", max_new_tokens=2)), Piece)
    with pytest.raises(AttributeError):
        ds.load_pear  # type: ignore[attr-defined]  # noqa: B018
    with golden.raises(ds.InputError):
        pair.generate("a", temprature=1.0)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [(None, 0.0), ("kary:2,2", 1.0), ("eagle2:depth=3,beam=2,nodes=6", 1.0)],
)
def test_both_doors_give_the_same_output(door, target_dir, draft_dir, tree, temperature):
    words = f"--target {target_dir} --draft {draft_dir} --max_new_tokens 12 --seed 7".split()
    words += ["--temperature", temperature, *(["--tree", tree] if tree else [])]
    words += ["--prompt", "The quick"]
    (row,) = decoded(door, *words)
    # At temperature 0 `auto` learns from all texts of a pair, and this one has seen none.
    pair = ds.load_pair(target_dir, draft=draft_dir, device="cpu")
    out = pair.generate("The quick", tree=tree, temperature=temperature, max_new_tokens=12, seed=7)
    mine = out.row()
    for found in (row, mine):
        del found["stats"]["seconds"]
    assert mine == row
    assert (out.text, out.output_ids, out.finish_reason) == (
        row["text"],
        row["output_ids"],
        row["finish_reason"],
    )
    assert out.stats.tau == out.stats.emitted / out.stats.target_calls
    assert sum(out.from_draft) == out.stats.accepted == row["stats"]["accepted"]


def test_a_list_draws_what_a_file_of_these_prompts_draws(
    door, pair, target_dir, draft_dir, tmp_path
):
    texts = ["The quick", "dog", "The quick", "A draft model proposes"]
    file = write_rows(tmp_path / "p.jsonl", *({"prompt": text} for text in texts))
    words = f"--target {target_dir} --draft {draft_dir} --prompts {file} --max_new_tokens 9"
    rows = decoded(door, *words.split(), "--temperature", 1)
    for batch_size in (1, 3):
        options: Any = {"temperature": 1, "max_new_tokens": 9, "batch_size": batch_size}
        outputs = pair.generate(texts, seed=0, **options)
        assert [out.output_ids for out in outputs] == [row["output_ids"] for row in rows]
        assert [out.id for out in outputs] == [row["id"] for row in rows]
    # Token ids in place of texts are the same prompts; a prompt that comes again draws anew.
    ids = [np.array(load_tokenizer(target_dir)(text)["input_ids"]) for text in texts]
    again = pair.generate(cast(Any, ids), temperature=1, max_new_tokens=9, seed=0)
    assert [out.output_ids for out in again] == [row["output_ids"] for row in rows]
    assert outputs[0].output_ids != outputs[2].output_ids


def test_pieces_come_as_they_are_decoded_and_are_the_text(pair, golden):
    options: dict[str, Any] = {
        "temperature": 1,
        "max_new_tokens": 24,
        "seed": 3,
        "ignore_eos": True,
        "tree": "chain:4",
    }
    out, pieces = pair.generate("The quick", **options), list(pair.stream("The quick", **options))
    assert "".join(pieces) == out.text and len(pieces) > 5
    assert {piece.from_draft for piece in pieces} == {True, False}
    stream = pair.stream("The quick", **options)
    assert next(stream) == pieces[0]
    stream.close()
    with golden.raises(ds.InputError):
        next(pair.stream("dog " * 200))
    assert repr(out).startswith("Output(") and len(repr(out)) < 120 and len(repr(pair)) < 200


def test_a_text_is_what_the_user_says_to_a_chat_model_at_both_doors(
    door, pair, target_dir, draft_dir, tmp_path, golden
):
    template = "{% for turn in messages %}[{{ turn.content }}]{% endfor %}:"
    file = tmp_path / "t.jinja"
    file.write_text(template)
    chat = [{"role": "user", "content": [{"type": "text", "text": "Who jumps?"}]}]
    words = ["--target", target_dir, "--draft", draft_dir, "--prompt", "Who jumps?"]
    words += ["--max_new_tokens", 4, "--chat_template", str(file)]
    options: dict[str, Any] = {"max_new_tokens": 4, "chat_template": template}
    chatted = pair.generate("Who jumps?", **options)
    assert pair.tokenizer.chat_template is None
    # A template writes its special tokens itself.
    assert chatted.prompt_ids == pair.encode("[Who jumps?]:")[1:]
    from_file = pair.generate("Who jumps?", **options | {"chat_template": str(file)})
    assert from_file.output_ids == chatted.output_ids
    raw = pair.generate("Who jumps?", raw=True, **options)
    assert raw.prompt_ids == pair.encode("Who jumps?")
    for out, more in ((chatted, []), (raw, ["--raw"])):
        (row,) = decoded(door, *words, *more)
        assert (row["prompt_ids"], row["output_ids"]) == (out.prompt_ids, out.output_ids)
    untyped: Any = pair
    for asked in (
        untyped.generate(chat, **options),
        untyped.generate({"messages": chat}, **options),
        untyped.generate(["Who jumps?"], **options)[0],
        untyped.generate([{"messages": chat}], **options)[0],
    ):
        assert asked.prompt_ids == chatted.prompt_ids
        assert asked.output_ids == chatted.output_ids
    with golden.raises(ds.InputError):
        untyped.generate([{"role": "user", "content": [{"type": "image"}]}], **options)


def drawn(outputs):
    listed = outputs if isinstance(outputs, list) else [outputs]
    return [out.output_ids for out in listed]


def test_several_outputs_of_a_prompt_are_those_of_the_command(door, pair, target_dir, draft_dir):
    words = f"--target {target_dir} --draft {draft_dir} --prompt dog --num_samples 2"
    rows = decoded(door, *words.split(), *"--temperature 1 --max_new_tokens 6".split())
    outputs = pair.generate("dog", num_samples=2, temperature=1, max_new_tokens=6, seed=0)
    assert drawn(outputs) == [row["output_ids"] for row in rows]


WRONG: list[dict[str, Any]] = [
    {"tree": 4.5},
    {"temprature": 1},
    {"stop": 5},
    {"temperature": "hot"},
    {"max_new_tokens": 0},
    {"verifier": "nosuch"},
    {"proposer": "nosuch"},
    {"tools": [{}]},
    {"prompts": 5},
    {"prompts": [5, True]},
    {"prompts": ["a", ["b"]]},
    {"prompts": {"text": "a"}},
    {"prompts": [{"role": "user", "text": "a"}]},
    {"prompts": ""},
    {"prompts": [""]},
    {"prompts": [[]]},
    {"prompts": {"messages": []}},
]


def test_a_wrong_option_or_prompt_is_one_line(pair, golden):
    for options in WRONG:
        with golden.raises(ds.InputError):
            pair.generate(**{"prompts": "a"} | options)
    assert pair.generate([]) == []


def test_arrays_and_series_of_texts_are_texts(pair):
    texts = ["The quick", "dog"]
    expected = drawn(pair.generate(texts, max_new_tokens=4))
    untyped: Any = pair
    for given in (np.array(texts), np.array(texts, dtype=object), pd.Series(texts, index=[4, 7])):
        assert drawn(untyped.generate(given, max_new_tokens=4)) == expected
    ids = torch.tensor(pair.encode("dog"))
    assert drawn(untyped.generate(ids, max_new_tokens=4)) == expected[1:]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(["a", "b"], {}), ("a", {"num_samples": 2})],
)
def test_a_stream_is_of_one_output(pair, prompt, options, golden):
    with golden.raises(ds.InputError):
        pair.stream("The quick", on_tokens=print)
    with golden.raises(ds.InputError):
        pair.stream(prompt, max_new_tokens=4, **options)


def test_a_stream_takes_the_options_of_generate_and_says_what_is_wrong_at_the_call(pair, golden):
    chat = [{"role": "user", "content": "Who jumps?"}]
    options: dict[str, Any] = {"max_new_tokens": 4, "chat_template": "{{ messages[0].content }}"}
    expected = pair.generate("Who jumps?", **options).text
    for given in ("Who jumps?", chat):
        assert "".join(pair.stream(given, **options)) == expected
    for wrong in ({"temperature": "hot"}, {"verifier": "nosuch"}, {"max_new_tokens": 500}):
        with golden.raises(ds.InputError):
            pair.stream("a", **wrong)


def test_what_is_not_followed_of_a_models_own_config_is_said_at_both_doors(
    target_dir, caplog, golden
):
    own = ds.load_pair(target_dir, device="cpu")
    own.target.generation_config.encoder_repetition_penalty = 1.37
    own.target.generation_config.repetition_penalty = 1.36
    ds.SpeculativeDecoder(own.target).generate([[1, 2]], max_new_tokens=1)
    own.generate("a", max_new_tokens=1)
    (line,) = [text for text in caplog.messages if "encoder_repetition_penalty=1.37" in text]
    assert "=1.36" not in line
    golden(line)


def test_the_decoder_itself_takes_loaded_models_only(golden):
    with golden.raises(ValueError):
        ds.SpeculativeDecoder(cast(Any, "x"))


def read_stream(pieces: Generator[Piece, None, ds.Output]) -> tuple[str, ds.Output]:
    """Return the text of a stream and its output."""
    text = ""
    while True:
        try:
            text += next(pieces)
        except StopIteration as end:
            return text, end.value


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_ends_the_text_and_is_kept_on_request(pair, include_stop, length):
    options: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    whole = pair.generate("The quick", **options)
    for begin in (0, 4, 9):
        stop = whole.text[begin : begin + length]
        options["stop"] = ["no such text", stop]
        cut = pair.generate("The quick", include_stop=include_stop, **options)
        first = whole.text.index(stop)
        assert cut.text == whole.text[: first + length * include_stop]
        assert cut.finish_reason == "stop" and len(cut.output_ids) <= len(whole.output_ids)
        streamed = pair.stream("The quick", include_stop=include_stop, **options)
        text, output = read_stream(streamed)
        assert text == output.text == cut.text


def test_what_only_begins_as_a_stop_is_streamed(pair):
    options = {"max_new_tokens": 24, "ignore_eos": True}
    whole = pair.generate("The quick", **options)
    text, output = read_stream(pair.stream("The quick", stop=whole.text[-5:] + "~", **options))
    assert text == output.text == whole.text


def test_a_seed_is_drawn_and_returned(pair):
    options = {"temperature": 1.0, "max_new_tokens": 12}
    one, other = (pair.generate("The quick", **options) for _ in range(2))
    assert one.seed != other.seed
    again = pair.generate("The quick", seed=one.seed, **options)
    assert again.output_ids == one.output_ids


def test_a_keyword_that_is_unknown_is_an_error_of_both_families(pair, target_dir):
    calls: list[Any] = [
        lambda: pair.generate("a", sed=1),
        lambda: pair.stream("a", sed=1),
        lambda: ds.load_pair(target_dir, devic="cpu"),
    ]
    for call in calls:
        with pytest.raises(ds.DraftsmithError) as caught:
            call()
        assert isinstance(caught.value, TypeError)


def test_parts_of_ones_own_are_passed_as_objects(pair, draft_dir):
    greedy = pair.generate("The quick", proposer="none", max_new_tokens=12).output_ids
    draft = load_model(draft_dir, device="cpu")
    mine = dataclasses.replace(VERIFIERS["exact"], name="mine", title="a rule of my own")
    for options in (
        {"proposer": DraftModelProposer([draft])},
        {"proposer": DraftModelProposer([draft]), "tree": Tree((-1, 0, 0)), "verifier": mine},
        {"tree": Tree((-1, -1, 0)), "verifier": mine},
        {"proposer": "prompt_lookup", "verifier": "exact"},
    ):
        assert pair.generate("The quick", max_new_tokens=12, **options).output_ids == greedy


def test_lookup_comes_before_the_drafts_of_a_pair(pair):
    text = "the quick fox and the quick dog and the quick fox"
    options = {"proposer": "prompt_lookup", "max_new_tokens": 24, "tree": "chain:2"}
    joined = pair.generate(text, **options)
    alone = pair.generate(text, draft=[], **options)
    assert joined.output_ids == alone.output_ids
    assert joined.stats.copied_calls < joined.stats.target_calls <= alone.stats.target_calls
    assert joined.stats.proposed > alone.stats.proposed
    assert joined.stats.copied_accepted <= joined.stats.accepted
    assert alone.stats.copied_calls == 0
    assert pair.decoding(proposer="prompt_lookup").name == "prompt_lookup+draft"


def test_a_draft_that_a_proposer_does_not_read_is_an_error(pair, golden):
    (name,) = pair.drafts
    with golden.raises(ds.InputError):
        pair.generate("The quick", draft=name, proposer="lookahead")
    assert pair.generate("The quick", proposer="lookahead", max_new_tokens=8).output_ids


def test_drafts_are_chosen_by_name(target_dir, draft_dir, other_vocabulary_dir, golden):
    several = ds.load_pair(
        Path(target_dir), draft={"a": Path(draft_dir), "b": other_vocabulary_dir}, device="cpu"
    )
    greedy = several.generate("dog", proposer="none", max_new_tokens=8)
    assert greedy.stats.proposed == 0
    together = several.decoding()
    assert together.method is not None and together.method.verifier == "specinfer"
    alone = several.decoding(draft="a")
    assert alone.method is not None and alone.method.verifier == "mcsd"
    assert several.decoding(draft="a") is alone
    for chosen in (None, "a", ["b"]):
        assert (
            several.generate("dog", draft=chosen, max_new_tokens=8).output_ids == greedy.output_ids
        )
    with golden.raises(ds.InputError):
        several.generate("dog", draft="c")


@pytest.mark.parametrize("package", ["train", "eval"])
def test_a_file_of_the_caller_may_have_the_name_of_a_room(tmp_path, package, golden):
    (tmp_path / f"{package}.py").write_text("name = 'mine'\n")
    (tmp_path / "study.py").write_text(
        f"import {package}, draftsmith as ds\nprint({package}.name, ds.TrainConfig.__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    golden(done.stdout)
