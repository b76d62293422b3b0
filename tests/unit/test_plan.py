"""`magicdec plan`: its input, its errors and its output."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_records import parse_record

from magicdec.cli import plan
from magicdec.cli.plan import PlanSection
from magicdec.hardware.ceiling_file import Hardware, Link, MachineFile
from magicdec.hardware.costs import Deployment
from magicdec.model.presets.presets import find_config
from magicdec.output.tables import widest_cells
from magicdec.predict.acceptance_file import drafting_of, is_plain
from magicdec.predict.curves import conditional_rate, find_conditional, find_curves
from magicdec.predict.lengths import AcceptanceLengths
from magicdec.predict.plan import make_record, tables
from magicdec.predict.speculation import SelectionCost
from magicdec.records.reading import load_passes

BASELINES = (
    Path(__file__).parents[2] / "magicdec" / "bench" / "gate" / "baselines" / "acceptance.jsonl"
)
BY_HAND = "--bandwidth 2039 --flops 312"
MACHINE = MachineFile(
    {"cpu": "a", "gpu": None, "world_size": 2, "threads": 1, "collectives": "gloo"},
    4e10,
    {"float32": 1e11, "bfloat16": 8e11},
    {"float32": 2e-4, "bfloat16": 0.0},
    {"float32": 3e10, "bfloat16": 2e10},
    Link(1e-5, 1e9),
    None,
    {"float32": 1e11, "bfloat16": 8e11},
    {"float32": 0.0, "bfloat16": 0.0},
)

Run = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str, str]]
) -> Run:
    """`magicdec plan` with these flags, in a directory with a machine file: (code, out, err)."""
    monkeypatch.chdir(tmp_path)
    MACHINE.save(tmp_path / "machine.json")
    return lambda flags: command("plan", *flags.split())


def make(flags: str) -> plan.SpeculationPlan:
    return plan.make_plan(plan.main.build_parser().read(flags.split())[PlanSection])


def test_the_demo_on_a_probed_machine(run: Run) -> None:
    code, out, err = run("--machine machine.json --acceptance 0.8 --out plan.json")
    assert (code, err) == (0, "") and out.startswith("predicted, not measured")
    assert out.count("predicted") == 3 and "demo on 1 rank, bfloat16" in out
    assert "demo supports 20480 tokens" not in out
    found = json.loads(Path("plan.json").read_text())
    assert list(found)[:2] == ["kind", "schema_version"] and found["kind"] == "plan"
    assert found["status"] == "predicted" and "environment" not in found
    assert len(found["cells"]) == 9
    asked = make("--machine machine.json --acceptance 0.8")
    for cell in found["cells"]:
        p = asked.predict(cell["batch_size"], cell["prefix_len"])
        assert cell["decode_ms"] == 1e3 * p.decode_s and cell["speedup"] == p.speedup
        assert cell["net_speedup"] == p.net_speedup(64) and cell["begin_ms"] == 1e3 * p.begin_s
        assert f"{p.speedup:.2f} ({p.gamma})" in out and f"{1e3 * p.decode_s:.2f}" in out
    assert found["break_even_prefix_len"] == {str(B): asked.break_even(B) for B in (1, 4, 8)}


def test_where_speculation_does_not_pay(run: Run) -> None:
    code, out, _ = run(f"{BY_HAND} --acceptance 0 --B 4 --prefix_len 100 --out p.json")
    assert code == 0 and "1.00 (0)" in out and "never" in out
    cell = json.loads(Path("p.json").read_text())["cells"][0]
    assert (cell["gamma"], cell["speedup"], cell["net_speedup"]) == (0, 1.0, 1.0)
    assert cell["begin_ms"] == 0 and cell["break_even_gen_len"] is None
    assert cell["draft_ms"] is cell["verify_ms"] is cell["budget"] is None


def test_hardware_from_flags() -> None:
    asked = make(
        f"{BY_HAND} --acceptance 0.8 --model llama-2-7b --tp 8 --nodes 2 --link 300 "
        "--link_latency_us 15 --node_link 25 --node_link_latency_us 30 --overhead_us 320"
    )
    h = asked.target.hardware
    found = (h.read_bytes_per_s, h.flops_per_s, h.layer_overhead_s)
    assert found == pytest.approx((2.039e12, 3.12e14, 1e-5)) and h.kv_bytes_per_s is None
    links = [(x.latency_s, x.bytes_per_s) for x in (h.link, h.node_link) if x is not None]
    assert links == [pytest.approx((15e-6, 300e9)), pytest.approx((30e-6, 25e9))]
    assert (asked.target.tp, asked.target.nodes, asked.target.dtype_bytes) == (8, 2, 2)


def test_hardware_from_a_file_and_what_flags_add(run: Run) -> None:
    asked = make("--machine machine.json --acceptance 0.8 --tp 2 --dtype float32")
    assert asked.target.hardware == Hardware(
        4e10, 1e11, 2e-4, 3e10, Link(1e-5, 1e9), None, 1e11, 0.0
    )
    assert asked.target.dtype_bytes == 4
    more = make(
        "--machine machine.json --acceptance 0.8 --overhead_us 6 --link 5 --link_latency_us 0"
    )
    assert more.target.hardware == Hardware(4e10, 8e11, 1e-6, 2e10, Link(0.0, 5e9), None, 8e11, 0.0)


def test_no_word_or_number_of_the_costs_is_broken_in_80_columns() -> None:
    """Of batches and contexts of three and five digits, as in the README."""
    asked = make(
        f"{BY_HAND} --model llama-3.1-8b --tp 8 --link 300 --link_latency_us 15 --overhead_us 160 "
        "--conditional_acceptance 0.81 --budget 512 --B 1 128 --prefix_len 4000 32000"
    )
    costs, _ = tables([make_record(asked)])
    rows = [costs.broken_labels(), *costs.body]
    assert "2.39x" in rows[-1] and rows[-1][-1] == "2"
    assert sum(widest_cells(rows)) + len(rows[0]) - 1 <= 80


def test_a_draft_of_its_own(run: Run) -> None:
    flags = f"{BY_HAND} --acceptance 0.8 --link 300 --link_latency_us 15 "
    itself = make(flags)
    assert itself.is_self_speculation and itself.draft == itself.target
    names = "--model llama-2-7b-32k --draft model:llama-68m --tp 8"
    own = make(flags + names)
    assert (own.draft.config.name, own.draft.tp, own.target.tp) == ("llama-68m", 1, 8)
    assert not own.is_self_speculation
    assert (
        own.predict(32, 32768).speedup
        > make(flags + "--model llama-2-7b-32k --tp 8").predict(32, 32768).speedup
    )
    assert "draft: llama-68m on 1 rank" in run(flags + names)[1]


def test_int8_weights_halve_what_is_read(run: Run) -> None:
    """With B 1 and a short context, the time of a large model's forward is that of its weights."""
    flags = f"{BY_HAND} --acceptance 0.8 --model llama-2-7b --B 1 --prefix_len 16 --out p.json"
    times = {}
    for weights in ("auto", "bfloat16", "int8"):
        code, out, _ = run(f"{flags} --target_dtype {weights}")
        found = json.loads(Path("p.json").read_text().splitlines()[-1])
        times[weights] = found["cells"][0]["decode_ms"]
        assert code == 0 and ("llama-2-7b in int8 on 1 rank" in out) == (weights == "int8")
        kind = "int8" if weights == "int8" else "bfloat16"
        model = found["config"]["model"]
        assert (model["dtype"], model["target_dtype"]) == ("bfloat16", kind)
        assert found["config"]["draft"] is None, "the model itself"
    assert times["auto"] == times["bfloat16"]
    assert 0.5 < times["int8"] / times["auto"] < 0.51


def test_a_directory_needs_no_weights(run: Run, tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint / "config.json", tmp_path)
    assert make(f"{BY_HAND} --acceptance 0.8 --model {tmp_path}").target.config.num_layers == 2
    assert make(f"{BY_HAND} --acceptance 0.8 --model random:llama-2-7b").target == (
        make(f"{BY_HAND} --acceptance 0.8 --model llama-2-7b").target
    )


def test_acceptance_as_a_rate() -> None:
    rate = conditional_rate(0.8, 4)
    assert find_curves(["0.8"], None, "self") == ({257: rate}, "0.8 of 4 draft tokens a step")
    assert find_curves(["0.8"], [9, 5], "self")[0] == {9: rate, 5: rate}
    assert find_conditional([0.8], [9, 5]) == ({9: 0.8, 5: 0.8}, "given")
    assert make(f"{BY_HAND} --conditional_acceptance 0.8").curves == {257: 0.8}
    assert make(f"{BY_HAND} --acceptance 0.8 --acceptance_gamma 1").curves[257] == (
        pytest.approx(0.8)
    )
    assert make(f"{BY_HAND} --acceptance 0.8").max_gamma == 8


GOLDEN = """# key = num_speculative_tokens; value = golden AL
_metadata: {draft-model: a/Draft}
mini:
  thinking_on: {4: '4.6', 1: 1.8, 2: 2.4}
  thinking_off: {12: 5}
"""


def test_acceptance_of_a_golden_file(tmp_path: Path) -> None:
    """Each length is that of the file, no other draft length is planned, and the fastest of these
    is the one that the lengths and the times of a step say."""
    path = tmp_path / "mini_mtp.yaml"
    path.write_text(GOLDEN)
    flags = f"{BY_HAND} --acceptance {path} --model llama-3.1-8b --budget 512 257"
    found = make(f"{flags} --acceptance_curve thinking_on")
    lengths = AcceptanceLengths.flat({1: 1.8, 2: 2.4, 4: 4.6})
    assert found.curves == {512: lengths, 257: lengths}
    assert found.max_gamma == 4 and "mini, thinking_on" in found.acceptance_source
    (_, way) = found.candidates()  # of the smaller budget, which is never slower
    steps = {gamma: way.predict_step(8, 32000, gamma) for gamma in (1, 2, 4)}
    assert [step.tokens_per_step for step in steps.values()] == [1.8, 2.4, 4.6]
    best = max(steps.values(), key=lambda step: step.speedup)
    assert best.gamma == found.predict(8, 32000).gamma == 4
    assert make(f"{flags} --acceptance_curve thinking_on --max_gamma 3").predict(8, 32000).gamma < 3
    assert make(f"{flags} --acceptance_curve thinking_off --max_gamma 12").max_gamma == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOLDEN, "it has several curves; choose one by --acceptance_curve: thinking_on, "),
        ("a: {on: {1: 1.5}}\nb: {on: {1: 1.5}}", "no golden acceptance file of InferenceX"),
        ("- mini: 1.5", "no golden acceptance file of InferenceX"),
        ("mini: 1.5", "mini has no thinking modes"),
        ("mini: {a: {}}", "a has no acceptance lengths"),
        ("mini: {a: {3: 4.1}}", "length of 4.1 for 3 draft tokens; it is from 1 to 4"),
        ("mini: {a: {3: 0.9}}", "an acceptance length of 0.9"),
        ("mini: {a: {3: .nan}}", "an acceptance length of nan"),
        ("mini: {a: {3: [2]}}", "an acceptance length of [2]"),
        ("mini: {a: {0: 1.0}}", "a has 0 draft tokens"),
        ("mini: {a: {yes: 1.0}}", "a has True draft tokens"),
        ("mini: {a: {12: 5}}", "--max_gamma 8: --acceptance begins at 12 draft tokens"),
        ("mini: {a: {1: 1.5", "it is no YAML (expected ',' or '}', but got '<stream end>' in"),
        ("mini: !!python/object/apply:os.getcwd []", "it is no YAML (could not determine"),
        ("[" * 9999, "it is no YAML (RecursionError)"),
    ],
)
def test_a_bad_golden_file_is_one_line(text: str, message: str, run: Run) -> None:
    Path("golden.yaml").write_text(text)
    code, _, err = run(f"{BY_HAND} --acceptance golden.yaml")
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_curve_is_chosen_of_a_golden_file_alone(run: Run) -> None:
    Path("golden.yaml").write_text(GOLDEN)
    for words, message in (
        ("0.8 --acceptance_curve a", "--acceptance_curve does nothing here"),
        ("golden.yaml --acceptance_curve a", "it has no --acceptance_curve a; choose from"),
        ("golden.yaml --acceptance_gamma 3", "--acceptance_gamma does nothing here"),
        ("golden.yaml 0.5", "--acceptance golden.yaml is not known"),
        ("missing.yaml", "--acceptance missing.yaml: No such file or directory"),
    ):
        code, _, err = run(f"{BY_HAND} --acceptance {words}")
        assert code == 2 and message in err and err.count("\n") == 1


def test_records_of_another_kind_do_not_count(tmp_path: Path) -> None:
    first = json.loads(BASELINES.read_text().splitlines()[0])
    for section, key, value in (
        ("decoding", "drafter", "ngram"),
        ("decoding", "pa", 0.9),
        ("kv", "policy", "full"),
        ("kv", "budget", -1),
    ):
        other = json.loads(json.dumps(first))
        other["config"][section][key] = value
        path = tmp_path / f"{key}.jsonl"
        path.write_text(parse_record(other).to_json())
        with pytest.raises(ValueError, match="has no record with acceptance under a KV budget"):
            find_curves([str(path)], None, "self")
    path.write_text(json.dumps(first))
    with pytest.raises(ValueError, match="--kv_policy snapkv; `magicdec longspec` makes one"):
        find_curves([str(path)], None, "model", "snapkv")


@pytest.mark.parametrize("drafter", ["self", "model"])
@pytest.mark.parametrize("policy", [None, "streaming_llm", "snapkv", "verified", "retrieval"])
def test_acceptance_from_records(drafter: str, policy: str | None) -> None:
    """Each budget in the committed baselines has its longest curve, and never one of the full
    cache, of another policy or of another drafter."""
    records = [json.loads(record.to_json()) for record in load_passes(BASELINES)]
    expected = {
        r["config"]["kv"]["budget"]: tuple(r["metrics"]["acceptance_per_position"])
        for r in records
        if r["name"] == "static+draft"
        and r["environment"]["world_size"] == 1  # those of several ranks have fewer prompts
        and r["config"]["kv"]["policy"] == (policy or "streaming_llm")
        and r["config"]["decoding"]["gamma"] == 4
        and drafting_of(r["config"]) == (drafter, policy or "streaming_llm", None, None)
        and is_plain(r["config"])
    }
    if not expected:
        assert drafter == "model" and policy in ("verified", "retrieval"), "what is never measured"
        return
    found, source = find_curves([str(BASELINES)], None, drafter, policy)
    assert found == expected and 257 in expected
    assert source == f"{BASELINES} (measured with demo at 4096 tokens, {policy or 'streaming_llm'})"


def test_the_rate_of_a_record_gives_what_its_curve_gives() -> None:
    """About: drafts at different positions are not equally likely to be accepted. A rate taken for
    a conditional one predicts too little."""
    flags = f"{BY_HAND} --model llama-2-7b --B 64 --prefix_len 30000 --max_gamma 4 --budget 257"
    for record in load_passes(BASELINES):
        decoding = record.config["decoding"]
        metrics = record.metrics
        kind = decoding["drafter"], decoding["gamma"], (record.config["kv"] or {}).get("policy")
        if not record.shares_prefill:
            continue
        if kind[:2] != ("self", 4) or kind[2] == "full" or metrics is None:
            continue
        if drafting_of(record.config) is None:
            continue
        rate = metrics.draft_acceptance_rate
        plan = make(f"{flags} --acceptance {rate}")
        curve = tuple(metrics.acceptance_per_position)
        expected = replace(plan, curves={257: curve}).predict(64, 30000)
        found = plan.predict(64, 30000)
        assert found.gamma == expected.gamma == 4
        assert found.speedup == pytest.approx(expected.speedup, rel=0.01)
        wrong = make(f"{flags} --conditional_acceptance {metrics.draft_acceptance_rate}").predict(
            64, 30000
        )
        assert wrong.speedup < 0.9 * expected.speedup


def test_a_plan_says_which_machine_was_probed(tmp_path: Path) -> None:
    MACHINE.save(tmp_path / "machine.json")
    flags = f"--machine {tmp_path / 'machine.json'} --acceptance 0.8 --dtype float32"
    two_ranks = f"{tmp_path / 'machine.json'} (a, ranks 2 x threads 1"
    assert make(f"{flags} --tp 2 --link 1 --link_latency_us 1").machine_source == f"{two_ranks})"
    assert make(flags).machine_source == f"{two_ranks}, not of 1 ranks)"


def test_what_a_policy_does_before_the_first_step_costs() -> None:
    flags = f"{BY_HAND} --acceptance 0.8 --model llama-2-7b --gen_len 16"
    steps = make(flags).predict(8, 4096)
    assert steps.begin_s == 0.0 and steps.net_speedup(16) == pytest.approx(steps.speedup)
    found = {}
    for policy in ("streaming_llm", "snapkv", "verified", "retrieval"):
        asked = make(f"{flags} --kv_policy {policy}")
        found[policy] = p = asked.predict(8, 4096)
        assert p.speedup == steps.speedup and asked.gen_len == 16
    assert plan.find_choice("streaming_llm", 257) == SelectionCost(), (
        "what no --kv_policy stands for"
    )
    assert found["streaming_llm"].begin_s == 0.0
    for policy in ("snapkv", "verified", "retrieval"):
        assert 1.0 < found[policy].net_speedup(16) < steps.speedup, policy
    own = make(f"{flags} --draft model:llama-68m").predict(8, 4096)
    assert own.begin_s > 0 and own.net_speedup(16) < own.speedup


def test_some_budgets_of_records() -> None:
    everything, _ = find_curves([str(BASELINES)], None, "self")
    two, _ = find_curves([str(BASELINES)], [513, 33], "self")
    assert two == {b: everything[b] for b in (513, 33)} and len(everything) == 5
    assert make(f"{BY_HAND} --acceptance {BASELINES}").max_gamma == 4
    snapkv = make(f"{BY_HAND} --acceptance {BASELINES} --kv_policy snapkv").curves
    assert snapkv == find_curves([str(BASELINES)], None, "self", "snapkv")[0]
    assert snapkv[257] != everything[257]


LINK = "--link 3 --link_latency_us 1"
FAR = "--node_link 3 --node_link_latency_us 1"
PLAIN = f"{BY_HAND} --acceptance 0.8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "give --acceptance or --conditional_acceptance"),
        ("--acceptance 0.8 --conditional_acceptance 0.9", "in place of --acceptance; give one"),
        (
            f"{BY_HAND} --conditional_acceptance 0.8 --acceptance_gamma 2",
            "--acceptance_gamma does nothing here: it is for an --acceptance that is a rate",
        ),
        ("--acceptance 0.8", "give either --machine FILE, or both --bandwidth and --flops"),
        (f"--acceptance 0.8 --machine machine.json {BY_HAND}", "give either --machine FILE"),
        (f"{BY_HAND} --acceptance 1.2", "--acceptance 1.2: 1.2 is not between 0 and 1"),
        (f"{BY_HAND} --acceptance high", "--acceptance high is not known; choose from a rate"),
        (f"{BY_HAND} --acceptance 0.8 0.7", "2 values for 1 of --budget"),
        (f"{BY_HAND} --acceptance {BASELINES} --budget 7", "--budget 7 is not in"),
        (f"{BY_HAND} --acceptance {BASELINES} --max_gamma 99", "--max_gamma 99: --acceptance has"),
        (f"{PLAIN} {LINK}", "--link does nothing here: a node has one rank"),
        (f"{PLAIN} --tp 2 {LINK} {FAR}", "--node_link does nothing here: --nodes is 1"),
        (f"{PLAIN} --kv_policy snapkv --budget 20", "--budget 20 must be larger than --window_si"),
        (f"{PLAIN} --draft model:llama-68m", "a vocabulary of 32000"),
        (f"{PLAIN} --draft ngram", "--draft ngram is not known; choose from self"),
        (f"{PLAIN} --target_dtype float32", "--target_dtype float32: weights"),
        (f"{PLAIN} --tp 3", "--tp 3 does not divide the 4 attention heads"),
        (f"{PLAIN} --tp 2", "several ranks need the cost of a link; give --link and"),
        (f"{PLAIN} --tp 2", "or a --machine that `magicdec probe --nproc 2` wrote"),
        (f"{PLAIN} --tp 2 --nodes 2", "several ranks need the cost of a link; give --node_link"),
        (f"{PLAIN} --tp 2 --nodes 4", "--nodes 4 does not divide --tp 2"),
        (f"{PLAIN} --tp 2 --link 3", "--link and --link_latency_us go together"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(run: Run, flags: str, message: str) -> None:
    code, out, err = run(flags)
    assert (code, out) == (2, "") and message in err
    assert err.startswith("magicdec plan: ") and err.count("\n") == 1


@pytest.mark.parametrize(("kv_dtype", "size"), [("fp8", 128), ("int8", 128 + 4), ("int4", 4 * 18)])
def test_a_cache_of_codes_is_read_in_its_bytes(kv_dtype: str, size: int) -> None:
    """Llama-3.1-8B has 32 layers of 8 KV heads of 128 numbers."""
    config = find_config("--model", "llama-3.1-8b")
    plain, coded = (
        Deployment(config, Hardware(1e9, 1e9), 2, kv_dtype=dtype).forward(3, 1, 999)
        for dtype in (None, kv_dtype)
    )
    assert plain.kv_bytes == 3 * 1000 * 32 * 2 * 8 * 128 * 2
    assert coded.kv_bytes == 3 * 1000 * 32 * 2 * 8 * size
    assert coded.weight_bytes == plain.weight_bytes


def test_a_cache_of_codes_is_planned(run: Run) -> None:
    code, out, _ = run(f"{BY_HAND} --acceptance 0.8 --kv_dtype int4")
    assert code == 0 and "with K and V in int4 on 1 rank" in out
    for words, message in (
        ("--dtype float32", "--kv_dtype int4: it is for --dtype bfloat16, not float32"),
        ("--model deepseek-v3", "--kv_dtype int4: layers of --model deepseek-v3 keep something el"),
    ):
        code, _, err = run(f"{BY_HAND} --acceptance 0.8 --kv_dtype int4 {words}")
        assert code == 2 and message in err and err.count("\n") == 1


def test_drafts_from_a_copy_of_every_token_are_planned(run: Run, tmp_path: Path) -> None:
    """Llama-3.1-8B, of which a draft reads 36,864 bytes a token in int4, the target 131,072. Both
    are moved once before the first step."""
    out = tmp_path / "plan.jsonl"
    words = "--model llama-3.1-8b --bandwidth 2000 --flops 1e6 --conditional_acceptance 0.93"
    words += f" --B 8 --prefix_len 8192 --max_gamma 2 --kv_policy quantised --out {out}"
    code, text, _ = run(words)
    assert code == 0 and "draft: the model itself over a copy of K and V in int4" in text
    assert "every token: conditional rate 0.93" in text
    (cell,) = json.loads(out.read_text())["cells"]
    assert (cell["gamma"], cell["budget"]) == (2, -1)
    weights_ms = cell["decode_ms"] - 1e3 * 8 * 8193 * 131072 / 2e12
    drafts_ms = 2 * weights_ms + 1e3 * 8 * (8193 + 8194) * 36864 / 2e12
    assert cell["draft_ms"] == pytest.approx(drafts_ms, rel=1e-3)
    assert cell["begin_ms"] == pytest.approx(1e3 * 8 * 8192 * (131072 + 36864) / 2e12)
    for more, message in (
        ("--budget 65", "--kv_policy quantised reads the whole cache"),
        ("--kv_dtype int4", "a copy in --draft_kv_dtype int4 has no fewer bits"),
        ("--draft model:llama-3.2-1b", "a standalone draft is never verified itself"),
    ):
        code, _, err = run(f"{words} {more}")
        assert code == 2 and message in err, err


def test_a_plan_imports_no_torch() -> None:
    code = (
        "import sys; from magicdec.cli import plan; "
        "sys.argv = 'plan --acceptance 0.8 --bandwidth 1 --flops 1'.split()\n"
        "try: plan.main()\nexcept SystemExit as stop: sys.exit(stop.code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
