"""Imports go one way (docs/structure.md). Read from the source, so that imports inside functions
count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "magicdec"
# A place may import from lower ones and from itself; `analysis` of others only `bench.record`.
HEIGHT = {"bench": 6, "analysis": 5.5, "engine": 5, "scheduler": 4, "decoding": 4, "runner": 3}
HEIGHT |= {"rolling_runner": 3.5}
HEIGHT |= {
    "model": 2,
    "attention": 1.5,
    "kv": 1,
    "distributed": 1,
    "config": 0,
    "request": 0,
    "build": 0,
    "triton_modules": 0,
    "machine": -1,
    "names": -1,
    "sections": -0.5,
    "draft_section": -0.5,
    "model_section": -0.5,
    "layer_choice": -0.5,
    "options": -1,
    "checks": -1,
}
# Files of a package of alternatives share these, and never import each other.
SHARED = {
    "attention": {"backend", "library", "sequences", "triton_kernels"},
    "kv": {"cache", "device_rows", "layout", "int8_layout", "policy"},
    "decoding": {
        *("strategy", "drafter", "reader", "draft_length", "forecast"),
        *("sampling", "randomness", "verification", "moments", "choosing"),
        *("device_batch", "recorded", "replayed_steps", "steps"),
    },
}


def imports(source: str) -> Iterator[str]:
    """Dotted names of all imported modules, `b` of `from a import b` included where it is one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "imports are absolute"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                path = PACKAGE.parent / name.replace(".", "/")
                is_module = path.is_dir() or path.with_name(f"{path.name}.py").is_file()
                yield name if is_module else node.module


def allowed(importer: str, imported: str) -> bool:
    """May `importer` (bench.run) import `imported` (runner)?"""
    (here, _, _), (there, _, file) = importer.partition("."), imported.partition(".")
    if here == there:
        return here not in SHARED or file in SHARED[here]
    if here == "analysis":
        return imported == "bench.record"
    if (here, there) == ("attention", "kv"):
        # What a backend reads is a view, in an order it asked for.
        return file in {"layout", "int8_layout", "policy"}
    return HEIGHT[there] < HEIGHT[here]


def test_imports_go_one_way() -> None:
    found = [
        (".".join(path.relative_to(PACKAGE).with_suffix("").parts), name.removeprefix("magicdec."))
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in imports(path.read_text(encoding="utf-8"))
        if name.startswith("magicdec.")
    ]
    assert len(found) > 50
    assert [f"{a} imports {b}" for a, b in found if not allowed(a, b)] == []


@pytest.mark.parametrize(
    "name", ["scheduler", "config", "sections", "names", "checks", "request", "bench/record"]
)
def test_the_light_files_import_no_torch(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert not {"torch", "numpy"} & {module.split(".")[0] for module in imports(source)}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("runner", "engine"),
        ("scheduler", "decoding.strategy"),
        ("config", "request"),
        ("kv.policy", "attention.backend"),
        ("kv.policy", "kv.full"),
        ("attention.sdpa", "kv.cache"),
        ("decoding.speculative", "decoding.self_draft"),
        ("analysis.table", "bench.run"),
        ("analysis.table", "config"),
    ],
)
def test_the_rule_can_be_broken(importer: str, imported: str) -> None:
    assert not allowed(importer, imported)
