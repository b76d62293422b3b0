"""Every drafter under every KV policy, and one rank of decoding with all of them: a ragged batch,
up to 110 tokens a row. Started by test_engine_ranks.py; rank 0 prints what each case emitted as
JSON.

A new drafter is in the table by itself; a new policy is a line in KV_SECTIONS."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product

import torch
from conftest import (
    decode,
    load,
    make_draft,
    make_requests,
    pack,
    random_prompts,
    refusal,
    trust_lookups,
)

from magicdec.attention.native import NativeBackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.strategy import Setup
from magicdec.distributed.groups import Group, Launch, read_launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.drafter import DraftModel
from magicdec.engine import Engine
from magicdec.executor.executor import Executor
from magicdec.model.transformer import Transformer
from magicdec.names import DRAFTERS, NGRAM_AND
from magicdec.runner import ModelRunner

PROMPTS, NUM_NEW = [5, 70, 1, 33], [110, 110, 9, 91]
TREE, MOST_DRAFTS = "2,2,1", 2 + 4 + 4
MAX_TOKENS = 70 + 110 + MOST_DRAFTS
# The three longer rows outgrow these budgets by at least 45 tokens; a prompt outgrows SnapKV's.
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 70, 4),
    KVSection("snapkv", 50, window_size=6),
    KVSection("snapkv", 70, window_size=6, reselect_every=30),
    KVSection("verified", 70, 4),
    KVSection("retrieval", 70, 4),
]


@dataclass(frozen=True)
class Case:
    drafter: str
    kv: KVSection
    gamma: int
    draft_ranks: tuple[int, ...] | None = None
    tree: str | None = None  # of the depth of gamma
    pa: float | None = None


@dataclass(frozen=True)
class Result:
    case: dict[str, object]
    tokens: list[list[int]]
    num_drafted: int
    num_accepted: int
    depths: list[int]  # numbers of draft tokens that steps had

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def make_cases(num_ranks: int, other_groups: bool = False) -> list[Case]:
    """All that is served, with standalone drafts on each kind of group among so many ranks in turn.
    With `other_groups`, only the standalone drafts, on the groups that were not their turn."""
    order, gammas = target_ranks(num_ranks), (1, 4) if num_ranks == 1 else (4,)
    groups = sorted({(0,), (num_ranks - 1,), order})
    cases = [Case(drafter, kv, 4, ranks) for drafter, kv, ranks in make_mixed(order)]
    cases = [] if other_groups else cases
    single = [drafter for drafter in DRAFTERS if not drafter.startswith(NGRAM_AND)]
    for drafter, (index, kv), gamma in product(single, enumerate(KV_SECTIONS), gammas):
        if refusal(drafter, kv) or (drafter == "ngram" and index > 0):
            continue  # prompt lookup reads no cache: one row for all policies
        turn = groups[index % len(groups)]
        if other_groups and drafter == "model":
            cases += [Case(drafter, kv, gamma, ranks) for ranks in groups if ranks != turn]
        elif not other_groups:
            cases.append(Case(drafter, kv, gamma, turn if drafter == "model" else None))
    return cases if other_groups else [*cases, *make_tree_cases(groups), *make_stops(groups)]


def make_mixed(order: tuple[int, ...]) -> list[tuple[str, KVSection, tuple[int, ...] | None]]:
    """Prompt lookup and a model, a standalone one on the first of the ranks in `order`."""
    full, streaming_llm, *others = KV_SECTIONS
    verified = next(kv for kv in others if kv.policy == "verified")
    of_self = [("ngram+self", kv, None) for kv in (streaming_llm, verified)]
    return [*of_self, ("ngram+model", full, order[:1]), ("ngram+model", streaming_llm, order)]


def make_tree_cases(groups: Sequence[tuple[int, ...]]) -> list[Case]:
    """Trees by self-speculation under two policies, and by a standalone draft on the last of the
    groups."""
    _, streaming_llm, _, _, _, retrieval = KV_SECTIONS
    pairs = [("self", streaming_llm), ("self", retrieval), ("model", KV_SECTIONS[0])]
    return [
        Case(drafter, kv, 3, groups[-1] if drafter == "model" else None, TREE)
        for drafter, kv in pairs
    ]


def make_stops(groups: Sequence[tuple[int, ...]]) -> list[Case]:
    """Chains that stop, of a draft on each kind of group: ranks without it learn how long they
    are."""
    _, streaming_llm, *_ = KV_SECTIONS
    of_drafts = [Case("model", streaming_llm, 5, ranks, pa=0.3) for ranks in groups]
    return [Case("self", streaming_llm, 5, pa=0.3), *of_drafts]


def target_ranks(num_ranks: int) -> tuple[int, ...]:
    """Reversed, so that a rank and its place in the group are not the same number."""
    return tuple(reversed(range(num_ranks)))


class Rank:
    """This rank's weights, by model and group size; a cache of its own for every case."""

    def __init__(self, launch: Launch, paths: list[str]) -> None:
        self.launch, self.order = launch, target_ranks(launch.world_size)
        device = torch.device("cpu")
        collectives = "shared_memory" if launch.world_size > 1 else None
        self.groups = {
            ranks: make_groups(launch, self.order, device, collectives, ranks)
            for ranks in {None, (0,), (launch.world_size - 1,), self.order}
        }
        self.paths = paths

    def load(self, which: int, group: Group) -> Transformer:
        return pack(load(self.paths[which], Shard(group.index, group.size)))

    def decode(self, case: Case | None) -> Result:
        """Case None: the baseline."""
        groups = self.groups[case.draft_ranks if case else None]
        model, tree = self.load(0, groups.target), case and case.tree
        runner = ModelRunner(
            model, NativeBackend(), groups.target, len(PROMPTS), MAX_TOKENS,
            executor=Executor(model, groups.target),
        )  # fmt: skip
        name = "speculative" if case else "autoregressive"
        drafter, gamma, pa = (case.drafter, case.gamma, case.pa) if case else (None, 1, None)
        decoding = DecodingSection(name, drafter, gamma, tree, pa)
        draft = case and self.make_draft(case, groups)
        setup = Setup(runner, decoding, case.kv if case else KV_SECTIONS[0], draft=draft)
        engine = Engine(runner, 64)
        engine.prefill(make_requests(random_prompts(PROMPTS, 97), NUM_NEW))
        steps = []
        requests = decode(engine, name, setup, lambda output, _: steps.append(output))
        return Result(
            asdict(case) if case else {},
            [list(r.output_ids) for r in requests],
            sum(s.num_drafted * len(s.token_ids) for s in steps),
            sum(sum(s.num_accepted or []) for s in steps),
            sorted({s.num_drafted for s in steps}),
        )

    def make_draft(self, case: Case, groups) -> DraftModel | None:
        if case.draft_ranks is None:
            return None
        source = self.order.index(case.draft_ranks[0])
        assert (groups.draft is not None) == (self.launch.rank in case.draft_ranks)
        if groups.draft is None:
            return DraftModel(None, source, 16)
        model, backend = self.load(1, groups.draft), NativeBackend()
        place = {"group": groups.draft, "source": source}
        draft = make_draft(model, case.kv, len(PROMPTS), MAX_TOKENS, backend, **place)
        assert draft.runner is not None
        draft.runner.executor = Executor(model, groups.draft)
        return draft


def main() -> None:
    torch.set_num_threads(1)
    trust_lookups()
    launch = read_launch()
    target, draft, which = sys.argv[1:]
    rank, cases = Rank(launch, [target, draft]), make_cases(launch.world_size, which == "other")
    results = [rank.decode(case) for case in [None, *cases]]
    if launch.rank == 0:
        print(json.dumps([asdict(result) for result in results]), flush=True)
    close_groups()


if __name__ == "__main__":
    main()
