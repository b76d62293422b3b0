"""The predicted speedup of self-speculation, for the summary, from the forwards measured by stage
`llama31` and from published acceptance rates. No speedup here is measured, and all are marked as
predicted. The published numbers were measured on other hardware (8 GPUs). The published rates are
taken as conditional rates, as in the formula of the paper."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from gpu.results import load_cells
from gpu.scale import Suite
from magicdec.predict.curves import expected_tokens

PAPER = Path(__file__).parents[3] / "results" / "paper"
MODEL = "llama-3.1-8b"
SOURCE = "llama31"
NEAR = 0.1  # prefixes that differ by less count as the same: 16000 and 16384


def predictions(suite: Suite) -> dict[str, Any]:
    """By batch size and context; empty if no forward was measured."""
    cells: dict[str, Any] = {}
    rates = [r for r in read_table("acceptance_rates.csv") if r["model"] == MODEL]
    budget = min(suite.scale.budgets, key=lambda b: abs(b - float(rates[0]["budget"])))
    for found in load_cells(suite.directory / f"{SOURCE}.json").values():
        rows = found["rows"]
        for B, S in sorted({(row["B"], row["context"]) for row in rows}):
            place = [row for row in rows if (row["B"], row["context"]) == (B, S)]
            rate = near(rates, S)
            if suite.is_tiny and rate is None:
                rate = rates[0]  # only tests the arithmetic
            if rate is None:
                continue
            prediction = predict(place, budget, float(rate["acceptance_rate"]))
            published = [
                {key: row[key] for key in ("hardware", "batch_size", "gamma", "speedup", "source")}
                for row in read_table("speedups.csv")
                if row["model"] == MODEL and near([row], S) and int(row["batch_size"]) == B
            ]
            cells[f"B{B}/S{S}"] = prediction | {"published": published}
    return cells


def predict(rows: list[dict[str, Any]], budget: int, rate: float) -> dict[str, Any]:
    """The best gamma and its speedup, from the forwards for one batch size and context: expected
    tokens per verification, divided by the time of drafts and verification relative to a decode
    step. Work between forwards (acceptance, bookkeeping) is left out."""
    decode = next(row["ms_median"] for row in rows if row["phase"] == "decode")
    draft = next(
        row["ms_median"] for row in rows if (row["phase"], row["budget"]) == ("draft", budget)
    )
    speedups = {
        row["T"] - 1: expected_tokens(rate, row["T"] - 1)
        * decode
        / ((row["T"] - 1) * draft + row["ms_median"])
        for row in rows
        if row["phase"] == "verify"
    }
    best = max(speedups, key=lambda gamma: speedups[gamma])
    return {
        "conditional_acceptance": rate,
        "budget": budget,
        "gamma": best,
        "predicted_speedup": speedups[best],
        "predicted_speedup_by_gamma": {str(gamma): value for gamma, value in speedups.items()},
    }


def near(rows: list[dict[str, str]], S: int) -> dict[str, str] | None:
    """The row whose prefix length is closest to S, or None if it differs by more than NEAR."""
    closest = min(rows, key=lambda row: abs(int(row["prefix_len"]) - S))
    return closest if abs(int(closest["prefix_len"]) - S) <= NEAR * S else None


def read_table(name: str) -> list[dict[str, str]]:
    with (PAPER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
