"""The documentation: links, anchors and paths lead somewhere, its commands have the flags that they
are given, and the README stays short."""

import dataclasses
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT

from magicdec.cli.commands import COMMANDS, KNOWN, parser_of, start
from magicdec.config import resolved, sections
from magicdec.runner import request
from magicdec.systems import options
from magicdec.systems.modes import SYSTEMS

FOLDERS = ("docs/**/*.md", "results/**/*.md", "magicdec/**/*.md", "scripts/**/README.md")
PAGES = sorted(
    str(page.relative_to(ROOT)) for pattern in ("*.md", *FOLDERS) for page in ROOT.glob(pattern)
)
# The log names files and flags that were there when something was measured.
TODAY = [page for page in PAGES if not page.startswith("docs/log/")]
# Written with a folder and as source or text, or within what is committed of the repository.
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/[\w-]+\.(py|md|sh|cpp|h)|results/(baselines|paper)/\S*")
DRIVERS = {f"tests/{name}_benchmark.py": name for name in KNOWN} | {"tests/probe.py": "probe"}
MOST_README_LINES = 200
WIDEST_README_LINE = 120
TERM = re.compile(r"^\| \*\*(.+)\*\* \|.*\|(.*)\|(.*)\|$", re.MULTILINE)  # of the glossary


def prose(text: str) -> str:
    """The text without its fenced blocks, which hold output and commands."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(path.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_links(page: str) -> list[str]:
    """Relative links of the page to a file or a heading that is not there."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose((ROOT / page).read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    return missing


def missing_paths(page: str) -> list[str]:
    """Repository paths in backticks that are not there; `kv/cache.py` is one within magicdec."""
    missing = []
    for word in " ".join(re.findall(r"`([^`\n]+)`", prose((ROOT / page).read_text()))).split():
        path = word.split(":")[0]
        if PATH.fullmatch(path) and not any((ROOT / p / path).exists() for p in ("", "magicdec")):
            missing.append(word)
    return missing


def commands(page: str) -> list[tuple[str, list[str]]]:
    """What the page's indented blocks start of `magicdec` and its drivers: command and flags."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    found = []
    for line in re.findall(r"^    (.*)$", text, flags=re.MULTILINE):
        for words in re.split(r"[;&]", line.partition("  #")[0]):
            shown = words.strip().removeprefix("do ").split()
            starts = [i for i, word in enumerate(shown) if word in DRIVERS]
            if shown[:1] == ["magicdec"]:
                found.append((shown[1], [w for w in shown if w.startswith("--")]))
            elif starts:
                driver = shown[starts[0]]
                flags = shown[starts[0] + 1 :]
                found.append((DRIVERS[driver], [w for w in flags if w.startswith("--")]))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert not missing_links(page)


@pytest.mark.parametrize("page", TODAY)
def test_paths_are_there(page: str) -> None:
    assert not missing_paths(page)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    docs_pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    results_pages = {f"../{page}" for page in PAGES if page.startswith("results/")}
    pages = docs_pages - {"README.md"} | results_pages
    assert [page for page in sorted(pages) if f"({page})" not in index] == []


def test_the_index_says_where_the_text_of_former_pages_is() -> None:
    """Of none that is there, so that its name leads nowhere else."""
    index = (ROOT / "docs" / "README.md").read_text()
    table = re.findall(r"^\| (`.*) \| (.*) \|$", index.partition("## Pages that were\n")[2], re.M)
    assert len(table) > 5 and all("](" in place for _, place in table)
    former = [name for names, _ in table for name in re.findall(r"`([\w.]+)`", names)]
    assert [name for name in former if (ROOT / "docs" / name).exists()] == []


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MOST_README_LINES
    is_wide = [len(line) > WIDEST_README_LINE and not line.startswith("|") for line in lines]
    assert not any(is_wide)


def test_the_first_block_of_the_readme_sets_everything_up() -> None:
    """With the commands of the Makefile that install, and how long they take."""
    first = re.search(r"(?:^    .*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert first is not None
    made = [line for line in first[0].splitlines() if line.startswith("    make ")]
    assert [line.split()[1] for line in made] == ["demo", "test"]
    assert all(re.search(r"\d+ minutes$", line) for line in made)
    targets = re.findall(r"^(\w+)(?= test-wide:|:)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"demo", "test"} <= {*targets}


OUTPUT = re.compile(r"[\w./-]+\.(?:jsonl?|csv|toml|sh|png|xml|md|html|parquet)\b")


def test_the_commands_of_the_readme_leave_no_files_behind() -> None:
    """Each file that they name is committed, ignored by git, or the reader's own text; so is each
    file that a command writes by itself."""
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^    (.*)$", prose(text), flags=re.MULTILINE)
    named = {name for line in lines for name in OUTPUT.findall(line.partition("  #")[0])}
    assert len(named) > 8
    named |= {"machine.json", "machine-nproc2.json", "results/demo.jsonl", "checkpoints/a/b.json"}
    committed = set(git("ls-files"))
    if not committed:
        pytest.skip("this is no checkout of git")
    paths = [
        name
        for name in sorted(named - {"books.jsonl"})
        if str((ROOT / name).resolve().relative_to(ROOT)) not in committed
    ]
    assert git("check-ignore", "--no-index", *paths) == paths


def git(*words: str) -> list[str]:
    command = ("git", "-C", str(ROOT), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.mark.parametrize("page", TODAY)
def test_commands_have_their_flags(page: str) -> None:
    parsers = {name: parser_of(name) for name in KNOWN}
    for name, flags in commands(page):
        names = [name, *(action for action in parsers if action.startswith(f"{name} "))]
        names += ["run"] if name == "sweep" else []  # takes the flags of the runs too
        known = {"--help", "--help_all"}
        for parser in names:
            settings = parsers[parser].settings.values() if parser in parsers else ()
            known |= {flag for setting in settings for flag in setting.flags}
        assert set(flags) <= known, f"{name} in {page}"


def keys() -> set[str]:
    """The keys of all records, and the fields of settings and requests."""
    found = set()
    for page in PAGES:
        for table in re.findall(r"<!-- fields: .*?<!-- end", (ROOT / page).read_text(), re.DOTALL):
            found |= set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE))
    for module in (resolved, sections, options, request):
        for var in filter(dataclasses.is_dataclass, vars(module).values()):
            found |= {field.name for field in dataclasses.fields(var)}
    for system in SYSTEMS.values():
        found |= system.own_settings
    return found | set(vars(request.Request))


def test_the_glossary_has_words_flags_and_keys_that_are_there() -> None:
    """A word is one of the package's source, with any ending; a flag is of a command; a key is of a
    record, a setting or a request."""
    sources = "\n".join(path.read_text() for path in sorted((ROOT / "magicdec").glob("**/*.py")))
    text = re.sub(r"[\s#\"_-]+", " ", sources.lower())
    flags = {flag for n in KNOWN for s in parser_of(n).settings.values() for flag in s.flags}
    terms = TERM.findall((ROOT / "docs" / "glossary.md").read_text())
    assert len(terms) > 60
    words = [word for word, _, _ in terms]
    assert [w for w in words if not re.search(rf"\b{re.sub('[ _-]', ' ', w.lower())}", text)] == []
    assert {flag.strip("` ") for _, flag, _ in terms} - flags - {""} == set()
    assert {key.strip("` ") for _, _, key in terms} - keys() - {""} == set()
    assert len(words) == len({word.lower() for word in words})


@pytest.fixture
def wrap_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    import wrap_pages

    return wrap_pages


def test_lines_are_as_long_as_they_may_be(wrap_pages: ModuleType) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in wrap_pages.pages()}
    differ = [str(page) for page, text in texts.items() if wrap_pages.wrapped(text) != text]
    assert differ == [], "run scripts/dev/wrap_pages.py"


def test_filling_a_page_leaves_its_blocks_alone(wrap_pages: ModuleType) -> None:
    """Code, tables, headings and pictures stay; no line becomes an item; short code stays whole."""
    long = "word `a b` - 1. " * 20
    apart = [f"# {long}", f"| {long}|", f"    {long}", f"![{long}](x.png)", "```", long, "```"]
    page = "\n\n".join([*apart, f"- {long}", f"   {long}"]) + "\n"
    text = wrap_pages.wrapped(page)
    assert text.split() == page.split()
    assert wrap_pages.wrapped(text) == text
    lines = text.splitlines()
    assert [line for line in apart if line not in lines] == []
    filled = [line for line in lines if line not in apart and line]
    assert max(map(len, filled)) <= wrap_pages.WIDTH < len(long)
    assert [line for line in filled if line.count("`") % 2] == []
    assert [line[:2] for line in filled if not line.startswith("  ")] == ["- "]
    assert [line for line in filled[1:] if line.lstrip().startswith(("-", "1."))] == []


def test_the_readme_shows_every_command() -> None:
    shown = {name for name, _ in commands("README.md")}
    assert {name.split()[0] for name in COMMANDS} - shown == set()


def test_the_page_of_flags_is_what_the_commands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    import flags_page

    assert flags_page.PAGE.read_text() == flags_page.page(), "run scripts/dev/flags_page.py --write"


def test_the_plan_shown_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "plan.md").read_text()
    found = re.findall(r"^    (magicdec plan [^`]*?)\n\n```\n(.*?)```", text, re.S | re.M)
    assert len(found) == 1
    for command, shown in found:
        monkeypatch.setattr("sys.argv", command.replace("\\\n", " ").split()[1:])
        with pytest.raises(SystemExit):
            start("plan")
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == shown.splitlines()
