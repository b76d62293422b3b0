"""The figure of `magicdec acceptance`: tokens a step by context, and acceptance by depth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicdec.bench.acceptance.record import AcceptanceRecord
from magicdec.output.figures import look, saved_figure


def draw(flag: str, path: Path, records: Sequence[AcceptanceRecord]) -> None:
    """Draws each draft with the most draft tokens by context, and its conditional acceptance by
    depth at the longest context. Raises ValueError, naming the flag."""
    longest = max(record.context for record in records)
    with saved_figure(flag, path, (10.0, 4.2), columns=2) as (_, (tokens, depths)):
        for number, draft in enumerate(dict.fromkeys(record.draft for record in records)):
            draft_records = sorted(
                (r for r in records if r.draft == draft), key=lambda r: r.context
            )
            style = look(number)
            marks = {"color": style.colour, "marker": style.marker, "linestyle": style.line}
            values = [record.rows[-1].tokens or 0.0 for record in draft_records]
            ends = [record.rows[-1].tokens_interval for record in draft_records]
            errors = [
                [
                    value - (end[0] if end else value)
                    for value, end in zip(values, ends, strict=True)
                ],
                [
                    (end[1] if end else value) - value
                    for value, end in zip(values, ends, strict=True)
                ],
            ]
            contexts = [record.context for record in draft_records]
            tokens.errorbar(contexts, values, yerr=errors, capsize=2, label=draft, **marks)
            last = draft_records[-1]
            if last.context == longest:
                known = [row for row in last.rows if row.conditional is not None]
                rates = [depth.conditional or 0.0 for depth in known]
                depths.plot([depth.depth for depth in known], rates, label=draft, **marks)
        contexts = sorted({record.context for record in records})
        tokens.set_xscale("log", base=2)
        tokens.set_xticks(contexts, list(map(str, contexts)))
        depths.set_xticks(range(1, max(record.gamma for record in records) + 1))
        gamma = max(record.gamma for record in records)
        tokens.set_xlabel("context (tokens)")
        tokens.set_ylabel(f"tokens a step, gamma {gamma}")
        depths.set_xlabel("draft token")
        depths.set_ylabel(f"accepted, given all before, at {longest}")
        depths.set_ylim(0, 1)
        tokens.legend(fontsize="small")
