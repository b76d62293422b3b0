"""The exact rule of the gate: where it applies and why not elsewhere, what it names first, and that
a baseline that was edited is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Command
from synthetic_records import (
    KERNELS,
    draw_chances,
    draw_pass,
    logged,
    parse_record,
    parts_of,
    with_fields,
)

from magicdec.cli import compare as compare_command
from magicdec.cli.gate import PACKAGED
from magicdec.records.acceptance import Verifications
from magicdec.records.comparison.compare import (
    PairedCounts,
    change_of,
    compare,
    exit_code,
    junit,
    rate_variances,
)
from magicdec.records.comparison.exact import find_other_verdict
from magicdec.records.drafted import DraftedPass
from magicdec.records.pass_record import PassRecord, RequestRecord, verifications_of
from magicdec.records.reading import load_passes

Raw = dict[str, Any]
STEP_FIELDS = (
    "per_step_drafted",
    "per_step_accepted",
    "per_step_emitted",
    "per_step_position",
    "per_step_context",
    "draft_hashes",
    "num_draft_kv_read",
)


def changed(change: Callable[[Raw], Any]) -> PassRecord:
    """A logged record whose requests and groups are changed."""
    raw = json.loads(logged().to_json())
    change(raw)
    return parse_record(raw)


def set_at(name: str, request: int, step: int, value: Any) -> Callable[[Raw], Any]:
    return lambda raw: raw["requests"][request][name].__setitem__(step, value)


def lose(raw: Raw) -> None:
    """Request 5 accepts nothing in its step 3, whatever it was."""
    set_at("per_step_accepted", 5, 3, 0)(raw)


WAS = (logged().requests[5].per_step_accepted or [])[3]
DIFFERENCES: dict[str, tuple[Callable[[Raw], Any], str]] = {
    "drafted": (set_at("draft_hashes", 4, 2, "ffff0004"), "prompt 4, step 2: other tokens drafted"),
    "positions": (
        set_at("draft_hashes", 1, 0, "0000ffff"),
        "prompt 1, step 0: its draft forwards read other positions (260 keys, as before)",
    ),
    "keys": (
        set_at("num_draft_kv_read", 7, 1, 261),
        "prompt 7, step 1: its draft forwards read 261 keys, was 260",
    ),
    "accepted": (
        set_at("per_step_accepted", 5, 3, 3 - WAS % 3),
        f"prompt 5, step 3: accepted {3 - WAS % 3} of 4, was {WAS}",
    ),
    "proposed": (
        set_at("per_step_drafted", 5, 3, 3),
        "prompt 5, step 3: 3 drafts proposed, was 4, accepted",
    ),
    "emitted": (
        set_at("per_step_emitted", 5, 3, 9),
        "prompt 5, step 3: emitted 9, was",
    ),
    "tokens": (
        lambda raw: raw["requests"][6].update(output_hash="0" * 15 + "f"),
        "prompt 6, emitted other tokens",
    ),
    "kernels": (
        lambda raw: raw["groups"][0].update(draft_kv_tokens=258),
        "draft_kv_tokens [258], was [257]",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_any_difference_is_named_and_fails_gain_or_loss(name: str) -> None:
    change, message = DIFFERENCES[name]
    new = changed(change)
    for pair in ((new, logged()), (logged(), new)):
        (found,) = compare([pair[0]], [pair[1]])
        assert found.verdict == "changed" and exit_code([found]) == 1, found
        assert str(found).endswith("renew it with `magicdec gate save` [exact]")
    (found,) = compare([new], [logged()])
    assert message in str(found), found
    suite = ElementTree.fromstring(junit([found]).split("\n", 1)[1])
    assert suite.get("failures") == "1" and message in str(suite[0][0].get("message"))


def test_totals_that_a_baseline_has_not_counted_are_no_change() -> None:
    """Systems may count more than they did; what both have counted is compared."""

    def forget(raw: Raw) -> None:
        raw["groups"][0]["draft_kv_tokens"] = None

    (found,) = compare([logged()], [changed(forget)])
    assert found.verdict == "same" and found.rule == "exact", found


def test_equal_steps_are_the_same_and_the_number_of_prompts_that_differ_is_said() -> None:
    (found,) = compare([logged()], [logged()])
    assert found.verdict == "same" and "every step as before [exact]" in str(found)

    def two(raw: Raw) -> None:
        for number in (2, 5):
            raw["requests"][number]["draft_hashes"][1] = "ffffffff"

    (found,) = compare([changed(two)], [logged()])
    assert "prompt 2, step 1" in str(found) and "; 2 prompts differ" in str(found)


REASONS = {
    "environment__cpu": ("Other", "CPU Other, was "),
    "environment__torch": ("3", "torch 3, was 2"),
    "environment__compiler": ("clang 19", "compiler clang 19, was g++ 12"),
    "environment__instructions": (
        ["AVX2", "AVX512F", "AVX512BW", "AVX512VL", "AVX512DQ"],
        "instructions of the kernels are with AVX512BW, AVX512DQ, AVX512F and 1 more and without "
        "FMA now",
    ),
    "environment__kernels": (
        {"packed": "cc", "shared_memory": "dd"},
        "kernels have changed since: packed]",
    ),
    "config__model__native_steps": ("off", "not all layers are those of --native_steps"),
    "config__parallel__device": ("cuda", "a GPU sums in any order"),
    "config__model__dtype": ("bfloat16", "bfloat16 rounds"),
    "config__decoding__gamma": ("auto", "the draft length follows from measured times"),
}


@pytest.mark.parametrize("field", REASONS)
def test_statistics_decide_where_bits_may_differ_and_the_line_says_why(field: str) -> None:
    value, message = REASONS[field]
    both = field.startswith("config__") and field != "config__model__native_steps"
    old = with_fields(logged(), **{field: value}) if both else logged()
    new = with_fields(changed(lose), **{field: value})
    (found,) = compare([new], [old])
    assert f"[statistics: {message}" in str(found) and exit_code([found]) == 0, found
    assert "in 19 of 20 runs" in str(found)


def test_kernels_that_only_one_process_had_loaded_and_those_that_nobody_names() -> None:
    more = with_fields(logged(), environment__kernels=KERNELS | {"shared_memory": "dd"})
    (found,) = compare([more], [logged()])
    assert found.verdict == "same" and str(found).endswith("[exact]"), found
    unnamed = with_fields(logged(), environment__kernels=None)
    (found,) = compare([logged()], [unnamed])
    assert "the baseline does not say which kernels computed it; renew it with" in str(found)


def test_a_case_that_drafts_nothing_any_more_is_a_regression() -> None:
    new = with_fields(logged(), metrics__draft_acceptance_rate=None)
    (found,) = compare([new], [logged()])
    assert exit_code([found]) == 1 and "nothing is drafted any more" in str(found)


def test_a_baseline_without_a_log_is_compared_by_statistics() -> None:
    none = [
        replace(request, draft_hashes=None, num_draft_kv_read=None) for request in logged().requests
    ]
    old = replace(logged(), requests=none, seal=None)
    (found,) = compare([logged()], [old])
    note = "the baseline holds no log of what was drafted and read; renew it with"
    assert found.verdict == "same" and note in str(found)


def test_an_edited_baseline_is_refused_with_its_line(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "old.jsonl"
    new = tmp_path / "new.jsonl"
    line = logged().to_json()
    new.write_text(line + "\n")
    raw = json.loads(line)
    assert len(raw["seal"]) == 16
    raw["metrics"]["draft_acceptance_rate"] = 0.1
    edits = {
        "a number": json.dumps(raw),
        "a digit": line.replace("260]", "261]", 1),
        "no seal": line.replace(raw["seal"], "").replace('"seal": ""', '"seal": null'),
        "another order": json.dumps(dict(reversed(json.loads(line).items()))),
    }
    for name, edited in edits.items():
        assert edited != line, name
        path.write_text(f"{line}\n{edited}\n")
        for words in ((compare_command, new, path), ("gate", "--baseline", path)):
            code, _, err = command(*words)
            assert code == 2 and err.count("\n") == 1, (name, err)
            assert f"{path}:2: this record was edited since" in err
    path.write_text(f"{line}\n")
    assert command(compare_command, new, path).code == 0


def pass_of(rng: np.random.Generator, chances: Any) -> DraftedPass:
    requests = parts_of(draw_pass(rng, chances, 4, 63)).requests
    return DraftedPass(verifications_of(requests), ["0"] * len(chances), None, {})


def pair_of_passes(before: DraftedPass, after: DraftedPass) -> PairedCounts:
    errors = np.sqrt(rate_variances(before) + rate_variances(after))
    return PairedCounts(before.counts, after.counts, 0, errors)


def test_the_loss_that_would_be_seen_is_seen_in_19_of_20() -> None:
    """Over 400 pairs of passes, the second of which loses what the first pairs say on average."""
    rng = np.random.default_rng(0)
    level = 0.99
    margin = 0.02
    chances = draw_chances(rng, 16, 0.7, 0.1)
    rate = float(pass_of(rng, chances).counts.rates.mean())

    def change_with(share: float) -> Any:
        return change_of(
            pair_of_passes(pass_of(rng, chances), pass_of(rng, share * chances)), level
        )

    losses = [change_with(1.0).seen_loss(rate, level, margin) for _ in range(60)]
    target = float(np.mean(losses))
    low = 0.0
    high = 0.5
    for _ in range(10):  # the share of the chances by which the rate falls so much
        share = (low + high) / 2
        lost = np.mean([-change_with(1 - share).relative for _ in range(30)])
        low, high = (share, high) if lost < target else (low, share)
    found = [change_with(1 - share) for _ in range(400)]
    seen = [c.relative < -margin and not c.is_noise for c in found]
    assert 0.91 <= np.mean(seen) <= 0.985


def test_the_worst_prompt_is_named_where_one_is_dead_and_not_by_chance() -> None:
    rng = np.random.default_rng(1)
    alarms = 0
    chances = draw_chances(rng, 16, 0.7, 0.1)
    for _ in range(300):
        worst = pair_of_passes(pass_of(rng, chances), pass_of(rng, chances)).worst_prompt()
        alarms += worst is not None and worst.is_loss(0.01)
    assert alarms <= 9, "at 1 %: 3 are expected"
    chances[11] = 0.75
    dead = chances.copy()
    dead[11] = 1e-9
    num_seen = 0
    for _ in range(40):
        worst = pair_of_passes(pass_of(rng, chances), pass_of(rng, dead)).worst_prompt()
        assert worst is not None and str(worst).startswith("prompt 11 lost most, 0.")
        num_seen += worst.is_loss(0.0002)
    assert num_seen >= 30


def test_one_dead_prompt_of_many_is_a_regression_by_statistics_too() -> None:
    def kill(raw: Raw) -> None:
        accepted = raw["requests"][2]["per_step_accepted"]
        accepted[:] = [0] * len(accepted)

    new = with_fields(changed(kill), environment__torch="3")
    (found,) = compare([new], [logged()])
    assert exit_code([found]) == 1 and "prompt 2 lost" in str(found), found


def ahead(*runs: tuple[int, int, int], output: str = "0") -> DraftedPass:
    """A pass of one prompt whose drafts ran ahead; of runs: position, drafted, accepted tokens."""
    found = Verifications()
    for position, drafted, accepted in runs:
        found.add(0, drafted, accepted, accepted + 1, position=position)
    return DraftedPass(found, [output], None, {})


def test_drafts_that_run_ahead_are_compared_by_their_place() -> None:
    """However they are cut into runs, and whichever of them times have let be judged."""
    before = ahead((10, 4, 2), (13, 4, 4), (20, 2, 0))
    change, num_places = find_other_verdict(ahead((10, 1, 1), (13, 2, 2), (15, 8, 2)), before)
    assert change is None and num_places == 5
    for other, message in (
        (ahead((10, 4, 3)), "prompt 0, position 12: the draft is accepted, was rejected"),
        (ahead((13, 4, 1)), "prompt 0, position 14: the draft is rejected, was accepted"),
        (ahead((10, 4, 2), output="1"), "prompt 0, emitted other tokens"),
    ):
        change, _ = find_other_verdict(other, before)
        assert str(change) == message
    assert find_other_verdict(ahead((40, 1, 1)), before) == (None, 0)


def test_drafts_that_run_ahead_without_their_places_fall_under_statistics() -> None:
    """Such as those of a file of an earlier version, whichever of the two records is of it."""
    (known,) = [record for record in load_passes(PACKAGED) if record.name == "pipeinfer"]
    unknown = replace(
        known, requests=[replace(request, per_step_position=None) for request in known.requests]
    )
    (found,) = compare([known], [known])
    assert found.rule == "exact"
    for new, old in ((known, unknown), (unknown, known)):
        (found,) = compare([new], [old])
        assert exit_code([found]) == 0
        assert "does not say where its drafts were" in found.rule


def test_drafts_that_run_ahead_are_judged_by_their_places_on_another_machine() -> None:
    """A slow machine has other drafts judged, of which fewer are accepted; a draft that was judged
    in both is what tells."""
    (known,) = [record for record in load_passes(PACKAGED) if record.name == "pipeinfer"]
    elsewhere = with_fields(known, environment__torch="3")

    def cut(request: RequestRecord) -> RequestRecord:
        """Every second verification goes, with the drafts that it accepted."""
        columns = {name: getattr(request, name) for name in STEP_FIELDS}
        return replace(request, **{name: c and c[::2] for name, c in columns.items()})

    fewer = replace(elsewhere, requests=[cut(request) for request in elsewhere.requests])
    (found,) = compare([fewer], [known])
    assert "places that were judged in both" in str(found) and found.rule.startswith("statistics")
    assert found.verdict == "same"

    def lose(request: RequestRecord) -> RequestRecord:
        return replace(request, per_step_accepted=[0] * len(request.per_step_drafted or ()))

    worse = replace(fewer, requests=[lose(request) for request in fewer.requests])
    (found,) = compare([worse], [known])
    assert found.verdict == "regression"


def test_passes_that_stop_chains_elsewhere_are_not_compared() -> None:
    (known,) = [record for record in load_passes(PACKAGED) if record.name == "pipeline+draft"]
    workload = known.config["workload"] | {"pa": 0.5}
    (found,) = compare([replace(known, config=known.config | {"workload": workload})], [known])
    assert exit_code([found]) != 0 and "not comparable" in str(found)
