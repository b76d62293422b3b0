"""`magicdec download` against a stand-in for the hub: what is fetched, what happens after an
interruption, and the one line that each refusal is."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_files import CONFIG, make_tensors, write_sharded
from conftest import HANG, Launch
from hub_server import COMMIT, TOKEN, Hub
from huggingface_hub.hf_api import RepoSibling

from magicdec.model.checkpoint import hub as hub_module
from magicdec.model.checkpoint.hub import check_space
from magicdec.model.checkpoint.source import find_model
from magicdec.model.families.hf_config import to_hf_config

ROOT = Path(__file__).parents[2]
SINGLE = {
    "config.json": json.dumps(to_hf_config(CONFIG)).encode(),
    "tokenizer.json": b"{}",
    "tokenizer.model": b"the same pieces",
    "model.safetensors": bytes(range(256)) * 400,
    "pytorch_model.bin": b"the same weights",
    "consolidated.00.pth": b"the same weights",
    "README.md": b"words",
}
LARGE = b"0123456789abcdef" * (1 << 20)  # more than the 10 MiB that the library writes at once


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub(dict(SINGLE))
    hub.start()
    yield hub
    hub.stop()


def environment(hub: Hub, directory: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.address, "HF_HOME": str(directory / "home")}


def start(hub: Hub, directory: Path, *args: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    command = [sys.executable, str(ROOT / "download.py"), *args, "--out_dir", str(directory / "m")]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": str(ROOT), **environment(hub, directory)},
    )


Fetch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fetch(launch: Launch) -> Fetch:
    """Runs the script to its end in a process that has imported torch already, but nothing of the
    hub's library, which reads its environment when it is imported."""

    def run(hub: Hub, directory: Path, *args: str, **env: str) -> tuple[int, str, str]:
        words = args or ("--repo_id", "org/model")
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("HF_")]:
                patch.delenv(name)
            for name, value in (environment(hub, directory) | env).items():
                patch.setenv(name, value)
            done = launch("../download.py", *words, "--out_dir", directory / "m")
        assert TOKEN not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


def held(directory: Path) -> set[str]:
    """The files that were fetched. `.cache` is the library's own."""
    files = (p.relative_to(directory / "m") for p in (directory / "m").rglob("*.*"))
    return {str(file) for file in files if file.parts[0] != ".cache"}


def test_only_what_is_needed(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    code, out, err = fetch(hub, tmp_path)
    assert code == 0, err
    assert held(tmp_path) == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "download.json",
    }
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "m" / name).read_bytes() == SINGLE[name]
    assert f"org/model at commit {COMMIT}" in out and "3 files" in out
    source = json.loads((tmp_path / "m" / "download.json").read_text())
    assert (source["repo_id"], source["commit"]) == ("org/model", COMMIT)
    assert "model.safetensors, 0.00 GB" in out

    before = len(hub.requests)
    assert fetch(hub, tmp_path)[0] == 0  # nothing is fetched twice
    assert [path for path, _, _ in hub.requests[before:]] == ["/api/models/org/model/revision/main"]


@pytest.mark.wide
def test_a_damaged_file_on_disk_is_fetched_anew(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path)[0] == 0
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(b"\1" + SINGLE["model.safetensors"][1:])
    assert fetch(hub, tmp_path)[0] == 0
    assert weights.read_bytes() == SINGLE["model.safetensors"]


@pytest.mark.wide
def test_sharded_weights_run_and_no_pickle_is_fetched(
    hub: Hub, fetch: Fetch, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    source = write_sharded(tmp_path / "source", make_tensors())
    hub.files = {p.name: p.read_bytes() for p in source.iterdir()} | {"pytorch_model.bin": b"old"}
    assert fetch(hub, tmp_path)[0] == 0
    assert held(tmp_path) >= {"a.safetensors", "b.safetensors", "model.safetensors.index.json"}
    assert "pytorch_model.bin" not in held(tmp_path)
    assert find_model("--model", str(tmp_path / "m")).config.num_layers == CONFIG.num_layers

    del hub.files["b.safetensors"]
    code, _, err = fetch(hub, tmp_path)
    assert code == 2
    assert "--repo_id org/model lacks b.safetensors, though its model.safetensors.index.json" in err
    hub.files = {"config.json": SINGLE["config.json"], "pytorch_model.bin": b"old"}
    code, _, err = fetch(hub, tmp_path / "other")
    assert code == 2 and err.count("\n") == 1
    assert "holds no model.safetensors, whole or in shards; its files end in .bin, .json" in err
    assert not hub.ranges("pytorch_model.bin")


def unfinished(directory: Path) -> list[Path]:
    return list((directory / "m").rglob("*.incomplete"))


def test_a_killed_download_keeps_the_files_that_are_complete(
    hub: Hub, fetch: Fetch, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    source = write_sharded(tmp_path / "source", make_tensors())
    hub.files = {p.name: p.read_bytes() for p in source.iterdir()}
    first, second = (name for name in sorted(hub.files) if name.endswith(".safetensors"))
    hub.files[second] += bytes(len(LARGE))
    hub.stall_after = 15 << 20
    process = start(hub, tmp_path, "--repo_id", "org/model")
    try:
        for _ in range(10 * HANG):
            # Its file is there before it is asked for.
            if (tmp_path / "m" / first).exists() and unfinished(tmp_path) and hub.ranges(second):
                break
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    assert first in held(tmp_path) and second not in held(tmp_path) and unfinished(tmp_path)
    hub.stall_after = None
    assert fetch(hub, tmp_path)[0] == 0
    assert hub.ranges(first) == [None] and hub.ranges(second) == [None, None]
    assert (tmp_path / "m" / second).read_bytes() == hub.files[second]
    assert not unfinished(tmp_path)


@pytest.mark.wide
def test_a_lost_connection_is_taken_up_again(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = LARGE
    hub.cut_after = 15 << 20
    code, _, err = fetch(hub, tmp_path)
    assert code == 0, err
    first, again = hub.ranges("model.safetensors")
    assert first is None and again == f"bytes={10 << 20}-"
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == LARGE


@pytest.mark.narrow(1)
@pytest.mark.parametrize("way", ["flag", "environment", "login"])
def test_the_token_comes_from_three_places(
    hub: Hub, fetch: Fetch, tmp_path: Path, way: str
) -> None:
    (tmp_path / "home").mkdir()
    if way == "login":
        (tmp_path / "home" / "token").write_text(TOKEN)
    flag = ("--hf_token", TOKEN) if way == "flag" else ()
    env = {"HF_TOKEN": TOKEN} if way == "environment" else {}
    code, _, err = fetch(hub, tmp_path, "--repo_id", "org/gated", *flag, **env)
    assert code == 0, err
    assert {sent for _, _, sent in hub.requests} == {f"Bearer {TOKEN}"}


REFUSALS = {
    "org/gated": "is gated and no token was found; accept its terms on its page, then give "
    "--hf_token, set HF_TOKEN or log in",
    "org/missing": "does not exist on the hub, or is private (no token)",
    "org/private": "does not exist on the hub, or is private (no token)",
    "org/busy": "the hub answered 503; run the command again; files that are complete are kept",
    "not a name": "is not a name on the hub; it looks like owner/model",
}


@pytest.mark.narrow(2)
@pytest.mark.parametrize("repo_id", REFUSALS)
def test_the_hub_refuses(hub: Hub, fetch: Fetch, tmp_path: Path, repo_id: str) -> None:
    code, _, err = fetch(hub, tmp_path, "--repo_id", repo_id)
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith(f"download.py: --repo_id {repo_id}") and last.endswith(REFUSALS[repo_id])
    assert "Traceback" not in err


@pytest.mark.wide
def test_a_wrong_token_and_a_wrong_revision(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    wrong = "hf_thisIsNotTheToken"
    code, out, err = fetch(hub, tmp_path, "--repo_id", "org/model", "--hf_token", wrong)
    assert code == 2 and wrong not in out + err
    assert err.endswith("the hub answered 401; is the token valid for it?\n")
    code, out, err = fetch(hub, tmp_path, "--repo_id", "org/model", "--hf_token", "hf_\nbad")
    assert code == 2 and "bad" not in out + err and "Traceback" not in err
    code, _, err = fetch(hub, tmp_path, "--repo_id", "org/model", "--revision", "v9")
    assert (code, err) == (2, "download.py: --repo_id org/model has no --revision v9\n")
    assert fetch(hub, tmp_path, "--repo_id", "org/model", "--revision", COMMIT)[0] == 0


def test_offline(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    code, _, err = fetch(hub, tmp_path, HF_HUB_OFFLINE="1")
    told = "--repo_id org/model: HF_HUB_OFFLINE is set; unset it to download"
    assert (code, err) == (2, f"download.py: {told}\n")
    code, _, err = fetch(hub, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 2 and "Traceback" not in err
    assert "the hub cannot be reached (ConnectError); run the command again" in err


def test_damage_on_the_way(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.damaged = "model.safetensors"
    code, _, err = fetch(hub, tmp_path)
    assert code == 2
    assert err.endswith(
        "model.safetensors did not arrive intact (its checksum is not the hub's) and was thrown "
        "away; run the command again\n"
    )
    assert held(tmp_path) == {"config.json", "tokenizer.json"}


# Of a model that only the plan knows.
LATENTS = json.dumps(
    {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
).encode()


@pytest.mark.narrow(1)
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b""}, "--repo_id org/model holds no config.json; is it a model?"),
        (
            {"config.json": b"{}", "m.gguf": b""},
            "holds no model.safetensors, whole or in shards; its files end in .gguf, .json",
        ),
        (
            {
                "config.json": b'{"architectures": ["T5ForConditionalGeneration"]}',
                "model.safetensors": b"x",
            },
            "architecture 'T5ForConditionalGeneration' is not supported",
        ),
        (
            {"config.json": LATENTS, "model.safetensors": b"x"},
            "--repo_id org/model: its config has kv_lora_rank",
        ),
    ],
)
def test_what_cannot_run_is_not_downloaded(
    hub: Hub, fetch: Fetch, tmp_path: Path, files: dict[str, bytes], message: str
) -> None:
    hub.files = files
    code, _, err = fetch(hub, tmp_path)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not hub.ranges("model.safetensors")


def test_disk_space_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=3 * 10**9)
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage)
    shards = [RepoSibling(f"{i}.safetensors", size=2 * 10**9) for i in range(2)]
    with pytest.raises(ValueError) as caught:
        check_space(shards, tmp_path)
    assert str(caught.value) == (
        f"--out_dir {tmp_path} has 3.00 GB free, 4.00 GB are still to be downloaded; make room or "
        "name another directory"
    )
    check_space(shards[:1], tmp_path)
