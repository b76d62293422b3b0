"""`magicdec latency`: its flags, the order of its forwards, how ranks' times become rows, and the
memory plan of a grid, held to the caches that its forwards make."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_runner, tiny_transformer
from recorder import StandInRecorder
from torch import Tensor, nn

from magicdec.attention.sdpa import SDPABackend
from magicdec.bench.latency import forwards
from magicdec.bench.latency.forwards import (
    check_grid_memory,
    fill,
    make_forwards,
    plan_place,
    seconds_of_products,
    time_once,
    time_place,
)
from magicdec.bench.latency.record import (
    FROM_A_CACHE,
    SLOWER_ALONE,
    LatencyCell,
    LatencyGrid,
    LatencyRecord,
    LatencyRow,
    TimedCell,
    break_even_table,
    summarise,
    tables,
)
from magicdec.bench.roofline import expert_bytes, kv_bytes_per_token
from magicdec.cli.latency import largest_run, parse, prepare
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import AttentionSection, KVSection, ModelSection
from magicdec.distributed.groups import Group, Launch
from magicdec.model.config import ExpertsConfig, LayerKind
from magicdec.model.experts import Experts
from magicdec.model.linear.packed import PackedLinear, first_outputs, pack
from magicdec.model.linear.quantizers import INT4
from magicdec.output.tables import Shown
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.prefill import take
from magicdec.runner.request import Request
from magicdec.runner.step_plan import PrefillChunk
from magicdec.setup.memory_plan import Models
from magicdec.speculation.policies.verified import VerifiedKV
from magicdec.speculation.steps.recorder import Eager

SMALL = {"num_sink_tokens": 4, "window_size": 8}
DRAFTS = tuple(
    KVSection(policy, budget, **SMALL)
    for policy, budget in (("streaming_llm", 24), ("snapkv", 24), ("verified", 40), ("full", -1))
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--T 32 --kv_policy verified", "--T 32 is too large for --kv_policy verified; "),
        ("--budget 65 16", "--budget 16 must be larger than --num_sink_tokens 16"),
        (
            "--budget 20 --kv_policy verified --recent_window 9",
            "--recent_window 9 does not fit --budget 20 beside --num_sink_tokens 16",
        ),
        (
            "--budget 65 --kv_policy full",
            "--budget does nothing here: no policy of --kv_policy full",
        ),
        ("--out .", "--out .: Is a directory; name a file"),
    ],
)
def test_bad_flags_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse(flags.split())
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_the_grid_is_every_policy_with_every_budget_and_the_decode(tmp_path: Path) -> None:
    out = tmp_path / "new" / "l.json"
    flags = "--T 8 2 --kv_policy full verified --budget 40 33 --num_sink_tokens 4 --dtype float32"
    config, grid, _ = parse([*flags.split(), "--out", str(out)])
    assert grid.new_tokens == (1, 2, 8)
    drafts = [(kv.policy, kv.budget, kv.num_sink_tokens) for kv in grid.drafts]
    assert drafts == [("full", -1, 4), ("verified", 40, 4), ("verified", 33, 4)]
    assert config.model.dtype == "float32" and not out.parent.exists()


def test_backends_that_are_one_here_are_not_measured_twice() -> None:
    flags = "--B 1 --prefix_len 64 --T 2 --budget 33 --dtype float32 --device cpu"
    asked, grid, args = parse([*flags.split(), "--attention", "sdpa", "auto"])
    assert args.attention == ("sdpa", "auto")
    runs = prepare(asked, args.attention, grid, Launch())
    first, second = (str(run.config.attention.backend) for run, _ in runs)
    assert first == "sdpa" != second
    with pytest.raises(ValueError, match=f"^--attention {second} auto are both {second} here; "):
        prepare(asked, (second, "auto"), grid, Launch())


def names(cells: Sequence[LatencyCell]) -> list[tuple[str, int, str | None]]:
    return [(c.phase, c.T, c.kv_policy) for c in cells]


def test_forwards_take_turns_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round has each forward once, the next in the opposite order; the warm-up is not
    kept."""
    ran: list[LatencyCell] = []

    def record(forward: forwards.TimedForward, *args: object) -> float:
        ran.append(forward.cell)
        return time_once(forward, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(forwards, "time_once", record)
    grid = LatencyGrid((2,), (50,), (1, 3), DRAFTS, repeats=2, warmup=1)
    config = resolve(RunConfig(attention=AttentionSection("grouped")), Machine(2))
    place = tiny_transformer(), Group((0,), 0), config, grid, 2, 50
    timings = time_place(*place, advance=lambda: None)
    cells = [cell for cell, *_ in timings]
    assert names(cells) == [
        ("decode", 1, None),
        ("verify", 3, None),
        ("verify", 3, "verified"),
        ("draft", 1, "streaming_llm"),
        ("draft", 1, "snapkv"),
        ("first_draft", 1, "verified"),
        ("draft", 1, "verified"),
        ("draft", 1, "full"),
    ]
    assert ran == [*cells, *reversed(cells), *cells]
    assert [len(seconds) for _, seconds, *_ in timings] == [2] * len(cells)


def test_every_forward_finds_and_leaves_the_cache_at_its_context() -> None:
    runner = make_runner(tiny_transformer(), 3, 70)
    batch = fill(runner, 61)
    grid = LatencyGrid((3,), (61,), (1, 2, 5), DRAFTS, repeats=1, warmup=0)
    seen = []
    for forward in make_forwards(runner, batch, grid, 61):
        for _ in range(2):
            time_once(forward, runner, runner.group)
            assert runner.cache.lengths == [61] * 3 == runner.cache.seq_lens.tolist()
        assert forward.counts is not None and forward.counts.num_forwards == 1
        seen.append(forward.counts.kv_tokens_read)
    # verify T 2 and 5 also watched; verified: sinks 4, one block 16, the newest 61 - 48 = 13
    assert seen == [3 * n for n in (62, 63, 63, 66, 66, 25, 25, 34, 34, 62)]


def noted(ran: list[tuple[int, Tensor, int]], run: Any, layer: int, *heads: Any) -> Tensor:
    """A backend's `run`, which notes the layer, the queries and the keys that they see."""
    ran.append((layer, heads[0], sum(heads[-1].num_visible)))
    return run(layer, *heads)


def test_the_end_of_a_prefill_is_that_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of at most the context, of one row, once for the first batch size: it computes what
    `prefill` computes of such a part, and its attention is that of every layer, once."""
    kinds = (LayerKind(window=20), LayerKind(), LayerKind(window=20))
    model = tiny_transformer(replace(TINY, layer_kinds=kinds, num_layers=3))
    for B, chunk, expected in ((2, 16, [(1, 50, 16)]), (2, 80, [(1, 50, 50)]), (1, 16, [])):
        runner = make_runner(model, B, 58)
        batch = fill(runner, 50)
        grid = LatencyGrid((2, 1), (50,), (1, 3), DRAFTS[:1], 1, 0, prefill_chunk=chunk)
        made = [f for f in make_forwards(runner, batch, grid, 50) if f.cell.phase == "prefill"]
        assert [(f.cell.B, f.cell.context, f.cell.T) for f in made] == expected
        ran = list[tuple[int, Tensor, int]]()
        for backend in runner.backends:
            monkeypatch.setattr(backend, "run", partial(noted, ran, backend.run))
        for forward in made:
            tokens = forward.cell.T
            before = runner.cache.lengths[:]
            time_once(forward, runner, runner.group)
            in_forward = [(layer, q.shape, seen) for layer, q, seen in ran]
            ran.clear()
            assert forwards.seconds_of_attention(forward) > 0
            alone = [(layer, q.shape, seen) for layer, q, seen in ran]
            assert alone == in_forward * (1 + forwards.ATTENTION_TRIES)
            assert runner.cache.lengths == before == runner.cache.seq_lens.tolist()
            seen_by_window = {min(19, 50 - tokens), 50 - tokens}
            assert {seen for *_, seen in in_forward} == seen_by_window
            # As `prefill` takes the same tokens after the same ones.
            forward.prepare()
            forward.run()
            end = torch.arange(50 - tokens, 50).unsqueeze(0)
            cached = [runner.caches.read(n, torch.tensor([0]), end) for n in range(3)]
            ids = forwards.new_ids(runner, tokens)[0].tolist()
            beginning = batch.requests[0].prompt_ids[: 50 - tokens]
            request = Request(0, (*beginning, *ids, 0), forwards.GREEDY, row=0)
            runner.truncate([0], [50 - tokens])
            part = PrefillChunk(request, 0, 50 - tokens, 50)
            assert take(runner, part, tokens) is None
            again = [runner.caches.read(n, torch.tensor([0]), end) for n in range(3)]
            for (k, v), (other_k, other_v) in zip(cached, again, strict=True):
                assert torch.equal(k, other_k) and torch.equal(v, other_v)


def test_recorded_forwards_do_what_the_others_do() -> None:
    """The same tokens chosen, the same keys read, the cache left at its context."""
    grid = LatencyGrid((3,), (61,), (1, 2, 5), DRAFTS, repeats=1, warmup=0)
    found: list[list[Any]] = []
    for recorder in (Eager(), StandInRecorder()):
        runner = make_runner(tiny_transformer(), 3, 70, SDPABackend(16))
        results: list[Any] = []
        for forward in make_forwards(runner, fill(runner, 61), grid, 61, recorder):
            for _ in range(2):
                time_once(forward, runner, runner.group)
                assert runner.cache.lengths == [61] * 3 == runner.cache.seq_lens.tolist()
            assert forward.counts is not None
            ids = forward.run().tolist()
            forward.undo()
            results.append((forward.cell, ids, forward.counts))
        found.append(results)
    assert found[0] == found[1]


def test_a_forward_ends_in_chosen_tokens_and_a_watch_is_told() -> None:
    runner = make_runner(tiny_transformer(), 2, 64)
    batch = fill(runner, 50)
    whole = runner.forward
    watched = []

    def forward(batch: ForwardBatch) -> torch.Tensor:
        watched.append(bool(runner.observers or batch.observers))
        return whole(batch)

    grid = LatencyGrid((2,), (50,), (1, 4), DRAFTS, repeats=1, warmup=0)
    made = list(make_forwards(runner, batch, grid, 50))
    runner.forward = forward  # type: ignore[method-assign]
    for f in made[:3]:
        ids = f.run()
        assert (ids.shape, ids.dtype) == ((2, f.cell.T), torch.int64) and int(ids.max()) < 97
        f.undo()
    assert watched == [False, False, True]
    assert [f.run().shape for f in made[3:]] == [(2, 1)] * (len(DRAFTS) + 1)


def test_only_a_first_draft_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy that watches chooses once a verification, wherever rounds begin."""
    chosen: list[int] = []
    top_blocks = VerifiedKV.top_blocks

    def record(policy: VerifiedKV, committed: Tensor, mass: Tensor, most: int) -> Tensor:
        chosen.append(mass.shape[1])
        return top_blocks(policy, committed, mass, most)

    monkeypatch.setattr(VerifiedKV, "top_blocks", record)
    runner = make_runner(tiny_transformer(), 2, 64)
    grid = LatencyGrid((2,), (50,), (1, 2), DRAFTS[2:3], repeats=1, warmup=0)
    made = {f.cell.phase: f for f in make_forwards(runner, fill(runner, 50), grid, 50)}
    counts = []
    for phase in ("first_draft", "draft", "verify", "draft", "first_draft"):
        chosen.clear()
        time_once(made[phase], runner, runner.group)
        counts.append(len(chosen))
    assert counts == [1, 0, 0, 0, 1]


def test_the_cache_is_filled_with_keys_to_choose_by() -> None:
    runner = make_runner(tiny_transformer(), 2, 40)
    fill(runner, 33)
    for pool in (runner.cache.k, runner.cache.v):
        assert 0.9 < pool.std() < 1.1
        tokens = pool.flatten(0, -2)
        layer = tokens[: len(tokens) // TINY.num_layers]
        assert len(layer.unique(dim=0)) == len(layer)


def test_a_repeat_lasts_as_long_as_its_slowest_rank() -> None:
    cell = LatencyCell("draft", 4, 100, 1, 24, "snapkv")
    ranks = [
        [TimedCell(cell, [1.0, 4.0, 2.0], 600, 0.6, 2.5, 1.5)],
        [TimedCell(cell, [3.0, 1.0, 2.0], 400, 0.9, 2.5, 1.2)],
    ]
    (row,) = summarise(ranks, bandwidth=1000.0)
    assert (row.ms_median, row.ms_p10, row.ms_p90) == pytest.approx((3e3, 2.2e3, 3.8e3))
    assert (row.bytes, row.tokens) == (1000, 4)
    assert row.roofline_fraction == pytest.approx(1000 / 1000.0 / 3.0)
    assert row.products_fraction == pytest.approx(0.9 / 3.0)
    assert row.attention_fraction == pytest.approx(1.5 / 3.0)
    assert (row.experts_read, row.experts_by_chance) == (2.5, None)


def test_a_share_above_100_percent_is_null_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that took longer by themselves than in the forward, and bytes from a cache, are no
    shares; the whole of the time is one."""
    cell = LatencyCell("decode", 1, 100, 1)
    rows = [
        summarise([[TimedCell(cell, [1.0], num_bytes, products, None, attention)]], 100.0)[0]
        for num_bytes, products, attention in ((100, 1.0, 1.0), (101, 0.5, 1.2), (50, 1.01, None))
    ]
    assert [row.roofline_fraction for row in rows] == [1.0, None, 0.5]
    assert [row.products_fraction for row in rows] == [1.0, 0.5, None]
    assert [row.attention_fraction for row in rows] == [1.0, None, None]
    assert [row.roofline_reason for row in rows] == [None, FROM_A_CACHE, None]
    assert [row.products_reason for row in rows] == [None, None, SLOWER_ALONE]
    monkeypatch.setattr("magicdec.bench.latency.record._title", lambda record: "")
    record = LatencyRecord.__new__(LatencyRecord)
    object.__setattr__(record, "rows", rows)
    (table,) = tables([record])
    shares = [["100.0 %", "100.0 %"], ["-", "50.0 %"], ["50.0 %", "-"]]
    assert [cells[-3:-1] for cells in table.body if cells] == shares
    assert [line.rpartition(": more than")[0] for line in table.below] == [
        "of bytes, where none is shown",
        "of products, where none is shown",
    ]


def test_other_programs_only_add_to_the_time_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the times of a product by itself the least counts: all others waited for a core."""
    times = itertools.cycle([5.0] * (forwards.TRIES - 1) + [0.5])
    monkeypatch.setattr(forwards, "seconds_of", lambda *args: next(times))
    model = tiny_transformer()
    quiet = seconds_of_products(model, 3, torch.device("cpu"))
    monkeypatch.setattr(forwards, "seconds_of", lambda *args: 0.5)
    assert seconds_of_products(model, 3, torch.device("cpu")) == quiet


def test_a_mixtures_forwards_are_shown_with_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three layers have experts, each of which reads those that its tokens go to."""
    experts = ExpertsConfig(16, 2, 8)
    kinds = (LayerKind(), LayerKind(has_mlp=True), LayerKind())
    model = tiny_transformer(replace(TINY, experts=experts, layer_kinds=kinds, num_layers=3))
    read = list[int]()

    def note(layer: Experts, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        chosen, _ = layer.route(inputs[0].flatten(0, -2))
        read.append(len(chosen.unique()))

    for layer in (module for module in model.modules() if isinstance(module, Experts)):
        layer.register_forward_hook(note)
    grid = LatencyGrid((2,), (20,), (1, 4), DRAFTS[-1:], 1, 0)
    timings = time_place(model, Group((0,), 0), CONFIG, grid, 2, 20, lambda: None)
    rows = summarise([timings], 1e9, experts)
    assert [(row.phase, row.tokens) for row in rows] == [("decode", 2), ("verify", 8), ("draft", 2)]
    assert [row.experts_read for row in rows] == [sum(read[i : i + 2]) / 2 for i in (0, 2, 4)]
    by_chance = [16 * (1 - (14 / 16) ** row.tokens) for row in rows]
    assert [row.experts_by_chance for row in rows] == pytest.approx(by_chance)
    expert_total, number = expert_bytes(model)
    new_kv = 2 * 3 * kv_bytes_per_token(model)  # of three tokens more in each of two rows
    more_bytes = expert_total // number * (sum(read[2:4]) - sum(read[:2]))
    assert rows[1].bytes - rows[0].bytes == new_kv + more_bytes
    monkeypatch.setattr("magicdec.bench.latency.record._title", lambda record: "")
    dense = replace(rows[0], experts_read=None, experts_by_chance=None)
    for shown, headings in ((rows, ["experts", "by chance"]), ([dense], [])):
        record = LatencyRecord.__new__(LatencyRecord)
        object.__setattr__(record, "rows", shown)
        (table,) = tables([record])
        assert [
            column for column in table.columns if column in ("experts", "by chance")
        ] == headings
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize("linear", ["torch", "packed", "packed, int4"])
def test_products_by_themselves_are_those_of_the_first_outputs(linear: str) -> None:
    layer = nn.Linear(64, 3000)
    if linear == "packed, int4":
        whole = PackedLinear(INT4(layer.weight), layer.bias)
    else:
        whole = layer if linear == "torch" else pack(layer)
    part = first_outputs(whole, 10_000)
    x = torch.randn(3, 64)
    assert 0 < part.out_features < 3000
    assert torch.equal(part(x), whole(x)[:, : part.out_features])
    assert seconds_of_products(tiny_transformer(), 3, torch.device("cpu")) > 0


ALONE = Launch(0, 1, 0, 1)
MODELS = Models(TINY)
PLANNED = (
    KVSection("snapkv", 24, 4, window_size=8),
    KVSection("streaming_llm", 24, 4),
    KVSection("snapkv", 40, 4, window_size=8),
    KVSection("full", -1),
)
GRID = LatencyGrid((1, 3), (60, 200), (1, 5), PLANNED, 1, 0)
CONFIG = resolve(
    RunConfig(model=ModelSection(dtype="float32"), attention=AttentionSection("grouped")),
    Machine(2),
)


@pytest.mark.parametrize("context", GRID.contexts)
@pytest.mark.parametrize("B", GRID.batch_sizes)
def test_caches_are_those_of_the_forwards(B: int, context: int, made: list[int]) -> None:
    runner = make_runner(tiny_transformer(), B, context + 5, max_following=5)
    list(make_forwards(runner, fill(runner, context), GRID, context))
    plan = plan_place(CONFIG, GRID, MODELS, ALONE, B, context)
    assert made[0] == plan.kv and sum(made[1:]) == plan.draft_kv and len(made) == 3


def test_the_largest_place_is_shown_and_what_does_not_fit_refused() -> None:
    most = max(
        plan_place(CONFIG, GRID, MODELS, ALONE, B, context).total
        for B in GRID.batch_sizes
        for context in GRID.contexts
    )
    line = check_grid_memory(CONFIG, GRID, MODELS, ALONE, most)
    assert "on this host at --B 3 --prefix_len 200; " in line and line.endswith("GB free")
    assert "not known" in check_grid_memory(CONFIG, GRID, MODELS, ALONE, None)
    with pytest.raises(ValueError, match=r"^--B 3 --prefix_len 200 needs .* GB are free$"):
        check_grid_memory(CONFIG, GRID, MODELS, ALONE, most - 1)


def test_a_grid_of_decodes_alone() -> None:
    grid = replace(GRID, new_tokens=(1,), drafts=PLANNED[3:])
    plan = plan_place(CONFIG, grid, MODELS, ALONE, 3, 200)
    assert plan.kv == 3 * 201 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert plan.draft_kv == 0


def test_auto_is_decided_for_the_whole_grid() -> None:
    """By its largest cells and by the policy that asks most: what auto takes serves every cell."""
    flags = "--B 2 8 --prefix_len 100 1000 --T 1 4 --kv_policy streaming_llm verified --budget 129"
    config, grid, _ = parse(flags.split())
    run = largest_run(config, grid)
    assert (run.workload.batch_size, run.workload.prefix_len) == (8, 1000)
    assert (run.decoding.max_gamma, run.kv.policy) == (3, "verified")
    machine = Machine(2, has_cuda=True, missing_backends={"triton": "no triton"})
    resolved = resolve(run, machine)
    assert resolved.attention.backend == "sdpa" and resolved.decoding.cuda_graphs == "on"
    assert "flash_attn does not return attention weights" in resolved.attention.backend.why
    config, grid, _ = parse(flags.replace("streaming_llm verified", "snapkv").split())
    assert resolve(largest_run(config, grid), machine).attention.backend == "flash_attn"
    window = ModelTraits(sliding_window=1002)
    assert resolve(largest_run(config, grid), machine, window).attention.backend == "sdpa"
    decodes = replace(grid, new_tokens=(1,))
    assert largest_run(config, decodes).decoding.max_gamma == 1


def timed(cell: LatencyCell, ms: float) -> LatencyRow:
    numbers = {"tokens": cell.B * cell.T, "bytes": 1, "roofline_fraction": 1.0}
    return LatencyRow(**vars(cell), ms_median=ms, ms_p10=ms, ms_p90=ms, **numbers)


def test_drafting_pays_from_the_time_of_a_step_by_that_of_a_decode_step() -> None:
    """By hand, at two places: drafts, and those of a policy that chooses in its first draft and is
    verified by a forward that is watched."""
    rows = []
    for B, decode in ((1, 10.0), (4, 20.0)):
        for cell, ms in (
            (LatencyCell("decode", B, 99, 1), decode),
            (LatencyCell("verify", B, 99, 2), 11.0),
            (LatencyCell("verify", B, 99, 2, kv_policy="verified"), 12.0),
            (LatencyCell("verify", B, 99, 5), 15.0),
            (LatencyCell("verify", B, 99, 5, kv_policy="verified"), 17.0),
            (LatencyCell("draft", B, 99, 1, 65, "streaming_llm", "int4"), 2.0),
            (LatencyCell("first_draft", B, 99, 1, 65, "verified"), 7.0),
            (LatencyCell("draft", B, 99, 1, 65, "verified"), 3.0),
        ):
            rows.append(timed(cell, ms))
    record = LatencyRecord.__new__(LatencyRecord)
    object.__setattr__(record, "rows", rows)
    table = break_even_table(record)
    lines = [line for line in table.rows if len(line) == 5]
    expected = {
        "prompt lookup": (1.1, 1.5),
        "streaming_llm 65, int4 weights": (1.3, 2.3),
        "verified 65": (1.9, 3.3),
    }
    assert [line[2] for line in lines] == [*expected, *expected]
    found = [[cell.value for cell in line[3:] if isinstance(cell, Shown)] for line in lines]
    for row, at_one, at_four in zip(expected.values(), found[:3], found[3:], strict=True):
        assert at_one == pytest.approx(row)
        assert at_four == pytest.approx([number / 2 for number in row])
