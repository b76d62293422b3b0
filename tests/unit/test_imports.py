"""Imports go one way (docs/structure.md). Read from the source, so that imports inside functions
count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "magicdec"
# Rooms, from the ground up. A room may import from rooms of lower layers and from itself. Large
# rooms have rooms inside them.
LAYERS = (
    {"output", "names", "kernels"},
    {"config", "distributed", "kv"},
    {"attention", "model.linear"},
    {"model.elementwise"},
    {"model"},
    {"model.families"},
    {"model.presets"},
    {"model.checkpoint"},
    {"runner"},
    {"runner.sampling"},
    {"runner.device_batch", "runner.prefill"},
    {"workload", "records", "speculation"},
    {"speculation.steps"},
    {"hardware"},
    {"engine", "setup"},
    {"systems", "llm"},
    {"bench.check"},
    {"bench"},
    {"bench.runner"},
    {"bench.groups", "bench.recording"},
    {"bench.records_of"},
    {"bench.measure"},
    {"bench.latency", "bench.report", "bench.study"},
    {"bench.acceptance", "bench.audit"},
    {"bench.export", "bench.gate"},
    {"predict"},
    {"cli"},
    {"__main__", "__init__"},
)
HEIGHT = {room: height for height, layer in enumerate(LAYERS) for room in layer}
# Files of a package of alternatives share these, and never import each other.
SHARED = {
    "attention": {"backend", "library", "sinks", "triton_kernels"},
    "speculation": {
        "drafter",
        "draft_length",
        "forecast",
        "draft_kv",
        "block_kv",
        "copied_kv",
        "policy",
        "observation",
        "block_choice",
        "suffix_index",
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
    """The innermost room of a module given without `magicdec.`."""
    inner = ".".join(module.split(".")[:2])
    return inner if inner in HEIGHT else module.split(".")[0]


def allowed(importer: str, imported: str) -> bool:
    """May `importer` (bench.measure) import `imported` (runner.model_runner)?"""
    here = room_of(importer)
    there = room_of(imported)
    file = imported.rpartition(".")[2]
    if (importer, imported) == ("speculation.mixed", "speculation.ngram"):
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
        "names",
        "runner/request",
        "runner/step_plan",
        "engine/scheduler",
        "records/record",
        *(f"config/{path.stem}" for path in sorted((PACKAGE / "config").glob("*.py"))),
    ],
)
def test_the_light_files_import_no_torch(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
    assert not {"torch", "numpy"} & {module.split(".")[0] for module in imports(source)}


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("runner.model_runner", "engine.engine"),
        ("engine.scheduler", "systems.flover.system"),
        ("config.run_config", "runner.request"),
        ("kv.view", "attention.backend"),
        ("kv.view", "speculation.policies.policy"),
        ("attention.sdpa", "kv.cache"),
        ("speculation.model_drafter", "speculation.ngram"),
        ("speculation.drafter", "speculation.steps.steps"),
        ("model.transformer", "model.checkpoint.source"),
        ("runner.model_runner", "runner.sampling.verification"),
        ("records.describe", "bench.measure"),
        ("systems.mdi_llm.system", "bench.measure"),
        ("bench.check.check", "bench.recording"),
        ("bench.latency.record", "cli.latency"),
    ],
)
def test_the_rule_can_be_broken(importer: str, imported: str) -> None:
    assert has_module(importer) and has_module(imported)
    assert not allowed(importer, imported)


def has_module(module: str) -> bool:
    path = PACKAGE / module.replace(".", "/")
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file()


def test_every_room_is_there() -> None:
    assert [room for room in HEIGHT if not has_module(room)] == []
