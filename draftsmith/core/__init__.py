"""The ground all other packages stand on: errors, options, files, processes, sampling, tokenizers,
models, prompts.
"""

import ast
from pathlib import Path

__version__ = "0.1.0"


def lazy_names(file: str) -> dict[str, tuple[str, str]]:
    """Module and attribute of every name that a package imports for type checkers only, in its
    first `if`.
    """
    source = Path(file).read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    names: dict[str, tuple[str, str]] = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = (node.module or "", alias.name)
    return names
