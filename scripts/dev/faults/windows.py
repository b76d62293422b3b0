"""Of what the caches of layers with a window hold, and of blocks that texts share."""

from __future__ import annotations

from faults.fault import Fault, Property

CACHES = "kv/layer_caches.py"
BLOCKS = "test_window_blocks.py::"
PREFIXES = "kv/prefix_cache.py"
DRAFTER = "speculation/model_drafter.py"
DRAFTS = "speculation/drafter.py"
SCHEDULER = "engine/scheduler.py"
SHARED = "test_prefix_cache.py::"

PROPERTIES = (
    Property(
        "A batch emits what it emits where every token is kept.",
        f"{BLOCKS}test_a_batch_emits_what_it_emits_with_every_token[self-full-some-grouped]",
        (
            Fault(
                "keys that are still seen are given back",
                CACHES,
                "max(0, seen - self.rewound)",
                "seen + 8",
            ),
            Fault(
                "every token is held",
                CACHES,
                "if rolling.num_tokens < everything.num_tokens:",
                "if False:",
            ),
        ),
    ),
    Property(
        "Each layer has a place of its own in the cache of its window.",
        "test_families.py::test_greedy_tokens_are_the_references[gemma3]",
        (
            Fault(
                "layers share one",
                "kv/layer_views.py",
                "self.layers[at].index(i)",
                "0 * self.layers[at].index(i)",
            ),
        ),
    ),
    Property(
        "A prefill leaves out the tiles that no query of a vector sees, and no others.",
        "test_attention.py::test_native_prefills_a_chunk_of_several_tasks"
        "[('-march=x86-64-v3',)-20-torch.float32]",
        (
            Fault(
                "what the last one does not see any more",
                "attention/cpp/native_chunk.h",
                "if (seen(first, position, count).from == count) return;",
                "if (seen(last, position, count).from == count) return;",
            ),
            Fault(
                "what the first one does not see yet",
                "attention/cpp/native_chunk.h",
                "count = seen(last, position, count).to;",
                "count = seen(first, position, count).to;",
            ),
        ),
    ),
    Property(
        "A row that goes back further than was said is an error.",
        f"{BLOCKS}test_going_back_further_than_was_said_is_an_error",
        (
            Fault(
                "nobody looks", CACHES, "assert seen >= cache.first_held[row], (", "assert True, ("
            ),
        ),
    ),
    Property(
        "A kernel reads no block that a row has given back, not even in place of padding.",
        f"{BLOCKS}test_requests_in_flight[some-captured]",
        (
            Fault(
                "the first block of the pool",
                "kv/cache.py",
                "self.block_table[row, :num_before] = blocks[num_before]",
                "pass",
            ),
        ),
    ),
    Property(
        "A path is what was kept of a text.",
        f"{SHARED}test_a_path_is_what_was_kept_of_a_text",
        (
            Fault(
                "the whole prompt is found",
                PREFIXES,
                "range((len(text) - 1) // self.block_size)",
                "range(len(text) // self.block_size)",
            ),
            Fault(
                "a text is looked for by its newest block alone",
                PREFIXES,
                "            node = found\n        return path",
                "        return path",
            ),
        ),
    ),
    Property(
        "Of shared blocks the oldest goes first, and a beginning after what follows it.",
        f"{SHARED}test_the_oldest_goes_first_and_a_beginning_after_what_follows_it",
        (
            Fault("beginnings first", PREFIXES, "for held in reversed(path):", "for held in path:"),
            Fault("what was used again stays old", PREFIXES, "self._idle.pop(node, None)", "pass"),
        ),
    ),
    Property(
        "Caches of all windows give a row the same blocks.",
        f"{SHARED}test_caches_of_all_windows_give_the_same_blocks[none-layers]",
        (
            Fault(
                "that of the widest alone",
                "kv/layer_caches.py",
                "for cache in self.distinct:  # all",
                "for cache in self.distinct[:1]:  # all",
            ),
        ),
    ),
    Property(
        "A prompt that was cancelled leaves what it has computed, and no more.",
        f"{SHARED}test_a_prompt_that_was_cancelled_leaves_what_it_has_computed",
        (
            Fault(
                "uncomputed tokens are kept",
                "kv/layer_caches.py",
                "self.prefixes.leave(row, text[: first.lengths[row]], first.blocks[row])",
                "self.prefixes.leave(row, text, first.blocks[row])",
            ),
        ),
    ),
    Property(
        "Turns emit what they emit alone.",
        f"{SHARED}test_turns_emit_what_they_emit_alone[none-layers]",
        (
            Fault(
                "a block that others read is given back",
                "kv/layer_caches.py",
                "cache.release(row, kept)",
                "cache.release(row)",
            ),
        ),
    ),
    Property(
        "What a text has of another's block is copied while that is there.",
        f"{SHARED}test_a_draft_model_that_shares_drafts_what_it_drafts_alone",
        (
            Fault(
                "nothing is copied", "kv/pool.py", "pool[:, target].copy_(pool[:, source])", "pass"
            ),
            Fault(
                "a block is taken for it that is not there",
                PREFIXES,
                "if not self.keeps_block or self.num_needed(num_blocks) < num_free:",
                "if True:",
            ),
        ),
    ),
    Property(
        "Blocks that several rows hold count once.",
        f"{SHARED}test_blocks_that_several_rows_hold_count_once[with none to spare]",
        (
            Fault(
                "they count for each row",
                SCHEDULER,
                "held -= self.prefixes.num_repeated(leaving)",
                "pass",
            ),
            Fault(
                "who joins takes all",
                PREFIXES,
                "return num_blocks - len(self.path) + num_idle",
                "return num_blocks",
            ),
        ),
    ),
    Property(
        "A draft model that shares drafts what it drafts alone.",
        f"{SHARED}test_a_draft_model_that_shares_drafts_what_it_drafts_alone[full-layers]",
        (
            Fault(
                "it computes what it has again",
                DRAFTER,
                "replace(part, start=num_shared,",
                "replace(part, start=0,",
            ),
        ),
    ),
    Property(
        "No child of a node of the prefix tree is the beginning of another.",
        f"{SHARED}test_turns_emit_what_they_emit_alone[none-layers]",
        (
            Fault(
                "what has gone on in another block stays",
                PREFIXES,
                "self._replaced += [child.block for child in shorter if self._forget(child)]",
                "pass",
            ),
            Fault(
                "its block is nobody's",
                "kv/layer_caches.py",
                "self._give_back(self.prefixes.take_replaced())",
                "self.prefixes.take_replaced()",
            ),
            Fault(
                "an end that is there already is kept again",
                PREFIXES,
                "num_common(child.tokens, rest) < len(rest) for child in last.after.values()",
                "True for child in last.after.values()",
            ),
        ),
    ),
    Property(
        "What was looked for in a prefix cache adds up, also of requests that were preempted.",
        f"{SHARED}test_turns_emit_what_they_emit_alone[snapkv-layers]",
        (
            Fault(
                "requests have none of it",
                SCHEDULER,
                "        self.moves[request_id].num_looked_up += num_tokens\n",
                "",
            ),
            Fault(
                "the prompt alone is looked for when it joins again",
                SCHEDULER,
                "counts = request.num_cached, found.num_tokens,",
                "counts = len(request.prompt_ids), found.num_tokens,",
            ),
            Fault(
                "the last time that it joined counts",
                SCHEDULER,
                "        self.num_looked_up += num_tokens\n",
                "        self.num_looked_up = num_tokens\n",
            ),
            Fault(
                "what is shared is prefilled again",
                SCHEDULER,
                "new = [(r, row, self._shared.get(r, 0)) for r, row in admitted]",
                "new = [(r, row, 0) for r, row in admitted]",
            ),
        ),
    ),
    Property(
        "A draft model prefills a text without what it shares, in every turn.",
        f"{SHARED}test_a_draft_model_prefills_what_it_does_not_share",
        (
            Fault(
                "what it has prefilled is not kept for others",
                DRAFTS,
                "runner.release(row, self.entries_of(text))",
                "runner.release(row)",
            ),
            Fault(
                "prompts alone are kept",
                DRAFTS,
                "text = (*request.prompt_ids, *request.output_ids)",
                "text = request.prompt_ids",
            ),
            Fault(
                "one token too few is taken for shared",
                DRAFTER,
                "num_shared = self.begin(runner, part.request)",
                "num_shared = self.begin(runner, part.request) - 1",
            ),
        ),
    ),
    Property(
        "A window is read up to its size.",
        "test_bytes.py::test_a_window_is_read_up_to_its_size",
        (
            Fault(
                "a full window and a new token",
                "hardware/costs.py",
                "entries = sum(n * (T + min(S, (window or S + 1) - 1)) for",
                "entries = sum(n * (T + min(S, window or S)) for",
            ),
            Fault(
                "one window for several new tokens",
                "hardware/costs.py",
                "entries = sum(n * (T + min(S, (window or S + 1) - 1)) for",
                "entries = sum(n * min(S + T, window or S + T) for",
            ),
            Fault(
                "layers without a window alone",
                "kv/forward_counts.py",
                "self.kv_bytes_read += keys * bytes_per_token // self.num_layers",
                "self.kv_bytes_read += keys // self.num_layers * bytes_per_token",
            ),
        ),
    ),
    Property(
        "A row of a window holds as many blocks as it can need, and no more.",
        "test_bytes.py::test_a_row_of_a_window_holds_as_many_blocks_as_it_can_need",
        (
            Fault(
                "a window of one token more",
                "kv/layer_caches.py",
                "(window - 1 + room.rewound + room.new)",
                "(window + room.rewound + room.new)",
            ),
            Fault(
                "no block for what begins within one",
                "kv/layer_caches.py",
                "// small) + 1\n",
                "// small)\n",
            ),
            Fault(
                "no room to go back",
                "kv/layer_caches.py",
                "(window - 1 + room.rewound + room.new)",
                "(window - 1 + room.new)",
            ),
        ),
    ),
)
