"""Pages of the site that are made from the code, so that they cannot say something else than it
does.
"""

import base64
import json
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from draftsmith.core.options import options_of

ROOT = Path(__file__).resolve().parents[1]
# Pages that only the site has, by what they are made from: links lead there in the repository.
MADE_FROM = {
    "tour.ipynb": "tour.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../CHANGELOG.md": "changelog.md",
    "../draftsmith/cli/commands.py": "reference-commands.md",
    "../eval/figures.py": "reference-figures.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    sys.path.insert(0, str(ROOT))
    pages: dict[str, str | bytes] = {
        "reference-commands.md": commands(),
        "reference-figures.md": figures(),
        "contributing.md": of_the_root("CONTRIBUTING.md"),
        "changelog.md": of_the_root("CHANGELOG.md"),
        **notebook(ROOT / "docs" / "tour.ipynb"),
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links to what a page is made from lead to the page."""
    for source, page in MADE_FROM.items():
        markdown = markdown.replace(f"]({source})", f"]({page})")
    return markdown


def of_the_root(name: str) -> str:
    """A page that lies in the repository's root; its links to pages in docs/ lead to the same pages
    here.
    """
    return (
        (ROOT / name)
        .read_text(encoding="utf-8")
        .replace("](docs/", "](")
        .replace("](README.md)", "](index.md)")
    )


def commands() -> str:
    """Every command with its options, their types, defaults and meanings."""
    from draftsmith.cli.commands import COMMANDS

    parts = [
        "# Commands\n\n`draftsmith COMMAND --key value ...`, or `accelerate launch [...] -m "
        "draftsmith COMMAND ...` on "
        "several processes. Every command also takes `--config FILE.yaml` (the same keys; what "
        "is typed wins), "
        "`--print_config`, `--json` (the last line of standard output is one JSON object) and "
        "`--help`.\n\n"
        "| exit code | |\n| --- | --- |\n| 0 | done |\n| 1 | failed while running, in one line |\n"
        "| 2 | bad input or usage, in one line |\n"
        "| 3 | done, and a requirement of `eval --require` is not met; one line each |\n"
        "| 130, 143 | interrupted, told to stop; what was done is kept |"
    ]
    for name, command in COMMANDS.items():
        uses = {name: command} | {
            f"{name} --{key}": other for key, other in command.instead.items()
        }
        for title, use in uses.items():
            rows = "\n".join(f"| {' | '.join(row)} |" for row in options(use.options))
            head = (
                f"{'##' if title == name else '###'} "
                f"{title}\n\n{use.what[0].upper()}{use.what[1:]}."
            )
            parts.append(
                f"{head}\n\n| option | type | default | |\n| --- | --- | --- | --- |\n{rows}"
            )
    return "\n\n".join(parts) + "\n"


def options(cls: type) -> list[tuple[str, str, str, str]]:
    """(option, type, default, meaning) of every option of a command."""
    rows = []
    for option in options_of(cls):
        kind = ", ".join(f"`{choice}`" for choice in option.choices) or option.metavar.replace(
            "|", " or "
        )
        shown = f"`{option.default_text}`" if option.default_text else ""
        meaning = option.help.replace("|", "\\|")
        default = "**required**" if option.required else shown
        rows.append((f"`--{option.key}`", kind + " ..." * option.many, default, meaning))
    return rows


def figures() -> str:
    """What every figure in results.json means, from its own definitions."""
    from draftsmith.eval.figures import definitions

    rows = "\n".join(f"| **{name}** | {text} |" for name, text in definitions().items())
    return (
        "# Figures in results\n\nThese definitions are also in every `results.json`, under "
        "`definitions`. "
        "[Acceptance and speed](acceptance.md) explains them.\n\n| figure | definition |\n| --- "
        f"| --- |\n{rows}\n"
    )


def notebook(path: Path) -> dict[str, str | bytes]:
    """A notebook as a page, with the outputs that are stored in it."""
    pages: dict[str, str | bytes] = {}
    parts = []
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                name = f"tour-{number}.png"
                pages[name] = base64.b64decode(data["image/png"])
                parts.append(f"![output of the cell above]({name})")
            elif "text/html" in data:
                parts.append(re.sub(r"\n\s*", "\n", "".join(data["text/html"])))
            elif text := "".join(output.get("text") or data.get("text/plain", "")):
                parts.append(f"```text\n{text.rstrip()}\n```")
    pages[f"{path.stem}.md"] = "\n\n".join(parts) + "\n"
    return pages
