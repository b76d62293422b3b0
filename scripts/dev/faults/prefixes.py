"""Of drafts after a hit of the prefix cache."""

from __future__ import annotations

from faults.fault import Fault, Property

DRAFTER = "speculation/drafter.py"
HEAD = "speculation/head_drafter.py"
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
                "states do not go to host memory",
                "kv/pool.py",
                "            self.host.add(tensor)\n\n    def offload",
                "            pass\n\n    def offload",
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
            Fault(
                "the sinks of another place come back",
                "kv/pool.py",
                "tensor[block].copy_(host[place], non_blocking=True)",
                "tensor[block].copy_(host[place - 1], non_blocking=True)",
            ),
            Fault("within a chunk", ROLLS, "most, self.chunk)", "most)"),
            Fault(
                "what steps have computed is kept",
                DRAFTER,
                "                text = text[:num_admitted]",
                "                pass",
            ),
            Fault(
                "they are turned where others read them",
                ROLLS,
                "                cache.block_table[row, place] = own\n",
                "",
            ),
        ),
    ),
    Property(
        "A cache that rolls leaves whole blocks for others, also where a budget ends within one.",
        f"{DRAFTS}[a budget below a block]",
        (
            Fault(
                "what a row has in blocks of its own stays there",
                ROLLS,
                "                cache.copy_block(own, block)",
                "                pass",
            ),
        ),
    ),
    Property(
        "A block that a row is about to read keeps its place in host memory.",
        "test_prefix_cache.py::test_a_block_that_a_row_is_about_to_read_keeps_its_place",
        (
            Fault(
                "it loses it",
                "kv/prefix_cache.py",
                "            self._away.pop(node, None)\n            self._num_repeated",
                "            self._num_repeated",
            ),
        ),
    ),
)
