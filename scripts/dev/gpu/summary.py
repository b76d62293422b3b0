"""One page, `summary.md`, from the files of the stages that are there, with the measured value of
each goal of the suite. Measures nothing."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from gpu.predict import predictions
from gpu.results import load_cells, read_file
from gpu.scale import Suite

# (goal, wanted, (phase, T), B, S, budget) for whole forwards of the 8B model, as a share of their
# roofline. 76 % means 1.2 times the roofline's time, plus 10 %.
ROOFLINES = (
    ("decode step, B=1, S=4096", "at least 65 %", ("decode", 1), 1, 4096, None),
    ("decode step, B=32, S=32768", "at least 75 %", ("decode", 1), 32, 32768, None),
    ("draft step, budget 513, B=32, S=16384", "at least 76 %", ("draft", 1), 32, 16384, 513),
)

# Of drafts in few bits: milliseconds of a step by rows, and speedups by place.
DRAFT_STEPS = {1: 1.9, 28: 2.6}
DRAFT_RUNS = {(1, 32768): 1.4, (28, 32768): 2.3, (8, 16384): 1.3}


def run(suite: Suite) -> None:
    peers = load_cells(suite.directory / "peers.json")
    page = "\n".join(lines(goals(suite.directory), peers, predictions(suite)) + stages(suite))
    (suite.directory / "summary.md").write_text(page + "\n")
    print(page)


def copied_per_s(directory: Path) -> float | None:
    """Bytes per second of a copy, of the stage or the part of `quick` that measured it."""
    for stage in ("attention", "broken"):
        cells = load_cells(directory / f"{stage}.json")
        if "copy_bandwidth" in cells:
            return float(cells["copy_bandwidth"]["bytes_per_s"])
    return None


def goals(directory: Path) -> list[dict[str, Any]]:
    """The measured value of each goal, or None."""
    attention = load_cells(directory / "broken.json") | load_cells(directory / "attention.json")
    copied = copied_per_s(directory)
    rows = [row for cell in load_cells(directory / "llama31.json").values() for row in cell["rows"]]
    prefix = "llama-3.1-8b/B32/S16384/"
    shares = {
        name.removeprefix(prefix): cell["1"]["of_copy"]
        for name, cell in attention.items()
        if name.startswith(prefix)
    }
    best = max(shares, key=lambda name: shares[name], default=None)
    found = [
        {
            "goal": "decode attention, B=32, S=16384, 8 KV heads of 128: share of the copy",
            "wanted": "at least 75 %",
            "measured": None if best is None else shares[best],
            "by": best,
        }
    ]
    for goal, wanted, (phase, T), B, S, budget in ROOFLINES:
        row = largest(rows, phase, T, B, S, budget)
        roofline_share = None
        if row is not None and copied is not None:
            roofline_share = row["bytes"] / copied / (row["ms_median"] / 1e3)
        found.append(goal_of(f"{goal}: share of its roofline", wanted, roofline_share, row))
    decode, verify = (largest(rows, *kind, 32, 32768) for kind in (("decode", 1), ("verify", 5)))
    ratio = None
    if decode is not None and verify is not None:
        ratio = verify["ms_median"] / decode["ms_median"]
    goal = "verification of 5 tokens in decode steps, B=32, S=32768"
    found.append(goal_of(goal, "at most 1.15", ratio, verify))
    found.append(speculation_goal(load_cells(directory / "whole_runs.json")))
    return found + draft_goals(load_cells(directory / "drafts.json"))


def draft_goals(cells: dict[str, Any]) -> list[dict[str, Any]]:
    """The fastest draft step, and the largest speedup at the published acceptance, of drafts in few
    bits."""
    found = []
    for B, wanted in DRAFT_STEPS.items():
        rows = [row for row in cells.get(f"step/B{B}", {}).get("rows", ()) if row["draft_weights"]]
        best = min(rows, key=lambda row: float(row["ms_median"]), default=None)
        measured, weights = (
            (None, None) if best is None else (best["ms_median"], best["draft_weights"])
        )
        goal = f"draft step in few bits, B={B}: milliseconds"
        found.append(
            {"goal": goal, "wanted": f"at most {wanted}", "measured": measured, "by": weights}
        )
    for (B, S), least in DRAFT_RUNS.items():
        speedups = {
            name: cell["emulated_acceptance"]["published"]["speedup"]
            for name, cell in cells.items()
            if is_near(name, B, S) and "published" in cell["emulated_acceptance"]
        }
        by = max(speedups, key=lambda name: speedups[name], default=None)
        goal = f"drafts in few bits, acceptance as published (emulated), B={B}, S={S}: speedup"
        measured = None if by is None else speedups[by]
        found.append({"goal": goal, "wanted": f"at least {least}", "measured": measured, "by": by})
    return found


def speculation_goal(cells: dict[str, Any]) -> dict[str, Any]:
    """The speedup at the published acceptance, of the largest batch at that context."""
    speedups = {
        name: cell["emulated_acceptance"]["published"]["speedup"]
        for name, cell in cells.items()
        if "/S32768/" in name and "published" in cell["emulated_acceptance"]
    }
    best = max(speedups, key=lambda name: int(name.split("/")[0][1:]), default=None)
    return {
        "goal": "self-speculation at the published acceptance (emulated), B=28, S=32768: speedup",
        "wanted": "at least 1.5",
        "measured": None if best is None else speedups[best],
        "by": best,
    }


def is_near(name: str, B: int, S: int) -> bool:
    """Whether it is a whole run with that context and B rows, or as many as fitted."""
    kind, *_, rows, context, _ = name.split("/") if name.count("/") == 4 else [""] * 4
    return kind == "run" and context == f"S{S}" and 0.75 * B <= int(rows[1:]) <= B


def stages(suite: Suite) -> list[str]:
    """How much of each stage is there."""
    page = ["", "| stage | cells | failed | no time was left |", "|---|--:|---|--:|"]
    for path in sorted(suite.directory.glob("*.json")):
        found = read_file(path)
        failed = "; ".join(found.get("failed", ())) or "none"
        counts = [len(found.get(key, ())) for key in ("cells", "left")]
        page.append(f"| {path.stem} | {counts[0]} | {failed} | {counts[1]} |")
    return page


def goal_of(
    goal: str, wanted: str, measured: float | None, row: dict[str, Any] | None
) -> dict[str, Any]:
    place = None if row is None else f"B={row['B']}, S={row['context']}"
    return {"goal": goal, "wanted": wanted, "measured": measured, "by": place}


def largest(
    rows: list[dict[str, Any]], phase: str, T: int, B: int, S: int, budget: int | None = None
) -> dict[str, Any] | None:
    """The forward with that context and the largest batch up to B, as B rows may not have fit."""
    fitting = [
        row
        for row in rows
        if (row["phase"], row["T"], row["context"], row["budget"]) == (phase, T, S, budget)
        and row["B"] <= B
    ]
    return max(fitting, key=lambda row: int(row["B"]), default=None)


def goal_lines(goals: list[dict[str, Any]]) -> list[str]:
    page = ["| goal | wanted | measured | where |", "|---|---|--:|---|"]
    for goal in goals:
        shown = "not measured" if goal["measured"] is None else f"{goal['measured']:.3f}"
        page.append(f"| {goal['goal']} | {goal['wanted']} | {shown} | {goal['by'] or ''} |")
    return page


def peer_lines(cells: dict[str, Any]) -> list[str]:
    """The step of each peer, and whether its tokens are those of the first peer at that place."""
    if not cells:
        return []
    head = "| decode step of peers | peer | ms | tokens as the first peer's |"
    page = ["", head, "|---|---|--:|--:|"]
    first: dict[str, Any] = {}
    for name, found in cells.items():
        place, _, peer = name.rpartition("/")
        tokens = [token for row in found["tokens"] for token in row]
        expected = first.setdefault(place, tokens)
        share = sum(map(operator.eq, tokens, expected)) / len(tokens)
        page.append(f"| {place} | {peer} | {found['ms_median']:.3f} | {100 * share:.0f} % |")
    return page


def lines(
    goals: list[dict[str, Any]], peers: dict[str, Any], predicted: dict[str, Any]
) -> list[str]:
    page = goal_lines(goals)
    page += peer_lines(peers)
    page += ["", "| predicted, not measured | gamma | speedup | published, other hardware |"]
    page.append("|---|--:|--:|---|")
    for place, found in predicted.items():
        published = "; ".join(
            f"{p['speedup']} (gamma {p['gamma']}, {p['hardware']})" for p in found["published"]
        )
        speedup = f"{found['predicted_speedup']:.2f}"
        page.append(f"| {place} | {found['gamma']} | {speedup} | {published or 'none'} |")
    return page
