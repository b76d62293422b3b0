"""What drafts read, under every policy and after every kind of step, against references of a few
lines that are written from the definitions (`plain_choices.py`).

Tokens cannot show this: a verification makes any draft lossless. Requests join and leave a running
batch whose steps draft any number of tokens, or none, and accept as many as chance has it."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
import torch
from conftest import TINY
from plain_choices import REFERENCES, PlainModel, PlainReference
from watched_drafts import (
    FOLLOWING,
    MAX_TOKENS,
    SEED,
    Admitted,
    Verified,
    WatchedDraft,
    WatchedMeasure,
    WatchedRun,
    serve,
)

from magicdec.config.sections import KVSection
from magicdec.model.config import LayerKind
from magicdec.names import KV_POLICIES

TOLERANCE = 2e-4  # of scores, float32 against float64
MODELS = {
    "grouped": TINY,
    "window": replace(TINY, layer_kinds=(LayerKind(56),)),
    "window of some layers": replace(
        TINY, num_layers=3, layer_kinds=(LayerKind(30), LayerKind(), LayerKind(30))
    ),
}
KV = {
    "full": KVSection("full"),
    "streaming_llm": KVSection("streaming_llm", 21, 5),
    "snapkv": KVSection("snapkv", 24, window_size=6),
    "retrieval": KVSection("retrieval", 52, 3, recent_window=4),
    "verified": KVSection("verified", 52, 3, recent_window=4),
    "quantised": KVSection("quantised"),
}
PLAIN: dict[str, PlainModel] = {}


def plain(name: str) -> PlainModel:
    if name not in PLAIN:
        PLAIN[name] = PlainModel(MODELS[name], SEED)
    return PLAIN[name]


def check(
    run: WatchedRun, policy: str, name: str, kv: KVSection, is_checked: bool = True
) -> Counter[str]:
    """Compare each draft of each request with the reference. Returns how often things happened.
    `is_checked`: what was drafted is, too, where the target's own KV is read."""
    seen = Counter[str]()
    for request in run.requests:
        events = run.watch.of(request)
        seen["requests"] += any(isinstance(event, Admitted) for event in events)
        reference = PlainReference(plain(name), kv, (MAX_TOKENS, FOLLOWING))
        if events:  # one forward for all of them: the other texts are its beginnings
            plain(name).read(max((event.text for event in events), key=len))
        for number, event in enumerate(events):
            place = f"request {request.request_id}, event {number}"
            if isinstance(event, Admitted):
                reference = REFERENCES[policy](plain(name), kv, (MAX_TOKENS, FOLLOWING))
                reference.admitted(event.text)
                seen["admitted"] += 1
            elif isinstance(event, WatchedMeasure):
                reference.drafts(event.text, event.asked)
            elif isinstance(event, Verified):
                reference.verified(event.text, event.chain, event.num_accepted)
                seen[kind_of(event)] += 1
            else:
                check_keys(event, plain(name), place)
                check_places(event, place)
                check_reads(event, reference, seen, place)
                if is_checked:
                    check_tokens(event, plain(name), place)
        seen["choices"] += reference.num_choices
    return seen


def kind_of(event: Verified) -> str:
    is_all = event.num_accepted == len(event.chain) - 1
    return "none" if event.num_accepted == 0 else "all" if is_all else "some"


def check_keys(event: WatchedDraft, model: PlainModel, place: str) -> None:
    """The cache holds the keys of this text."""
    keys = torch.stack(model.read(event.text).keys)
    assert torch.allclose(event.keys.double(), keys, rtol=1e-3, atol=1e-3), place


def check_places(event: WatchedDraft, place: str) -> None:
    """Drafts follow the newest token. Before that, a standalone draft takes what it lacks."""
    if not event.forwards:
        return  # a lookup alone has drafted
    count = len(event.text) + 1
    ends = [forward.end for forward in event.forwards if forward.end >= count]
    assert ends == [*range(count, count + len(ends))] and ends, place
    assert all(forward.end - forward.begin < 3 for forward in event.forwards[-len(ends) :]), place
    for before, after in pairwise(event.forwards):
        assert after.begin <= before.end, place


def check_reads(
    event: WatchedDraft, reference: PlainReference, seen: Counter[str], place: str
) -> None:
    """The first forward over so many committed tokens reads what it must; others read the same, and
    the tokens since, as far as the sliding window goes."""
    text = (*event.text, event.chain[0])
    before = dict[int, list[list[frozenset[int]]]]()
    for forward in event.forwards:
        count = forward.committed
        is_new = count not in before
        heads = before.setdefault(count, forward.read)
        wanted = reference.wanted(text[:count], event.asked) if is_new else None
        for layer, layer_reads in enumerate(forward.read):
            first = reference.first_of(forward.begin, layer)
            seen["slid"] += first > 0
            for head, read in enumerate(layer_reads):
                where = f"{place}, {forward.begin} tokens, layer {layer}, head {head}"
                tail = {p for p in read if p >= count}
                assert tail == set(range(max(count, first), forward.end)), where
                if wanted is not None:
                    choice = wanted[layer][head]
                    seen["by score"] += 0 < choice.count < len(choice.units)
                    seen["everything"] += len(read - tail) == count
                    assert (complaint := choice.complaint(read - tail, TOLERANCE)) is None, (
                        where,
                        complaint,
                    )
                kept = {p for p in heads[layer][head] if first <= p < count}
                assert {p for p in read - tail if p >= first} == kept, where
    seen["drafts"] += 1


def check_tokens(event: WatchedDraft, model: PlainModel, place: str) -> None:
    """What was drafted are the likeliest tokens of a model that reads these positions and no
    others."""
    before = len(event.text)
    ids = [*event.text, *event.chain]
    masks = model.causal(len(ids))
    for layer, layer_reads in enumerate(event.forwards[0].read):
        for head, read in enumerate(layer_reads):
            hidden = [p for p in range(before) if p not in read]
            masks[layer, head, before:, hidden] = False
    logits = model.run(ids, masks).logits[before:-1]
    found = logits.gather(1, torch.tensor(event.chain[1:]).view(-1, 1))[:, 0]
    assert torch.allclose(found, logits.amax(dim=1), rtol=0, atol=2e-3), place


def run_schedules(
    policy: str, name: str, seeds: range, kv: KVSection | None = None, **kwargs: object
) -> Counter[str]:
    seen = Counter[str]()
    kv = kv or KV[policy]
    # Of rounded keys `test_quantised_kv.py` compares logits.
    is_checked = kwargs.get("drafter", "self") == "self" and policy != "quantised"
    for seed in seeds:
        run = serve(MODELS[name], kv, Random(seed), **kwargs)  # type: ignore[arg-type]
        seen += check(run, policy, name, kv, is_checked)
    return seen


# Every policy, every model and both ways to compute; each of these sees a planted fault of its own.
FEW = {
    ("full", "grouped", False),
    ("streaming_llm", "window", False),
    ("snapkv", "grouped", False),
    ("snapkv", "window", False),
    ("snapkv", "window of some layers", False),
    ("verified", "grouped", False),
    ("verified", "window", False),
    ("verified", "window of some layers", True),
    ("retrieval", "grouped", False),
    ("retrieval", "grouped", True),
    ("quantised", "grouped", True),
    ("quantised", "window of some layers", False),
}
SCHEDULED = [
    pytest.param(
        *case,
        marks=() if case in FEW else pytest.mark.wide,
        id=f"{case[0]}-{case[1]}-{'native' if case[2] else 'layers'}",
    )
    for case in product(KV_POLICIES, MODELS, (False, True))
]


@pytest.mark.parametrize(("policy", "name", "is_native"), SCHEDULED)
def test_self_speculation_reads_what_its_policy_says(
    policy: str, name: str, is_native: bool
) -> None:
    seen = run_schedules(policy, name, range(2), is_native=is_native)
    assert min(seen[kind] for kind in ("none", "some", "all")) > 0, seen
    assert (seen["slid"] > 0) == ("window" in name), seen
    assert seen["admitted"] > seen["requests"], "some were preempted and came back"
    assert (seen["by score"] > 0) == (policy in ("snapkv", "retrieval", "verified")), seen


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_native", [False, True], ids=["layers", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_snapkv_chooses_anew_when_that_is_due(name: str, is_native: bool) -> None:
    """Some texts go on for several choices, of which one may be made after steps without drafts."""
    for seed, pooling in ((2, "avg"), (3, "max")):
        kv = replace(KV["snapkv"], reselect_every=5, pooling=pooling)
        seen = run_schedules("snapkv", name, range(seed, seed + 1), kv, is_native=is_native)
        assert seen["by score"] > 0 and seen["choices"] > seen["admitted"], seen


@pytest.mark.parametrize("policy", ["full", "streaming_llm", "snapkv"])
def test_a_standalone_draft_reads_what_its_policy_says(policy: str) -> None:
    """StreamingLLM in a cache that gives blocks back. The draft lacks one or two of the newest
    tokens, or more after steps without drafts."""
    seen = run_schedules(policy, "grouped", range(1), drafter="model")
    assert min(seen[kind] for kind in ("none", "some", "all")) > 0, seen


@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize(
    "policy", ["streaming_llm", "snapkv", "retrieval", "verified", "quantised"]
)
def test_drafts_beside_lookups_read_what_the_policy_says(policy: str) -> None:
    """Verifications judge tokens of lookups, too."""
    seen = run_schedules(policy, "grouped", range(1), drafter="ngram+self")
    assert seen["drafts"] > 10, seen


@pytest.mark.wide
@pytest.mark.parametrize(
    ("policy", "name", "is_native"),
    [
        pytest.param(policy, name, bool(i + j & 1), id=f"{policy}-{name}")
        for (i, policy), (j, name) in product(enumerate(KV_POLICIES), enumerate(MODELS))
    ],
)
def test_many_schedules(policy: str, name: str, is_native: bool) -> None:
    """Layer by layer and native in turn."""
    most = 12 if name == "window of some layers" else 16  # a layer more, and as many kinds of rows
    run_schedules(policy, name, range(10, most), is_native=is_native)
    run_schedules(policy, name, range(30, 32), is_native=is_native, drafter="ngram+self")
