"""`magicdec plan` with acceptance by context, from records of `magicdec acceptance` and from golden
files, and `magicdec export --format golden`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from acceptance_records import GAMMA, TEXTS, WORSE, acceptance_record, write_records
from conftest import Command
from synthetic_records import BASELINES

from magicdec.bench.acceptance.record import AcceptanceRecord, counts_of
from magicdec.bench.acceptance.selection import by_context, lengths_of
from magicdec.cli import plan
from magicdec.cli.plan import PlanSection
from magicdec.config.sections import KVSection
from magicdec.predict.curves import expected_tokens, find_curves, tokens_interval
from magicdec.predict.lengths import AcceptanceLengths
from magicdec.predict.plan import SpeculationPlan
from magicdec.records.intervals import interval

BY_HAND = "--bandwidth 2039 --flops 312 --model llama-3.1-8b"
PLACES = "--B 64 --prefix_len 1024 2048 4096 32000"
SNAPKV = KVSection("snapkv", 65)


@pytest.fixture
def records() -> list[AcceptanceRecord]:
    """Of a draft at two contexts, and of a larger budget at the second."""
    larger = KVSection(budget=257)
    return [
        acceptance_record(1024),
        acceptance_record(4096, WORSE),
        acceptance_record(4096, kv=larger),
    ]


@pytest.fixture
def file(records: list[AcceptanceRecord], tmp_path: Path) -> Path:
    return write_records(tmp_path / "acceptance.jsonl", records)


def make(flags: str) -> SpeculationPlan:
    return plan.make_plan(plan.main.build_parser().read(flags.split())[PlanSection])


def lengths_without(accepted: Sequence[str], gamma: int) -> list[float]:
    """The acceptance length of all texts, then without each, counted step by step: tokens are taken
    from the front of a text."""
    groups = [list(accepted)]
    groups += [[text for text in accepted if text != left_out] for left_out in accepted]
    found = []
    for texts in groups:
        lengths = []
        for text in texts:
            left = counts_of(text)
            while left:
                lengths.append(1 + min(left[0], gamma))
                del left[: lengths[-1]]
        found.append(sum(lengths) / len(lengths))
    return found


def test_lengths_by_hand() -> None:
    found = lengths_of(acceptance_record(64, ["03", "21"]))
    expected = {1: (5 / 3, 2.0, 1.5), 2: (7 / 3, 3.0, 2.0), 3: (8 / 3, 3.0, 2.5)}
    assert found == {gamma: pytest.approx(lengths) for gamma, lengths in expected.items()}
    with_empty = lengths_of(acceptance_record(64, ["03", "", "21"]))
    assert with_empty == found, "a text that ends at once is none"
    assert list(lengths_of(acceptance_record(64, is_chain=False))) == [GAMMA]


def sampled_record(context: int) -> AcceptanceRecord:
    """Of two texts with three positions, at one of which nothing was drafted."""
    record = acceptance_record(context, ["03", "2"])
    sampling = record.config["sampling"] | {"temperature": 0.8, "top_p": 0.9}
    return replace(
        record,
        config=record.config | {"sampling": sampling},
        accepted=None,
        acceptance_probabilities=[[[0.5, 0.25, 0.125], []], [[1.0, 0.5, 0.25]]],
    )


def test_lengths_of_sampled_texts_are_those_that_are_expected() -> None:
    """With one draft token the first text takes 1 step with 0.5, and 2 else; it accepts 0.5."""
    found = lengths_of(sampled_record(64))
    assert list(found) == [1, 2, 3]
    assert found[1] == pytest.approx((1 + 1.5 / 2.5, 2.0, 1 + 0.5 / 1.5))
    assert found[3] == pytest.approx((1 + 2.625 / 2.5, 2.75, 1 + 0.875 / 1.5))


def test_a_file_has_one_way_of_sampling(command: Command, tmp_path: Path) -> None:
    alone = write_records(tmp_path / "alone.jsonl", [sampled_record(64), sampled_record(128)])
    both = write_records(tmp_path / "both.jsonl", [acceptance_record(128), sampled_record(64)])
    golden = tmp_path / "golden.yaml"
    for path, expected in ((alone, 0), (both, 2)):
        for words in (["export", path, "--format", "golden", "--out", golden],):
            code, _, err = command(*words)
            assert code == expected, err
        code, _, err = command("plan", *BY_HAND.split(), "--acceptance", path)
        assert code == expected, err
        assert not expected or "several ways of sampling: --temperature 0.8 --top_p 0.9" in err
    assert "temperature: 0.8" in golden.read_text() and "--top_p 0.9" in golden.read_text()


def test_drafts_drawn_at_every_position_have_no_steps(command: Command, tmp_path: Path) -> None:
    record = replace(sampled_record(64), is_forked=False)
    assert record.num_positions == 3
    for words in (["export", "--format", "golden"], ["plan", *BY_HAND.split()]):
        both = write_records(tmp_path / f"{words[0]}.jsonl", [acceptance_record(128), record])
        more = [both, "--out", tmp_path / "golden.yaml"]
        given = more if words[0] == "export" else ["--acceptance", both]
        code, _, err = command(*words, *given)
        assert code == 2 and err.count("\n") == 1, err
        assert "sampled texts" in err and "greedy texts, or of drafts in forks" in err


def test_between_contexts_lengths_are_linear_in_the_logarithm() -> None:
    curve = AcceptanceLengths({4096: {1: (1.9, 1.8, 2.0)}, 1024: {1: (1.5, 1.4, 1.7), 2: (2.0,)}})
    assert curve.estimates(2048, 1) == pytest.approx((1.7, 1.6, 1.85))
    assert curve.length(1448, 1) == pytest.approx(1.6, abs=1e-4)
    for context, measured in ((1024, 1024), (4096, 4096), (1, 1024), (99999, 4096)):
        assert curve.estimates(context, 1) == curve.by_context[measured][1]
    assert curve.gammas == [1], "what every context has"
    others = AcceptanceLengths({1024: {1: (1.5, 1.4, 1.7)}, 4096: {1: (1.9, 1.8)}})
    assert others.estimates(2048, 1) == pytest.approx((1.7,)), "other texts"
    assert others.estimates(4096, 1) == (1.9, 1.8)


def test_each_context_has_its_own_speedup_with_its_interval(file: Path) -> None:
    """The speedup of each set of texts, with its own tokens a step, gives the interval."""
    found = make(f"{BY_HAND} --acceptance {file} --budget 65")
    (way,) = found.candidates()
    for context, accepted in ((1024, TEXTS), (4096, WORSE), (32000, WORSE)):
        for gamma in (1, 2, 3):
            step = way.predict(64, context, gamma)
            lengths = lengths_without(accepted, gamma)
            assert step.draft_s is not None and step.verify_s is not None
            seconds = step.draft_s + step.verify_s
            speedups = np.array([tokens * step.decode_s / seconds for tokens in lengths])
            assert step.speedup == pytest.approx(speedups[0], rel=1e-12)
            bounds = [tokens * step.decode_s / seconds for tokens in (1, 1 + gamma)]
            expected = interval(speedups, *bounds)
            assert expected is not None and step.speedup_interval == pytest.approx(expected)
            low, high = step.speedup_interval or (0, 0)
            assert low < step.speedup < high
            late = replace(step, begin_s=7 * step.decode_s)
            ends = [replace(late, speedup=end).net_speedup(64) for end in (low, high)]
            assert late.net_speedup_interval(64) == ends
    none = way.predict(64, 1024, 0)
    assert none.speedup_interval is none.net_speedup_interval(64) is None
    best = {context: found.predict(64, context).gamma for context in (1024, 2048, 4096, 32000)}
    steps = {S: [way.predict(64, S, gamma).speedup for gamma in range(4)] for S in best}
    assert best == {S: int(np.argmax(speedups)) for S, speedups in steps.items()}
    assert len({*best.values()}) > 1


def test_a_plan_says_where_a_run_may_draft_otherwise(command: Command, tmp_path: Path) -> None:
    other = acceptance_record(64, inexact="it has a window")
    path = write_records(tmp_path / "other.jsonl", [other])
    shown = " ".join(command("plan", *BY_HAND.split(), "--acceptance", path).out.split())
    assert "tokens; a run may draft otherwise: it has a window" in shown


def test_of_lookups_it_is_said_that_they_are_judged_whole(command: Command, tmp_path: Path) -> None:
    """In the table and in a golden file, and of other drafts not."""
    for drafter in ("ngram", "self"):
        path = write_records(
            tmp_path / f"{drafter}.jsonl", [acceptance_record(64, drafter=drafter)]
        )
        out = tmp_path / f"{drafter}.yaml"
        assert command("export", path, "--format", "golden", "--out", out).code == 0
        shown = command("table", path).out
        for text in (out.read_text(), shown):
            assert ("ngram: lookups are judged whole" in text) == (drafter == "ngram")


def test_few_texts_have_no_interval(tmp_path: Path) -> None:
    few = write_records(tmp_path / "few.jsonl", [acceptance_record(64, TEXTS[:3])])
    assert make(f"{BY_HAND} --acceptance {few}").predict(64, 32000).speedup_interval is None


def test_the_same_acceptance_at_two_contexts_plans_as_one_that_is_given(tmp_path: Path) -> None:
    same = [acceptance_record(context) for context in (1024, 4096)]
    by_context = make(f"{BY_HAND} --acceptance {write_records(tmp_path / 'a.jsonl', same)}")
    lengths = [1.0, *(row.tokens_per_step or 0.0 for row in same[0].rows)]
    shares = tuple(longer - shorter for shorter, longer in pairwise(lengths))
    given = replace(by_context, curves={65: shares})
    for S in (100, 1024, 2000, 4096, 32000):
        for B in (1, 64):
            ours = by_context.predict(B, S)
            theirs = given.predict(B, S)
            assert replace(ours, speedup_interval=None) == replace(
                theirs,
                tokens_per_step=pytest.approx(theirs.tokens_per_step, rel=1e-14),
                speedup=pytest.approx(theirs.speedup, rel=1e-14),
            )
            assert by_context.flat_speedup(B, S) == ours.speedup
        assert given.flat_speedup(1, S) is None
    assert by_context.break_even(64) == given.break_even(64)


def test_drafts_pay_from_where_acceptance_makes_them(tmp_path: Path) -> None:
    """All is accepted at two powers of 2, and nothing at 3000 tokens between them."""
    accepted = {2048: "3", 3000: "0", 4096: "3"}
    several = [acceptance_record(context, [digit] * 5) for context, digit in accepted.items()]
    found = make(f"{BY_HAND} --acceptance {write_records(tmp_path / 'a.jsonl', several)}")
    context = found.break_even(64)
    assert context is not None and 3000 < context < 4096
    gammas = [found.predict(64, S).gamma for S in (3000, context - 1, context, 4096)]
    assert gammas[:2] == [0, 0] and min(gammas[2:]) > 0


def test_the_record_and_the_tables_have_it(file: Path, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    flags = f"{BY_HAND} {PLACES} --acceptance {file} --budget 65".split()
    ended = command("plan", *flags, "--out", out)
    assert (ended.code, ended.err) == (0, "")
    (line,) = out.read_text().splitlines()
    found = json.loads(line)
    expected = {"1024": lengths_of(acceptance_record(1024))}
    expected["4096"] = lengths_of(acceptance_record(4096, WORSE))
    assert found["config"]["workload"]["acceptance"]["65"] == {
        context: {str(gamma): estimates[0] for gamma, estimates in lengths.items()}
        for context, lengths in expected.items()
    }
    asked = make(" ".join(flags))
    first = replace(asked, curves={65: AcceptanceLengths({0: expected["1024"]})})
    for cell in found["cells"]:
        place = cell["batch_size"], cell["prefix_len"]
        p = asked.predict(*place)
        assert cell["speedup_interval"] == p.speedup_interval
        assert cell["net_speedup_interval"] == p.net_speedup_interval(64)
        assert cell["flat_speedup"] == first.predict(*place).speedup
    assert [cell["flat_speedup"] == cell["speedup"] for cell in found["cells"]] == [
        True,
        False,
        False,
        False,
    ]
    shown = command("table", out).out
    assert shown == ended.out
    assert "demo at every position after 1024 4096 tokens, streaming_llm), by context" in shown
    assert "acceptance lengths of 3 draft tokens 2.89 at 1024, 2.09 at 4096" in shown
    assert "note        budget 65: acceptance was not measured at 32000; that of the" in shown
    last = shown[shown.index("speedups [95 % intervals over texts]; flat: by the shortest") :]
    assert max(map(len, last.splitlines())) <= 80
    assert last.count("[") == 1 + 2 * sum(cell["gamma"] > 0 for cell in found["cells"])
    plain = command("plan", *BY_HAND.split(), "--acceptance", "0.8").out
    assert "intervals" not in plain and "flat" not in plain


def test_what_a_file_has_several_of_is_told_apart_by_flags(tmp_path: Path) -> None:
    others = [
        acceptance_record(64, WORSE, kv=SNAPKV),
        acceptance_record(64, WORSE, draft_weights="int4"),
        acceptance_record(64, WORSE, drafter="ngram"),
        acceptance_record(64, WORSE, dtype="bfloat16"),
        acceptance_record(64, WORSE, model="other", model_sha256="n"),
        acceptance_record(64, WORSE, drafter="model", draft="small"),
        acceptance_record(64, ["3"] * 5, drafter="model", draft="tiny"),
        acceptance_record(64, ["0"] * 5, random_weights=True),
    ]
    path = write_records(tmp_path / "all.jsonl", [acceptance_record(64), *others])
    worse = lengths_of(others[0])
    wanted = {"models": "demo", "dtypes": "float32", "draft models": "tiny"}

    def found(drafter: str = "self", policy: str | None = None, **more: Any) -> Any:
        names = wanted | more.pop("names", {})
        curves, _ = find_curves([str(path)], None, drafter, policy, names=names, **more)
        (curve,) = curves.values()
        assert isinstance(curve, AcceptanceLengths)
        return curve.by_context[64]

    assert found() == lengths_of(acceptance_record(64)) != worse
    assert found(policy="snapkv") == found(weights="int4") == worse
    assert found(names={"dtypes": "bfloat16"}) == found(names={"models": "other"}) == worse
    assert found("model")[1][0] == 2.0 and found("model", names={"draft models": "small"}) == worse


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model": "a", "model_sha256": "n"}, "several models: a, demo; give the --model of one"),
        ({"model_sha256": "n"}, "several weights of one model: m, n; give a file with one"),
        ({"dtype": "float16"}, "several dtypes: float16, float32; give the --dtype of one"),
        ({"dataset": "books"}, "several datasets: books, demo; give a file with one"),
        ({"kv": KVSection(budget=65, num_sink_tokens=4)}, "several settings of the policy: --num"),
    ],
)
def test_what_no_flag_tells_apart_is_refused_in_one_line(
    more: dict[str, Any], message: str, command: Command, tmp_path: Path
) -> None:
    both = [acceptance_record(64), acceptance_record(128, **more)]
    path = write_records(tmp_path / "both.jsonl", both)
    code, _, err = command("plan", *BY_HAND.split(), "--acceptance", path)
    assert code == 2 and message in err and err.count("\n") == 1, err


def test_two_draft_models_are_told_apart_by_the_draft_of_a_plan(
    command: Command, tmp_path: Path
) -> None:
    names = ("llama-3.2-1b", "demo-draft")
    both = [acceptance_record(64, drafter="model", draft=name) for name in names]
    path = write_records(tmp_path / "both.jsonl", both)
    flags = f"{BY_HAND} --acceptance {path} --draft model:"
    assert command("plan", *f"{flags}llama-3.2-1b".split()).code == 0
    code, _, err = command("plan", *f"{flags}llama-3.2-3b".split())
    assert code == 2 and err.count("\n") == 1
    assert "several draft models: demo-draft, llama-3.2-1b; give the --draft model:NAME" in err


def test_of_several_cells_of_a_context_the_one_with_most_drafts_counts() -> None:
    first = acceptance_record(64, WORSE)
    longer = acceptance_record(64, gamma=4)
    more = acceptance_record(64, [*WORSE, "3"], gamma=4)
    newest = acceptance_record(64, [*WORSE, "2"], gamma=4)
    assert by_context([first, longer]) == by_context([longer, first]) == {64: longer}
    assert by_context([more, newest, longer, first]) == {64: newest}


def test_contexts_without_a_common_number_of_drafts_are_refused(
    command: Command, tmp_path: Path
) -> None:
    both = [
        acceptance_record(64, is_chain=False),
        acceptance_record(128, gamma=2, accepted=["21", "02"], is_chain=False),
    ]
    path = write_records(tmp_path / "both.jsonl", both)
    code, _, err = command("plan", *BY_HAND.split(), "--acceptance", path)
    assert code == 2 and err.count("\n") == 1
    assert "the contexts 64, 128 have no number of draft tokens in common; measure them with" in err


def test_a_file_with_passes_too_says_which_records_count(file: Path, command: Command) -> None:
    with file.open("ab") as lines:
        lines.write(BASELINES.read_bytes())
    flags = [*BY_HAND.split(), "--acceptance", file]
    code, out, err = command("plan", *flags)
    assert (code, err) == (0, "")
    assert "streaming_llm; its 13 passes with such drafts do not count)" in out, out
    code, out, _ = command("plan", *flags, "--kv_policy", "snapkv")
    assert code == 0 and "(measured with demo at 4096 tokens, snapkv), the same at" in out
    file.write_text(acceptance_record(64, drafter="ngram").to_json())
    code, _, err = command("plan", *flags)
    assert code == 2 and err.count("\n") == 1
    assert "no record with acceptance under a KV budget" in err and "it has acceptance of" in err


def test_a_golden_file_has_the_lengths_of_every_context(
    file: Path, command: Command, tmp_path: Path
) -> None:
    out = tmp_path / "golden.yaml"
    ended = command("export", file, "--format", "golden", "--out", out)
    assert ended.code == 0 and "3 rows written" in ended.err
    ours, _ = find_curves([str(file)], None, "self")
    assert [*ours] == [65, 257]
    for budget, curve in ours.items():
        name = f"self_streaming_llm_{budget}"
        theirs, _ = find_curves([str(out)], [budget], "self", golden_curve=name)
        for context in (1, 1024, 2000, 4096, 9999):
            for gamma in (1, 2, 3):
                place = gamma, context
                assert expected_tokens(theirs[budget], *place) == expected_tokens(curve, *place)
                assert tokens_interval(theirs[budget], *place) is None, "the format has none"
    flags = f"{BY_HAND} {PLACES} --budget 65 --acceptance"
    first = make(f"{flags} {file}")
    again = make(f"{flags} {out} --acceptance_curve self_streaming_llm_65")
    for S in (1024, 2048, 4096, 32000):
        assert replace(first.predict(64, S), speedup_interval=None) == again.predict(64, S)
        assert first.flat_speedup(64, S) == again.flat_speedup(64, S)
    code, _, err = command("plan", *BY_HAND.split(), "--acceptance", out)
    assert code == 2 and "--acceptance_curve: self_streaming_llm_65, self_streaming_llm_257" in err


def test_one_context_is_what_inferencex_has(command: Command, tmp_path: Path) -> None:
    one = [
        acceptance_record(64, ["03", "21"]),
        acceptance_record(64, ["0", "0"], drafter="model", draft="d", inexact="it has a window"),
    ]
    path = write_records(tmp_path / "one.jsonl", one)
    out = tmp_path / "golden.yaml"
    assert command("export", path, "--format", "golden", "--out", out).code == 0
    text = out.read_text()
    assert yaml.safe_load(text) == {
        "demo": {
            "self_streaming_llm_65": pytest.approx({1: 5 / 3, 2: 7 / 3, 3: 8 / 3}),
            "model:d_streaming_llm_65": {1: 1.0, 2: 1.0, 3: 1.0},
        }
    }
    lines = [line for line in text.splitlines() if line.startswith("# ")]
    assert "# dataset: demo | context: 64 | temperature: 0 | output_len: 5" in lines
    assert "# model:d_streaming_llm_65: it has a window" in lines
    assert "# key = num_speculative_tokens; value = AL" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m: {a: {64: {1: 1.5}, 128: 1.6}}", "a at 128 tokens has no acceptance lengths"),
        ("m: {a: {64: {1: 2.5}}}", "a at 64 tokens has an acceptance length of 2.5 for 1 draft"),
        ("m: {a: {short: {1: 1.5}}}", "a has a context of short; a whole number of tokens from 1"),
        ("m: {a: {0: {1: 1.5}}}", "a has a context of 0; a whole number of tokens from 1"),
        ("m: {a: {64: {1: 1.5}, 128: {2: 1.5}}}", "64, 128 have no number of draft tokens in comm"),
    ],
)
def test_a_bad_context_axis_is_one_line(
    text: str, message: str, command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(text)
    code, _, err = command("plan", *BY_HAND.split(), "--acceptance", path)
    assert code == 2 and message in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"model": "b", "model_sha256": "n"}, "are of several models: b, demo; give records of"),
        ({"dataset": "books"}, "are of several datasets: books, demo; give records of one"),
        ({"kv": KVSection(budget=65, num_sink_tokens=4)}, "65 are of several settings of the pol"),
    ],
)
def test_what_a_golden_file_cannot_say_is_refused(
    other: dict[str, Any], message: str, command: Command, tmp_path: Path
) -> None:
    both = [acceptance_record(64), acceptance_record(128, **other)]
    path = write_records(tmp_path / "both.jsonl", both)
    code, _, err = command("export", path, "--format", "golden", "--out", tmp_path / "g.yaml")
    assert code == 2 and "--format golden" in err and message in err and err.count("\n") == 1, err
