"""Faults of caches with fewer bits."""

from __future__ import annotations

from faults.fault import Fault, Property

KV = "test_int8_kv.py::"

PROPERTIES = (
    Property(
        "An int8 cache is the definition's, for plain decoding as for drafts.",
        f"{KV}test_logits_are_those_of_transformers_with_a_rounded_cache",
        (
            Fault(
                "every token of a tile has the scale of its first",
                "kv/layout.py",
                "    scales = _scales(pool)[:, slots // TILE, slots % TILE]\n",
                "    scales = _scales(pool)[:, slots // TILE, 0 * slots]\n",
            ),
            Fault(
                "7 bits of 8",
                "kv/layout.py",
                "MOST_CODE = 127",
                "MOST_CODE = 63",
            ),
        ),
    ),
    Property(
        "The flag stores the target's cache in int8.",
        f"{KV}test_drafts_are_lossless_over_an_int8_cache[--draft self --budget 49]",
        (
            Fault(
                "the flag stores nothing in int8",
                "setup/loading.py",
                "kv_dtype=torch.int8 if plan.is_int8_kv else None,",
                "kv_dtype=None,",
            ),
        ),
    ),
    Property(
        "Records of caches in other dtypes are not compared.",
        "test_gate_rule.py::test_the_first_cause_is_named_where_conditions_differ[int8 cache]",
        (
            Fault(
                "the dtype of the cache left out",
                "records/comparison/conditions.py",
                '        "kv_dtype": kv_dtype_of(config),\n',
                "",
            ),
        ),
    ),
)
