"""Several hosts: network namespaces on this machine (`scripts/dev/netns_ring.sh`), each with a
rank."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from conftest import DEV, ROOT, Launch

SCRIPT = DEV / "netns_ring.sh"
IMPATIENT = Path(__file__).with_name("impatient.py")
NAMESPACES = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]


def why_not() -> str | None:
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is missing"
    made = subprocess.run(NAMESPACES, check=False, capture_output=True)
    return "this user may not make namespaces" if made.returncode else None


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}"),
]


def run_on_hosts(
    options: list[str], words: list[str], **more: str
) -> subprocess.CompletedProcess[str]:
    package = str(ROOT)
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": paths, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"}
    environment["NETNS_RING_PROGRAM"] = str(IMPATIENT)
    with TemporaryDirectory() as folder:
        environment |= {"TMPDIR": folder, **more}
        done = subprocess.run(
            [SCRIPT, *options, "--", *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )
        assert not list(Path(folder).iterdir()), "nothing is left behind"
    return done


def test_a_ring_of_hosts_decodes_the_tokens_of_one_process(tmp_path: Path) -> None:
    """Their clocks are compared for the chart and for the queues. Each host has as many cores, so
    that the threads of one do not count for the other."""
    out = tmp_path / "runs.jsonl"
    chart = tmp_path / "gantt.png"
    words = (
        "recurrent --modes sequential ring --num_requests 3 --prefix_len 64 --gen_len 6 "
        "--target_dtype float32 --threads 2"
    )
    files = "--out", str(out), "--plot", str(chart)
    done = run_on_hosts(["--hosts", "2"], [*words.split(), *files])
    assert done.returncode == 0, done.stdout + done.stderr
    one, ring = map(json.loads, out.read_text().splitlines())
    assert ring["environment"]["world_size"] == 2 and ring["status"] == "verified"
    assert ring["config"]["parallel"]["collectives"] == "gloo"
    assert ring["config"]["parallel"]["threads"] == 2 and ring["environment"]["threads"] == 2
    assert [record["groups"][0]["threads"] for record in (one, ring)] == [[2, 0], [2, 2]]
    assert ring["details"]["num_layers"] == [3, 3] and max(ring["details"]["queue_depth"]) > 0
    assert chart.read_bytes().startswith(b"\x89PNG")


RUN = (
    "baseline --B 1 --prefix_len 64 --gen_len 8 --num_batches 1 --warmup_batches 0 --out /dev/null"
)
LATENCY = "latency --B 1 --prefix_len 64 --repeats 1 --out /dev/null"
SWEEP = "sweep run --B 1 --prefix_len 64 --gen_len 8 --num_batches 1 --out /dev/null"
SERVE = "serve --modes ring --num_requests 2 --prefix_len 64 --gen_len 8 --out /dev/null"


# The command, what rank 1 has otherwise, and what is said of it.
DISAGREEMENTS = (
    (RUN, {"RANK_1_WORDS": "--gen_len 9"}, "--gen_len: rank 0 has 8, rank 1 has 9"),
    (RUN, {"RANK_1_WORDS": "--model demo-draft"}, r"model's \w+: rank 0 has \d+, rank 1 has"),
    (SERVE, {"RANK_1_VERSION": "0.0.1"}, r"magicdec: rank 0 has .*, rank 1 has 0\.0\.1"),
    (LATENCY, {"RANK_1_WORDS": "--repeats 2"}, "repeats: rank 0 has 1, rank 1 has 2"),
    (SWEEP, {"RANK_1_WORDS": "--gamma 2 3"}, "--gamma: rank 0 has None, rank 1 has 3"),
)


def test_hosts_that_disagree_refuse() -> None:
    words, rank_1, line = DISAGREEMENTS[0]
    done = run_on_hosts(["--hosts", "2"], [*words.split(), "--threads", "1"], **rank_1)
    assert done.returncode != 0, done.stdout
    assert re.search(rf"^host0: .*{line}", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.wide
@pytest.mark.parametrize(
    ("words", "rank_1", "line"),
    DISAGREEMENTS,
    ids=["setting", "model", "version", "repeats", "study"],
)
def test_ranks_that_disagree_in_anything_refuse(
    words: str, rank_1: dict[str, str], line: str, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host, where their settings are compared in the same way, and ranks start at once."""
    for name, value in rank_1.items():
        monkeypatch.setenv(name, value)
    script = f"distributed/{IMPATIENT.name}"
    done = launch(script, *words.split(), "--threads", 1, num_ranks=2)
    assert done.returncode != 0, done.stdout
    assert re.search(f": .*{line}", done.stderr), done.stderr


LINK_RATE = 100
LINK_DELAY_MS = 20


@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="/dev/net/tun is missing")
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
def test_links_have_their_delay_and_their_rate() -> None:
    """They are never faster; how much slower is up to the machine."""
    options = ["--hosts", "2", "--rate", f"{LINK_RATE}mbit", "--delay", f"{LINK_DELAY_MS}ms"]
    program = {"NETNS_RING_PROGRAM": str(SCRIPT.with_name("slow_link.py"))}
    done = run_on_hosts(options, ["measure"], **program)
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"^host1: (?:round trip|throughput) (\d+\.\d+) "  # torchrun may print others
    round_trip_ms, throughput = map(float, re.findall(line, done.stdout, re.MULTILINE))
    assert round_trip_ms >= 2 * LINK_DELAY_MS and throughput <= LINK_RATE


@pytest.mark.wide
def test_a_host_that_is_cut_off_ends_the_others(tmp_path: Path) -> None:
    words = (
        "baseline --model demo --B 1 --prefix_len 64 --gen_len 8000 --threads 1 --warmup_batches 0"
    )
    done = run_on_hosts(
        ["--hosts", "2", "--cut_on", "static: "], [*words.split(), "--out", "/dev/null"]
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "host0: rank 0: rank 1 has not been heard of for" in done.stdout


@pytest.mark.wide
def test_a_host_that_is_killed_early_is_named_by_all_others(tmp_path: Path) -> None:
    """While the ranks make groups, load and connect. Rank 1 is no neighbour of rank 3."""
    words = "recurrent --modes sequential ring --num_requests 4 --prefix_len 64 --gen_len 6"
    done = run_on_hosts(
        ["--hosts", "4", "--kill_on", "messages"],
        [*words.split(), "--threads", "1", "--out", str(tmp_path / "r.jsonl")],
    )
    assert done.returncode == 1, done.stdout + done.stderr
    for rank in range(3):
        pattern = (
            rf"^host{rank}: rank {rank}: (rank 3 has not been heard of for \d+ s"
            "|the connection with rank 3 is lost: .*)$"
        )
        assert re.search(pattern, done.stdout, re.MULTILINE), done.stdout
