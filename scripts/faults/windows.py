"""Of what the caches of layers with a window hold."""

from __future__ import annotations

from faults.fault import Fault, Property

CACHES = "kv/layer_caches.py"
BLOCKS = "test_window_blocks.py::"

PROPERTIES = (
    Property(
        "A batch emits what it emits where every token is kept.",
        f"{BLOCKS}test_a_batch_emits_what_it_emits_with_every_token[self-full-some-grouped]",
        (
            Fault("keys that are still seen are given back", CACHES,
                  "max(0, seen - self.rewound)", "seen + 8"),
            Fault("every token is held", CACHES,
                  "if rolling.num_tokens < everything.num_tokens:", "if False:"),
        ),
    ),
    Property(
        "Each layer has a place of its own in the cache of its window.",
        "test_families.py::test_greedy_tokens_are_the_references[gemma3]",
        (
            Fault("layers share one", "kv/layer_views.py",
                  "self.layers[at].index(i)", "0 * self.layers[at].index(i)"),
        ),
    ),
    Property(
        "A row that goes back further than was said is an error.",
        f"{BLOCKS}test_going_back_further_than_was_said_is_an_error",
        (
            Fault("nobody looks", CACHES,
                  "assert seen >= cache.first_held[row], (", "assert True, ("),
        ),
    ),
    Property(
        "A kernel reads no block that a row has given back, not even in place of padding.",
        f"{BLOCKS}test_requests_in_flight[some-captured]",
        (
            Fault("the first block of the pool", "kv/cache.py",
                  "self.block_table[row, :num_before] = blocks[num_before]", "pass"),
        ),
    ),
)  # fmt: skip
