"""Every drafter under every KV policy, and one rank of decoding with all of them: a ragged batch,
up to 110 tokens a row; and fewer tokens in steps that are recorded once and replayed, sums over
ranks included, greedy or sampled, and of requests that join and leave. Started by
test_engine_ranks.py; rank 0 prints what each case emitted as JSON.

A new drafter is in the table by itself; a new policy is a line in KV_SECTIONS."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
from conftest import (
    decode,
    load,
    make_draft,
    make_requests,
    pack,
    random_prompts,
    refusal,
    served_pairs,
    trust_lookups,
)
from draft_heads import is_head, read_mtp_head, state_layers
from fake_clock import VirtualClock
from recorder import StandInRecorder

from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.capabilities import policy_called
from magicdec.config.sections import (
    NAMED,
    DecodingSection,
    KVSection,
    SamplingSection,
    model_drafter_of,
)
from magicdec.distributed.groups import Group, Launch, read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.model.draft_head import DraftHead
from magicdec.model.transformer import Transformer
from magicdec.names import DRAFTERS, MTP, NGRAM_AND
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Request
from magicdec.runner.sampling.sampling import make_params
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.draft_length import AutoLength
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.steps.recorder import Eager
from magicdec.speculation.steps.strategy import Setup, make_strategy

PROMPTS = [5, 70, 1, 33]
NUM_NEW = [110, 110, 9, 91]
MOST_DRAFTS = 5
MAX_TOKENS = 70 + 110 + MOST_DRAFTS
# The three longer rows outgrow these budgets by at least 45 tokens; a prompt outgrows SnapKV's.
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 70, 4),
    KVSection("snapkv", 50, window_size=6),
    KVSection("snapkv", 70, window_size=6, reselect_every=30),
    KVSection("verified", 70, 4),
    KVSection("retrieval", 70, 4),
    KVSection("quantised"),
]
# Of the replayed steps, in which only the last row is greedy where the others are sampled.
FEW_NEW = [10, 8, 4, 9]
SAMPLINGS = [
    SamplingSection(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingSection(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02),
    SamplingSection(temperature=0.8, top_p=0.9, repetition_penalty=1.1),
    SamplingSection(repetition_penalty=1.2),
]


@dataclass(frozen=True)
class MatrixCase:
    drafter: str
    kv: KVSection
    gamma: int
    draft_ranks: tuple[int, ...] | None = None
    pa: float | None = None
    steps: str = "native"  # or "eager", "replayed" or "in flight", by operators of torch
    is_sampled: bool = False

    @property
    def has_head(self) -> bool:
        return is_head(self.drafter)

    @property
    def is_native(self) -> bool:
        return self.steps == "native"

    @property
    def dtype(self) -> torch.dtype:
        """In float64 nothing rounds so that a random number falls to the other side."""
        return torch.float64 if self.is_sampled else torch.float32


@dataclass(frozen=True)
class Result:
    case: dict[str, object]
    tokens: list[list[int]]
    num_drafted: int
    num_accepted: int
    depths: list[int]  # numbers of draft tokens that steps had
    num_replayed: int

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def make_cases(num_ranks: int, which: str = "in turn") -> list[MatrixCase]:
    """All that is served, with standalone drafts on each kind of group among so many ranks in turn.
    `other` are only the standalone drafts, on the groups that were not their turn; `not replayed`
    are all but the steps that are recorded and replayed."""
    other_groups = which == "other"
    order = target_ranks(num_ranks)
    gammas = (1, 4) if num_ranks == 1 else (4,)
    groups = sorted({(0,), (num_ranks - 1,), order})
    cases = [MatrixCase(drafter, kv, 4, ranks) for drafter, kv, ranks in make_mixed(order)]
    cases = [] if other_groups else cases
    single = [drafter for drafter in DRAFTERS if not drafter.startswith(NGRAM_AND)]
    for drafter, (index, kv), gamma in product(single, enumerate(KV_SECTIONS), gammas):
        if refusal(drafter, kv) or (drafter == "ngram" and index > 0):
            continue  # prompt lookup reads no cache: one row for all policies
        turn = groups[index % len(groups)]
        if other_groups and drafter in NAMED:
            cases += [MatrixCase(drafter, kv, gamma, ranks) for ranks in groups if ranks != turn]
        elif not other_groups:
            cases.append(MatrixCase(drafter, kv, gamma, ranks_of(drafter, turn, order)))
    is_many = num_ranks > 2  # on fewer, what replays and what joins and leaves is complete
    others = make_stops(groups)
    others += [] if which == "not replayed" else make_replayed(groups, order, is_many)
    others += make_in_flight(order)[:: 2 if is_many else 1]
    return cases if other_groups else [*cases, *others]


def ranks_of(
    drafter: str, ranks: tuple[int, ...], order: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The ranks of what drafts beside the target, which may be these; the head of its own
    checkpoint is on all in `order`."""
    if model_drafter_of(drafter) == MTP:
        return order
    return ranks if model_drafter_of(drafter) in NAMED else None


def make_mixed(order: tuple[int, ...]) -> list[tuple[str, KVSection, tuple[int, ...] | None]]:
    """Prompt lookup and a model, a standalone one on the first of the ranks in `order`."""
    full, streaming_llm, *others = KV_SECTIONS
    verified = next(kv for kv in others if kv.policy == "verified")
    self_cases = [("ngram+self", kv, None) for kv in (streaming_llm, verified)]
    model_cases = [("ngram+model", full, order[:1]), ("ngram+model", streaming_llm, order)]
    head_cases = [("ngram+eagle", full, order[:1]), ("ngram+mtp", full, order)]
    return [*self_cases, *model_cases, *head_cases]


def make_stops(groups: Sequence[tuple[int, ...]]) -> list[MatrixCase]:
    """Chains that stop, of a draft on each kind of group: ranks without it learn how long they
    are."""
    _, streaming_llm, *_ = KV_SECTIONS
    draft_cases = [MatrixCase("model", streaming_llm, 5, ranks, pa=0.3) for ranks in groups]
    head_case = MatrixCase("eagle", streaming_llm, 5, groups[0], pa=0.9)
    return [MatrixCase("self", streaming_llm, 5, pa=0.3), *draft_cases, head_case]


def make_replayed(
    groups: Sequence[tuple[int, ...]], order: tuple[int, ...], is_in_turn: bool
) -> list[MatrixCase]:
    """Each pair that is served, greedy and sampled, or with `is_in_turn` one of the two; a
    standalone draft on the first of the groups.
    Sampled steps that the host starts are compared with those of other numbers of ranks, too."""
    greedy = [("replayed", False)]
    sampled = [("eager", True), ("replayed", True)]
    cases = []
    for index, (drafter, policy) in enumerate(sorted(served_pairs(), key=str)):
        kinds = (greedy, sampled)[index % 2] if is_in_turn else [*greedy, *sampled]
        kv = KVSection("full") if policy in (None, "full") else KVSection(policy, 40, 4, 8)
        ranks = ranks_of(drafter, groups[0], order)
        cases += [
            MatrixCase(drafter, kv, 3, ranks, steps=s, is_sampled=drawn) for s, drawn in kinds
        ]
    return cases


def make_in_flight(order: tuple[int, ...]) -> list[MatrixCase]:
    """Requests that join and leave: every drafter, and the policies that choose."""
    cases = []
    for drafter, policy in (
        ("ngram", "full"),
        ("self", "snapkv"),
        ("self", "quantised"),
        ("self", "verified"),
        ("self", "streaming_llm"),
        ("model", "streaming_llm"),
        ("ngram+self", "streaming_llm"),
        ("ngram+model", "full"),
        ("eagle", "streaming_llm"),
        ("eagle", "full"),
        ("mtp", "full"),
    ):
        kv = KVSection(policy, -1 if policy == "full" else 40, 4, 8)
        ranks = ranks_of(drafter, order, order)
        cases.append(MatrixCase(drafter, kv, 3, ranks, steps="in flight"))
    return cases


def target_ranks(num_ranks: int) -> tuple[int, ...]:
    """Reversed, so that a rank and its place in the group are not the same number."""
    return tuple(reversed(range(num_ranks)))


class Rank:
    """This rank's weights, by model and group size; a cache of its own for every case."""

    def __init__(self, launch: Launch, paths: list[str]) -> None:
        self.launch = launch
        self.order = target_ranks(launch.world_size)
        device = torch.device("cpu")
        is_alone = launch.world_size == 1
        shared = None if is_alone else "shared_memory"
        # What is recorded needs the process group's own collectives, as it has them by NCCL.
        self.groups = {
            (is_native, ranks): make_groups(launch, self.order, device, collectives, ranks)
            for is_native, collectives in ((True, shared), (False, None))
            for ranks in (None, *sorted({(0,), (launch.world_size - 1,), self.order}))
        }
        self.paths = paths

    def make_runner(self, case: MatrixCase, which: int, group: Group) -> ModelRunner:
        model = load(self.paths[which], Shard(group.index, group.size), dtype=case.dtype)
        return self.runner_of(case, model, group)

    def runner_of(self, case: MatrixCase, model: Transformer, group: Group) -> ModelRunner:
        size = len(PROMPTS), MAX_TOKENS
        reads_codes = policy_called(case.kv.policy).reads_codes  # in whole tiles
        if case.steps == "in flight":  # a row less than requests, and memory for a long one
            block, num_blocks = (64, 4) if reads_codes else (8, 14)
            backend = SDPABackend(block)
            return ModelRunner(model, backend, group, 3, MAX_TOKENS, num_blocks=num_blocks)
        if not case.is_native:
            return ModelRunner(model, SDPABackend(64 if reads_codes else 16), group, *size)
        if isinstance(model, DraftHead):
            return ModelRunner(pack(model), NativeBackend(), group, *size)
        executor = Executor(pack(model), group)
        return ModelRunner(model, NativeBackend(), group, *size, executor=executor)

    def decode(self, case: MatrixCase, name: str = "speculative") -> Result:
        groups = self.groups[case.is_native, case.draft_ranks]
        recorder = StandInRecorder()
        runner = self.make_runner(case, 0, groups.target)
        if groups.draft is not None and case.has_head:
            layers = state_layers(case.drafter, runner.model.config)
            runner.observers.append(HiddenStates.of(runner, layers))
        decoding = DecodingSection(name, case.drafter, case.gamma, case.pa)
        is_in_flight = case.steps == "in flight"
        draft = self.make_draft(case, groups, runner.model)
        is_auto = is_in_flight and case.kv.policy == "streaming_llm"
        setup = Setup(
            runner,
            decoding,
            case.kv,
            draft=draft,
            is_in_flight=is_in_flight,
            draft_length=AutoLength(case.gamma, runner.group, runner.device) if is_auto else None,
            recorder=recorder if case.steps == "replayed" else Eager(),
        )
        requests = requests_of(case)
        steps = []
        if is_in_flight:
            self.serve(setup, requests)
        else:
            engine = Engine(runner, 64)
            engine.prefill(requests)
            requests = decode(engine, name, setup, lambda ids, output, s: steps.append(output))
        return Result(
            asdict(case),
            [list(r.output_ids) for r in requests],
            sum(s.draft_width * len(s.token_ids) for s in steps),
            sum(sum(s.num_accepted or []) for s in steps),
            sorted({s.draft_width for s in steps}),
            recorder.replayed,
        )

    def serve(self, setup: Setup, requests: list[Request]) -> None:
        """The ranks' clocks disagree, so that the schedule depends on which rank decides."""
        shape = setup.runner.cache.shape
        sizes = shape.block_size, shape.num_blocks
        limits = BatchLimits(MAX_TOKENS, *sizes, step_tokens=4, prefill_tokens=7)
        clock = VirtualClock(1.0 + self.launch.rank)
        for request in requests:
            request.arrived_s = 1.5 * request.request_id
        strategy = make_strategy("speculative", setup)
        Engine(setup.runner, 16, limits, clock).serve(strategy, requests)
        assert not any(setup.runner.cache.blocks)

    def make_draft(self, case: MatrixCase, groups, target: Transformer) -> DraftModel | None:
        if case.draft_ranks is None:
            return None
        source = self.order.index(case.draft_ranks[0])
        assert (groups.draft is not None) == (self.launch.rank in case.draft_ranks)
        if groups.draft is None:
            return DraftModel(None, source, 16, case.kv.policy == "streaming_llm")
        if model_drafter_of(case.drafter) == MTP:
            head = read_mtp_head(Path(self.paths[3]), target)
            runner = self.runner_of(case, head, groups.draft)
        else:
            runner = self.make_runner(case, 2 if case.has_head else 1, groups.draft)
        size = (len(PROMPTS), MAX_TOKENS)
        place = {"group": groups.draft, "source": source}
        draft = make_draft(runner.model, case.kv, *size, runner.backend, **place)
        assert draft.runner is not None
        draft.runner.executor = runner.executor
        if isinstance(runner.model, DraftHead):
            runner.model.share(target)
        return draft


def requests_of(case: MatrixCase) -> list[Request]:
    prompts = random_prompts(PROMPTS, 97)
    if not case.is_sampled:
        return make_requests(prompts, NUM_NEW if case.is_native else FEW_NEW)
    rows = zip(prompts, FEW_NEW, SAMPLINGS, strict=True)
    return [Request(i, prompt, make_params(s, n, (), i)) for i, (prompt, n, s) in enumerate(rows)]


def main() -> None:
    torch.set_num_threads(1)
    trust_lookups()
    launch = read_launch()
    *paths, which = sys.argv[1:]
    rank = Rank(launch, paths)
    cases = make_cases(launch.world_size, which)
    baseline = rank.decode(MatrixCase("self", KV_SECTIONS[0], 1), "autoregressive")
    results = [baseline, *map(rank.decode, cases)]
    if launch.rank == 0:
        print(json.dumps([asdict(result) for result in results]), flush=True)
    close_groups()


if __name__ == "__main__":
    main()
