"""The measurements of `bench_peers.py`: decode steps, verifications and prefill of all peers in
turn on a random model, and whole generations on the demo model. Both first check that all peers
emit the same float32 tokens, and measure nothing if not."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from magicdec.model.checkpoint.source import find_model
from magicdec.model.tokenizer import load_tokenizer
from magicdec.workload.workload import Wanted, build_workload
from peers import PEERS, Entry
from peers.measuring import CallTiming, timing_of
from peers.process import PeerStart, PeerWorker, Sizes, export_model, started_here
from peers.serving_trace import VOCAB

LAYERS = 6
HIDDEN = 384
HEADS = 6
HEAD_DIM = 64
FFN = 1024
POSITIONS = 32768
BATCH = 4
CHECKED_PROMPT = 200
CHECKED_TOKENS = 24
VERIFIED = 4  # tokens per row in a verification
ROUNDS = 6  # interleaved turns per case; the first warms up
REPEATS = {"transformers": 2}  # steps and verifications per turn; other peers: REPEATS_A_TURN
REPEATS_A_TURN = 10
GENERATED = 96
GENERATED_ROUNDS = 3
GENERATED_CHECKED = 2048  # the longest prefix to check
WARM_PREFIX = 1024
WARM_TOKENS = 8
ROOM = 128  # cached tokens per row beyond the prompt
# Of the texts whose tokens' probabilities are compared.
SCORED_ROWS = 2
SCORED_TOKENS = 2048
SCORES_OF = "transformers"  # in float32, what others are compared with on the random model
INEXACT_CAPTION = "* not exact: its KV cache of 8 or 4 bits changes the emitted tokens"
DEMO = Path(__file__).parents[3] / "magicdec" / "demo" / "target"


@dataclass(frozen=True)
class PeerCase:
    kv_heads: int
    prefix: int

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the whole batch's KV cache, which a decode step reads."""
        return 2 * LAYERS * BATCH * self.kv_heads * HEAD_DIM * self.prefix * itemsize


def save_model(kv_heads: int, directory: Path) -> None:
    """Save a random model of the benchmark's shape with transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(kv_heads)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def make_prompts(length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    rows: list[list[int]] = torch.randint(3, VOCAB, (BATCH, length), generator=generator).tolist()
    return rows


def make_drafts(prompts: list[list[int]]) -> list[list[int]]:
    """Draft tokens to verify. Their values do not affect the time."""
    return [prompt[1 - VERIFIED :] for prompt in prompts]


def check_tokens(starts: Sequence[PeerStart], threads: int) -> dict[str, str]:
    """Check that all exact peers emit the same tokens in float32, also after a verification
    halfway, and that their verifications agree. Returns the versions of all peers. Raises
    RuntimeError if tokens differ."""
    emitted = {}
    verified = {}
    versions = {}
    prompts = make_prompts(CHECKED_PROMPT)
    for start in starts:
        sizes = Sizes(threads, CHECKED_PROMPT + ROOM, BATCH)
        with PeerWorker(start, "float32", sizes) as worker:
            versions[start.name] = worker.version
            if not PEERS[start.name].is_exact:
                continue
            worker.ask(do="prefill", prompts=prompts)
            worker.ask(do="step", count=CHECKED_TOKENS // 2)
            if worker.can_verify:
                answer = worker.ask(do="verify", drafts=make_drafts(prompts))
                verified[start.name] = answer["verified"]
            emitted[start.name] = worker.ask(do="step", count=CHECKED_TOKENS // 2)["tokens"]
    require_equal("float32 tokens", emitted, CHECKED_TOKENS)
    require_equal("verified float32 tokens", verified, VERIFIED)
    return versions


def score(
    start: PeerStart, dtype: str, texts: list[list[int]], threads: int
) -> list[list[float]] | None:
    """Log-probabilities of the tokens of `texts`, see `Peer.score`; None if the peer gives none."""
    with PeerWorker(start, dtype, Sizes(threads, len(texts[0]) + ROOM, len(texts))) as worker:
        if not worker.can_score:
            return None
        log_probs: list[list[float]] = worker.ask(do="score", texts=texts)["log_probs"]
        return log_probs


def log_prob_differences(
    starts: Sequence[PeerStart], dtypes: Mapping[str, str], threads: int
) -> dict[str, float | None]:
    """By peer, in its dtype: the mean absolute difference of the log-probabilities of the tokens of
    random texts to those of transformers in float32. The perplexity of a random model would not
    show how exact a peer is."""
    texts = [row[:SCORED_TOKENS] for row in make_prompts(SCORED_TOKENS)[:SCORED_ROWS]]
    reference = next(start for start in starts if start.name == SCORES_OF)
    expected = score(reference, "float32", texts, threads)
    assert expected is not None, "transformers has logits"
    return {
        start.name: mean_difference(score(start, dtypes[start.name], texts, threads), expected)
        for start in starts
    }


def mean_difference(found: list[list[float]] | None, expected: list[list[float]]) -> float | None:
    if found is None:
        return None
    return float((torch.tensor(found) - torch.tensor(expected)).abs().mean())


def perplexities(
    starts: Sequence[PeerStart], dtypes: Mapping[str, str], texts: list[list[int]], threads: int
) -> dict[str, float | None]:
    """By peer, in its dtype; None where it gives no probabilities."""
    scores = {start.name: score(start, dtypes[start.name], texts, threads) for start in starts}
    return {
        name: None if found is None else float((-torch.tensor(found).double()).mean().exp())
        for name, found in scores.items()
    }


def marked(name: str, is_exact: bool) -> str:
    """The name of a peer or way in a table, with a mark that `INEXACT_CAPTION` explains."""
    return name if is_exact else f"{name} *"


def require_equal(what: str, rows: dict[str, list[list[int]]], count: int) -> None:
    """Raises RuntimeError unless the first `count` tokens of each row are the same for all
    peers."""
    first = next(iter(rows))
    for name, ids in rows.items():
        if [row[:count] for row in ids] != [row[:count] for row in rows[first]]:
            raise RuntimeError(f"{name} and {first} emit different {what}")


def measure(
    case: PeerCase, starts: Sequence[PeerStart], dtypes: Mapping[str, str], threads: int
) -> list[dict[str, Any]]:
    """One row per peer, in its dtype: milliseconds of a decode step and of a verification of the
    batch, and prefill tokens per second."""
    sizes = Sizes(threads, case.prefix + ROOM, BATCH)
    prompts = make_prompts(case.prefix)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(PeerWorker(start, dtypes[start.name], sizes)) for start in starts
        ]
        prefill = {w.name: w.ask(do="prefill", prompts=prompts)["seconds"][0] for w in workers}
        steps, verifications = take_turns(workers, make_drafts(prompts))
    rows = []
    for name, seconds in steps.items():
        dtype = dtypes[name]
        row = {"peer": name, "is_exact": PEERS[name].is_exact, "dtype": dtype, "batch": BATCH}
        row |= asdict(case)
        row |= timing_of(seconds).as_json() | {"verified_tokens": VERIFIED}
        verify = timing_of(verifications[name]) if verifications[name] else None
        row |= prefixed("verify_", verify)
        row["prefill_tokens_per_s"] = BATCH * case.prefix / prefill[name]
        rows.append(row | {"bytes": case.kv_bytes(getattr(torch, dtype).itemsize)})
    return rows


def prefixed(prefix: str, timing: CallTiming | None) -> dict[str, float | None]:
    """A timing's JSON with `prefix` before each name; values are None without a timing."""
    names = CallTiming.__dataclass_fields__
    return {prefix + name: getattr(timing, name) if timing else None for name in names}


def take_turns(
    workers: Sequence[PeerWorker], drafts: list[list[int]]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of all steps and of all verifications by peer, interleaved in alternating order."""
    steps: dict[str, list[float]] = {w.name: [] for w in workers}
    verifications: dict[str, list[float]] = {w.name: [] for w in workers}
    for turn in range(ROUNDS):
        for worker in workers if turn % 2 == 0 else reversed(workers):
            count = REPEATS.get(worker.name, REPEATS_A_TURN)
            stepped = worker.ask(do="step", count=count)["seconds"]
            verified = []
            if worker.can_verify:
                verified = worker.ask(do="verify", drafts=drafts, count=count)["seconds"]
            if turn:
                steps[worker.name] += stepped
                verifications[worker.name] += verified
    return steps, verifications


def make_starts(
    plain: Path, pythons: Mapping[str, str], wanted: Callable[[Entry], bool]
) -> list[PeerStart]:
    """The peers with a wanted entry that this environment or one of `pythons`, the interpreters by
    environment, runs. Writes transformers' checkpoint `plain` in the format of each, beside it."""
    starts: dict[str, PeerStart] = {}
    for environment, python in pythons.items():
        if any(wanted(entry) and entry.environment == environment for entry in PEERS.values()):
            starts[environment] = PeerStart(
                environment, python, plain.with_name(f"{environment}-{plain.name}")
            )
            export_model(starts[environment], plain)
    return [
        replace(starts[entry.environment], name=name)
        if entry.environment
        else started_here(name, plain)
        for name, entry in PEERS.items()
        if wanted(entry) and entry.environment in {"", *starts}
    ]


def measure_generations(
    texts: Sequence[str],
    prefix: int,
    pythons: Mapping[str, str],
    dtypes: Mapping[str, str],
    threads: int,
) -> list[dict[str, Any]]:
    """One row per text and peer: seconds from the prompts to the last token, of these the seconds
    after the first token of all rows, and the perplexity of the demo text as the peer computes
    it."""
    source = find_model("--model", "demo")
    tokenizer = load_tokenizer(DEMO)
    bos = source.config.bos_token_id
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("target", "draft"):  # the draft stays beside the model
            (Path(directory) / name).symlink_to(DEMO.with_name(name))
        starts = make_starts(Path(directory) / "target", pythons, lambda entry: entry.generates)
        for text in texts:
            workload = build_workload(text, tokenizer, bos, Wanted(prefix, BATCH, 0, GENERATED))
            prompts = [list(prompt) for prompt in workload.prompts]
            check_generations(starts, [prompt[-GENERATED_CHECKED:] for prompt in prompts], threads)
            measured = take_generations(starts, prompts, dtypes, threads)
            rows += [{"text": workload.dataset, **row} for row in measured]
        scored = build_workload("demo", tokenizer, bos, Wanted(SCORED_TOKENS, SCORED_ROWS, 0, 0))
        found = perplexities(starts, dtypes, [list(text) for text in scored.prompts], threads)
    return [row | {"perplexity": found[row["way"]]} for row in rows]


def take_generations(
    starts: Sequence[PeerStart], prompts: list[list[int]], dtypes: Mapping[str, str], threads: int
) -> list[dict[str, Any]]:
    """All peers generate in turn, each the first token alone and then all."""
    seconds: dict[str, list[float]] = {start.name: [] for start in starts}
    decoding: dict[str, list[float]] = {start.name: [] for start in starts}
    sizes = Sizes(threads, len(prompts[0]) + ROOM, BATCH)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(PeerWorker(start, dtypes[start.name], sizes)) for start in starts
        ]
        for worker in workers:
            warm = [prompt[-WARM_PREFIX:] for prompt in prompts]
            worker.ask(do="generate", prompts=warm, num_new=WARM_TOKENS)
        for _ in range(GENERATED_ROUNDS):
            for worker in workers:
                first, whole = (
                    worker.ask(do="generate", prompts=prompts, num_new=num_new)["seconds"][0]
                    for num_new in (1, GENERATED)
                )
                seconds[worker.name].append(whole)
                decoding[worker.name].append(whole - first)
    return [
        {"way": name, "dtype": dtypes[name], "batch": BATCH, "prefix": len(prompts[0])}
        | {"num_new": GENERATED, "seconds": statistics.median(values), "all_seconds": values}
        | {"decode_seconds": statistics.median(decoding[name])}
        | {"all_decode_seconds": decoding[name]}
        for name, values in seconds.items()
    ]


def check_generations(starts: Sequence[PeerStart], prompts: list[list[int]], threads: int) -> None:
    """Raises RuntimeError unless all peers emit the same float32 tokens after `prompts`."""
    emitted = {}
    sizes = Sizes(threads, len(prompts[0]) + ROOM, len(prompts))
    for start in starts:
        with PeerWorker(start, "float32", sizes) as worker:
            answer = worker.ask(do="generate", prompts=prompts, num_new=GENERATED)
            emitted[start.name] = answer["tokens"]
    require_equal("float32 tokens", emitted, GENERATED)
