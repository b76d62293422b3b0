"""A name of a table is written in the name table and in the files of what it names, nowhere else:
code asks what a choice declares of itself and never what it is called."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from magicdec.names import ATTENTION_BACKENDS, KV_POLICIES

PACKAGE = Path(__file__).parents[2] / "magicdec"
TABLES = {"attention backend": ATTENTION_BACKENDS, "KV policy": KV_POLICIES}
# Folders and files where a word is the name of something else.
OTHER_MEANINGS = {
    "full": ("config/sections", "records/table"),  # the full length; full KV in a table
    # the verb
    "verified": ("cli/front/checkpoints", "model/checkpoint/convert", "config/capabilities"),
    "grouped": ("model/families/",),  # a packing of q, k and v
    "native": ("model/elementwise/",),  # a way to compute norms, rotation and gates, as `triton`
    "triton": (
        "model/elementwise/",
        "kernels/build",
        "kv/kernel_view",
        "cli/front/doctor",
    ),  # library
}


@cache
def texts(source: str) -> list[tuple[int, str]]:
    """(line, text) of every string of a module but its docstrings; f-strings part by part."""
    tree = ast.parse(source)
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [
        (node.lineno, node.value)
        for node in found
        if isinstance(node.value, str) and id(node) not in docs
    ]


def mentions(name: str, source: str) -> list[int]:
    """The lines whose strings hold `name` as a word."""
    word = re.compile(rf"(?<![\w.=]){name}(?![\w.])")
    return [line for line, text in texts(source) if word.search(text)]


def is_home(name: str, path: str) -> bool:
    """Whether the file at `path` in the package may write the name."""
    stem = Path(path).stem
    if path == "names.py" or stem == name or stem.startswith(f"{name}_"):
        return True
    return path.startswith(OTHER_MEANINGS.get(name, ()))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table]
)
def test_a_name_is_written_at_home_alone(kind: str, name: str) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in mentions(name, path.read_text(encoding="utf-8"))
        if not is_home(name, path.relative_to(PACKAGE).as_posix())
    ]
    assert found == [], f"the {kind} {name} is named outside its own file"


def test_the_rule_can_be_broken() -> None:
    code = '"""sdpa"""\nif backend == "sdpa":\n    raise ValueError(f"choose {x}, sdpa")\nsdpa = 1'
    assert mentions("sdpa", code) == [2, 3]
    assert mentions("sdpa", 'x = "sdpa_backend", "magicdec.attention.sdpa:SDPABackend"') == []
    assert is_home("sdpa", "attention/sdpa.py") and is_home("triton", "attention/triton.py")
    assert not is_home("sdpa", "config/choices/backend.py") and not is_home("native", "names2.py")
