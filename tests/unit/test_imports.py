"""Imports go one way (docs/structure.md). Read from the source, so that imports inside functions
count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "magicdec"
SOURCES = (".py", ".cpp", ".h")
# Rooms, from the ground up. A room may import from rooms of lower layers and from itself.
LAYERS = (
    {"files"},
    {"names", "console", "figures", "kernels"},
    {"tables", "gantt", "config", "distributed", "model.linear", "kv"},
    {"model.elementwise", "request", "attention"},
    {"model", "scheduling", "records"},
    {"model.families", "executor", "workload", "hardware", "pipelined_speculation"},
    {"model.presets", "cost_model", "runner"},
    {"sampling"},
    {"model.checkpoint", "device_batch", "prefill"},
    {"drafting"},
    {"decoding", "memory"},
    {"engine", "setup"},
    {"probe", "autotune"},
    {"run", "latency", "llm", "simulator", "pipeline"},
    {"gate", "study", "reproduce"},
    {"serving"},
    {"report"},
    {"cli"},
    {"__main__", "__init__"},
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
# Files of a package of alternatives share these, and never import each other.
SHARED = {
    "attention": {"backend", "library", "triton_kernels"},
    "drafting": {
        *("drafter", "draft_length", "forecast", "draft_kv", "block_kv", "policy"),
        *("observation", "block_choice", "draft_tree", "suffix_index"),
        "streaming_llm",  # whose budget bounds the cache of `rolling_runner`
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


def room_of(module: str) -> str:
    """The room of a module given without `magicdec.`; `model` has rooms inside it."""
    first, *rest = module.split(".")
    return f"{first}.{rest[0]}" if f"{first}.{(rest or [''])[0]}" in HEIGHT else first


def allowed(importer: str, imported: str) -> bool:
    """May `importer` (run.run) import `imported` (runner)?"""
    here, there, file = room_of(importer), room_of(imported), imported.rpartition(".")[2]
    if (importer, imported) == ("drafting.mixed", "drafting.ngram"):
        return True  # of which it is made
    if here == there:
        return here not in SHARED or file in SHARED[here]
    if (here, there) == ("attention", "kv"):
        # What a backend reads is a view, in an order it asked for.
        return file in {"layout", "view"}
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
    "name",
    [
        *("names", "request", "records/record"),
        *(f"scheduling/{name}" for name in ("scheduler", "plan")),
        *(f"config/{path.stem}" for path in sorted((PACKAGE / "config").glob("*.py"))),
    ],
)
def test_the_light_files_import_no_torch(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert not {"torch", "numpy"} & {module.split(".")[0] for module in imports(source)}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("runner", "engine"),
        ("scheduling.scheduler", "decoding.strategy"),
        ("config.run_config", "request"),
        ("kv.view", "attention.backend"),
        ("kv.view", "drafting.policies.policy"),
        ("attention.sdpa", "kv.cache"),
        ("drafting.model_drafter", "drafting.ngram"),
        ("model.transformer", "model.checkpoint.source"),
        ("records.table", "run.run"),
        ("latency.record", "cli.latency"),
    ],
)
def test_the_rule_can_be_broken(importer: str, imported: str) -> None:
    assert not allowed(importer, imported)


def test_no_folder_is_a_drawer() -> None:
    """A folder holds what a reader can take in, C++ included."""
    sizes = {
        str(folder.relative_to(PACKAGE)): sum(path.suffix in SOURCES for path in folder.iterdir())
        for folder in (PACKAGE, *PACKAGE.rglob("*/"))
    }
    assert {folder: size for folder, size in sizes.items() if size > 16} == {}
