"""README.md of a checkpoint or a distilled set, in the format that the Hugging Face hub reads: YAML header, Markdown.

A card is a function of the record that lies beside it (`draftsmith.json`, `manifest.json`), of the cards of the models
that the record names, and of nothing else: no clock, no output path. A resumed run thus writes the same bytes.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download, metadata_load

from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError
from draftsmith_core.hub import PLACEHOLDER, is_hub_name
from draftsmith_core.io import read_json, write_text_atomic

Values = Mapping[str, Any]

_MEASURED = {
    "heldout_alpha": "alpha: expected acceptance of one drafted token, teacher-forced on the held-out part of the data",
    "heldout_tau": "tokens per target call of chain:4, as if its tokens were accepted independently",
    "heldout_loss": "loss of the objective per token",
}
_ALPHA = "alpha is the expected acceptance of one drafted token; intervals are 95 %, from a bootstrap over prompts."
_PURPOSE = """A {what} that drafts for `{target}` in speculative decoding: it proposes tokens, the target
accepts or replaces them, and the output stays distributed as the target's own."""
_LOADING_LM = """With transformers, beside any target that has this vocabulary:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}")
draft = AutoModelForCausalLM.from_pretrained("{here}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0]))
```

With draftsmith, or with vLLM on a GPU (which needs equal `vocab_size` in both configs; not tried by draftsmith):

```bash
draftsmith decode --target {target} --draft {here} --prompt "Once upon a time"
{vllm}
```"""
_LOADING_FOREIGN = """It has another tokenizer than `{target}`, and drafts the tokens that both have:

```bash
draftsmith decode --target {target} --draft {here} --heterogeneous_vocab true --prompt "Once upon a time"
```"""
_LOADING_HEAD = """It reads the hidden states of `{target}` and works with that model only:

```bash
draftsmith decode --target {target} --draft {here} --prompt "Once upon a time"
```

It is not an `assistant_model` of transformers. Its tensors are named as in the {kind} authors' code; whether vLLM or
SGLang load it has not been tried by draftsmith."""
_LOADING_SET = """```python
import datasets

rows = datasets.load_dataset("{here}", split="train")
```

With the directory on disk, `draftsmith train --data DIRECTORY`. `response_ids` include the end token; where teacher
rows were kept, `draftsmith_core.teacher_rows.unpack` reads the bytes of `teacher`."""


def checkpoint_card(record: Values, results: Values | None = None, draft: str | None = None) -> str:
    """The card of a draft checkpoint.

    record: its `draftsmith.json`. results: a `results.json` of `draftsmith eval` in which it is called `draft`; its
    figures then replace the held-out ones of training.
    """
    config, kind = record.get("config", {}), record["kind"]
    is_lm = kind == "draft-lm"
    target = record.get("target") or "THE-TARGET"
    starts = [part["draft"] for part in record.get("merged_from", [])] or [config.get("draft")]
    models = [name for name in (*starts, record.get("merge_base"), record.get("target")) if name]
    licence, about_licence = _licence(models)
    sets = [*config.get("data", []), *config.get("replay", [])]
    header = {
        # The hub lists a model under what its weights started from; a head or a fresh draft under its target.
        "base_model": next((name for name in models if is_hub_name(name)), None),
        "datasets": sorted({name for each in sets if (name := _hub_dataset(each))}),
        "library_name": "transformers" if is_lm else "draftsmith",
        "license": licence,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "draftsmith", *([] if is_lm else [kind])],
    }
    purpose = _PURPOSE.format(what="small language model" if is_lm else f"{kind} head", target=target)
    of_language_model = _LOADING_FOREIGN if config.get("heterogeneous_vocab") else _LOADING_LM
    loading = of_language_model if is_lm else _LOADING_HEAD
    _, vllm = SERVING["vllm"]["draft"].commands("draft", target, PLACEHOLDER, 4)
    sections = {
        "Measured": _heldout(record) if results is None else _evaluated(results, draft or ""),
        "How to load it": loading.format(target=target, here=PLACEHOLDER, kind=kind, vllm=vllm),
        "How it was made": _made(record, config, sets),
        "Licence": about_licence,
    }
    return _card(header, f"Draft for {target}", purpose, sections)


def distilled_set_card(manifest: Values) -> str:
    """The card of a distilled set, from its `manifest.json`."""
    config = manifest["config"]
    licence, about_licence = _licence([config["target"]])
    header = {
        "license": licence,
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "distillation", "draftsmith"],
        "source_datasets": [name] if (name := _hub_dataset(str(config["prompts"]))) else None,
        "configs": [{"config_name": "default", "data_files": "part-*.parquet"}],
    }
    keys = ("prompts", "num_samples", "max_new_tokens", "temperature", "top_p", "top_k", "teacher_top_k", "seed")
    rows = [(key, config[key]) for key in keys]
    if config.get("temperatures"):
        rows[keys.index("temperature")] = ("temperatures", " ".join(config["temperatures"]))
    rows += [(key.replace("_", " "), value) for key, value in manifest["counts"].items()]
    rows += [("response tokens", manifest["response_tokens"])]
    rows += [(f"ended by {key}", value) for key, value in manifest["finish_reasons"].items()]
    rows += [("target fingerprint", manifest["identity"]["target_fingerprint"])]
    purpose = f"What `{config['target']}` answered to a set of prompts: training data for a draft model, as token ids."
    made = f"By `draftsmith distill`. `manifest.json` has every option and every part's hash ({_versions(manifest)})."
    sections = {
        "How to load it": _LOADING_SET.format(here=PLACEHOLDER),
        "How it was made": f"{made}\n\n{_table(('what', 'value'), rows)}",
        "Licence": about_licence,
    }
    return _card(header, f"Answers of {config['target']}", purpose, sections)


def add_results(checkpoint: Path, results: Path, draft: str) -> None:
    """Write the figures of an evaluation, in which this checkpoint is called `draft`, into its card."""
    record = read_json(checkpoint / "draftsmith.json", "the record of a draft checkpoint")
    document = read_json(results, "the results of `draftsmith eval`")
    if draft not in document.get("drafts", []):
        raise InputError(f"{results}: has no draft {draft!r}; it has {', '.join(document.get('drafts', []))}")
    write_text_atomic(checkpoint / "README.md", checkpoint_card(record, document, draft))


def licence_of(name: str) -> str | None:
    """The licence that a model's own card or config states; None where there is none or it cannot be read."""
    directory = Path(name)
    card = directory / "README.md"
    if not directory.is_dir():
        from draftsmith_core.hub import hub_has_address

        try:
            card = Path(hf_hub_download(name, "README.md", local_files_only=not hub_has_address()))
        except Exception:  # the hub client's errors share no base class; each means that the licence is not known
            return None
    with contextlib.suppress(ValueError, yaml.YAMLError):  # a card that cannot be read states none
        header = (metadata_load(card) if card.is_file() else None) or {}
        if isinstance(header.get("license"), str):
            return str(header["license"])
    config = read_json(directory / "config.json", "a model's config") if (directory / "config.json").is_file() else {}
    return str(config["license"]) if "license" in config else None


def _licence(names: Sequence[str]) -> tuple[str | None, str]:
    """The licence that all these models share, and what the card says about it."""
    stated = {name: licence_of(name) for name in names}
    said = "; ".join(f"`{name}`: {licence or 'states none that could be read'}" for name, licence in stated.items())
    shared = next(iter(stated.values()), None)
    if shared is not None and set(stated.values()) == {shared}:
        return shared, f"As the models it was made from ({said})."
    return None, f"Not set: it does not follow from the models it was made from ({said or 'none is recorded'})."


def _hub_dataset(source: str) -> str | None:
    """The hub dataset behind a source: a hub name itself, or the prompts of a distilled set on disk."""
    manifest = Path(source) / "manifest.json"
    if manifest.is_file():
        source = str(read_json(manifest, "the manifest of a distilled set").get("config", {}).get("prompts", ""))
    name = source.partition(":")[0]
    return name if is_hub_name(name) else None


def _made(record: Values, config: Values, sets: Sequence[str]) -> str:
    merged = record.get("merged_from", [])
    rows: list[tuple[str, Any]] = [(f"weight of {part['draft']}", part["weight"]) for part in merged]
    if merged:
        rows += [("weight of the rest", f"on {record['merge_base']}" if record["merge_base"] else None)]
    else:
        rows += [("started from", config.get("draft") or "fresh weights"), ("data", ", ".join(sets))]
    rows += [("response tokens", record.get("data", {}).get("response_tokens"))]
    rows += [("learning rate", config.get("optim", {}).get("lr")), ("seed", config.get("seed"))]
    keys = ("objective", "steps", "best_step", "fingerprint", "target_fingerprint")
    rows += [(key.replace("_", " "), record.get(key)) for key in keys]
    maker = "merge" if merged else "train"
    said = f"By `draftsmith {maker}`. `draftsmith.json` has every option and the versions ({_versions(record)})."
    return f"{said}\n\n" + _table(("what", "value"), [row for row in rows if row[1] is not None])


def _heldout(record: Values) -> str:
    rows = [(what, f"{record[key]:.4f}") for key, what in _MEASURED.items() if key in record]
    return _table(("held out while training", "value"), rows) if rows else "Nothing yet; `draftsmith eval` does."


def _evaluated(results: Values, draft: str) -> str:
    """alpha of the base and of this draft by prompt set and temperature, then tokens per target call by method."""
    names = list(dict.fromkeys((results["base"], draft)))
    sets = {suite["name"] for suite in results["suites"]}
    rows = [row for row in results["rows"] if row["domain"] in sets and row["part"] is None]
    values = {(row["draft"], row["domain"], row["temperature"]): row for row in rows if row["figure"] == "alpha"}
    alphas, calls = [], []
    for row in (row for row in rows if row["draft"] == draft):
        if row["figure"] == "alpha":
            figures = [_interval(values[name, row["domain"], row["temperature"]]) for name in names]
            alphas.append((f"{row['domain']} ({row['kind'].upper()})", row["temperature"], *figures))
        elif row["figure"] == "tau":
            calls.append((row["domain"], row["temperature"], f"{row['tree']}, {row['verifier']}", _interval(row)))
    said = f"By `draftsmith eval`, compared as `{draft}` with `{results['base']}`. {_ALPHA}"
    alpha = _table(("prompts", "temperature", *(f"alpha of {name}" for name in names)), alphas)
    return f"{said}\n\n{alpha}\n\n" + _table(("prompts", "temperature", "method", "tokens per target call"), calls)


def _interval(estimate: Values) -> str:
    if estimate["value"] is None:
        return "not measured"
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['value']:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def _versions(record: Values) -> str:
    found = record.get("versions", {})
    return ", ".join(f"{name} {found[name]}" for name in ("draftsmith", "torch", "transformers") if name in found)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _card(header: Values, title: str, purpose: str, sections: Mapping[str, str]) -> str:
    known = yaml.safe_dump({k: v for k, v in header.items() if v}, sort_keys=False, allow_unicode=True)
    return (
        "\n\n".join([f"---\n{known}---", f"# {title}", purpose, *(f"## {k}\n\n{v}" for k, v in sections.items())])
        + "\n"
    )
