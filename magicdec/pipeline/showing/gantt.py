"""The Gantt charts of a ring as it was measured: which sample every stage computed when, and where
every sample was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from magicdec import gantt
from magicdec.gantt import Bar, Look, Panel
from magicdec.pipeline.tracing import RingTrace

# Light, so that the text on a bar can be read.
COLOURS = (
    *("#8ecae6", "#ffb703", "#95d5b2", "#f4a6a0", "#c8b6ff", "#d4a373", "#ffd6a5", "#a3cef1"),
    *("#e9c46a", "#b5e48c"),
)
PROMPT, HEAD, DECODE = "prompt", "head, sampling, drafting and scheduling", "decoding"
LEGEND = {
    DECODE: Look("#d9d9d9"),
    PROMPT: Look("#d9d9d9", hatch="////"),
    HEAD: Look("#555555", height=0.3),
}
SHOWN_SPANS = 60  # of the slowest stage, of messages that decode: what a chart shows
SHOWN_BEFORE = 0.25  # of that is shown before the last stage computes the first of these messages


def draw_ring(flag: str, path: Path, trace: RingTrace, until_ms: float | None) -> None:
    """Draw both charts, of the first `until_ms`. Without it, they show how the first
    samples begin to decode. Raises ValueError, naming the flag, if there are too many rows or the
    file cannot be written."""
    origin_s = trace.stages[0][0][0]
    end_s = max(end for spans in [*trace.stages, trace.head] for _, end in spans) - origin_s
    begin_s, until_s = decoding_window(trace) if until_ms is None else (0.0, until_ms / 1e3)
    gantt.draw(flag, path, panels_of(trace, origin_s, begin_s, min(until_s, end_s)), LEGEND)


def decoding_window(trace: RingTrace) -> tuple[float, float]:
    """When the time that is shown begins and ends, in seconds after the first message began. A
    trace in which nothing decodes is shown from its beginning."""
    are_prompts = trace.are_prompts if not all(trace.are_prompts) else [False] * len(trace.samples)
    shown = [
        [span for span, is_prompt in zip(spans, are_prompts, strict=True) if not is_prompt]
        for spans in trace.stages
    ]
    length_s = SHOWN_SPANS * max(sum(e - b for b, e in spans) / len(spans) for spans in shown)
    first_s = shown[-1][0][0] - trace.stages[0][0][0]
    begin_s = max(0.0, first_s - SHOWN_BEFORE * length_s)
    return begin_s, begin_s + length_s


def panels_of(trace: RingTrace, origin_s: float, begin_s: float, until_s: float) -> list[Panel]:
    """Both charts between two times after `origin_s`."""
    bars = [
        bar for bar in bars_of(trace, origin_s)
        if bar[1].begin_s < until_s and bar[1].end_s > begin_s
    ]  # fmt: skip
    samples = sorted({sample for each, _ in bars for sample in each})
    place = {sample: row for row, sample in enumerate(samples)}
    error = f" (clocks within {1e3 * trace.clock_error_s:.2f} ms)" if trace.clock_error_s else ""
    names = [f"stage {n}" for n in range(len(trace.stages))]
    of_stages = [bar for _, bar in bars]
    of_samples = [
        Bar(place[sample], bar.begin_s, bar.end_s, look_of(sample, bar.look), str(bar.row))
        for each, bar in bars for sample in each if bar.look is not LEGEND[HEAD]
    ]  # fmt: skip
    return [
        Panel(f"stages, and the sample that each computes{error}", names, of_stages, until_s,
              begin_s=begin_s),
        Panel("samples, and the stage that computes each",
              [f"sample {sample}" for sample in samples], of_samples, until_s,
              begin_s=begin_s),
    ]  # fmt: skip


def bars_of(trace: RingTrace, begin_s: float) -> Iterator[tuple[Sequence[int], Bar]]:
    """The bars of the chart of stages, each with its samples."""
    for stage, spans in enumerate(trace.stages):
        messages = zip(spans, trace.samples, trace.are_prompts, strict=True)
        for (begin, end), samples, is_prompt in messages:
            look = look_of(samples[0], LEGEND[PROMPT if is_prompt else DECODE])
            text = ",".join(map(str, samples))
            yield samples, Bar(stage, begin - begin_s, end - begin_s, look, text)
    for begin, end in trace.head:
        yield (), Bar(0, begin - begin_s, end - begin_s, LEGEND[HEAD])


def look_of(sample: int, look: Look) -> Look:
    """The same look in the colour of the sample."""
    return Look(COLOURS[sample % len(COLOURS)], look.height, look.hatch)
