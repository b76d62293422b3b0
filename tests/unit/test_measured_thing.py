"""When two records measure the same thing, and under the same conditions."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from synthetic_records import drawn, parse_record

from magicdec.bench.report.listing import settings
from magicdec.bench.study.cells import config_key
from magicdec.config.sections import KVSection
from magicdec.names import KV_POLICIES
from magicdec.records.comparison.compare import compare
from magicdec.records.comparison.conditions import measured_thing
from magicdec.records.describe import method
from magicdec.records.reading import Unreadable
from magicdec.speculation.policies.policy import make_policy


def record_with(policy: str, drafter: str = "self", **settings: Any) -> dict[str, Any]:
    record = json.loads(drawn().to_json())
    record["config"]["kv"] |= {"policy": policy, **settings}
    record["config"]["decoding"]["drafter"] = drafter
    return record


SETTINGS: dict[str, Any] = {
    "budget": 99,
    "num_sink_tokens": 5,
    "window_size": 9,
    "pooling": "max",
    "reselect_every": 7,
    "recent_window": 3,
    "draft_kv_dtype": "int8",
}


@pytest.mark.parametrize("policy", KV_POLICIES)
def test_settings_tell_records_apart_where_the_policy_reads_them(policy: str) -> None:
    """What a policy reads: the fields that change what `build` makes of the section."""
    assert set(SETTINGS) | {"policy"} == {f.name for f in fields(KVSection)}
    section = replace(KVSection(policy), recent_window=20)
    for name, value in SETTINGS.items():
        changed = replace(section, **{name: value})
        matters = make_policy(changed) != make_policy(section)
        records = [record_with(**asdict(kv)) for kv in (section, changed)]
        things = [measured_thing(parse_record(record)) for record in records]
        assert (things[0] != things[1]) == matters, name


def test_drafters_and_policies_are_told_apart() -> None:
    things = [
        measured_thing(parse_record(record_with(p, d)))
        for d in ("self", "model")
        for p in KV_POLICIES
    ]
    assert len(set(things)) == 2 * len(KV_POLICIES)
    records = (record_with(p, "ngram", budget=b) for p in KV_POLICIES for b in (9, 8))
    lookups = {measured_thing(parse_record(record)) for record in records}
    assert len(lookups) == 1 and not lookups & set(things), "prompt lookup reads no cache"


def test_records_of_a_version_with_draft_trees_measure_the_same_without_one() -> None:
    """A record that has no tree measures what one measures that cannot have any. A record of a tree
    is no record of this version."""
    chain, older, tree = (record_with("streaming_llm") for _ in range(3))
    older["config"]["decoding"] |= {"tree": None, "tree_nodes": None}
    tree["config"]["decoding"] |= {"tree": "3,2", "tree_nodes": 9}
    things = [measured_thing(parse_record(record)) for record in (chain, older)]
    assert things[0] == things[1]
    assert config_key(chain["config"]) == config_key(older["config"])
    with pytest.raises(Unreadable, match="--tree 3,2"):
        parse_record(tree)


def test_chains_that_stop_are_another_thing() -> None:
    records = []
    for pa in (None, 0.3, 0.4):
        record = record_with("streaming_llm")
        record["config"]["decoding"] |= {"pa": pa, "gamma": 4}
        records.append(parse_record(record))
    assert len(set(map(measured_thing, records))) == 3
    assert [settings(record)["pa"] for record in records] == [None, 0.3, 0.4]
    assert method(records[1]).endswith("gamma 4, pa 0.3")


def test_another_draft_model_is_another_thing() -> None:
    """Other weights under the same name are not comparable."""
    records = []
    for name, weights in (("a", "1"), ("b", "1"), ("a", "2")):
        record = record_with("full", "model")
        draft = {"model": name, "random_weights": False, "model_sha256": weights}
        record["workload"]["draft"] = draft
        records.append(parse_record(record))
    found = compare(records, records[:1])
    assert (
        found[0].verdict == "same" and found[1].name == "--draft model:b --kv_policy full --gamma 4"
    )
    assert found[1].text == "not comparable: the baseline has no such record"
    assert found[2].text == "not comparable: draft a has other weights"


@pytest.mark.parametrize(
    ("name", "value", "comparable"),
    [
        ("temperature", 0.8, False),
        ("repetition_penalty", 1.1, False),
        ("presence_penalty", 0.1, False),
        ("seed", 3, True),
    ],
)
def test_sampling_is_a_condition(name: str, value: float, comparable: bool) -> None:
    new = json.loads(drawn().to_json())
    old = json.loads(drawn().to_json())
    new["config"]["sampling"][name] = value
    del old["config"]["sampling"]  # records from before there was any
    (found,) = compare([parse_record(new)], [parse_record(old)])
    assert (found.verdict == "same") == comparable
    assert comparable or "not comparable: sampling {" in found.text
