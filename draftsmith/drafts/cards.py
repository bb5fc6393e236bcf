"""README.md of a checkpoint or a distilled set: a YAML header for the hub, and Markdown from
`templates/`.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import CardData, metadata_load

from draftsmith.core.distilled_sets import described
from draftsmith.core.errors import InputError, change_texts
from draftsmith.core.hub import PLACEHOLDER, cached
from draftsmith.core.io import JsonObject, checksums, read_json, write_sealed, write_text_atomic
from draftsmith.core.records import RECORD, RESULTS_SCHEMA
from draftsmith.core.sources import is_hub_name
from draftsmith.drafts.engine_commands import SERVING, decode_command

_MEASURED = {
    "heldout_alpha": "alpha: expected acceptance of one drafted token, teacher-forced on the "
    "held-out part of the data",
    "heldout_tau": "tokens per target call of chain:4, as if its tokens were accepted "
    "independently",
    "heldout_loss": "loss of the objective per token",
}


# Options of `distill` in the card of a set.
_SET_OPTIONS = (
    "prompts",
    "num_samples",
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "teacher_top_k",
    "seed",
)


def checkpoint_card(
    record: JsonObject, results: JsonObject | None = None, draft: str | None = None
) -> str:
    """Return the card of a draft checkpoint from its `draftsmith.json`.

    results: a `results.json` of `draftsmith eval` in which it is called `draft`; its figures
    replace those of training.
    """
    config = record.get("config", {})
    kind = record["kind"]
    is_lm = kind == "draft-lm"
    target = record.get("target") or "THE-TARGET"
    models = [name for name in (config.get("draft"), record.get("target")) if name]
    on_hub = [name for name in models if is_hub_name(name)]
    licence, about_licence = _licence(models)
    sets = [*config.get("data", []), *config.get("replay", [])]
    datasets = {_hub_dataset(directory) for directory in sets}
    header = {
        # The hub lists a model under what its weights started from; a head or a fresh draft under
        # its target.
        "base_model": on_hub[0] if on_hub else None,
        "datasets": sorted(name for name in datasets if name) or None,
        "library_name": "transformers" if is_lm else "draftsmith",
        "license": licence,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "draftsmith", *([] if is_lm else [kind])],
    }
    _, serve = SERVING["vllm"]["draft"].commands("draft", target, PLACEHOLDER, 4)
    measured = [key for key in _MEASURED if key in record]
    values: JsonObject = {} if results is None else _evaluated(results, draft or "")
    measured_by = "" if results is None else results["provenance"]["command"]
    options = ["--draft", PLACEHOLDER]
    values |= {
        "decode": decode_command(target, measured_by, options, "Once upon a time"),
        "heldout": [(_MEASURED[key], f"{record[key]:.4f}") for key in measured],
        "vllm": serve,
        "is_lm": is_lm,
        "target": target,
        "draft": draft,
        "made": _made(record, config, header["datasets"]),
        "licence": about_licence,
    }
    return _card("draft.md.j2", header, record, values)


def distilled_set_card(manifest: JsonObject) -> str:
    """Return the card of a distilled set, from its `manifest.json`."""
    config = manifest["config"]
    licence, about_licence = _licence([config["target"]])
    dataset = _hub_dataset(str(config["prompts"]))
    header = {
        "license": licence,
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "distillation", "draftsmith"],
        "source_datasets": [dataset] if dataset else None,
        "configs": [{"config_name": "default", "data_files": "part-*.parquet"}],
    }
    rows: dict[str, object] = {}
    for key in _SET_OPTIONS:
        if key == "temperature" and config.get("temperatures"):
            rows["temperatures"] = " ".join(config["temperatures"])
        else:
            rows[key] = config[key]
    for key, count in manifest["counts"].items():
        rows[key.replace("_", " ")] = count
    rows["texts"] = "; ".join(described(manifest))
    rows["target fingerprint"] = manifest["identity"]["target_fingerprint"]
    values = {"made": list(rows.items()), "licence": about_licence}
    return _card("distilled_set.md.j2", header, manifest, values)


def write_record(directory: Path, record: JsonObject) -> None:
    """Write the record of a draft checkpoint, with the sha256 of each file there, and the card made
    of it, into its directory.
    """
    write_sealed(directory / RECORD, {**record, "files": checksums(directory)})
    (directory / "README.md").write_text(checkpoint_card(record), encoding="utf-8")


def add_results(checkpoint: str | Path, results: str | Path, draft: str) -> None:
    """Write the figures of an evaluation into the card of the checkpoint that it calls `draft`.

    Raise InputError if the checkpoint has no record, or the results no such draft
    or another schema.
    """
    checkpoint = Path(checkpoint)
    record = read_json(checkpoint / "draftsmith.json", "the record of a draft checkpoint")
    parts = ("base", "drafts", "suites", "rows", "remarks", "provenance")
    document = read_json(Path(results), "the results of `draftsmith eval`", parts)
    if document.get("schema_version") != RESULTS_SCHEMA:
        raise InputError(f"{results}: made by another version; evaluate again")
    if draft not in document["drafts"]:
        raise InputError(
            f"{results}: has no draft {draft!r}; it has {', '.join(document['drafts'])}"
        )
    write_text_atomic(checkpoint / "README.md", checkpoint_card(record, document, draft))


def licence_of(name: str) -> str | None:
    """Return the licence that a model's card states; None if there is none or it cannot be read."""
    card = cached(name, "README.md")
    if card is None:
        return None
    try:
        metadata = metadata_load(card) or {}
        return str(metadata["license"])
    except (OSError, KeyError, ValueError, yaml.YAMLError):
        return None


def _licence(names: Sequence[str]) -> tuple[str | None, str]:
    """Return the licence that all these models share, and a sentence for the card."""
    licences = {name: licence_of(name) for name in names}
    stated = [f"`{name}`: {licences[name] or 'none that can be read'}" for name in licences]
    sources = "; ".join(stated)
    distinct = set(licences.values())
    shared = distinct.pop() if len(distinct) == 1 else None
    start = "As the models" if shared else "Not set: it does not follow from the models"
    return shared, f"{start} it was made from ({sources or 'none is recorded'})."


def _hub_dataset(source: str) -> str | None:
    """Return the hub dataset behind a source: the source itself, or the prompts of a distilled set
    on disk.
    """
    manifest = Path(source) / "manifest.json"
    if manifest.is_file():
        document = read_json(manifest, "the manifest of a distilled set")
        config = document.get("config", {})
        source = str(config.get("prompts", ""))
    name, _, _ = source.partition(":")
    return name if is_hub_name(name) else None


def _made(
    record: JsonObject, config: JsonObject, datasets: Sequence[str] | None
) -> list[tuple[str, object]]:
    rows = {
        "data": ", ".join(datasets or []) or None,
        "response tokens": record.get("data", {}).get("response_tokens"),
        "learning rate": config.get("optim", {}).get("lr"),
        "seed": config.get("seed"),
    }
    for key in ("objective", "steps", "best_step", "fingerprint", "target_fingerprint"):
        rows[key.replace("_", " ")] = record.get(key)
    return [(what, value) for what, value in rows.items() if value is not None]


def _evaluated(results: JsonObject, draft: str) -> JsonObject:
    """alpha of the base and of this draft by prompt set and temperature, then tokens per target
    call by method.
    """
    names = dict.fromkeys((results["base"], draft))
    suites = {suite["name"] for suite in results["suites"]}
    rows = [row for row in results["rows"] if row["set"] in suites and row["part"] is None]
    # alpha by draft, prompt set and temperature.
    intervals: dict[tuple[str, str, float], str] = {}
    for row in rows:
        if row["figure"] == "alpha":
            intervals[row["draft"], row["set"], row["temperature"]] = _interval(row)
    alphas: list[list[str]] = []
    calls: list[list[str]] = []
    for row in rows:
        suite = row["set"]
        temperature = row["temperature"]
        if row["draft"] == draft and row["figure"] == "alpha":
            of_names = [intervals[name, suite, temperature] for name in names]
            alphas.append([f"{suite} ({row['kind'].upper()})", temperature, *of_names])
        if row["draft"] == draft and row["figure"] == "tau":
            method = f"{row['tree']}, {row['rule']}"
            calls.append([suite, temperature, method, _interval(row)])
    head = ["prompts", "temperature", *(f"alpha of {name}" for name in names)]
    return {"results": results, "alpha_head": head, "alphas": alphas, "calls": calls}


def _interval(estimate: JsonObject) -> str:
    if estimate["value"] is None:
        return "not measured"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = []
    for line in (head, ["---"] * len(head), *rows):
        cells = [str(cell).replace("|", "\\|") for cell in line]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _card(template: str, header: JsonObject, record: JsonObject, values: JsonObject) -> str:
    versions = record.get("versions", {})
    known = [name for name in ("draftsmith", "torch", "transformers") if name in versions]
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("draftsmith.drafts"), keep_trailing_newline=True
    )
    pages.filters |= {"shell": shlex.quote, "python": json.dumps}
    pages.globals |= {
        "table": _table,
        "here": PLACEHOLDER,
        "versions": ", ".join(f"{name} {versions[name]}" for name in known),
    }
    # A line break in a name would begin a line of the page.
    values = change_texts(values | {"record": record}, lambda text: " ".join(text.split()))
    body = pages.get_template(template).render(values)
    return f"---\n{CardData(**header).to_yaml()}\n---\n\n{body}"
