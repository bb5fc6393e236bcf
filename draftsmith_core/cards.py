"""README.md of a checkpoint or a distilled set: a YAML header for the hub, and Markdown from
`templates/`.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from huggingface_hub import metadata_load

from draftsmith_core.engine_commands import SERVING
from draftsmith_core.errors import InputError
from draftsmith_core.hub import PLACEHOLDER, cached, is_hub_name
from draftsmith_core.io import read_json, write_text_atomic

Values = Mapping[str, Any]

_MEASURED = {
    "heldout_alpha": "alpha: expected acceptance of one drafted token, teacher-forced on the "
    "held-out part of the data",
    "heldout_tau": "tokens per target call of chain:4, as if its tokens were accepted "
    "independently",
    "heldout_loss": "loss of the objective per token",
}


def checkpoint_card(record: Values, results: Values | None = None, draft: str | None = None) -> str:
    """Return the card of a draft checkpoint from its `draftsmith.json`.

    results: a `results.json` of `draftsmith eval` in which it is called `draft`; its figures
    replace those of training.
    """
    config, kind = record.get("config", {}), record["kind"]
    is_lm = kind == "draft-lm"
    target = record.get("target") or "THE-TARGET"
    starts = [part["draft"] for part in record.get("merged_from", [])] or [config.get("draft")]
    models = [name for name in (*starts, record.get("merge_base"), record.get("target")) if name]
    licence, about_licence = _licence(models)
    sets = [*config.get("data", []), *config.get("replay", [])]
    header = {
        # The hub lists a model under what its weights started from; a head or a fresh draft under
        # its target.
        "base_model": next((name for name in models if is_hub_name(name)), None),
        "datasets": sorted({name for source in sets if (name := _hub_dataset(source))}),
        "library_name": "transformers" if is_lm else "draftsmith",
        "license": licence,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "draftsmith", *([] if is_lm else [kind])],
    }
    values = {} if results is None else _evaluated(results, draft or "")
    values["heldout"] = [
        (what, f"{record[key]:.4f}") for key, what in _MEASURED.items() if key in record
    ]
    values["vllm"] = SERVING["vllm"]["draft"].commands("draft", target, PLACEHOLDER, 4)[1]
    values |= {"config": config, "kind": kind, "is_lm": is_lm, "target": target, "draft": draft}
    return _card(
        "draft.md.j2",
        header,
        record,
        made=_made(record, config, sets),
        licence=about_licence,
        **values,
    )


def distilled_set_card(manifest: Values) -> str:
    """Return the card of a distilled set, from its `manifest.json`."""
    config = manifest["config"]
    licence, about_licence = _licence([config["target"]])
    header = {
        "license": licence,
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "distillation", "draftsmith"],
        "source_datasets": [name] if (name := _hub_dataset(str(config["prompts"]))) else None,
        "configs": [{"config_name": "default", "data_files": "part-*.parquet"}],
    }
    keys = (
        "prompts",
        "num_samples",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "teacher_top_k",
        "seed",
    )
    rows = [(key, config[key]) for key in keys]
    if config.get("temperatures"):
        rows[keys.index("temperature")] = ("temperatures", " ".join(config["temperatures"]))
    rows += [(key.replace("_", " "), value) for key, value in manifest["counts"].items()]
    rows += [("response tokens", manifest["response_tokens"])]
    rows += [(f"ended by {key}", value) for key, value in manifest["finish_reasons"].items()]
    rows += [("target fingerprint", manifest["identity"]["target_fingerprint"])]
    return _card(
        "distilled_set.md.j2", header, manifest, config=config, made=rows, licence=about_licence
    )


def add_results(checkpoint: Path, results: Path, draft: str) -> None:
    """Write the figures of an evaluation into the card of the checkpoint that it calls `draft`."""
    record = read_json(checkpoint / "draftsmith.json", "the record of a draft checkpoint")
    document = read_json(results, "the results of `draftsmith eval`")
    if draft not in document.get("drafts", []):
        raise InputError(
            f"{results}: has no draft {draft!r}; it has {', '.join(document.get('drafts', []))}"
        )
    write_text_atomic(checkpoint / "README.md", checkpoint_card(record, document, draft))


def licence_of(name: str) -> str | None:
    """Return the licence that a model's card states; None if there is none or it cannot be read."""
    card = cached(name, "README.md")
    try:
        return None if card is None else str((metadata_load(card) or {})["license"])
    except (OSError, KeyError, ValueError, yaml.YAMLError):
        return None


def _licence(names: Sequence[str]) -> tuple[str | None, str]:
    """Return the licence that all these models share, and a sentence for the card."""
    licences = {name: licence_of(name) for name in names}
    sources = "; ".join(
        f"`{name}`: {licence or 'none that can be read'}" for name, licence in licences.items()
    )
    shared = licences[names[0]] if len(set(licences.values())) == 1 else None
    start = "As the models" if shared else "Not set: it does not follow from the models"
    return shared, f"{start} it was made from ({sources or 'none is recorded'})."


def _hub_dataset(source: str) -> str | None:
    """Return the hub dataset behind a source: the source itself, or the prompts of a distilled set
    on disk.
    """
    manifest = Path(source) / "manifest.json"
    if manifest.is_file():
        source = str(
            read_json(manifest, "the manifest of a distilled set")
            .get("config", {})
            .get("prompts", "")
        )
    name = source.partition(":")[0]
    return name if is_hub_name(name) else None


def _made(record: Values, config: Values, sets: Sequence[str]) -> list[tuple[str, Any]]:
    merged = record.get("merged_from", [])
    rows: list[tuple[str, Any]] = [
        (f"weight of {part['draft']}", part["weight"]) for part in merged
    ]
    if not merged:
        rows += [
            ("started from", config.get("draft") or "fresh weights"),
            ("data", ", ".join(sets)),
        ]
    rows += [("response tokens", record.get("data", {}).get("response_tokens"))]
    rows += [("learning rate", config.get("optim", {}).get("lr")), ("seed", config.get("seed"))]
    keys = ("merge_base", "objective", "steps", "best_step", "fingerprint", "target_fingerprint")
    rows += [(key.replace("_", " "), record.get(key)) for key in keys]
    return [row for row in rows if row[1] is not None]


def _evaluated(results: Values, draft: str) -> dict[str, Any]:
    """alpha of the base and of this draft by prompt set and temperature, then tokens per target
    call by method.
    """
    names = list(dict.fromkeys((results["base"], draft)))
    sets = {suite["name"] for suite in results["suites"]}
    rows = [row for row in results["rows"] if row["domain"] in sets]
    values = {
        (row["draft"], row["domain"], row["temperature"]): row
        for row in rows
        if row["figure"] == "alpha"
    }
    alphas, calls = [], []
    for row in (row for row in rows if row["draft"] == draft):
        if row["figure"] == "alpha":
            figures = [_interval(values[name, row["domain"], row["temperature"]]) for name in names]
            alphas.append(
                (f"{row['domain']} ({row['kind'].upper()})", row["temperature"], *figures)
            )
        elif row["figure"] == "tau":
            calls.append(
                (
                    row["domain"],
                    row["temperature"],
                    f"{row['tree']}, {row['verifier']}",
                    _interval(row),
                )
            )
    head = ("prompts", "temperature", *(f"alpha of {name}" for name in names))
    return {"results": results, "alpha_head": head, "alphas": alphas, "calls": calls}


def _interval(estimate: Values) -> str:
    if estimate["value"] is None:
        return "not measured"
    low, high = estimate["low"], estimate["high"]
    return f"{estimate['value']:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _card(template: str, header: Values, record: Values, **values: Any) -> str:
    versions = record.get("versions", {})
    names = [
        f"{name} {versions[name]}"
        for name in ("draftsmith", "torch", "transformers")
        if name in versions
    ]
    page = jinja2.Environment(
        loader=jinja2.PackageLoader("draftsmith_core"), keep_trailing_newline=True
    )
    page.filters |= {"shell": shlex.quote, "python": json.dumps}
    page.globals |= {"table": _table, "here": PLACEHOLDER, "versions": ", ".join(names)}
    head = yaml.safe_dump(
        {key: value for key, value in header.items() if value}, sort_keys=False, allow_unicode=True
    )
    return f"---\n{head}---\n\n" + page.get_template(template).render(values, record=record)
