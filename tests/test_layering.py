"""Imports point one way, and nothing in the tree depends on one machine."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "palimpsa_surgery"
LAYERS = ("kernels", "hf_models", "surgery", "stages", "cli")  # each may import those before it
SHARED = ("errors", "ranks", "_version")  # for surgery and above
HEAVY = {"torch", "transformers", "datasets", "accelerate", "matplotlib", "rich", "numpy", "huggingface_hub"}

ExportedSources = [*sorted((PACKAGE / "kernels").glob("*.py")), *sorted((PACKAGE / "hf_models").glob("*.py"))]


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Absolute names of the modules that a source file imports, relative imports resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("palimpsa_surgery", *path.parent.relative_to(PACKAGE).parts)
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def sources() -> list[Path]:
    """Every module that belongs to a layer."""
    return [path for layer in LAYERS for path in sorted((PACKAGE / layer).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path):
    layer = path.relative_to(PACKAGE).parts[0]
    below = LAYERS[: LAYERS.index(layer) + 1]
    allowed = below if layer in ("kernels", "hf_models") else (*below, *SHARED)
    ours = [name.split(".")[1] for name in imports(path) if name.startswith("palimpsa_surgery.")]
    wrong = sorted(set(ours) - set(allowed))
    assert not wrong, f"{layer} must not import {wrong}"


@pytest.mark.parametrize("path", ExportedSources, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_exported_files_need_only_torch_and_transformers(path: Path):
    # huggingface_hub comes with transformers, whose configs are its strict dataclasses.
    required = {"torch", "transformers", "huggingface_hub", "palimpsa_surgery", *sys.stdlib_module_names}
    optional = {"triton", "mamba_ssm", "causal_conv1d", "liger_kernel"}
    names = {name.split(".")[0] for name in imports(path)}
    assert names <= required | optional, f"{path.name} imports {sorted(names - required - optional)}"

    unguarded = ast.parse(path.read_text(encoding="utf-8"))
    for parent in ast.walk(unguarded):  # whatever may be missing must stand in a try
        for field in ("body", "orelse"):
            if hasattr(parent, field) and isinstance(getattr(parent, field), list):
                kept = [node for node in getattr(parent, field) if not isinstance(node, ast.Try)]
                setattr(parent, field, kept)
    for node in ast.walk(unguarded):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {node.module.split(".")[0]}
        else:
            continue
        assert not names & optional, f"{path.name}, line {node.lineno}: {names} may be missing, so import it in a try"


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_command_line_modules_import_nothing_heavy_at_the_top(path: Path):
    allowed = {"rich"} if path.name == "console.py" else set()  # itself imported inside functions only
    found = list(imports(path, top_level_only=True))
    assert not {name.split(".")[0] for name in found} & (HEAVY - allowed)
    light = ("palimpsa_surgery.errors", "palimpsa_surgery.ranks", "palimpsa_surgery._version", "palimpsa_surgery.cli")
    ours = [name for name in found if name.startswith("palimpsa_surgery")]
    assert not [name for name in ours if not name.startswith(light) or ".console" in name]


def text_files() -> Iterator[Path]:
    """The tree as it is committed, without data."""
    for path in sorted(ROOT.iterdir()):
        if (path.is_file() and path.name != ".git") or path.name in ("src", "tests", "docs", "benchmarks", ".ci"):
            yield from (p for p in [path, *path.rglob("*")] if p.is_file())


def test_nothing_in_the_tree_names_a_machine_or_a_package_index():
    pattern = re.compile(rb"/(?:work|root|home)/[a-z.]|index[-]url|pypi[.]org|download[.]pytorch[.]org")
    skipped = {".bin", ".safetensors", ".png", ".pyc", ".parquet"}
    found = []
    for path in text_files():
        if path.suffix in skipped or path.stat().st_size > 1_000_000 or "egg-info" in str(path):
            continue
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found
