"""A function within a function reads only names that are assigned before it is defined. A reader
need not look further down for what it will see when it is called."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "magicdec"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def assigned_names(node: ast.AST) -> dict[str, int]:
    """The first line in which each name is assigned in the function's own scope."""
    lines: dict[str, int] = {}
    stack = list(ast.iter_child_nodes(node))
    while stack:
        child = stack.pop()
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            lines[child.id] = min(lines.get(child.id, child.lineno), child.lineno)
        scopes = (*Function.__args__, ast.Lambda, ast.ClassDef)
        if not isinstance(child, scopes):
            stack.extend(ast.iter_child_nodes(child))
    return lines


def late_names(source: str) -> list[str]:
    """Names that a nested function reads, and that its enclosing function first assigns after the
    nested function's definition."""
    late = []
    for outer in ast.walk(ast.parse(source)):
        if not isinstance(outer, Function):
            continue
        nested = [n for n in ast.walk(outer) if isinstance(n, Function) and n is not outer]
        lines = assigned_names(outer) if nested else {}
        for inner in nested:
            own = {arg.arg for arg in ast.walk(inner.args) if isinstance(arg, ast.arg)}
            own |= assigned_names(inner).keys()
            late += [
                f"{inner.name} (line {inner.lineno}) reads {name.id}, assigned in line "
                f"{lines[name.id]}"
                for name in ast.walk(inner)
                if isinstance(name, ast.Name) and name.id not in own
                if lines.get(name.id, 0) > (inner.end_lineno or 0)
            ]
    return late


def test_no_nested_function_reads_what_is_assigned_later() -> None:
    late = {path: late_names(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert len(late) > 50
    assert {path: names for path, names in late.items() if names} == {}


def test_the_rule_can_be_broken() -> None:
    source = "def f():\n    def g():\n        return x + y\n    y = 1\n    return g()\n"
    assert late_names(source) == ["g (line 2) reads y, assigned in line 4"]
    assert late_names(source.replace("def g()", "def g(y)")) == []
