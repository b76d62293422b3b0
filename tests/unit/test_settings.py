"""The settings of all commands, as their parsers have them: one vocabulary, and what every declared
bound, choice and type refuses."""

import re
import typing
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

import flags_page
import pytest

from magicdec.cli.commands import COMMANDS
from magicdec.cli.completion import SHELLS, script_of
from magicdec.cli.drivers import DRIVERS
from magicdec.cli.parsing.parser import Parser
from magicdec.config.setting import Declared, check_values, declared, same, setting
from magicdec.config.toml_file import TomlFile

PARSERS = flags_page.parsers()
DRIVER_PARSERS = {name: driver.build_parser() for name, driver in DRIVERS.items()}
SETTINGS = {
    command: list(parser.settings.values())
    for command, parser in (PARSERS | DRIVER_PARSERS).items()
}
# `--out` names the file of records in some commands, and what a command writes in others;
# `--modes` what is served, or what is simulated; `--format` how tables are printed, or for which
# program records are exported.
TWO_MEANINGS = {"--out", "--modes", "--format"}
# Choices of these belong to the command, or to the policies that it knows.
OWN_CHOICES = {"--modes", "--kv_policy", "--dtype", "--kind"}
# Spellings that other projects, or earlier versions, have for a concept of the vocabulary.
SYNONYMS = {
    "--mode",
    "--baselines",
    "--output_len",
    "--max_new_tokens",
    "--batch_size",
    "--context",
    "--results",
    "--json",
    "--num_draft_tokens",
    "--num_speculative_tokens",
    "--drafter",
    "--n_predict",
    "--num_prompts",
    "--world_size",
    "--num_ranks",
    "--policy",
}


CONCEPTS = flags_page.concepts()
FLAGS = sorted({flag for flag, _ in CONCEPTS})


def uses_of(flag: str) -> list[tuple[str, Declared]]:
    return [use for (name, _), uses in CONCEPTS.items() if name == flag for use in uses]


def is_equal(default: Any, other: Any) -> bool:
    """Whether two defaults are the same, though one may be a text, a path or a list of one."""
    texts = [list(map(str, v)) if isinstance(v, tuple) else [str(v)] for v in (default, other)]
    return texts[0] == texts[1]


def test_a_flag_has_one_meaning_and_one_default() -> None:
    for flag in FLAGS:
        check_meanings(flag)


def check_meanings(flag: str) -> None:
    meanings: dict[str, list[tuple[str, Declared]]] = {}
    for command, declaration in uses_of(flag):
        meanings.setdefault(declaration.setting.help, []).append((command, declaration))
    assert len(meanings) == 1 or (flag in TWO_MEANINGS and len(meanings) == 2), flag
    for uses in meanings.values():
        _, first = uses[0]
        for command, declaration in uses:
            assert declaration.flags[0] == first.flags[0]
            assert declaration.setting.other_defaults == first.setting.other_defaults
            if flag not in OWN_CHOICES:
                assert declaration.setting.choices == first.setting.choices, command
            is_said = command in declaration.setting.other_defaults
            is_absent = declaration.default in (None, MISSING)
            assert is_said or is_absent or is_equal(declaration.default, usual_default(uses)), (
                command
            )


def usual_default(uses: list[tuple[str, Declared]]) -> Any:
    """The default of the commands that the setting does not name."""
    others = [
        declaration.default
        for command, declaration in uses
        if command not in declaration.setting.other_defaults
        and declaration.default not in (None, MISSING)
    ]
    return others[0] if others else None


def test_a_concept_has_one_spelling() -> None:
    spellings: dict[str, set[str]] = {}
    for flag, meaning in CONCEPTS:
        spellings.setdefault(meaning, set()).add(flag)
    assert [flags for flags in spellings.values() if len(flags) > 1] == []
    assert SYNONYMS & set(FLAGS) == set()
    for parser in PARSERS.values():
        aliases = [setting.flags[1:] for setting in parser.settings.values()]
        assert not any(aliases), "only the drivers of the original suite have further spellings"


def test_the_vocabulary_has_a_row_for_each_flag() -> None:
    page = flags_page.page()
    for flag in FLAGS:
        assert page.count(f"\n| `{flag}` |") == (2 if flag in TWO_MEANINGS else 1)
    assert all(f"\n## {name}\n" in page for name in PARSERS)


@pytest.mark.parametrize("command", [name for name, parser in PARSERS.items() if parser.gone])
def test_a_flag_that_is_gone_is_answered_with_what_took_its_place(
    command: str, tmp_path: Path
) -> None:
    """Wherever it stands, and in a file too; the flags that the answer names are there."""
    parser = PARSERS[command]
    for flag, place in parser.gone.items():
        assert flag not in parser.names
        answer = f"{flag} is gone: {re.escape(place)}$"
        for words in ([flag], [f"{flag}=1"], ["--nonsense", flag, "1"]):
            with pytest.raises(ValueError, match=f"^{answer}"):
                parser.read(words)
        file = tmp_path / "a.toml"
        file.write_text(f"{flag.removeprefix('--')} = true\n")
        with pytest.raises(ValueError, match=f"a.toml, line 1: {answer}"):
            parser.read_file(TomlFile("--config", file))
        other = next((n for n in PARSERS if f"`magicdec {n} " in place), command)
        named = {word.removeprefix("--") for word in re.findall(r"--\w+", place)}
        assert named <= set(PARSERS[other].names)


def bad_values(declaration: Declared) -> list[tuple[str, str]]:
    """Texts that the setting refuses, each with what the refusal says after flag and text."""
    limits = declaration.setting
    bad = list[tuple[str, str]]()
    is_number = "int" in str(declaration.kind) or "float" in str(declaration.kind)
    if limits.least is not None and is_number:
        bad.append((f"{limits.least - 1:g}", f"is too small; it must be at least {limits.least:g}"))
    if limits.above is not None:
        bad.append((f"{limits.above:g}", f"is too small; it must be more than {limits.above:g}"))
    if limits.most is not None:
        bad.append((f"{limits.most + 1:g}", f"is too large; it must be at most {limits.most:g}"))
    if limits.choices:
        bad.append(("nonsense", f"is not known; choose from {', '.join(limits.choices)}"))
    elif is_number and limits.parse is None:
        bad.append(("nonsense", "is not"))
    if "float" in str(declaration.kind) and limits.parse is None:
        bad += [("nan", "is not a finite number"), ("inf", "is not a finite number")]
    return bad


@pytest.mark.parametrize("command", SETTINGS)
def test_what_a_setting_cannot_be_is_refused_in_one_line(command: str) -> None:
    for placed in SETTINGS[command]:
        check_refusals(placed)


def check_refusals(declaration: Declared) -> None:
    for text, reason in bad_values(declaration):
        with pytest.raises(ValueError) as refused:
            declaration.read([text] if declaration.is_list else text)
        assert str(refused.value).startswith(f"{declaration.flag} {text} {reason}")
        assert "\n" not in str(refused.value)
    if declaration.kind is not bool:
        with pytest.raises(ValueError, match=f"{declaration.flag} True: give a value"):
            declaration.read(True)
    if declaration.is_list and (declaration.setting.choices or declaration.setting.is_set):
        twice = [str(declaration.setting.choices[0] if declaration.setting.choices else 7)] * 2
        is_number = float in typing.get_args(declaration.kind)
        if declaration.setting.can_repeat:
            assert declaration.read(twice) == tuple(twice)
            return
        with pytest.raises(
            ValueError, match=f"{declaration.flag} names {twice[0]}{'.0' * is_number} twice"
        ):
            declaration.read(twice)


def test_many_settings_have_bounds() -> None:
    settings = [
        declaration for command_settings in SETTINGS.values() for declaration in command_settings
    ]
    assert sum(bool(bad_values(setting)) for setting in settings) > 150


@pytest.mark.parametrize("command", PARSERS)
def test_the_defaults_are_values_that_a_user_could_give(command: str) -> None:
    parser = PARSERS[command]
    for placed in parser.settings.values():
        if placed.default not in (None, MISSING) and placed.kind is not bool:
            texts = (
                [str(value) for value in placed.default] if placed.is_list else str(placed.default)
            )
            if texts:
                assert placed.read(texts) == placed.default, placed.flag


@dataclass(frozen=True)
class Example:
    count: int = setting(3, "A count.", least=1)
    ratio: float = setting(0.5, "A ratio.", above=0, most=1)
    names: tuple[str, ...] = setting(("a",), "Names.", choices=("a", "b"))
    is_fast: bool = setting(False, "Whether to hurry.", "--fast")
    depth: int | str = setting(4, "A depth.", words=("auto",), least=1)
    texts: str = setting("demo", "Texts.", is_joined=True)


@dataclass(frozen=True)
class Other:
    count: int = same(Example, "count", 9)


def parser() -> Parser:
    return Parser("An example.", {"example": Example()})


def test_the_words_of_a_command_line_and_a_file_are_read_alike(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('count = 7\nratio = 1\nnames = ["b", "a"]\nfast = true\ndepth = "auto"\n')
    words = ["--count", "7", "--ratio", "1", "--names", "b", "a", "--fast", "--depth", "auto"]
    expected = Example(7, 1.0, ("b", "a"), True, "auto")
    assert parser().read(words)[Example] == expected
    by_file = parser().read([], TomlFile("--config", file).values)
    assert by_file[Example] == expected
    assert by_file.given == parser().read(words).given
    assert parser().read([])[Example] == Example()


def test_several_texts_are_joined_by_commas() -> None:
    for words in (["--texts", "a", "b"], ["--texts", "a,b"]):
        assert parser().read(words)[Example].texts == "a,b"
    assert parser().read([], {"texts": ["a", "b"]})[Example].texts == "a,b"
    with pytest.raises(ValueError, match=r"--texts a,b has a comma, .* give it alone"):
        parser().read(["--texts", "c", "a,b"])


def test_numbers_and_names_that_no_record_holds_are_refused() -> None:
    for flag in ("--count", "--depth"):
        with pytest.raises(ValueError, match=rf"^{flag} 9{{200}}\.\.\. is ") as caught:
            parser().read([flag, "9" * 400])
        assert len(str(caught.value)) < 300
    for value in ("caf\udce9", ["a", "caf\udce9"]):
        with pytest.raises(ValueError, match=r"--texts caf\\xe9 is not UTF-8, .* rename it"):
            parser().read([], {"texts": value})


def test_a_program_is_refused_what_a_user_is_refused() -> None:
    check_values(Example())
    for wrong, message in (
        (Example(count=0), "--count 0 is too small; it must be at least 1"),
        (Example(ratio=1.5), "--ratio 1.5 is too large; it must be at most 1"),
        (Example(depth="deep"), "--depth deep is not known; choose a whole number or auto"),
    ):
        with pytest.raises(ValueError, match=message):
            check_values(wrong)
    assert declared(Other)["count"].setting is not declared(Example)["count"].setting
    assert declared(Other)["count"].setting == declared(Example)["count"].setting
    assert Other().count == 9


def test_a_key_of_a_file_is_found_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[common]\nB = 1\n[[grid]]\nbudget = 2\n[[grid]]\n'budget' = 3\nprefix = 3\n")
    file = TomlFile("", path)
    assert file.place_of("B") == f"{path}, line 2"
    assert file.place_of("budget") == f"{path}, line 4"
    assert file.place_of("nowhere") == str(path)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_flags(shell: str) -> None:
    script = script_of(shell)
    assert all(re.search(rf"\b{word}\b", script) for name in COMMANDS for word in name.split())
    assert "prefix_len" in script and "streaming_llm" in script
