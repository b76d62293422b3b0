"""scripts/dev/lossless_matrix.py: what a cell says of a run, that no difference is passed over, and
that the page has a table of all drafts and ways."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

PAGE = Path(__file__).parents[2] / "results" / "hybrids" / "README.md"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    import lossless_matrix

    monkeypatch.setattr(lossless_matrix, "DRAFTS", {"`ngram`": "--draft ngram"})
    monkeypatch.setattr(lossless_matrix, "WAYS", lossless_matrix.WAYS[:1])
    return lossless_matrix


def record(status: str = "verified", emitted: float | None = 2.345) -> dict[str, Any]:
    return {
        "status": status,
        "correctness": {"num_tokens": 144, "num_identical": 140},
        "metrics": {"mean_acceptance_length": emitted},
    }


def test_a_cell_says_what_a_run_was(matrix: Any) -> None:
    assert matrix.judged(record(), 0) == matrix.Cell("144, 2.35")
    assert matrix.judged(record(emitted=None), 0) == matrix.Cell("144")
    for found, status in ((record("failed"), 1), (record("failed"), 0), (record(), 1)):
        cell = matrix.judged(found, status)
        assert cell.is_bad
        assert "140" in cell.reason


def test_reasons_are_listed_once(matrix: Any) -> None:
    refused = matrix.Cell("refused", reason="--draft x: why")
    other = matrix.Cell("refused", reason="--draft y: why")
    text = matrix.table(
        {"a": [refused], "b": [other], "c": [refused], "d": [matrix.Cell("9, 1.00")]}
    )
    assert [line.split("|")[2].strip() for line in text.splitlines()[2:6]] == [
        "refused (1)",
        "refused (2)",
        "refused (1)",
        "9, 1.00",
    ]
    assert text.splitlines()[-2:] == ["1. --draft x: why", "2. --draft y: why"]


@pytest.mark.parametrize(
    ("code", "message", "cell"),
    [
        (2, "magicdec run: --draft x: why\n", ("refused", False, "--draft x: why")),
        (1, "Traceback:\nKeyError: 'x'\n", ("**ended**", True, "KeyError: 'x'")),
        (-9, "", ("**ended**", True, "no message")),
    ],
)
def test_a_command_without_a_record(
    code: int,
    message: str,
    cell: tuple[str, bool, str],
    matrix: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Not passed over, unless it was refused; the exit status says so."""
    ended = subprocess.CompletedProcess([], code, "", message)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    monkeypatch.setattr(matrix, "random_hybrid", lambda folder: str(folder))
    found = matrix.measured(matrix.WAYS[0], "", "demo", tmp_path / "talks", tmp_path)
    assert found == matrix.Cell(*cell)
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    monkeypatch.setattr("sys.argv", ["lossless_matrix.py", "--write", str(page)])
    assert matrix.main() == int(cell[1])
    assert page.read_text().startswith(f"before\n\n{matrix.BEGIN}\n\n| draft | batches |\n")
    assert page.read_text().endswith(f"\n\n{matrix.END}\nafter\n")
    assert "old" not in page.read_text()


def test_the_page_has_all_of_them() -> None:
    import lossless_matrix

    lines = PAGE.read_text(encoding="utf-8").partition(lossless_matrix.BEGIN)[2].splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    assert [cell.strip() for cell in table[0][1:]] == [way.name for way in lossless_matrix.WAYS]
    assert [row[0].strip() for row in table[2:]] == [*lossless_matrix.DRAFTS]
    assert not any("**" in cell for row in table for cell in row)


@pytest.mark.wide
def test_some_drafts_of_the_models_head_are_right(tmp_path: Path) -> None:
    """The model is one that transformers reads."""
    import lossless_matrix

    model = lossless_matrix.random_hybrid(tmp_path / "model")
    other = transformers.Qwen3_5ForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert other.config.layer_types.count("full_attention") == 1
    talks = tmp_path / "talks"
    lossless_matrix.write_talks(talks)
    words = "--draft mtp --kv_policy full"
    cell = lossless_matrix.measured(lossless_matrix.WAYS[0], words, model, talks, tmp_path)
    assert not cell.is_bad
    assert 1.2 < float(cell.text.split(", ")[1]) < 3.5
