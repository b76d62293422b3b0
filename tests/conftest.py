"""Tiny models, runners on them, and a torchrun helper. CPU and gloo; nothing outlives its test.

Every fixture and every test starts from the same seeds and the same number of threads, whichever
tests ran before it."""

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, by whomever

from _pytest import runner
from frame_room import call_with_room
from long_texts import remember_long_texts
from rank_server import NOTICE_S, Job, RankServer
from safetensors.torch import save_file
from tiers import choose, ordered
from torch.utils._device import _device_constructors
from triton_interpreter import patch_once

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.cli.commands import console
from magicdec.config.capabilities import policy_called
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    BESIDE_TARGET,
    DecodingSection,
    DraftSection,
    KVSection,
    SamplingSection,
    model_drafter_of,
)
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.hardware import timing
from magicdec.hardware.costs import stored_bytes
from magicdec.kernels.build import check_cpu
from magicdec.kernels.cpu import CannotExecute
from magicdec.kv.cache import KVCache
from magicdec.model.checkpoint.checked import VARIABLE
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.checkpoint.weight_map import expected_shapes, weight_map
from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.native import NativeElementwise
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.transformer import Transformer
from magicdec.names import DRAFTERS, KV_POLICIES, NGRAM_AND
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Observer, Request, ignore_step
from magicdec.runner.sampling.sampling import make_params
from magicdec.speculation import mixed, ngram, suffix_index
from magicdec.speculation.draft_length import DraftCost
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries, make_policy
from magicdec.speculation.policies.streaming_llm import StreamingLLM
from magicdec.speculation.rolling_runner import MOST_REWOUND, RollingRunner
from magicdec.speculation.steps.recorder import Eager, Recorder
from magicdec.speculation.steps.strategy import Setup, make_strategy

# No test asserts a bandwidth, and reading the real buffer takes as long as a small run. The small
# one is used in the tests' process and in the ranks of rank_server.py, not in other processes,
# unless they get the environment `WITH_SMALL_READS`.
timing.BANDWIDTH_BYTES = 1 << 22
STARTED = Path(__file__).with_name("started"), os.environ.get("PYTHONPATH")
WITH_SMALL_READS = {"PYTHONPATH": os.pathsep.join(str(path) for path in STARTED if path)}
remember_long_texts()
# What is remembered of the checkpoints of tests goes with them. The first process of a run makes
# the folder and removes it; workers and ranks, which end without clearing up, find it in the
# environment.
if "magicdec-checked-" not in os.environ.get(VARIABLE, ""):
    REMEMBERED = TemporaryDirectory(prefix="magicdec-checked-")
    os.environ[VARIABLE] = REMEMBERED.name
# A shell ignores Ctrl-C for what it starts in the background, and so would the programs that tests
# start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).parents[1]
DEV = ROOT / "scripts" / "dev"  # on the path of imports by `pythonpath` of pyproject.toml
THREADS = torch.get_num_threads()
TINY = ModelConfig("tiny", 97, 2, 48, 80, 6, 3, 16, 1024, bos_token_id=1, eos_token_ids=(2,))


settings.register_profile("seeded", derandomize=True, deadline=None)
settings.load_profile("seeded")
# For scripts/dev/plant_faults.py, which asks whether a test fails and not for the smallest example.
FOUND = Phase.explicit, Phase.generate
settings.register_profile("planted", derandomize=True, deadline=None, phases=FOUND)


# torch.manual_seed takes a third of a millisecond to find that there is no other device.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def start_alike() -> None:
    random.seed(0)
    np.random.seed(0)
    SEED(0)
    torch.set_num_threads(THREADS)


class EndedCommand(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


Command = Callable[..., EndedCommand]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `magicdec` with these words in this process, or the `main` of a module of
    `magicdec.cli`, which is then the first of them."""

    def run(first: Any, *words: object) -> EndedCommand:
        name = first if isinstance(first, str) else first.__name__.rpartition(".")[2]
        program = ["magicdec", name] if first is name else [f"magicdec {name}"]
        monkeypatch.setattr(sys, "argv", [*program, *map(str, words)])
        code = 0
        try:
            console() if first is name else first.main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return EndedCommand(code, *capsys.readouterr())

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    start_alike()


def pytest_collection_finish() -> None:
    forget_garbage()


def forget_garbage() -> None:
    """No later test walks through what was imported and made before when it looks for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    if "triton.runtime.interpreter" in sys.modules:  # importing it takes too long for most tests
        patch_once()
    num_modules = len(sys.modules)
    done = call_with_room(lambda: runner.pytest_runtest_protocol(item, nextitem))
    is_last = nextitem is None or nextitem.path != item.path
    if is_last or len(sys.modules) > num_modules:
        forget_garbage()
    return done


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test whose kernels are compiled for another CPU is skipped, after they were compiled, where
    this one cannot execute them."""
    start_alike()
    if item.get_closest_marker("two_threads"):
        torch.set_num_threads(2)
    try:
        return (yield)
    except CannotExecute as error:
        pytest.skip(str(error))


def pytest_configure() -> None:
    """Without `check_cpu`, tests of a suite whose MAGICDEC_MARCH is wrong would all be skipped. The
    functions that `torch.device("meta")` takes for makers of tensors are listed once in a process:
    were `torch.tensor` replaced then, transformers would leave rotary tables of later tests as they
    are in memory."""
    check_cpu()
    _device_constructors()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if never := choose(items):
        config.hook.pytest_deselected(items=[item for item in items if item in never])
    items[:] = ordered([item for item in items if item not in never])
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def tiny_transformer(
    config: ModelConfig = TINY,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layers: range | None = None,
    has_ends: bool | None = None,
) -> Transformer:
    """Random weights large enough that logits are far apart and output does not settle on one
    token."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config, layers=layers, has_ends=has_ends)
    for name, p in model.named_parameters():
        p.requires_grad_(False)
        if p.ndim == 2:
            std = 1.0 if "embedding" in name else 2.0 * p.shape[1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
        else:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + ("norm" in name))
    return model.to(dtype).eval()


def load(
    path: Path | str,
    shard: Shard = Shard(),
    layers: range | None = None,
    has_ends: bool | None = None,
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """A part of the checkpoint in a directory, on the CPU."""
    source = find_model("--model", str(path))
    cpu = torch.device("cpu")
    place = source.config, source.weights, shard, layers, dtype, cpu
    return load_transformer(*place, has_ends=has_ends)


def pack(model: Transformer) -> Transformer:
    """As `--linear packed` loads it."""
    model.pack()
    model.use(NativeElementwise())
    return model


def portable_backend(kv: KVSection) -> AttentionBackend:
    """One that needs no compiler, and reads what drafts under this policy do."""
    return SDPABackend() if policy_called(kv.policy).reads_codes else GroupedBackend()


def make_runner(
    model: Transformer,
    num_rows: int,
    max_tokens: int,
    backend: AttentionBackend | None = None,
    max_following: int | None = None,
) -> ModelRunner:
    place = backend or GroupedBackend(), Group((0,), 0), num_rows, max_tokens
    return ModelRunner(model, *place, max_following=max_following)


class TiledCopies(SDPABackend):
    """One with blocks of 8 tokens, or of whole tiles where so many are not asked for."""

    def block_size(self, max_tokens: int) -> int:
        return 8 if max_tokens <= 8 else 64


def that_drafts(runner: ModelRunner, kv: KVSection) -> ModelRunner:
    """The runner, with another backend if its own does not read what drafts under this policy
    do."""
    reads_codes = policy_called(kv.policy).reads_codes
    if not reads_codes or isinstance(runner.backend, NativeBackend):
        return runner
    return replace(runner, backend=TiledCopies())


def make_draft(
    model: Transformer,
    kv: KVSection,
    num_rows: int,
    max_tokens: int,
    backend: AttentionBackend | None = None,
    chunk: int = 16,
    block_size: int = 8,
    max_drafts: int = 8,
    group: Group = Group((0,), 0),
    source: int = 0,
    max_following: int | None = None,
    shares_prefixes: bool = False,
) -> DraftModel:
    """A standalone draft on the ranks of `group`, of which the target's `source`-th tells the
    others; small chunks and blocks, so that short texts cross them."""
    policy = make_policy(kv)
    rows = (num_rows, max_tokens)
    place = model, backend or GroupedBackend(), group
    if not isinstance(policy, StreamingLLM):
        runner = ModelRunner(
            *place,
            *rows,
            max_following=max_following,
            block_tokens=block_size if shares_prefixes else None,
            shares_prefixes=shares_prefixes,
        )
        return DraftModel(runner, source, chunk)
    rewound = max_drafts + 1 if model.config.is_head else MOST_REWOUND
    tail = max(chunk, rewound) + max_drafts
    runner = RollingRunner(
        *place,
        *rows,
        policy,
        shares_prefixes=shares_prefixes,
        max_tail=tail,
        block_size=block_size,
        most_rewound=rewound,
        chunk=chunk,
    )
    return DraftModel(runner, source, chunk, is_rolling=True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every KV cache, in the order in which they are made."""
    sizes: list[int] = []
    original = KVCache.__init__

    def record(cache: KVCache, *args: Any, **named: Any) -> None:
        original(cache, *args, **named)
        sizes.append(cache.num_bytes)

    monkeypatch.setattr(KVCache, "__init__", record)
    return sizes


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(3, vocab_size, (n,), generator=generator).tolist()) for n in lengths
    ]


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    num_new: int | Sequence[int],
    eos: tuple[int, ...] = (),
    sampling: SamplingSection = SamplingSection(),
    is_coupled: bool = False,
) -> list[Request]:
    lengths = [num_new] * len(prompts) if isinstance(num_new, int) else list(num_new)
    return [
        Request(i, prompt, make_params(sampling, n, eos, i, is_coupled))
        for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]


def decode(
    engine: Engine, name: str, setup: Setup, observe: Observer = ignore_step
) -> list[Request]:
    """Decode what `engine` has prefilled by the strategy of that name."""
    strategy = make_strategy(name, setup)
    engine.begin(strategy)
    return engine.decode(strategy, observe)


def decode_both(
    runner: ModelRunner,
    requests: list[Request],
    kv: KVSection,
    gamma: int,
    chunk: int = 64,
    drafter: str = "self",
    draft: DraftModel | None = None,
    recorder: Recorder | None = None,
    names: Sequence[str] = ("autoregressive", "speculative"),
    pa: float | None = None,
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """(baseline tokens, speculation's tokens, accepted counts by step), from one shared prefill;
    steps are replayed if there is a recorder. The baseline's tokens are [] if it is not decoded,
    because `names` has only "speculative"."""
    engine = Engine(runner, chunk)
    keep_queries(runner if draft is None or draft.runner is None else draft.runner, kv)
    snapshots = engine.prefill(requests)
    decoding = DecodingSection("speculative", drafter, gamma, pa)
    accepted: list[list[int]] = []
    outputs: list[list[list[int]]] = []
    for name in names:
        engine.rewind(snapshots)
        finished = decode(
            engine,
            name,
            Setup(runner, decoding, kv, draft=draft, recorder=recorder or Eager()),
            lambda ids, out, s: accepted.append(out.num_accepted or []),
        )
        outputs.append([list(r.output_ids) for r in finished])
    baseline = outputs[0] if len(names) > 1 else []
    return baseline, outputs[-1], [a for a in accepted if a]


def trust_lookups() -> None:
    """From now on lookups are believed and cost nothing, so that they draft often and are often
    wrong, but after some tokens there is none."""
    suffix_index.LEAST_MATCH = 1
    suffix_index.PRIORS = (0.999,) * len(suffix_index.PRIORS)
    suffix_index.PRIOR_WEIGHT = suffix_index.TEXT_WEIGHT = 1e9
    for module in (ngram, mixed):
        module.LOOKUP = DraftCost(0.0, 0.001)
    mixed.DRAFT_COST = 0.0
    propose = suffix_index.Lookup.propose

    def some(lookup: suffix_index.Lookup, count: int, least: float) -> list[tuple[int, float]]:
        return propose(lookup, count if sum(lookup.index.tokens[-2:]) % 3 else 0)

    suffix_index.Lookup.propose = some  # type: ignore[method-assign]


@pytest.fixture
def trusted_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `trust_lookups`, in one test."""
    names = ("LEAST_MATCH", "PRIORS", "PRIOR_WEIGHT", "TEXT_WEIGHT", "LOOKUP", "DRAFT_COST")
    for module, name in product((suffix_index, ngram, mixed), names):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(suffix_index.Lookup, "propose", suffix_index.Lookup.propose)
    trust_lookups()


@pytest.fixture
def lookups_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lookup proposes as many ones as are asked for, and is sure of them."""

    def look_up(
        self: ngram.NgramDrafter, requests: Sequence[Request], most: int
    ) -> list[list[float]]:
        self.proposals = {r.row: [(1, 1.0)] * most for r in requests if r.row is not None}
        return [[1.0] * most] * len(requests)

    monkeypatch.setattr(ngram.NgramDrafter, "look_up", look_up)


def refusal(drafter: str, kv: KVSection) -> str | None:
    """What `config` tells a run of the two; None where it is served."""
    draft = DraftSection() if model_drafter_of(drafter) in BESIDE_TARGET else None
    config = RunConfig(draft=draft, kv=kv, decoding=DecodingSection("speculative", drafter, 4))
    try:
        config.check(world_size=1)
    except ValueError as error:
        return str(error)
    return None


def served_pairs() -> set[tuple[str, str | None]]:
    """Every drafter of one source under every KV policy that a run may name; prompt lookup, which
    reads no cache, once, under None."""
    single = [drafter for drafter in DRAFTERS if not drafter.startswith(NGRAM_AND)]
    pairs = {(d, p) for d in single for p in KV_POLICIES if refusal(d, KVSection(p)) is None}
    return {(d, None if d == "ngram" else p) for d, p in pairs}


def save_checkpoint(model: Transformer, directory: Path) -> Path:
    """A Hugging Face directory with the demo's tokenizer."""
    assert model.shard == Shard()
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for parameter, pieces in weight_map(model.config, model.shard, model.layers).items():
        rows = [p.rows[1] - p.rows[0] for p in pieces]
        parts = model.state_dict()[parameter].split(rows)
        tensors |= {p.name: t.contiguous().clone() for p, t in zip(pieces, parts, strict=True)}
    save_file(tensors, directory / "model.safetensors")
    config = replace(model.config, dtype=str(next(model.parameters()).dtype).split(".")[1])
    (directory / "config.json").write_text(json.dumps(to_hf_config(config)))
    shutil.copy(ROOT / "magicdec" / "demo" / "target" / "tokenizer.model", directory)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GQA 6:3, an odd vocabulary on top of the demo tokenizer's ids: uneven shards for 2 and 3
    ranks."""
    config = replace(TINY, vocab_size=2051, eos_token_ids=(2, 5))
    return save_checkpoint(tiny_transformer(config), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One made-up book, long enough for dozens of prefixes."""
    generator = torch.Generator().manual_seed(0)
    words = [
        "".join(chr(97 + int(c)) for c in torch.randint(0, 26, (4,), generator=generator))
        for _ in range(500)
    ]
    picks = torch.randint(0, len(words), (9000,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(" ".join(words[i] for i in picks))
    return path


Launch = Callable[..., subprocess.CompletedProcess[str]]
HANG = 500  # seconds; on a busy machine too, only what hangs takes as long


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def launch(tmp_path: Path, rank_server: RankServer) -> Launch:
    """Run a script of tests/ with `num_ranks` ranks, forked from a process that has imported torch
    or, with `torchrun`, as a user starts them. All its processes are gone afterwards, also those of
    a run that hangs: if one has failed, the others end within `notice_s` or are ended."""

    def run(
        script: str,
        *args: object,
        num_ranks: int = 1,
        torchrun: bool = False,
        timeout: float = HANG,
        notice_s: float = NOTICE_S,
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        words = list(map(str, args))
        if torchrun:
            return run_torchrun([str(ROOT / "tests" / script), *words], num_ranks, env, tmp_path)
        with TemporaryDirectory() as outside:
            out = Path(outside, "out")
            err = Path(outside, "err")
            job = Job(script, words, num_ranks, env, str(tmp_path), str(out), str(err), notice_s)
            returncode = rank_server.run(job, timeout)
            return subprocess.CompletedProcess(
                [script, *words], returncode, out.read_text(), err.read_text()
            )

    return run


@dataclass(frozen=True)
class Driven:
    """What a driver said, and the records and samples that it left."""

    stdout: str
    stderr: str
    records: list[dict[str, Any]]
    saved: list[dict[str, Any]]

    @property
    def tokens(self) -> list[list[int]]:
        return [sample["output_ids"] for sample in self.saved]


Drive = Callable[..., Driven]


@pytest.fixture
def drive(launch: Launch, tmp_path: Path) -> Drive:
    """Run a driver in a folder of its own, which must end well."""

    def run(driver: str, *args: object, num_ranks: int = 1, torchrun: bool = False) -> Driven:
        files = [tmp_path / name for name in ("r.jsonl", "t.jsonl")]
        for file in files:
            file.unlink(missing_ok=True)
        words = *args, "--out", files[0], "--save_tokens", files[1], "--threads", 1
        name = f"{driver}_benchmark.py"
        done = launch(name, *words, num_ranks=num_ranks, torchrun=torchrun)
        assert done.returncode == 0, done.stderr
        read = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        return Driven(done.stdout, done.stderr, *read)

    return run


def run_torchrun(
    words: list[str], num_ranks: int, env: dict[str, str], directory: Path
) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    logs = ["--log-dir", str(directory / "torchrun")]  # else it leaves a folder in /tmp
    command = [sys.executable, *torchrun, *logs, *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=directory,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=HANG)
    finally:
        if process.poll() is None:
            end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process: subprocess.Popen[str]) -> None:
    """On SIGTERM torchrun ends its ranks, which SIGKILL would leave behind: each has a session of
    its own."""
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_parameters(config: ModelConfig) -> int:
    """Stored parameters of a model; a tied head is counted once. Of a model that only the plan
    knows they are those that its costs count."""
    if config.planned_only:
        return stored_bytes(config, Shard(), size=1, is_packed=False)
    return sum(math.prod(shape) for shape in expected_shapes(config).values())
