"""The table of methods in Markdown, as docs/reference-methods.md has it."""

from draftsmith.cli.method_table import method_rows, notes


def markdown() -> str:
    """Return the table in Markdown."""
    lines = [
        "| name | what it does | lossless | trees | paper |",
        "| --- | --- | --- | --- | --- |",
    ]
    for option, rows in method_rows().items():
        lines.append(f"| **`{option}`** |  |  |  |  |")
        for name, what, lossless, trees, paper in rows:
            shape = f"`{trees}`" if option == "--tree" else trees
            lines.append(f"| `{name}` | {what} | {lossless} | {shape} | {paper} |")
    return "\n".join([*lines, "", "\\\n".join(notes())])
