"""Print, as YAML, the model classes that an engine's own sources take as a target, by method.

    python tests/workers/engine_classes.py vllm SITE_PACKAGES/vllm
    python tests/workers/engine_classes.py sglang SITE_PACKAGES/sglang

Sources are read as text and never run. `text`: every class that writes text. `eagle`, `eagle3`:
those that give such a head what it reads. drafts/engine_classes.yaml keeps what this prints.
"""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import yaml

# Of SGLang's classes: those that write text, and no heads.
_WRITES_TEXT = re.compile("ForCausalLM$|ForConditionalGeneration$|LMHeadModel$")
_HEADS = re.compile("Eagle|NextN|MTP|Draft|Assistant|DFlash|DSpark|Medusa")
_REGISTRIES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")


def vllm(package: Path) -> dict[str, list[str]]:
    """Names in its registry; a class with `SupportsEagle3` gives states to EAGLE-3 heads and block
    drafters.
    """
    registered = _registered(package / "model_executor" / "models" / "registry.py")
    classes = _classes([package / "model_executor" / "models", package / "models"])
    found: dict[str, list[str]] = {"text": sorted(registered)}
    for key, mark in (("eagle", "SupportsEagle"), ("eagle3", "SupportsEagle3")):
        having = [name for name in registered if _inherits(registered[name], mark, classes)]
        found[key] = sorted(having)
    return found


def sglang(package: Path) -> dict[str, list[str]]:
    """Classes that the files of its models enter, by the method that it calls for each kind of
    head.
    """
    models = package / "srt" / "models"
    classes = _classes([models])
    entered: set[str] = set()
    for file in models.rglob("*.py"):
        entered |= set(_entry_classes(file))
    entered = {name for name in entered if _WRITES_TEXT.search(name) and not _HEADS.search(name)}
    methods = {
        "eagle": "get_embed_and_head",
        "eagle3": "set_eagle3_layers_to_capture",
        "dflash": "set_dflash_layers_to_capture",
    }
    found = {"text": sorted(entered)}
    for key, method in methods.items():
        found[key] = sorted(name for name in entered if _inherits(name, f".{method}", classes))
    return found


def _registered(file: Path) -> dict[str, str]:
    """Architecture -> class, of the tables of models that write text."""
    names: dict[str, str] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id in _REGISTRIES:
                table = ast.literal_eval(node.value)
                names |= {architecture: place[-1] for architecture, place in table.items()}
    return names


def _classes(directories: list[Path]) -> dict[str, list[set[str]]]:
    """By class name, what each definition has: names of its bases, and `.name` of its methods."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    for directory in directories:
        for file in sorted(directory.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                    methods = {
                        f".{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
                    }
                    found[node.name].append(bases | methods)
    return found


def _inherits(name: str, mark: str, classes: dict[str, list[set[str]]]) -> bool:
    """Whether every definition of a class has the mark, in itself or in a base."""
    definitions = classes.get(name, [])
    return bool(definitions) and all(
        mark in has or any(base != name and _inherits(base, mark, classes) for base in has)
        for has in definitions
    )


def _entry_classes(file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
            names = node.value.elts if isinstance(node.value, ast.List) else [node.value]
            return [ast.unparse(name) for name in names]
    return []


if __name__ == "__main__":
    engine, directory = sys.argv[1:]
    read = {"vllm": vllm, "sglang": sglang}[engine]
    sys.stdout.write(yaml.safe_dump(read(Path(directory)), width=116, default_flow_style=None))
