"""Of drafts after a hit of the prefix cache."""

from __future__ import annotations

from faults.fault import Fault, Property

DRAFTER = "speculation/drafter.py"
HEAD = "speculation/eagle.py"
ROLLS = "speculation/rolling_runner.py"
STATES = "runner/observers/hidden_states.py"
DRAFTS = "test_prefix_drafts.py::test_drafts_after_a_hit_are_those_after_a_prefill"

PROPERTIES = (
    Property(
        "After a hit a head drafts what it drafts after a prefill.",
        f"{DRAFTS}[head]",
        (
            Fault(
                "a slot is taken whose next token is another",
                HEAD,
                "return tuple(pairwise(text))",
                "return tuple(text[:-1])",
            ),
            Fault(
                "slots begin one position late",
                HEAD,
                "request.row, num_shared, request",
                "request.row, num_shared + (num_shared > 0), request",
            ),
            Fault(
                "the states of a copied block stay behind",
                "kv/pool.py",
                "tensor[target].copy_(tensor[source])",
                "pass",
            ),
            Fault(
                "states stay with the row that computed them",
                STATES,
                "cache=runner.cache if runner.shares_prefixes else None",
                "cache=None",
            ),
        ),
    ),
    Property(
        "After a hit a draft model drafts what it drafts after a prefill.",
        f"{DRAFTS}[model]",
        (
            Fault(
                "it has the blocks of another text",
                "kv/prefix_cache.py",
                "found = node.after.get(self._tokens(text, at))",
                "found = next(iter(node.after.values()), None)",
            ),
        ),
    ),
    Property(
        "After a hit a draft model whose cache rolls drafts what it drafts after a prefill.",
        f"{DRAFTS}[model rolls]",
        (
            Fault("within a chunk", ROLLS, "most, self.chunk)", "most)"),
            Fault(
                "what steps have computed is kept",
                DRAFTER,
                "                text = text[:num_admitted]",
                "                pass",
            ),
            Fault(
                "sinks stay turned",
                ROLLS,
                "            self._turn_back(row)\n            super().keep",
                "            super().keep",
            ),
            Fault(
                "they are turned where others read them",
                ROLLS,
                "                cache.block_table[row, place] = own\n",
                "",
            ),
        ),
    ),
)
