"""Files that a user names: what is no regular file, has no end or is made to break its reader is
refused in a line, and what is written leads nowhere else."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import magicdec
from magicdec.bench.study.cells import results_in
from magicdec.config.toml_file import TomlFile
from magicdec.hardware.ceiling_file import load_machine
from magicdec.model.checkpoint.convert import find_damage
from magicdec.model.checkpoint.weight_files import open_weights
from magicdec.model.checkpoint.weight_map import read_index
from magicdec.model.families.fields import LAYER_FIELDS, ConfigFields, size
from magicdec.model.families.hf_config import load_model_config
from magicdec.model.tokenizer import load_tokenizer
from magicdec.output.files import complete_file, lines_of, open_regular, read_text
from magicdec.output.writing import check_writable
from magicdec.predict.published_table import PublishedTable
from magicdec.records.reading import read_records
from magicdec.records.record import Record
from magicdec.workload.books import read_books
from magicdec.workload.request_shapes import read_trace

# What reads a file of that name in a folder.
READERS: dict[str, Callable[[Path], Any]] = {
    "book.txt": lambda path: list(read_books(str(path), 9)),
    "book.jsonl": lambda path: list(read_books(str(path), 9)),
    "book.parquet": lambda path: list(read_books(str(path), 9)),
    "flags.toml": lambda path: TomlFile("--config", path),
    "trace.jsonl": lambda path: read_trace("--arrival", path),
    "runs.jsonl": lambda path: list(read_records(path, Record)),
    "runs.jsonl.gz": lambda path: list(read_records(path, Record)),
    "config.json": lambda path: load_model_config(path.parent),
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
    "model.safetensors": lambda path: open_weights(path.parent),
    "model.pth": lambda path: open_weights(path.parent),
    "model.safetensors.index.json": lambda path: open_weights(path.parent),
    "machine.json": load_machine,
    "model.pth.manifest.json": lambda path: find_damage(path.parent / "model.pth"),
    "magicdec_acceptance.csv": lambda path: PublishedTable("magicdec_acceptance", path.parent),
}
DEEP = "[" * 100_000
LONG = "9" * 5000


def refused(name: str, path: Path) -> str:
    """The one line with which the file is refused."""
    with pytest.raises(ValueError) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_and_a_device_are_refused_without_waiting(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    message = refused(name, path)
    assert path.name in message and "it is a pipe, not a regular file" in message
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "it is a device, not a regular file" in refused(name, path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, DEEP) for name in ("book.jsonl", "config.json", "model.safetensors.index.json")),
        ("book.jsonl", '{"text": ' + DEEP),
        ("machine.json", DEEP),
        ("flags.toml", f"a = {DEEP}"),
        ("runs.jsonl", DEEP),
        ("trace.jsonl", DEEP),
        ("model.pth.manifest.json", DEEP),
        ("config.json", f'{{"num_hidden_layers": {LONG}}}'),
        ("flags.toml", f"B = {LONG}"),
        ("book.json", f"[{LONG}]"),
        ("book.jsonl", LONG),
        ("tokenizer.json", DEEP),
        ("trace.jsonl", f'{{"arrival_ms": 0, "prompt_len": {LONG[:400]}, "output_len": 1}}'),
        ("runs.jsonl", '{"schema_version": 3, "kind": ["run"]}'),
        ("runs.jsonl", '{"schema_version": 3, "kind": {"run": 1}}'),
    ],
)
def test_what_breaks_a_reader_is_refused_in_a_line(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / "model.pth").touch()
    message = refused("book.jsonl" if name == "book.json" else name, tmp_path / name)
    assert name.partition(".")[0] in message


@pytest.mark.parametrize(("layers", "told"), [(10**9, "over 10000"), (10**400, "of 401 digits")])
def test_a_config_with_layers_without_number_is_refused(
    layers: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything has an entry for each layer, which a file may claim any number of."""
    config = json.loads((DEMO / "config.json").read_text()) | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("magicdec.model.families.hf_config.ModelConfig", None)
    with pytest.raises(ValueError, match=f"config.json: num_hidden_layers .*{told}"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("field", LAYER_FIELDS)
def test_every_number_of_layers_has_a_limit(field: str) -> None:
    assert size(ConfigFields({field: 10_000}), field) == 10_000
    with pytest.raises(ValueError, match=f"{field} 10001 is over 10000"):
        size(ConfigFields({field: 10_001}), field)


DEMO = Path(magicdec.__file__).parent / "demo" / "target"


def test_lines_and_files_have_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"ab\n\n12345\nxyz")
    with open_regular(path) as file:
        assert list(lines_of(file, 6)) == [(1, b"ab\n"), (3, b"12345\n"), (4, b"xyz")]
    with open_regular(path) as file, pytest.raises(OSError, match="line 3 has more than 5 bytes"):
        list(lines_of(file, 5))
    assert read_text(path, 13) == "ab\n\n12345\nxyz"
    with pytest.raises(OSError, match="it has more than 12 bytes"):
        read_text(path, 12)


def test_a_book_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also an item of an array, or the first line, which is read before the others."""
    monkeypatch.setattr("magicdec.workload.json_items.MOST_LINE_BYTES", 30)
    monkeypatch.setattr("magicdec.workload.json_items.CHUNK", 8)
    for text, place in (
        (f'{{"text": "{"x" * 40}"}}\n', "line 1"),
        (f'[{{"text": "a"}}, {{"text": "{"x" * 60}"}}]', "item 1"),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match=f"{place} has more than 0 MB"):
            list(read_books(str(tmp_path / "b.json"), 9))


def test_results_that_end_within_their_first_line_are_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert results_in(path) == []
    path.write_text('{"kind": ')
    assert results_in(path) == []


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/tmp/other.safetensors", "a/../../b.bin"]
)
def test_an_index_may_not_leave_its_directory(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": file}}))
    message = f"{index}: it places tensor weight in {file}, which is not in its directory"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_index(index)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_weights(folder)


def test_a_partial_file_does_not_follow_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    out = tmp_path / "out.csv"
    victim.write_text("mine")
    (tmp_path / "out.partial.csv").symlink_to(victim)
    with complete_file("--out", out) as partial:
        partial.write_text("new")
    assert (victim.read_text(), out.read_text()) == ("mine", "new")
    assert not out.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_a_pipe_that_nobody_reads_is_refused_as_output(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"--out .*pipe: nobody reads this pipe; name a file"):
        check_writable("--out", tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    check_writable("--out", tmp_path / "pipe")
    os.close(reader)
