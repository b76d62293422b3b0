"""A name of a table is written in the name table and in the files of what it names, nowhere else:
code asks what a choice declares of itself and never what it is called. A class, and an alias of a
type, has a name that nothing else in the package has. No name says nothing of the thing."""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from magicdec.names import ATTENTION_BACKENDS, KV_POLICIES, SYSTEMS
from magicdec.systems.modes import NAMES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "magicdec"
TABLES = {"attention backend": ATTENTION_BACKENDS, "KV policy": KV_POLICIES}
# Folders and files where a word is the name of something else.
OTHER_MEANINGS = {
    "full": ("config/sections", "records/describe"),  # the full length; full KV in a table
    "verified": (
        *("cli/checkpoints", "model/checkpoint/convert", "config/capabilities"),  # the verb
        *("records/record", "records/pass_record", "records/describe"),  # a status
        "bench/audit/",  # the same, and counts of verifications
    ),
    "grouped": ("model/families/",),  # a packing of q, k and v
    "quantised": ("model/",),  # weights of any format
    "native": ("model/elementwise/",),  # a way to compute norms, rotation and gates, as `triton`
    "triton": (
        "model/elementwise/",
        "kernels/build",
        "kv/kernel_view",
        "cli/doctor",
    ),  # library
}

# Names that say nothing of a thing, in the place of one such as `case` or `row_bytes`.
EMPTY_NAME = re.compile("each|said|is_there|_?of_.*", re.IGNORECASE)
CONSTRUCTOR = "of"  # of a class, but no name of a variable
# Words that say nothing of a class by themselves.
VAGUE = {"Each", "Part", "Room", "Watch", "What"}


@dataclass(frozen=True)
class Words:
    """What a module writes. `texts`: (line, text) of every string but docstrings; f-strings part by
    part. `types`: the names of all classes, and of aliases of types, which are written as classes
    are. `identifiers`: all names, attributes, parameters and fields. `empty_names`: names, those of
    loop variables among them, that say nothing of the thing."""

    texts: list[tuple[int, str]]
    types: list[str]
    identifiers: set[str]
    empty_names: set[str]


@cache
def words_of(source: str) -> Words:
    tree = ast.parse(source)
    docs = set[int]()
    texts = list[tuple[int, int, str]]()
    types = list[str]()
    identifiers = set[str]()
    defined = set[str]()
    variables = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((id(node), node.lineno, node.value))
        elif isinstance(node, ast.ClassDef):
            types.append(node.name)
            defined.add(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        names = {getattr(node, field, None) for field in ("id", "attr", "arg")}
        identifiers |= {name for name in names if isinstance(name, str)}
        if isinstance(node, ast.Name):
            variables.add(node.id)
        elif isinstance(node, ast.arg):
            variables.add(node.arg)
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        aliases = [target.id for target in targets if isinstance(target, ast.Name)]
        types += [name for name in aliases if re.fullmatch("[A-Z][a-z]\\w*", name)]
    empty = {name for name in identifiers | defined if EMPTY_NAME.fullmatch(name)}
    return Words(
        [(line, text) for place, line, text in texts if place not in docs],
        types,
        identifiers,
        empty | (variables & {CONSTRUCTOR}),
    )


def mentions(name: str, source: str) -> list[int]:
    """The lines whose strings hold `name` as a word."""
    word = re.compile(rf"(?<![\w.=]){name}(?![\w.])")
    return [line for line, text in words_of(source).texts if word.search(text)]


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


# Beside `names.SYSTEMS`: the presets name modes, and the simulator is one of two systems.
NAMES_SYSTEMS = ("cli/presets.py", "cli/simulate.py", "predict/simulator/")
NAMES_MODES = (*NAMES_SYSTEMS, "cli/commands.py")  # whose commands have names of modes
# The batches of `magicdec run`, which are those of one system over prompts that are kept.
DERIVED_OF = {"flover": "systems/prefilled_batching.py"}


def is_of_system(system: str, path: str) -> bool:
    """Whether the file at `path` in the package may name a system."""
    homes = f"systems/{system}/", "names.py", *NAMES_SYSTEMS
    return path.startswith(homes) or path == DERIVED_OF.get(system)


def mentions_system(system: str, source: str) -> bool:
    """In whatever spelling, also in a comment or in the name of a module."""
    words = system.replace("_", "[-_ ]?")
    return re.search(rf"(?<![a-z]){words}(?![a-z])", source, re.IGNORECASE) is not None


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "servers"])
def test_a_system_is_named_in_its_folder_alone(system: str) -> None:
    """Those of other programs are servers as any other program's."""
    found = [
        name
        for path in sorted(PACKAGE.rglob("*.py"))
        if not is_of_system(system, name := path.relative_to(PACKAGE).as_posix())
        and mentions_system(system, path.read_text(encoding="utf-8"))
    ]
    assert found == [], f"{system} is named outside its folder"


@pytest.mark.parametrize("room", ["bench", "cli", "records", "engine"])
def test_no_command_or_record_names_a_mode(room: str) -> None:
    found = [
        f"{name}:{line} {text}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if not (name := path.relative_to(PACKAGE).as_posix()).startswith(NAMES_MODES)
        for line, text in words_of(path.read_text(encoding="utf-8")).texts
        if text in NAMES
    ]
    assert found == []


def test_the_rule_of_systems_can_be_broken() -> None:
    assert mentions_system("mdi_llm", "x = 1  # as MDI-LLM does")
    assert mentions_system("mdi_llm", "from magicdec.systems.mdi_llm.details import A")
    assert not mentions_system("pipeinfer", "pipeinference")
    assert is_of_system("pipeinfer", "systems/pipeinfer/head.py")
    assert not is_of_system("pipeinfer", "systems/stages/staged.py")


def test_a_type_name_is_defined_once() -> None:
    homes = defaultdict[str, list[str]](list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for name in words_of(path.read_text(encoding="utf-8")).types:
            homes[name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
    assert VAGUE.isdisjoint(homes)


def test_classes_and_aliases_are_type_names() -> None:
    code = "class A:\n    class B:\n        pass\nRow = dict[str, str]\nT = TypeVar('T')\nROWS = 2"
    assert words_of(code).types == ["A", "B", "Row"]


# Other names of the draft length (`gamma`), of its bound (`max_gamma`) and of the drafts of a step
# (`num_drafted`).
OTHER_GAMMAS = {
    "num_drafts",
    "draft_tokens",
    "most_drafts",
    "most_draft_tokens",
    "num_draft_steps",
    "num_draft",
    "draft_len",
    "num_proposed",
    "num_speculative_tokens",
}


def test_the_draft_length_has_one_name() -> None:
    """vLLM calls the draft tokens of all steps `num_draft_tokens`: a key of metrics, of a pass or
    of one request."""
    found = {
        path.relative_to(PACKAGE).as_posix(): words_of(path.read_text(encoding="utf-8")).identifiers
        for path in PACKAGE.rglob("*.py")
    }
    assert {
        file: names & OTHER_GAMMAS for file, names in found.items() if names & OTHER_GAMMAS
    } == {}
    assert sorted(file for file, names in found.items() if "num_draft_tokens" in names) == [
        "bench/showing.py",
        *(
            f"records/{name}.py"
            for name in ("acceptance", "computing", "pass_record", "recomputing")
        ),
    ]


def test_identifiers_are_found_everywhere() -> None:
    assert words_of("def f(num_drafts): return a.most_drafts(draft_len=b)").identifiers == {
        "num_drafts",
        "a",
        "most_drafts",
        "draft_len",
        "b",
    }


@pytest.mark.parametrize("folder", ["magicdec", "scripts", "tests", "docs"])
def test_every_name_says_what_the_thing_is(folder: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    assert sources
    found = {
        path: names for path, source in sources.items() if (names := words_of(source).empty_names)
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("for each in rows: pass", "each"),
        ("[a for n, each in pairs]", "each"),
        ("sorted(rows, key=lambda each: each.n)", "each"),
        ("sum(n for _, of in pairs)", "of"),
        ("def of_row(): pass", "of_row"),
        ("OF_ROWS = 3", "OF_ROWS"),
        ("call(said=2)", "said"),
    ],
)
def test_an_empty_name_is_found(source: str, name: str) -> None:
    assert words_of(source).empty_names == {name}
    fine = words_of("row = Counts.of('each', num_of_rows)\ndef of(self): pass")
    assert fine.empty_names == set()
