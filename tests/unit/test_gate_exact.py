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
from synthetic_records import KERNELS, logged, with_fields
from synthetic_samples import draw_chances, draw_pass

from magicdec.bench.serving.record import ServingRecord
from magicdec.cli import compare as compare_command
from magicdec.cli.gate import PACKAGED
from magicdec.records.acceptance import Verifications, count_by_prompt
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
from magicdec.records.reading import read_records
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples

Raw = dict[str, Any]


def changed(change: Callable[[Raw], Any]) -> RunRecord:
    """A logged record whose samples are changed."""
    raw = json.loads(logged().to_json())
    samples = raw["samples"]["speculative"]
    change(samples)
    return with_fields(logged(), samples__speculative=samples)


def set_at(name: str, step: int, row: int, value: Any) -> Callable[[Raw], Any]:
    return lambda samples: samples[name][0][step].__setitem__(row, value)


def lose(samples: Raw) -> None:
    """Row 5 accepts nothing in its step 3, whatever it was."""
    samples["num_accepted"][0][3][5] = 0


WAS = logged().samples["speculative"].num_accepted[0]  # type: ignore[index]
DIFFERENCES: dict[str, tuple[Callable[[Raw], Any], str]] = {
    "drafted": (set_at("draft_hashes", 2, 4, "ffff0004"), "prompt 4, step 2: other tokens drafted"),
    "positions": (
        set_at("draft_hashes", 0, 1, "0000ffff"),
        "prompt 1, step 0: its draft forwards read other positions (260 keys, as before)",
    ),
    "keys": (
        set_at("draft_keys", 1, 7, 261),
        "prompt 7, step 1: its draft forwards read 261 keys, was 260",
    ),
    "accepted": (
        set_at("num_accepted", 3, 5, 3 - WAS[3][5] % 3),
        f"prompt 5, step 3: accepted {3 - WAS[3][5] % 3} of 4, was {WAS[3][5]}",
    ),
    "proposed": (
        set_at("num_drafted", 3, 5, 3),
        "prompt 5, step 3: 3 drafts proposed, was 4, accepted",
    ),
    "tokens": (
        lambda samples: samples["output_hashes"].__setitem__(6, "0" * 15 + "f"),
        "prompt 6, emitted other tokens",
    ),
    "kernels": (
        lambda samples: samples["draft_kv_tokens"].__setitem__(0, 258),
        "draft_kv_tokens [258], was [257]",
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_any_difference_is_named_and_fails_gain_or_loss(name: str) -> None:
    change, said = DIFFERENCES[name]
    new = changed(change)
    for pair in ((new, logged()), (logged(), new)):
        (found,) = compare([pair[0]], [pair[1]])
        assert found.verdict == "changed" and exit_code([found]) == 1, found
        assert str(found).endswith("renew it with `magicdec gate save` [exact]")
    (found,) = compare([new], [logged()])
    assert said in str(found), found
    suite = ElementTree.fromstring(junit([found]).split("\n", 1)[1])
    assert suite.get("failures") == "1" and said in str(suite[0][0].get("message"))


def test_equal_steps_are_the_same_and_the_number_of_prompts_that_differ_is_said() -> None:
    (found,) = compare([logged()], [logged()])
    assert found.verdict == "same" and "every step as before [exact]" in str(found)

    def two(samples: Raw) -> None:
        for row in (2, 5):
            samples["draft_hashes"][0][1][row] = "ffffffff"

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
    value, said = REASONS[field]
    both = field.startswith("config__") and field != "config__model__native_steps"
    old = with_fields(logged(), **{field: value}) if both else logged()
    new = with_fields(changed(lose), **{field: value})
    (found,) = compare([new], [old])
    assert f"[statistics: {said}" in str(found) and exit_code([found]) == 0, found
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
    old = with_fields(
        logged(), samples__speculative__draft_hashes=None, samples__speculative__draft_keys=None
    )
    (found,) = compare([logged()], [old])
    said = "the baseline holds no log of what was drafted and read; renew it with"
    assert found.verdict == "same" and said in str(found)


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
        "a digit": line.replace('"260', '"261', 1).replace("260]", "261]", 1),
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


def pass_of(rng: np.random.Generator, chances: Any) -> PassSamples:
    samples = draw_pass(rng, chances, 4, 63)
    samples.output_hashes = ["0"] * len(chances)
    return samples


def drafted(samples: PassSamples) -> DraftedPass:
    return DraftedPass.of_samples(samples)


def pair_of_passes(before: PassSamples, after: PassSamples) -> PairedCounts:
    errors = np.sqrt(rate_variances(drafted(before)) + rate_variances(drafted(after)))
    return PairedCounts(count_by_prompt(before), count_by_prompt(after), 0, errors)


def test_the_loss_that_would_be_seen_is_seen_in_19_of_20() -> None:
    """Over 400 pairs of passes, the second of which loses what the first pairs say on average."""
    rng = np.random.default_rng(0)
    level = 0.99
    margin = 0.02
    chances = draw_chances(rng, 16, 0.7, 0.1)
    rate = float(count_by_prompt(pass_of(rng, chances)).rates.mean())

    def change_with(share: float) -> Any:
        return change_of(
            pair_of_passes(pass_of(rng, chances), pass_of(rng, share * chances)), level
        )

    said = [change_with(1.0).seen_loss(rate, level, margin) for _ in range(60)]
    target = float(np.mean(said))
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
    def kill(samples: Raw) -> None:
        for steps in samples["num_accepted"]:
            for step in steps:
                if len(step) == 8:
                    step[2] = 0

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
    for other, said in (
        (ahead((10, 4, 3)), "prompt 0, position 12: the draft is accepted, was rejected"),
        (ahead((13, 4, 1)), "prompt 0, position 14: the draft is rejected, was accepted"),
        (ahead((10, 4, 2), output="1"), "prompt 0, emitted other tokens"),
    ):
        change, _ = find_other_verdict(other, before)
        assert str(change) == said
    assert find_other_verdict(ahead((40, 1, 1)), before) == (None, 0)


def test_drafts_that_run_ahead_without_their_places_fall_under_statistics() -> None:
    """Such as those of a file of an earlier version, whichever of the two records is of it."""
    (known,) = [each for each in read_records(PACKAGED, ServingRecord) if each.name == "pipeinfer"]
    unknown = replace(
        known, requests=[replace(each, per_step_position=None) for each in known.requests]
    )
    (found,) = compare([known], [known])
    assert found.rule == "exact"
    for new, old in ((known, unknown), (unknown, known)):
        (found,) = compare([new], [old])
        assert exit_code([found]) == 0
        assert "does not say where its drafts were" in found.rule


def test_passes_that_stop_chains_elsewhere_are_not_compared() -> None:
    (known,) = [
        each for each in read_records(PACKAGED, ServingRecord) if each.name == "pipeline+draft"
    ]
    workload = known.config["workload"] | {"pa": 0.5}
    (found,) = compare([replace(known, config=known.config | {"workload": workload})], [known])
    assert exit_code([found]) != 0 and "not comparable" in str(found)
