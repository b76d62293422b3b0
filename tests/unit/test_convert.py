"""Converting checkpoints: the same values from every format, complete files or none, and checksums
that show whether a file changed."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    EVEN,
    Q_PROJ,
    expected_shard,
    load,
    make_tensors,
    write,
    write_bin,
    write_config,
    write_pth,
    write_sharded,
    write_sharded_bin,
)
from conftest import HANG
from safetensors.torch import load_file

from magicdec.cli import checkpoints
from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint import weight_files
from magicdec.model.checkpoint.convert import (
    convert,
    find_checkpoint,
    find_damage,
    manifest_path,
    quantized,
)

ROOT = Path(__file__).parents[2]
WRITERS = [write, write_sharded, write_bin, write_sharded_bin]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_same_values_from_every_source(
    tmp_path: Path, writer: Callable[..., Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("READ_ELEMENTS", "TILE_ROWS"):  # several parts a tensor
        monkeypatch.setattr(weight_files, bound, 8)
    tensors = make_tensors()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tokenizer.model").write_bytes(b"pieces")
    source = find_checkpoint("--checkpoint_dir", writer(tmp_path / "in", tensors))
    out = tmp_path / "out" / name
    convert(source, out, dtype=None)
    loaded = load(out)
    torch.testing.assert_close(loaded, expected_shard(tensors, Shard()), atol=0, rtol=0)
    assert find_damage(out) is None
    assert sorted(p.name for p in out.parent.iterdir()) == sorted(
        ["config.json", name, f"{name}.manifest.json", "tokenizer.model"]
    )
    if out.suffix == ".safetensors":  # read by the library itself, not only by us
        torch.testing.assert_close(load_file(out), tensors, atol=0, rtol=0)
    else:
        stored = torch.load(out, weights_only=True)
        torch.testing.assert_close(stored, tensors, atol=0, rtol=0)


def test_what_is_refused(tmp_path: Path) -> None:
    write_pth(tmp_path, {"tok_embeddings.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"model\.pth was written by the original suite's conv"):
        find_checkpoint("--checkpoint_dir", tmp_path)
    with pytest.raises(ValueError, match=r"--checkpoint_dir .*nothing is not a directory"):
        find_checkpoint("--checkpoint_dir", tmp_path / "nothing")


def test_dtype(tmp_path: Path) -> None:
    tensors = make_tensors()
    out = tmp_path / "half.pth"
    convert(find_checkpoint("--checkpoint_dir", write(tmp_path, tensors)), out, "bfloat16")
    expected = {k: v.bfloat16() for k, v in tensors.items()}
    torch.testing.assert_close(torch.load(out, weights_only=True), expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    source = find_checkpoint("--checkpoint_dir", write(tmp_path / "in", make_tensors()))
    out = tmp_path / "out" / name
    out.parent.mkdir()
    out.write_text("what was there")

    def fail(tensor: str) -> None:
        if tensor == "model.norm.weight":
            raise OSError("no space left")

    with pytest.raises(ValueError, match=rf"--out .*{name}: no space"):
        convert(source, out, None, fail)
    assert [p.name for p in out.parent.iterdir()] == [name]
    assert out.read_text() == "what was there"
    expected = r"--out .*model\.safetensors is a file of the checkpoint to convert"
    with pytest.raises(ValueError, match=expected):
        convert(source, tmp_path / "in" / "model.safetensors", None)


KILLED = """
import os, sys
from pathlib import Path
from magicdec.model.checkpoint.convert import convert, find_checkpoint
source = find_checkpoint("--checkpoint_dir", Path(sys.argv[1]))
convert(source, Path(sys.argv[2]), None, lambda n: os._exit(9) if "norm" in n else None)
"""


@pytest.mark.wide
def test_a_killed_conversion_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    write(tmp_path, make_tensors())
    out = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(out)]
    assert subprocess.run(command, check=False, timeout=HANG).returncode == 9
    assert not out.exists() and not manifest_path(out).exists()


WATCHED = """
import sys, threading
from pathlib import Path
import torch
from magicdec.model.checkpoint.convert import convert, find_checkpoint, quantized

def held():  # kB of memory that no file backs
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

def watch():
    while not done.wait(0.001):
        seen.append(held())

torch.set_num_threads(1)
source = find_checkpoint("--checkpoint_dir", Path(sys.argv[1]))
source = quantized(source, "int8") if "int8" in sys.argv[2] else source
before, seen, done = held(), [], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
convert(source, Path(sys.argv[2]), None)
done.set()
thread.join()
print(len(seen), max(seen) - before)
"""


@pytest.mark.wide
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RssAnon is Linux's")
@pytest.mark.parametrize(
    "name",
    ["out.safetensors"]
    + [pytest.param(n, marks=pytest.mark.wide) for n in ("out.pth", "int8.safetensors")],
)
def test_memory_is_a_part_of_the_model(tmp_path: Path, name: str) -> None:
    """200 MB of weights with tensors of up to 16 MB are converted with 64 MB of memory."""
    config = replace(
        CONFIG,
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
        num_layers=4,
    )
    tensors = make_tensors(config)
    write(tmp_path, tensors, config)
    command = [sys.executable, "-c", WATCHED, str(tmp_path), str(tmp_path / name)]
    done = subprocess.run(command, check=False, timeout=HANG, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sum(4 * t.numel() for t in tensors.values()) > 2e8
    assert (tmp_path / name).stat().st_size > (6e7 if "int8" in name else 2e8)
    samples, most_kb = map(int, done.stdout.split())
    assert samples > 50 and most_kb < 64 << 10


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    tensors = make_tensors()
    (tmp_path / "in").mkdir()
    out = tmp_path / name
    convert(find_checkpoint("--checkpoint_dir", write(tmp_path / "in", tensors)), out, None)
    place = out.read_bytes().index(tensors[Q_PROJ].numpy().tobytes()) + 5
    flip(out, place)
    assert find_damage(out) == f"{out}: its sha256 differs from the manifest's"
    flip(out, place)
    assert find_damage(out) is None
    os.truncate(out, out.stat().st_size - 1)
    assert "bytes, its manifest says" in (find_damage(out) or "")


def test_a_manifest_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    out = tmp_path / "model.safetensors"
    convert(find_checkpoint("--checkpoint_dir", write(tmp_path / "in", make_tensors())), out, None)
    beside = manifest_path(out)
    beside.write_text(beside.read_text().replace('"size"', '"length"'))
    with pytest.raises(ValueError, match=r"not a manifest \('size'\)"):
        find_damage(out)
    beside.unlink()
    with pytest.raises(ValueError, match=r"No such file or directory; nothing can"):
        find_damage(out)


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["magicdec convert", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        checkpoints.old_convert()
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sharded(tmp_path, make_tensors())
    out = tmp_path / "model.pth"
    assert run(monkeypatch, "--checkpoint_dir", tmp_path, "--dtype", "bfloat16") == 0
    assert f"{out}: 27 tensors, bfloat16" in capsys.readouterr().out
    assert run(monkeypatch, "--verify", out) == 0
    assert capsys.readouterr().out == f"{out}: matches its manifest\n"
    flip(out, 3000)
    assert run(monkeypatch, "--verify", out) == 1
    assert str(out) in capsys.readouterr().err


def test_the_command_quantises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers in groups are copied unchanged, unless --dtype widens them."""
    write_bin(tmp_path, make_tensors(EVEN))
    write_config(tmp_path, EVEN)
    out = tmp_path / "model_int8.pth"
    assert run(monkeypatch, "--checkpoint_dir", tmp_path, "--quantize", "int8") == 0
    assert f"{out}: 57 tensors, bfloat16 and float32 and int8" in capsys.readouterr().out
    (tmp_path / "plain").mkdir()
    whole = write(tmp_path / "plain", make_tensors(EVEN), EVEN)
    plain = quantized(find_checkpoint("--checkpoint_dir", whole), "int8")
    convert(plain, tmp_path / "int8" / "model.safetensors", None)
    expected = load_file(tmp_path / "int8" / "model.safetensors")
    torch.testing.assert_close(torch.load(out, weights_only=True), expected, atol=0, rtol=0)
    again = ("--checkpoint_dir", tmp_path / "int8", "--out", tmp_path / "again.safetensors")
    assert run(monkeypatch, *again) == 0
    copied = load_file(tmp_path / "again.safetensors")
    torch.testing.assert_close(copied, expected, atol=0, rtol=0)
    assert run(monkeypatch, *again, "--dtype", "bfloat16") == 0
    widened = load_file(tmp_path / "again.safetensors")
    int8 = find_checkpoint("--checkpoint_dir", tmp_path / "int8")
    assert widened.keys() == make_tensors(EVEN).keys()
    assert torch.equal(widened[Q_PROJ], int8.weights.read(Q_PROJ).bfloat16())
    assert run(monkeypatch, *again, "--dtype", "bfloat16", "--quantize", "int8") == 0
    stored = load_file(tmp_path / "again.safetensors")
    assert torch.equal(stored[Q_PROJ], expected[Q_PROJ])
    assert stored["model.norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give either --checkpoint_dir or --verify"),
        (("--verify", "x", "--dtype", "float32"), "--verify writes nothing; leave out --out"),
        (("--verify", "x", "--quantize", "int8"), "--verify writes nothing; leave out --out"),
        (("--checkpoint_dir", "x", "--out", "y.bin"), "must end in one of .safetensors, .pth"),
        (
            ("--checkpoint_dir", "x", "--quantize", "q2_k"),
            "--quantize q2_k is not known; choose from int8, int4, int4_g128, q8_0, q4_0, q4_1",
        ),
        (("--checkpoint_dir", "nowhere"), "--checkpoint_dir nowhere is not a directory"),
        (("--verify", "nowhere.pth"), "nowhere.pth.manifest.json: No such file"),
    ],
)
def test_refusals(
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, *args) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_the_script_of_the_original_suite() -> None:
    script = [sys.executable, str(ROOT / "convert_hf_checkpoint.py"), "--help"]
    done = subprocess.run(script, check=False, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0 and "--checkpoint_dir" in done.stdout
