"""Passes in words: the verdict on their tokens, the way in which they draft, what they decoded,
which was the fastest, and whether speculation paid. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magicdec.names import BASELINE, EAGLE, FULL_KV_POLICY, MTP, NARROW
from magicdec.output.tables import Line
from magicdec.records.comparison.conditions import kv_dtype_of, policy_of, policy_text
from magicdec.records.correctness import (
    Correctness,
    Divergence,
    ForwardErrors,
    JudgedAgain,
)
from magicdec.records.fields import described_fields
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord, is_greedy
from magicdec.records.record import Status
from magicdec.records.workload import format_mark

WITHOUT_METRICS = (Status.MISMATCH, Status.FAILED)
STYLES = {Status.VERIFIED: "bold", Status.UNVERIFIED: "bold"}
STYLES |= {Status.VERIFIED_WITH_TIES: "bold yellow"} | dict.fromkeys(WITHOUT_METRICS, "bold red")


def method(record: PassRecord) -> str:
    """A pass's way to decode: drafter, low-bit weights, KV policy, budget and gamma."""
    return method_of(record.config)


def method_of(config: dict[str, Any]) -> str:
    decoding = config["decoding"]
    if decoding["strategy"] == BASELINE or decoding["drafter"] is None:
        return BASELINE
    names = {"model": "standalone draft", "self": "self-speculation"}
    names |= {EAGLE: "EAGLE-3 head", MTP: "multi-token prediction"}
    looked_up, plus, last = decoding["drafter"].rpartition("+")
    drafter = looked_up + plus + names.get(last, f"{last} draft")
    weights = decoding.get("draft_weights")
    drafter += f" in {weights}" if weights else ""
    policy = policy_of(config)
    reads = []
    if policy is not None:
        reads = ["full KV" if policy == FULL_KV_POLICY else policy_text(policy, config["kv"])]
    gamma = f"gamma {decoding['gamma']}"
    emulated = decoding.get("emulate_acceptance")
    if emulated is not None:
        gamma += f", EMULATED acceptance {' '.join(f'{rate:g}' for rate in emulated)}"
    if decoding.get("pa") is not None:
        gamma += f", pa {decoding['pa']:g}"
    return ", ".join([drafter, *reads, gamma])


def methods_of(records: Sequence[PassRecord]) -> list[str]:
    """A line that says how passes draft, or one for each where they do not draft alike."""
    drafting = [(record.name, method(record)) for record in records if record.is_drafting]
    ways = {way for _, way in drafting}
    if len(ways) == 1:
        return [f"drafts: {way}" for way in ways]
    return [f"drafts of {name}: {way}" for name, way in drafting]


def title_of(records: Sequence[PassRecord]) -> str:
    """What the passes of a command decoded, and on what."""
    newest = records[-1]
    config = newest.config
    environment = newest.environment
    parallel = config["parallel"]
    dataset = "" if newest.workload is None else f", {newest.workload.text}{format_mark(config)}"
    bandwidth = environment.read_bandwidth_bytes_per_s
    read = "" if bandwidth is None else f", {bandwidth / 1e9:.1f} GB/s read"
    return (
        f"{config['model']['model']} ({dtypes_of(config)}){dataset}: {load_of(newest)}; "
        f"ranks {environment.world_size} x threads {environment.threads}, "
        f"{parallel.get('collectives') or parallel['device']}{read}"
    )


def load_of(record: PassRecord) -> str:
    """The prompts of a pass: in batches, or as requests that arrive."""
    workload = record.config["workload"]
    if record.shares_prefill:
        return (
            f"B {workload['batch_size']}, prefix {workload['prefix_len']}, "
            f"{workload['gen_len']} new tokens, {batches(workload['num_batches'])}"
        )
    count = workload["num_requests"]
    noun = "request" if record.turns == 1 else "conversation"
    noun = "session" if record.has_sessions else noun
    output = "" if workload["gen_len"] is None else f", output length {workload['gen_len']}"
    size = "" if workload.get("batch_size") is None else f", --B {workload['batch_size']}"
    return f"{count} {noun}{'s' * (count != 1)}, arrival {record.arrival}{output}{size}"


def batches(count: int) -> str:
    return f"{count} batch{'' if count == 1 else 'es'}"


def dtypes_of(config: dict[str, Any]) -> str:
    """The dtype of a model from a record's config, and those of its weights and of its KV cache if
    they are narrow."""
    dtype: str = config["model"]["dtype"]
    weights = config["model"]["target_dtype"]
    cache = kv_dtype_of(config)
    narrow = [f"{weights} weights"] if weights in NARROW else []
    narrow += [f"{cache} KV cache"] if cache != dtype else []
    return ", ".join([dtype, *narrow])


def verdict_of(record: PassRecord, is_verbose: bool = True) -> str:
    """Its status and the reason in a line, and with `is_verbose`, or where its tokens are not known
    to be right, the finding of each check."""
    if record.status == Status.FAILED:
        return f"FAILED: {(record.error or '').removeprefix(f'{record.name}: ')}"
    status = record.status.replace("_", " ")
    is_wrong = record.status == Status.MISMATCH
    text = f"{status.upper() if is_wrong else status}, {compared_text(record, is_verbose)}"
    if record.emulated_by and not record.accepts_by_chance:
        text = f"{text}, EMULATED by {' '.join(record.emulated_by)}"
    if record.num_missing_repeats:
        text = f"{text}, {len(record.groups)} of {record.config['workload']['repeats']} repeats"
    found = record.correctness
    if found is not None and (is_verbose or record.status != Status.VERIFIED_WITH_TIES):
        text += judged_text(found.judged_again)
        text += measured_text(found.forwards, f"those of {record.reference}")
    return f"{text}; it has no metrics" if is_wrong else text


def compared_text(record: PassRecord, is_verbose: bool) -> str:
    """What the tokens of a pass were compared with, and what differed."""
    found = record.correctness
    tokens = "tokens" if found is None or found.num_tokens is None else f"{found.num_tokens} tokens"
    if record.accepts_by_chance:
        return "EMULATED acceptance, so its tokens mean nothing and are not compared"
    if record.reference is None:
        return f"its {tokens} are compared with nothing, because there is no other pass"
    if record.name == record.reference:
        return f"its {tokens} are the reference of the others"
    if record.num_differing is None:
        is_of_server = is_greedy(record.config)
        reason = "a server sent no token ids" if is_of_server else "drafts are sampled"
        if found is None or found.identical is not False:
            return f"its {tokens} are not compared, because {reason}"
        # In another repeat they were.
        return f"some of its {tokens} are not compared, because {reason}, and others differ"
    total = len(record.requests)
    if record.num_differing == 0:
        subject = "its request has" if total == 1 else f"all {total} requests have"
        return f"{subject} the {tokens} of {record.reference}"
    noun = "request differs" if total == 1 else "requests differ"
    text = f"{record.num_differing} of {total} {noun} from {record.reference} in {tokens}"
    if record.status == Status.UNVERIFIED:
        return f"{text}; rounding may be the reason"
    if record.status == Status.VERIFIED_WITH_TIES and not is_verbose:
        return f"{text}; rounding explains it"
    if found is None or found.first_divergence is None:
        return text
    return f"{text}; {place_text(found.first_divergence)}{explained_text(found)}"


def verdicts_of(records: Sequence[PassRecord], is_verbose: bool) -> list[Line]:
    """A line for each pass of a command; without `is_verbose` one line if all have the
    tokens of the first, and otherwise one for each pass of which there is more to say."""
    shown = list(records)
    if not is_verbose:
        shown = [
            record
            for record in records
            if record.status != Status.VERIFIED or record.emulated_by or record.num_missing_repeats
        ]
    if shown:
        return [
            Line(f"{record.name}: {verdict_of(record, is_verbose)}", STYLES[Status(record.status)])
            for record in shown
        ]
    first = records[0]
    others = "the other pass has" if len(records) == 2 else "all other passes have"
    found = first.correctness
    tokens = "" if found is None or found.num_tokens is None else f"{found.num_tokens} "
    return [Line(f"verified: {others} the {tokens}tokens of {first.name}", STYLES[Status.VERIFIED])]


def judged_text(found: JudgedAgain | None) -> str:
    """What was judged again, to be added to a line about tokens."""
    if found is None:
        return ""
    text = f"; {found.num_steps} of {found.num_steps_of_all} steps judged again"
    first = found.first_wrong
    if first is None:
        return f"{text}, all right"
    return (
        f"{text}, {found.num_wrong} WRONG, first at sequence {first.sequence}, token {first.index}"
    )


def measured_text(found: ForwardErrors | None, other: str) -> str:
    """How far the logits are from right ones, those of the reference too, and what could hide, to
    be added to a line about tokens."""
    if found is None or not found.num_positions:
        return ""
    if not found.num_unequal:
        return f"; logits of both passes equal at {found.num_positions} positions"
    text = f"; errors of the logits {found.verify_error:.2g}, {other} {found.decode_error:.2g}"
    if found.alarms:
        limits = ", ".join(
            f"{name} {getattr(found, name):.3g} of at most {getattr(found, f'most_{name}'):.3g}"
            for name in found.alarms
        )
        return f"{text}: TOO LARGE for rounding ({limits})"
    if found.hidden_error is None:
        return f"{text}, at too few positions to say what could hide in them"
    return f"{text}; more than {found.hidden_error:.2g} added to them would have been seen"


def explained_text(c: Correctness) -> str:
    """How much rounding explains, to be added to a line about tokens."""
    if c.most_differing is None:
        return ""
    text = f"; {limits_text(c)}"
    differing = (c.num_excused or 0) + (c.num_diverged or 0)
    if differing > c.most_differing or c.num_short is None:
        return text
    return (
        f"{text}; {c.num_short} token(s) are not the wider model's choice, of the reference's "
        f"{c.num_short_reference}"
    )


def limits_text(c: Correctness) -> str:
    """What rounding explains: sequences that differ and, where they are no more, margins."""
    text = f"rounding explains up to {c.most_differing}"
    is_more = (c.num_excused or 0) + (c.num_diverged or 0) > (c.most_differing or 0)
    return text if is_more else f"{text}, and margins up to {c.margin_bound:.2g}"


def place_text(first: Divergence) -> str:
    margin = "it ends elsewhere" if first.margin is None else f"margin {first.margin:.2g}"
    return f"first at sequence {first.sequence}, token {first.index} ({margin})"


STEADY = "in the speedup a stalled step counts as the median of its kind; in the others in full"


def stalls_of(records: Sequence[PassRecord]) -> list[str]:
    """A line for each pass in which steps stalled, and one that says what they count for."""
    measured = [(record.name, record.metrics) for record in records if record.metrics is not None]
    lines = [f"{name}: {stalls_in(metrics)}" for name, metrics in measured if metrics.stalled_steps]
    has_speedup = any(metrics.speedup is not None for _, metrics in measured)
    return [*lines, STEADY] if lines and has_speedup else lines


def stalls_in(metrics: PassMetrics) -> str:
    longest = metrics.longest_stall_ms
    median = metrics.longest_stall_median_ms
    text = f"{metrics.stalled_steps} of {metrics.num_decode_steps} steps stalled"
    if longest is None or median is None:
        return text
    return f"{text} ({longest:.3g} ms where the median is {median:.2g})"


def speed_of(metrics: PassMetrics, is_steady: bool) -> float:
    steady = metrics.steady_output_throughput
    return (steady if is_steady and steady is not None else metrics.output_throughput) or 0.0


def winner(records: Sequence[PassRecord]) -> list[str]:
    """A line that says which mode has the most output tokens/s, beside the first; none if nothing
    can be compared."""
    first = records[0]
    able = [(r.metrics, r.name) for r in records if r.metrics and r.metrics.output_throughput]
    if len(able) < 2 or first.metrics is None or not first.metrics.output_throughput:
        return []
    # Of two modes with stalls in one of them alone, the other may be the faster one.
    is_steady = all(metrics.steady_output_throughput for metrics, _ in able)
    has_stalls = is_steady and any(metrics.stalled_steps for metrics, _ in able)
    best, name = max(able, key=lambda pair: speed_of(pair[0], is_steady))
    noun = "output tokens/s without stalls" if has_stalls else "output tokens/s"
    text = f"{name} has the most {noun}, {speed_of(best, is_steady):,.1f}"
    if best is first.metrics:
        return [text]
    ratios = [
        f"{mine / theirs:.2f} times its {label}"
        for label, mine, theirs in (
            ("mean TTFT", best.mean_ttft_ms, first.metrics.mean_ttft_ms),
            ("mean TPOT", best.mean_tpot_ms, first.metrics.mean_tpot_ms),
        )
        if mine and theirs
    ]
    speed = speed_of(best, is_steady) / speed_of(first.metrics, is_steady)
    return [", ".join([f"{text}: {speed:.2f} times those of {first.name}", *ratios])]


def pays_of(record: PassRecord, needed: float | None) -> list[str]:
    """A sentence that says whether speculation pays, by the net speedup; none without one. `needed`
    are the tokens of a verification from which its drafts pay, if that is known."""
    metrics = record.metrics
    if metrics is None or metrics.net_speedup is None:
        return []
    count = len(metrics.net_speedup_per_group or ())
    ends = metrics.net_speedup_interval
    pays = "pays" if metrics.net_speedup > 1 else "does not pay"
    sure = f" in {batches(count)}" if ends is None else ""
    if ends is not None and ends[0] <= 1 <= ends[1]:
        pays = "may or may not pay"
    subject = "Speculation with EMULATED acceptance" if record.accepts_by_chance else "Speculation"
    described = {key: about for key, _, about in described_fields(PassMetrics)}
    net = described["net_speedup"].show_between(metrics.net_speedup, ends)
    reason = _emitted_and_needed(metrics, needed)
    return [f"{subject} {pays} here: net speedup {net}{sure}; {reason}."]


def _emitted_and_needed(metrics: PassMetrics, needed: float | None) -> str:
    """The tokens of a verification beside those that it needs, as a part of a sentence."""
    emitted = metrics.tokens_per_verification
    if emitted is None:
        return "nothing was drafted"
    text = f"a verification emits {emitted:.2f} tokens"
    if needed is None:
        return text
    text = f"{text} and pays from {needed:.2f} on"
    if (metrics.net_speedup or 0.0) > 1 or emitted <= needed:
        return text
    return f"{text}, but what comes before the first step costs more than the steps gain"
