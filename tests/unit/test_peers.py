"""The peers of `scripts/dev/bench_peers.py`: wrong flags are refused before a peer starts, this
project and transformers pass the script's check and undo their verifications, and the GGUF export
agrees with an independent reader and rotation. llama.cpp itself is checked by the script, which
measures only after all peers emit the same tokens."""

from __future__ import annotations

import inspect
import json
import math
import sys
from io import StringIO
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bench_peers import WIDTH, decode_table, generation_table, read_options
from conftest import ROOT
from peer_worker import answer_of, what_is_ready
from peers import ENVIRONMENTS, PEERS, Entry, PeerEnvironment, runs, timed_dtypes
from peers.gguf_file import gguf_tensors, interleave_rotary, read_bfloat16, widen
from peers.peer import CHUNK, Peer
from peers.process import PeerStart, PeerWorker, Sizes, started_here
from peers.runs import (
    PeerCase,
    check_tokens,
    log_prob_differences,
    make_drafts,
    make_prompts,
    measure,
    measure_generations,
    perplexities,
)
from peers.vllm_engine import VLLM
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.wide

HERE = sys.executable
DTYPES = dict.fromkeys(PEERS, "float32")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cases", "6"], "--cases 6: must be KV_HEADS:PREFIX, such as 6:4096"),
        (["--cases", "6:4k"], "--cases 6:4k: must be KV_HEADS:PREFIX, such as 6:4096"),
        (["--cases", "4:4096"], "--cases 4:4096: KV heads must divide 6"),
        (["--cases", "0:4096"], "--cases 0:4096: KV heads must divide 6"),
        (["--cases", "6:40000"], "--cases 6:40000: the prefix must be from 4 to 32640"),
        (["--threads", "0"], "--threads 0: must be at least 1"),
        (["--generated_prefix", "-1"], "--generated_prefix -1: must be at least 0"),
        (
            ["--json", "/nowhere/a.json"],
            "--json /nowhere/a.json: directory /nowhere does not exist",
        ),
        (
            ["--llama_cpp_python", "/nowhere/python"],
            "--llama_cpp_python /nowhere/python: No such file or directory; choose the python "
            "of an environment made by: CMAKE_ARGS=-DGGML_NATIVE=ON python -m pip install "
            "'llama-cpp-python==0.3.*' 'gguf'",
        ),
    ],
)
def test_refuses_in_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read_options(flags)
    assert str(error.value) == message


def test_an_environment_is_refused_with_what_it_lacks_and_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = PeerEnvironment(("pytest", "safetensors>=0.1", "torch==1.2.*", "no-such-package>=3"))
    monkeypatch.setitem(ENVIRONMENTS, "llama_cpp", needed)
    with pytest.raises(ValueError) as error:
        read_options(["--llama_cpp_python", HERE])
    assert str(error.value) == (
        f"--llama_cpp_python {HERE}: torch is {torch.__version__}, not ==1.2.*; no-such-package is "
        f"missing; install with: {HERE} -m pip install 'pytest' 'safetensors>=0.1' 'torch==1.2.*' "
        "'no-such-package>=3'"
    )


def test_an_environment_with_all_requirements_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are compared as pip does; a local version, such as 2.13.0+cpu, is the same version."""
    version = torch.__version__.partition("+")[0]
    needed = PeerEnvironment((f"torch=={version}", "typing-extensions", "Jinja2>=2"))
    monkeypatch.setitem(ENVIRONMENTS, "llama_cpp", needed)
    assert read_options(["--llama_cpp_python", HERE]).pythons == {"llama_cpp": HERE}


def test_an_environment_whose_library_cannot_be_imported_is_refused_with_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cause = "RuntimeError('operator torchvision::nms does not exist')"
    broken = f"raise ModuleNotFoundError('no module') from {cause}"
    needed = PeerEnvironment(("pytest",), unwanted=("torchvision",), imports=broken)
    monkeypatch.setitem(ENVIRONMENTS, "vllm", needed)
    with pytest.raises(ValueError) as error:
        read_options(["--vllm_python", HERE])
    assert str(error.value) == (
        f"--vllm_python {HERE}: `{broken}` fails: RuntimeError: operator torchvision::nms does not "
        f"exist; install with: {HERE} -m pip install 'pytest' && {HERE} -m pip uninstall --yes "
        "torchvision"
    )


def test_the_documentation_installs_what_is_checked() -> None:
    page = (ROOT / "results" / "performance.md").read_text(encoding="utf-8").replace("\\\n", " ")
    page = " ".join(page.split())
    for name, folder in (("openvino", "openvino"), ("llama_cpp", "llama"), ("vllm", "vllm")):
        python = f"{folder}/bin/python"
        assert ENVIRONMENTS[name].install_command(python) in page


def test_every_name_is_a_peer_and_has_what_its_entry_says() -> None:
    for entry in PEERS.values():
        peer = entry.load()
        assert issubclass(peer, Peer) and not inspect.isabstract(peer)
        assert (peer.export is not Peer.export) == bool(entry.environment)
        assert entry.environment in {"", *ENVIRONMENTS}
        assert (peer.verify is not Peer.verify) == peer.can_verify
        assert peer.can_score <= (peer.score is not Peer.score)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller version of the script's model."""
    directory = tmp_path_factory.mktemp("peers") / "hf"
    patch = pytest.MonkeyPatch()
    for name, value in {"LAYERS": 2, "FFN": 128, "POSITIONS": 1024}.items():
        patch.setattr(runs, name, value)
    runs.save_model(2, directory)
    patch.undo()
    return directory


@pytest.fixture(scope="module")
def starts(model: Path) -> list[PeerStart]:
    return [started_here(name, model) for name in ("magicdec", "transformers")]


class Here(PeerWorker):
    """A peer in the process of the tests: one of its own takes longer to start than to answer."""

    def __init__(self, start: PeerStart, dtype: str, sizes: Sizes) -> None:
        numbers = (sizes.threads, sizes.max_tokens, sizes.batch)
        self.name = start.name
        self.peer = PEERS[start.name].load()(str(start.model), dtype, *numbers)
        self.version, self.can_verify, self.can_score = what_is_ready(self.peer).values()

    def ask(self, **command: Any) -> dict[str, Any]:
        return json.loads(json.dumps(answer_of(self.peer, json.loads(json.dumps(command)))))

    def __exit__(self, *error: object) -> None:
        """There is no process to end."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PeerWorker", Here)


@pytest.mark.wide
@pytest.mark.usefixtures("here")
def test_peers_emit_and_verify_the_same_tokens(starts: list[PeerStart]) -> None:
    assert list(check_tokens(starts, threads=1)) == ["magicdec", "transformers"]


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.wide)])
def test_a_verification_is_right_and_leaves_no_trace(starts: list[PeerStart], place: int) -> None:
    """Drafts equal to the later tokens are returned shifted by one. Wrong drafts change nothing."""
    prompts = make_prompts(40)
    with PeerWorker(starts[place], "float32", Sizes(1, 128, len(prompts))) as worker:
        worker.ask(do="prefill", prompts=prompts)
        emitted = worker.ask(do="step", count=8)["tokens"]
        worker.ask(do="prefill", prompts=prompts)
        worker.ask(do="verify", drafts=make_drafts(prompts), count=3)
        drafts = [row[1:4] for row in emitted]
        assert worker.ask(do="verify", drafts=drafts)["verified"] == [row[1:5] for row in emitted]
        assert worker.ask(do="step", count=8)["tokens"] == emitted


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.mark.usefixtures("here")
def test_scores_are_those_of_one_forward_of_the_whole_text(
    starts: list[PeerStart], reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that read the cache, of which the last is short. In bfloat16 they differ."""
    texts = make_prompts(CHUNK + 30)[:2]
    ids = torch.tensor(texts)
    with torch.inference_mode():
        logits = reference(ids).logits[:, :-1].double()
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    found = perplexities(starts, DTYPES, texts, threads=1)
    assert found == pytest.approx(dict.fromkeys(found, float((-expected).mean().exp())), rel=1e-5)
    monkeypatch.setattr(runs, "SCORED_TOKENS", CHUNK + 30)
    assert all(value < 1e-5 for value in log_prob_differences(starts, DTYPES, 1).values())
    narrow = log_prob_differences(starts, DTYPES | {"magicdec": "bfloat16"}, 1)
    assert narrow["transformers"] < 1e-5 < 1e-3 < narrow["magicdec"] < 0.5
    with Here(starts[0], "float32", Sizes(1, CHUNK + 158, 2)) as worker:
        worker.ask(do="prefill", prompts=[text[:40] for text in texts])
        worker.ask(do="step", count=3)
        again = worker.ask(do="score", texts=texts)["log_probs"]
        assert np.allclose(again, expected, atol=1e-4), "of the state before nothing is left"


def test_vllm_scores_prompts_whatever_the_order_of_its_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By an engine that gives the probabilities as vLLM does: none of the first token, and a table
    by token id of each other one."""
    asked: dict[str, list[int]] = {}

    class Engine:
        def abort_request(self, names: list[str]) -> None:
            assert names == ["0"]

        def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
            assert sampling.prompt_logprobs == 0, "those of the prompt's own tokens"
            asked[name] = prompt["prompt_token_ids"]

        def has_unfinished_requests(self) -> bool:
            return bool(asked)

        def step(self) -> list[Any]:
            name, ids = asked.popitem()
            tables = [None, *({token: SimpleNamespace(logprob=-token)} for token in ids[1:])]
            return [SimpleNamespace(request_id=name, prompt_logprobs=tables)]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    peer = VLLM.__new__(VLLM)
    peer.engine = Engine()
    peer.count = 1
    peer.emitted = {"0": [7]}
    assert peer.score([[3, 4, 5], [6, 7, 8]]) == [[-4.0, -5.0], [-7.0, -8.0]]


def test_a_row_of_the_table_has_every_number(
    starts: list[PeerStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ROUNDS", 2)
    rows = measure(PeerCase(2, 40), starts[:1], {"magicdec": "float32"}, 1)
    numbers = ("ms", "ms_p10", "ms_p90", "verify_ms", "verify_ms_p10", "verify_ms_p90")
    assert [row["peer"] for row in rows] == ["magicdec"]
    assert all(rows[0][name] > 0 for name in (*numbers, "prefill_tokens_per_s"))
    assert rows[0]["bytes"] == 2 * 6 * 4 * 2 * 64 * 40 * 4


def test_generations_of_every_text_and_peer_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers of other environments get the model in their format; without its Python, one is left
    out. Seconds after the first tokens are those of all tokens less those of the first."""
    exported = []

    class Generates(FakeWorker):
        @property
        def can_score(self) -> bool:
            return bool(PEERS[self.name].load().can_score)

        def ask(self, do: str, num_new: int = 0, **command: Any) -> dict[str, Any]:
            if do == "score":
                assert self.dtype == DTYPES[self.name]
                return {"log_probs": [[-math.log(2 if self.name == "magicdec" else 4)] * 9] * 2}
            return {"tokens": [[0] * num_new], "seconds": [2.0 + num_new]}

    def export(start: PeerStart, source: Path) -> None:
        exported.append((start.name, start.python, source.resolve()))

    monkeypatch.setattr(runs, "PeerWorker", Generates)
    monkeypatch.setattr(runs, "export_model", export)
    texts = ["demo", "ruler:niah_multikey"]
    rows = measure_generations(texts, 512, {"vllm": "python", "openvino": "python"}, DTYPES, 1)
    ways = [name for name, entry in PEERS.items() if entry.generates]
    assert [(row["text"], row["way"]) for row in rows] == list(product(texts, ways))
    assert exported == [("vllm", "python", runs.DEMO)], "OpenVINO is not in this table"
    assert {row["seconds"] for row in rows} == {98.0}
    assert {row["decode_seconds"] for row in rows} == {95.0}
    found = {row["way"]: row["perplexity"] for row in rows}
    assert found.pop("vllm_lookup") is None and found.pop("magicdec") == pytest.approx(2)
    assert found == pytest.approx(dict.fromkeys(found, 4))
    printed = StringIO()
    Console(width=WIDTH, file=printed).print(generation_table(rows))
    lines = {line.split()[3]: line.split()[-2] for line in printed.getvalue().splitlines()[4:-1]}
    assert lines["magicdec"] == "2.0000" and lines["vllm_lookup"] == "-"
    here = measure_generations(texts[:1], 512, {}, DTYPES, 1)
    assert {row["way"] for row in here} == {way for way in ways if not PEERS[way].environment}


class FakeWorker:
    """Emits 0s; a peer named "odd" emits or verifies 1s."""

    version = "0"
    can_verify = True

    def __init__(self, start: PeerStart, dtype: str, sizes: Sizes) -> None:
        self.name = start.name
        self.dtype = dtype
        self.odd = int(start.name.startswith("odd"))
        self.verifies_odd = start.name == "odd_verified"

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        """There is no process to end."""

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        if do == "verify":
            return {"verified": [[self.odd] * runs.VERIFIED]}
        return {"tokens": [[self.odd and not self.verifies_odd] * runs.CHECKED_TOKENS]}


@pytest.mark.parametrize(
    ("name", "what"), [("odd", "float32 tokens"), ("odd_verified", "verified float32 tokens")]
)
def test_nothing_is_measured_after_other_tokens(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the peer is not exact, which the table then says."""
    monkeypatch.setattr(runs, "PeerWorker", FakeWorker)
    starts = [started_here(peer, Path()) for peer in ("magicdec", name)]
    monkeypatch.setitem(PEERS, name, Entry("nowhere"))
    with pytest.raises(RuntimeError, match=f"{name} and magicdec emit different {what}"):
        check_tokens(starts, threads=1)
    monkeypatch.setitem(PEERS, name, Entry("nowhere", is_exact=False))
    assert check_tokens(starts, threads=1) == {"magicdec": "0", name: "0"}


def test_the_table_marks_peers_that_are_not_exact() -> None:
    numbers = dict.fromkeys(("ms", "ms_p10", "ms_p90", "bytes", "prefill_tokens_per_s"), 1.0)
    verify = dict.fromkeys(("verify_ms", "verify_ms_p10", "verify_ms_p90"))
    rows = [
        {"peer": name, "is_exact": PEERS[name].is_exact, "dtype": "", "kv_heads": 6, "prefix": 8}
        | numbers
        | verify
        | {"log_prob_difference": None if "openvino" in name else 0.00123}
        for name in ("openvino", "openvino_u8", "llama_cpp_q8_0")
    ]
    measured = {"machine": {"read_bytes_per_s": 1e9}, "decode": rows}
    printed = StringIO()
    Console(width=WIDTH, file=printed).print(decode_table(measured))
    text = printed.getvalue()
    assert "openvino_u8 *" in text and "llama_cpp_q8_0 *" in text and "openvino *" not in text
    assert "* not exact" in text and "|Δ log p|" in text and "1.2e-03" in text


def test_a_peer_that_ends_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"magicdec ended with code 1: .*no-such-model"):
        PeerWorker(started_here("magicdec", tmp_path / "no-such-model"), "float32", Sizes(1, 64, 1))


def test_bfloat16_is_read_as_safetensors_reads_it(model: Path) -> None:
    path = model / "model.safetensors"
    expected = load_file(path)
    read = read_bfloat16(path)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(widen(read[name]), tensor.float().numpy())


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="a is F32; it must be BF16"):
        read_bfloat16(tmp_path / "a.safetensors")


def rotate(x: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
    """Rotary embedding of x [heads, D] as complex numbers: of dimensions i and i + D/2, or of 2i
    and 2i + 1."""
    size = x.shape[-1]
    turn = np.exp(1j * position * 10000.0 ** (-np.arange(0, size, 2) / size))
    if interleaved:
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * turn
    else:
        turned = (x[:, : size // 2] + 1j * x[:, size // 2 :]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_interleaved_rows_give_the_same_scores() -> None:
    rng = np.random.default_rng(0)
    heads = 3
    size = 8
    width = 24
    q, k = rng.normal(size=(2, heads * size, width))
    x, y = rng.normal(size=(2, width))
    scores = []
    for a, b, interleaved in (
        (q, k, False),
        (interleave_rotary(q, heads), interleave_rotary(k, heads), True),
    ):
        queries = rotate((a @ x).reshape(heads, size), 7, interleaved)
        keys = rotate((b @ y).reshape(heads, size), 3, interleaved)
        scores.append((queries * keys).sum(-1))
    assert np.allclose(*scores)


def test_every_tensor_gets_a_name_and_only_queries_and_keys_another_order(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tensors = read_bfloat16(model / "model.safetensors")
    renamed = gguf_tensors(config, tensors)
    assert len(renamed) == len(tensors) == 3 + 9 * config["num_hidden_layers"]
    for module, name in (("v_proj", "attn_v"), ("o_proj", "attn_output")):
        kept = tensors[f"model.layers.1.self_attn.{module}.weight"]
        assert np.array_equal(renamed[f"blk.1.{name}.weight"], kept)
    key = tensors["model.layers.1.self_attn.k_proj.weight"]
    assert np.array_equal(renamed["blk.1.attn_k.weight"], interleave_rotary(key, 2))
    assert not np.array_equal(renamed["blk.1.attn_k.weight"], key)


def test_a_peer_is_timed_in_the_dtype_that_is_fast_for_it() -> None:
    assert set(timed_dtypes(True, True).values()) == {"bfloat16"}
    dtypes = timed_dtypes(False, True)
    assert dtypes["magicdec"] == dtypes["llama_cpp"] == "bfloat16"
    assert dtypes["openvino"] == dtypes["transformers"] == "float32"
    assert set(timed_dtypes(False, False).values()) == {"float32"}
