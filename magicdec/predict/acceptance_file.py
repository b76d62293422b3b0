"""The acceptance of a file of records for the cost model: of which records, for each KV budget.
Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from magicdec.bench.acceptance.record import AcceptanceRecord
from magicdec.bench.acceptance.selection import (
    by_context,
    conditions_of,
    first_several,
    lengths_of,
    settings_of,
)
from magicdec.names import EVERY_TOKEN, WITHOUT_BUDGET
from magicdec.predict.lengths import AcceptanceLengths
from magicdec.records.comparison.conditions import copied_dtype, sampling
from magicdec.records.drafted import EVERY_POSITION, JudgedRecord
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records

Curves = dict[int, tuple[float, ...] | AcceptanceLengths]
"""By KV budget the shares of verifications that accept at least 1, 2, ... draft tokens, or lengths
by context."""
RecordsByKind = Mapping[str, Sequence[Any]]
KINDS = ("acceptance", "pass")  # of records with an acceptance, the first before the second
# The flags of a plan that tell records apart, by the noun in a refusal.
FLAGS = {"models": "--model", "dtypes": "--dtype", "draft models": "--draft model:NAME"}

DRAWN = (
    "it has acceptance of sampled texts whose drafts were drawn at every position, which does not "
    "say where the steps of a run begin; give records of greedy texts, or of drafts in forks"
)

Drafting = tuple[str, str, str | None, str | None]
"""The drafter, the KV policy, the draft weights and the dtype of a copy of every token of a run."""


def drafting_of(config: Mapping[str, Any]) -> Drafting | None:
    """How a record's config drafts. None without drafts that read a cache, and
    for chains unlike those of a plan, which end early (`--pa`) or whose lengths a given cost
    chose."""
    decoding = config["decoding"]
    is_other = any(decoding.get(name) is not None for name in ("pa", "step_cost"))
    if is_other or decoding["drafter"] is None or config.get("kv") is None:
        return None
    policy = config["kv"]["policy"]
    return decoding["drafter"], policy, decoding.get("draft_weights"), copied_dtype(config)


def budget_of(config: Mapping[str, Any]) -> int:
    """0 where a policy with a budget read the whole cache."""
    kv = config["kv"]
    return EVERY_TOKEN if kv["policy"] in WITHOUT_BUDGET else max(0, kv["budget"])


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether requests were greedy, and the policy chose once."""
    return sampling(config) == "greedy" and not config["kv"].get("reselect_every")


def load_by_kind(path: Path) -> RecordsByKind:
    """The records of a file with an acceptance, by kind; of baselines the passes alone, since what
    the gate has judged at every position is of one short context. Raises ValueError if it cannot be
    read, or has none."""
    found = defaultdict[str, list[Any]](list)
    for record in read_records(path, JudgedRecord, kinds=KINDS):
        if not (record.mode == EVERY_POSITION and record.is_logged):
            found[record.kind].append(record)
    return found


def curves_of_file(
    path: Path,
    records: RecordsByKind,
    budgets: Sequence[int] | None,
    like: Drafting,
    names: Mapping[str, str],
) -> tuple[Curves, str]:
    """Returns budget -> acceptance of the drafts that are as `like` says, and a text that names the
    source: records of `magicdec acceptance`, or passes if there are none of these. `names` has the
    one that counts of several models, dtypes and draft models. Raises ValueError if there is no
    such record, or if what tells several apart is in no flag."""
    drafter, policy, weights, _ = like
    positions, passes = (
        [record for record in records.get(kind, ()) if drafting_of(record.config) == like]
        for kind in KINDS
    )
    if not all(record.has_steps for record in positions):
        raise ValueError(f"--acceptance {path}: {DRAWN}")
    curves, places = _position_curves(path, positions, names)
    unused = f"; its {len(passes)} passes with such drafts do not count" if passes else ""
    if not curves:
        curves, places = _pass_curves(passes)
        unused = ""
    if not curves:
        command = "selfspec" if drafter == "self" else "longspec"
        drafts = dict.fromkeys(record.draft for record in records.get("acceptance", ()))
        found = f"; it has acceptance of {', '.join(drafts)}" if drafts else ""
        raise ValueError(
            f"--acceptance {path} has no record with acceptance under a KV budget and --kv_policy "
            f"{policy}{f' --draft_weights {weights}' if weights else ''}; "
            f"`magicdec {command}` makes one{found}"
        )
    chosen_budgets = sorted(curves) if budgets is None else budgets
    for budget in chosen_budgets:
        if budget not in curves:
            choices = " ".join(map(str, sorted(curves)))
            raise ValueError(f"--budget {budget} is not in {path}; choose from {choices}")
    place = ", ".join(sorted({places[budget] for budget in chosen_budgets}))
    chosen = {budget: curves[budget] for budget in chosen_budgets}
    return chosen, f"{path} (measured with {place}, {policy}{unused})"


def _pass_curves(records: Sequence[PassRecord]) -> tuple[Curves, dict[int, str]]:
    """The longest curve of each budget; among curves of equal length that of most verifications,
    and the newest of these; of the greedy records that chose once, if there are any. Beside them
    where each was measured."""
    curves: Curves = {}
    places: dict[int, str] = {}
    weights_of: dict[int, tuple[int, int]] = {}
    plain = [record for record in records if is_plain(record.config)]
    for record in plain or records:
        config = record.config
        metrics = record.metrics
        budget = budget_of(config)
        curve = metrics and metrics.acceptance_per_position
        if metrics is None or not budget or not curve:
            continue
        weight = len(curve), (metrics.judged_per_position or [0])[0]
        if weight >= weights_of.get(budget, (0, 0)):
            weights_of[budget] = weight
            place = f"{config['model']['model']} at {config['workload']['prefix_len']} tokens"
            curves[budget] = tuple(curve)
            places[budget] = place
    return curves, places


def _position_curves(
    path: Path, records: Sequence[AcceptanceRecord], names: Mapping[str, str]
) -> tuple[Curves, dict[int, str]]:
    """The lengths of each budget by context, and where they were measured."""
    usable = [
        record for record in records if budget_of(record.config) and not record.workload.is_random
    ]
    by_budget = defaultdict[int, list[AcceptanceRecord]](list)
    for record in _told_apart(path, usable, conditions_of, names):
        by_budget[budget_of(record.config)].append(record)
    curves: Curves = {}
    places: dict[int, str] = {}
    for budget, budget_records in by_budget.items():
        chosen = by_context(_told_apart(path, budget_records, settings_of, names))
        curves[budget] = AcceptanceLengths(
            {context: lengths_of(record) for context, record in chosen.items()}
        )
        contexts = " ".join(map(str, chosen))
        reasons = dict.fromkeys(record.inexact for record in chosen.values() if record.inexact)
        otherwise = "".join(f"; a run may draft otherwise: {reason}" for reason in reasons)
        model = budget_records[0].workload.model
        places[budget] = f"{model} at every position after {contexts} tokens{otherwise}"
    return curves, places


def _told_apart(
    path: Path,
    records: Sequence[AcceptanceRecord],
    conditions: Callable[[AcceptanceRecord], dict[str, str]],
    names: Mapping[str, str],
) -> Sequence[AcceptanceRecord]:
    """The records that agree in `conditions`: of several values those of `names`."""
    while (several := first_several(map(conditions, records))) is not None:
        noun, values = several
        if names.get(noun) not in values:
            flag = FLAGS.get(noun)
            way = f"give the {flag} of one" if flag else "give a file with one"
            raise ValueError(
                f"--acceptance {path} has acceptance of several {noun}: {', '.join(values)}; {way}"
            )
        records = [record for record in records if conditions(record)[noun] == names[noun]]
    return records
