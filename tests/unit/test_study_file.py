"""Studies as users write them: a file, or flags with several values; and what is refused in one
line."""

from pathlib import Path

import pytest

from magicdec.bench.study.study import Settings
from magicdec.cli.sweep import make_configs, parse
from magicdec.config.run_config import RunConfig


def configs(*argv: str) -> list[RunConfig]:
    _, study = parse(argv)
    return list(make_configs(study, world_size=1))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(
        """
        out = "here.jsonl"
        order_seed = 3
        repeats = 4
        [common]
        dtype = "float32"
        ignore_eos = true
        B = [1, 4]
        [[grid]]
        driver = "selfspec"
        kv_policy = ["snapkv", "streaming_llm"]
        draft_budget = 65
        gamma = [2, "auto"]
        [[grid]]
        driver = "longspec"
        model = "demo-draft"
        target = "demo"
        rank_group = [0]
        no_baseline = [true, false]
        temperature = 0.5
        """
    )
    return path


def test_a_file_has_every_combination(study: Path) -> None:
    found = configs(str(study))
    assert len(found) == 2 * 2 * 2 + 2 * 2
    selfspec = found[:8]
    longspec = found[8:]
    assert {(c.workload.batch_size, c.kv.policy, c.decoding.gamma) for c in selfspec} == {
        (B, policy, gamma)
        for B in (1, 4)
        for policy in ("snapkv", "streaming_llm")
        for gamma in (2, "auto")
    }
    assert {(c.workload.batch_size, c.decoding.baseline) for c in longspec} == {
        (B, baseline) for B in (1, 4) for baseline in (True, False)
    }
    assert {c.parallel.rank_group for c in longspec} == {(0,)}
    assert {c.sampling.temperature for c in longspec} == {0.5}
    for config in found:
        assert config.model.dtype == "float32" and config.decoding.ignore_eos


def test_flags_have_several_values() -> None:
    found = configs(
        "selfspec",
        "baseline",
        "--B",
        "1",
        "4",
        "8",
        "--prefix_len",
        "4096",
        "16384",
        "--rank_group",
        "0",
        "--ignore_eos",
        "--dtype=float32",
        "--order_seed",
        "1",
    )
    assert len(found) == 2 * 3 * 2
    assert {c.decoding.strategy for c in found} == {"autoregressive", "speculative"}
    assert {(c.workload.batch_size, c.workload.prefix_len) for c in found} == {
        (B, prefix) for B in (1, 4, 8) for prefix in (4096, 16384)
    }
    assert all(c.decoding.ignore_eos and c.parallel.rank_group == (0,) for c in found)


def test_run_has_every_draft_and_equal_cells_are_alike(tmp_path: Path) -> None:
    """A flag that does nothing in a cell keeps its default there."""
    path = tmp_path / "study.toml"
    path.write_text(
        """
        [common]
        driver = "run"
        [[grid]]
        draft = ["self", "ngram", "none", "model:demo-draft"]
        budget = [65, 129]
        gamma = [2, 4]
        """
    )
    found = configs(str(path))
    assert len(found) == 4 * 2 * 2
    drafts = [c.draft.model for c in found if c.draft is not None]
    assert drafts == ["demo-draft"] * 4
    distinct = {
        (c.decoding.drafter, c.kv.budget, c.decoding.gamma)
        for c in found
        if c.decoding.drafter in (None, "ngram")
    }
    assert distinct == {(None, 257, None), ("ngram", 257, 2), ("ngram", 257, 4)}
    assert {c.decoding.strategy for c in found if c.decoding.drafter is None} == {"autoregressive"}


def test_a_common_flag_may_do_nothing_in_a_grid(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    text = "[common]\ndriver = 'run'\nbudget = 65\n[[grid]]\ndraft = 'none'\n[[grid]]\n"
    path.write_text(text)
    assert [c.kv.budget for c in configs(str(path))] == [257, 65]


def test_flags_of_the_sweep_win_over_the_file(study: Path) -> None:
    _, given = parse([str(study), "--out", "there.jsonl", "--repeats", "2"])
    assert given.settings == Settings("there.jsonl", order_seed=3, repeats=2)


BAD_FILES = {
    "no TOML": ("out =", "study.toml is not a TOML file"),
    "unknown key": ("order_sed = 1", "study.toml, line 1: unknown key order_sed; did"),
    "unknown table": ("[base]\nB = 1", "study.toml, line 1: unknown key base; choose"),
    "type": ("out = 3", "study.toml, line 1: --out 3 is not a text"),
    "jobs of Slurm": (
        "[slurm]\ntime = 3",
        "study.toml, line 1: [slurm] is gone: an array job of the cluster",
    ),
    "no grid": ("out = 'x'", "study.toml: it has no [[grid]]"),
    "grid of another kind": ("grid = 3", "study.toml: grid must be an array of tables"),
    "common of another kind": ("common = 3", "study.toml: common must be a table"),
    "unknown driver": (
        "[[grid]]\ndriver = 'baseline'\n[[grid]]\ndriver = 'x'",
        "study.toml: grid 2: driver = 'x'",
    ),
    "empty axis": (
        "[[grid]]\ndriver = 'baseline'\nB = []",
        "study.toml, line 3: grid 1: B is empty",
    ),
    "value twice": (
        "[[grid]]\ndriver = 'baseline'\nB = [1, 1]",
        "study.toml, line 3: grid 1: B names 1 twice",
    ),
    "unknown flag": (
        "[[grid]]\ndriver = 'baseline'\ngama = 1",
        "study.toml, line 3: grid 1: unknown flag gama; did you mean gamma?",
    ),
    "flag of before": (
        "[[grid]]\ndriver = 'run'\nmax_len = 99",
        "study.toml, line 3: grid 1: max_len is gone: give --gen_len",
    ),
    "flag of one run": (
        "[[grid]]\ndriver = 'selfspec'\nsave_tokens = 'x'",
        "study.toml, line 3: grid 1: save_tokens is for one run",
    ),
    "two spellings": (
        "[[grid]]\ndriver = 'selfspec'\ndraft_budget = 65\nstreamingllm_budget = 70",
        "is a second spelling of another flag",
    ),
    "flag that does nothing": (
        "[[grid]]\ndriver = 'run'\ndraft = ['none', 'ngram']\nbudget = 65",
        "study.toml, line 4: grid 1: budget does nothing here",
    ),
    "too many": (
        f"[[grid]]\ndriver = 'baseline'\nseed = {list(range(10_001))}",
        "10001 runs, more than 10000",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    text, expected = BAD_FILES[case]
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        configs(str(path))
    assert expected in str(refused.value)


def test_a_part_has_a_file_of_its_own(study: Path) -> None:
    for out, expected in (("here.jsonl", "here.2-of-12.jsonl"), ("a/b.c.d", "a/b.c.2-of-12.d")):
        _, given = parse([str(study), "--out", out, "--part", "2/12"])
        assert given.settings == Settings(expected, order_seed=3, repeats=4)


def test_more_than_ten_thousand_runs_need_a_yes(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(BAD_FILES["too many"][0])
    _, study = parse([str(path), "--yes"])
    assert study.num_cells == 10_001


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "give a study file"),
        (["nope"], "nope is no study file (.toml) and no driver"),
        (["study.toml", "--B", "1"], "--B belongs into study.toml"),
        (["selfspec", "--B"], "selfspec: B is empty"),
        (["selfspec", "--ignore_eos", "yes"], "ignore_eos is a switch; give true or false"),
        (["selfspec", "--part", "0/8"], "--part 0/8 is no part; give I/N with I from 1 to N"),
        (["selfspec", "--part", "9/8"], "--part 9/8 is no part"),
        (["selfspec", "--part", "8"], "--part 8 is no part"),
        (["study.toml", "--executor", "slurm"], "--executor is gone: an array job of the cluster"),
        (["selfspec", "--only=a"], "--only is gone: an array job of the cluster"),
        (["selfspec", "--repeats", "0"], "--repeats 0 is too small; it must be at least 1"),
    ],
)
def test_bad_flags_are_refused_in_one_line(argv: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as refused:
        configs(*argv)
    assert expected in str(refused.value)
