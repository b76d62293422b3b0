"""Of what the figures of a report draw."""

from __future__ import annotations

from faults.fault import Fault, Property

DRAWN = "test_report_drawn.py::"
PASSES = "bench/report/figures/passes.py"
SERVED = "bench/report/figures/served.py"
PANELS = "bench/report/figures/panels.py"

ACROSS = "rows[x].astype(float) / scale,\n"
UP = "rows[y].astype(float) / scale,\n"

PROPERTIES = (
    Property(
        "Marks, lines and their intervals are where the axes say, in the colour of their series.",
        f"{DRAWN}test_marks_are_where_the_axes_say",
        (
            Fault(
                "the prefill of others in the speed of a request",
                PASSES,
                'TPOT = "request_step_ms"',
                'TPOT = "mean_tpot_ms"',
            ),
            Fault(
                "the mean TPOT of a loop as its median",
                SERVED,
                'known["p50_tpot_ms"].astype',
                'known["mean_tpot_ms"].astype',
            ),
            Fault(
                "the median TTFT as p90",
                SERVED,
                'draw_marks(ax, series, "p90_ttft_ms", metric)',
                'draw_marks(ax, series, "p50_ttft_ms", metric)',
            ),
            Fault(
                "the axes of marks exchanged",
                PANELS,
                f"{ACROSS}            {UP}",
                f"{UP}            {ACROSS}",
            ),
            Fault(
                "intervals of another metric",
                PANELS,
                'ends = [f"{y}_interval_low", f"{y}_interval_high"]',
                'ends = ["net_speedup_interval_low", "net_speedup_interval_high"]',
            ),
            Fault(
                "a bar's ends exchanged",
                PANELS,
                "yerr=[middle - low, high - middle]",
                "yerr=[high - middle, middle - low]",
            ),
            Fault(
                "the bytes of a median step",
                PASSES,
                'rows["mean_step_ms"].astype(float) / 1e3',
                'rows["median_step_ms"].astype(float) / 1e3',
            ),
            Fault(
                "marks without their unit",
                PASSES,
                "draw_marks(ax, series, x, y, GB)",
                "draw_marks(ax, series, x, y)",
            ),
            Fault(
                "the net speedup against acceptance",
                PASSES,
                'draw_marks(ax, series, "draft_acceptance_rate", "speedup")',
                'draw_marks(ax, series, "draft_acceptance_rate", "net_speedup")',
            ),
            Fault(
                "a series in another colour",
                PANELS,
                "{name: look(i) for i, name in enumerate(sorted(choose(drafting, most)))}",
                "{name: look(0) for i, name in enumerate(sorted(choose(drafting, most)))}",
            ),
        ),
    ),
    Property(
        "A front goes through what no pass of a quiet host beats, with its batch size.",
        f"{DRAWN}test_a_front_goes_through_its_passes_and_says_their_batch_size",
        (
            Fault(
                "passes of a busy host on a front",
                PASSES,
                "pareto(quiet(rows[is_kind]), X, Y)",
                "pareto(rows[is_kind], X, Y)",
            ),
            Fault(
                "the baselines' front as that of drafts",
                PASSES,
                "drawn = ax.plot(front[X], front[Y], line,",
                "drawn = ax.plot(front[Y], front[X], line,",
            ),
        ),
    ),
    Property(
        "The roof is the median of the measured bandwidths, in their range.",
        f"{DRAWN}test_the_roof_is_the_measured_bandwidth",
        (
            Fault(
                "the best bandwidth as the roof",
                PASSES,
                'roofs.quantile(interpolation="higher")',
                "roofs.max()",
            ),
        ),
    ),
    Property(
        "A dotted line is where its drafter pays: emitted tokens over the speedup.",
        f"{DRAWN}test_a_dotted_line_is_where_its_drafter_pays",
        (
            Fault(
                "where drafts pay upside down",
                PASSES,
                "pays_from = emitted / speedups",
                "pays_from = speedups / emitted",
            ),
        ),
    ),
    Property(
        "Of repeated runs of a context those of a quiet host are drawn.",
        f"{DRAWN}test_repeated_runs_of_a_context_are_those_of_a_quiet_host",
        (
            Fault(
                "runs of a busy host in the median",
                PASSES,
                "summarize(quiet(same), metric)",
                "summarize(same, metric)",
            ),
        ),
    ),
    Property(
        "A draft position has its own share and interval.",
        f"{DRAWN}test_a_position_has_its_own_share_and_interval",
        (
            Fault(
                "positions from 0 on",
                PASSES,
                "zip(shares, intervals, counts, strict=True), 1\n",
                "zip(shares, intervals, counts, strict=True), 0\n",
            ),
            Fault(
                "the upper end of an interval as its lower one",
                PASSES,
                '"low": (ends or [share])[0],',
                '"low": (ends or [share])[-1],',
            ),
        ),
    ),
    Property(
        "A cell of a map is at its batch size and prefix length, with its own numbers.",
        f"{DRAWN}test_a_cell_is_at_its_batch_size_and_prefix_length",
        (
            Fault(
                "prefix lengths from above",
                PASSES,
                'y = shades.index.get_loc(cell["prefix_len"])',
                'y = len(shades) - 1 - shades.index.get_loc(cell["prefix_len"])',
            ),
            Fault(
                "the colour of the steps",
                PASSES,
                "shades = table[NET].astype",
                'shades = table["speedup"].astype',
            ),
            Fault(
                "net speedups as those of steps",
                PASSES,
                """f"steps {cell['speedup']:.2f}x\\n\"""",
                """f"steps {cell[NET]:.2f}x\\n\"""",
            ),
        ),
    ),
    Property(
        "Phases are beside each other and make up the mean step.",
        f"{DRAWN}test_phases_are_beside_each_other_and_make_up_the_step",
        (
            Fault("phases on top of each other", PASSES, "left += widths", "left += 0"),
            Fault(
                "phases of a drafting step in each",
                PASSES,
                "values = weight * passes",
                "values = 1 * passes",
            ),
            Fault(
                "the median step of the baseline",
                "bench/report/frame.py",
                "reference.metrics.mean_step_ms",
                "reference.metrics.median_step_ms",
            ),
            Fault(
                "ticks half a bar too low",
                PASSES,
                "bars.index - 0.42, bars.index + 0.42",
                "bars.index, bars.index + 0.84",
            ),
            Fault(
                "the net speedup at the end of a bar",
                PASSES,
                '"speedup": "{:.2f}x"}  #',
                '"net_speedup": "{:.2f}x"}  #',
            ),
        ),
    ),
    Property(
        "A mark of a closed loop says how many requests are in flight.",
        f"{DRAWN}test_a_line_of_a_closed_loop_says_how_many_are_in_flight",
        (
            Fault(
                "numbers in flight in another order",
                SERVED,
                'zip(x, y, ordered["concurrency"], strict=True)',
                'zip(x, y, ordered["concurrency"][::-1], strict=True)',
            ),
        ),
    ),
    Property(
        "A bar is that of its mode, command and metric.",
        f"{DRAWN}test_a_bar_is_that_of_its_mode_command_and_metric",
        (
            Fault(
                "the median TTFT as the mean",
                SERVED,
                '"mean_ttft_ms": "mean time',
                '"p50_ttft_ms": "mean time',
            ),
            Fault(
                "bars in the order of their command",
                SERVED,
                'rows["pass"].map(modes.index) + (index',
                "np.arange(len(rows)) + (index",
            ),
            Fault(
                "labels of other bars",
                SERVED,
                'for value in rows["value"]]',
                'for value in rows["value"][::-1]]',
            ),
        ),
    ),
    Property(
        "A strip is the load of its own stage.",
        f"{DRAWN}test_a_strip_is_the_load_of_its_stage",
        (
            Fault(
                "strips from below",
                SERVED,
                '"parts": stage.parts,',
                '"parts": record.details.stages()[-1 - number].parts,',
            ),
        ),
    ),
)
