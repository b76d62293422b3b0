"""Faults of layers that keep states."""

from __future__ import annotations

from faults.fault import Fault, Property

HYBRID = "test_hybrid.py::"
SNAPSHOTS = "test_hybrid_prefixes.py::"
STATES = "runner/layer_states.py"
DELTA = "model/elementwise/delta.py"
DELTA_TRITON = "model/elementwise/triton_kernels.py"
DELTA_NATIVE = "model/elementwise/delta_steps.cpp"
CHUNKS_NATIVE = "model/elementwise/delta_chunks.cpp"
CONVOLUTION_NATIVE = "model/elementwise/delta_convolve.cpp"

PROPERTIES = (
    Property(
        "A row's state is that after the tokens that it has.",
        f"{HYBRID}test_rows_go_back_to_any_token[torch]",
        (
            Fault(
                "a rejected token stays in the state",
                DELTA,
                "torch.where(_by_row(position < places.first), after, state)",
                "after",
            ),
            Fault(
                "the base moves past what is committed",
                DELTA,
                "torch.where(_by_row(position < places.moved), state, moved)",
                "state",
            ),
            Fault(
                "a cancelled forward moves the base of all layers",
                STATES,
                "        is_room = (end - self.room.new",
                "        self.now.base[:, rows] = moved\n        is_room = (end - self.room.new",
            ),
            Fault(
                "what a token wrote is looked for in the slot behind",
                DELTA,
                "position % held.keys.shape[1])\n        after",
                "(position + 1) % held.keys.shape[1])\n        after",
            ),
            Fault(
                "the slots of another number of drafts",
                STATES,
                "return most_new + self.length - 1",
                "return most_new - 1",
            ),
            Fault(
                "the state of another row",
                DELTA,
                "state = moved = held.states[places.rows]",
                "state = moved = held.states[places.rows.flip(0)]",
            ),
            Fault(
                "the convolution keeps rejected tokens",
                STATES,
                "before = states.positions_before(first[:, None])",
                "before = states.positions_before(base[0][:, None])",
            ),
        ),
    ),
    Property(
        "A pass begins at the end of the prompt.",
        f"{HYBRID}test_a_second_pass_begins_at_the_ends_of_prompts",
        (
            Fault(
                "the prompt's end comes back without its state",
                STATES,
                "own[layer, rows] = others[number, source].to(own.dtype)",
                "own[layer, rows] = own[layer, rows]",
            ),
        ),
    ),
    Property(
        "Rows go back as far as any run that shares prompts needs.",
        f"{HYBRID}test_runs_of_a_sweep_share_prompts",
        (
            Fault(
                "as far as the first run needs",
                "systems/prefilled_batching.py",
                "room.rewound), state_room=room.state_room)",
                "room.rewound))",
            ),
        ),
    ),
    Property(
        "The newest tokens of a prompt and of a text that grows run again.",
        f"{HYBRID}test_newest_tokens_run_again",
        (
            Fault(
                "only those of a prompt's last part",
                STATES,
                "        if not is_of_prompt:\n            moved = torch.maximum(moved, committed",
                "        if True:\n            moved = torch.maximum(moved, committed",
            ),
            Fault(
                "only those that may be rejected",
                STATES,
                "committed - self.room.rerun)",
                "committed)",
            ),
        ),
    ),
    Property(
        "A text begins with the state after what it has in common with another.",
        f"{SNAPSHOTS}test_turns_emit_what_they_emit_alone",
        (
            Fault(
                "K and V without their state",
                "runner/model_runner.py",
                "if beginning.snapshot is not None:",
                "if False:",
            ),
            Fault(
                "the state of the text's end in place of its prompt's",
                STATES,
                "held = self.kept if length == int(self.kept_lengths[row]) else self.now",
                "held = self.now",
            ),
            Fault(
                "the state before what the newest tokens wrote",
                STATES,
                "for position in range(base, length):",
                "for position in range(base, base):",
            ),
            Fault(
                "the convolution begins anew",
                STATES,
                "self.now.channels[:, row, before] = self.snapshot_channels[:, number]",
                "self.now.channels[:, row, before] = 0",
            ),
            Fault(
                "the copy is given up, and the state is taken all the same",
                "kv/prefix_cache.py",
                "return Beginning(num_known=self.num_known)\n        return replace",
                "return replace(self, source=None, num_copied=0)\n        return replace",
            ),
        ),
    ),
    Property(
        "As little is computed of a text as snapshots allow.",
        f"{SNAPSHOTS}test_what_is_computed_of_a_turn_is_what_no_snapshot_has",
        (
            Fault(
                "none where texts part",
                "engine/scheduler.py",
                "keeps_state = num_done < known <= stop",
                "keeps_state = False",
            ),
            Fault(
                "none at the ends of prompts",
                STATES,
                "return [prompt, length] if 0 < prompt < length else [length]",
                "return [length]",
            ),
        ),
    ),
    Property(
        "The longest beginning with a snapshot is found.",
        "test_snapshots.py::test_a_text_begins_where_a_snapshot_was_taken",
        (
            Fault(
                "the shortest in a block",
                "kv/prefix_cache.py",
                "at = max((at for at in child.snapshots if at <= count), default=0)",
                "at = min((at for at in child.snapshots if at <= count), default=0)",
            ),
            Fault(
                "the newest gives way",
                "kv/prefix_cache.py",
                "oldest = next(iter(self._taken))",
                "oldest = next(reversed(self._taken))",
            ),
            Fault(
                "the end of a text that goes on loses its own",
                "kv/prefix_cache.py",
                "            child.snapshots = {}\n        self._replaced",
                "            node.snapshots = {}\n        self._replaced",
            ),
        ),
    ),
    Property(
        "A prompt is not cut out of a longer one whose states are not kept there.",
        f"{HYBRID}test_a_prompt_that_begins_a_longer_one_is_prefilled_anew",
        (
            Fault(
                "it is cut",
                "systems/shared_prefill.py",
                "held is not None and held.engine.runner.states is None",
                "held is not None",
            ),
        ),
    ),
    Property(
        "Linear attention is transformers'.",
        f"{HYBRID}test_logits_are_those_of_transformers",
        (
            Fault(
                "one decay behind in a chunk",
                DELTA,
                "kept = k[:, :, at] * (total - decayed[:, :, at])[..., None].exp()",
                "kept = k[:, :, at] * total[..., None].exp()",
            ),
            Fault(
                "value heads take turns with key heads",
                DELTA,
                "x.repeat_interleave(num_values // x.shape[dim], dim=dim)",
                "torch.cat([x] * (num_values // x.shape[dim]), dim=dim)",
            ),
            Fault(
                "no gate on attention",
                "model/block.py",
                "out = out * gates.sigmoid()",
                "out = out * 1",
            ),
            Fault(
                "the gate's rows are the query's",
                "model/checkpoint/weight_map.py",
                "gates = [(q, shifted(rows, c.head_dim), num_rows) for _, rows, _ in queries]",
                "gates = [(q, rows, num_rows) for _, rows, _ in queries]",
            ),
            Fault(
                "the convolution of a part begins with zeros",
                STATES,
                "before = now.channels[layer, rows, self.slots_before] * self.is_before",
                "before = 0 * now.channels[layer, rows, self.slots_before]",
            ),
        ),
    ),
    Property(
        "Each kind's tensors are read as transformers writes them.",
        f"{HYBRID}test_every_kind_has_the_logits_of_transformers",
        (
            Fault(
                "Qwen3-Next's rows are not by key head",
                "model/families/hybrids.py",
                "linear_by_key_head=True",
                "linear_by_key_head=False",
            ),
            Fault(
                "a rank's value heads are counted from the first",
                "model/checkpoint/weight_map.py",
                "own = max(values[0] - head * group, 0), min(",
                "own = 0, min(",
            ),
        ),
    ),
    Property(
        "Stages go back to what is committed.",
        "test_pipelined_scheduler.py::test_every_schedule_emits_what_plain_decoding_emits[0]",
        (
            Fault(
                "drafts are taken for committed",
                "systems/pipeinfer/sequence.py",
                "min(first, self.tip.position),",
                "first,",
            ),
        ),
    ),
    Property(
        "Native steps of linear attention are those of torch.",
        f"{HYBRID}test_steps_of_kernels_are_those_of_torch[native-{(2, 8, 6, 43)}]",
        (
            Fault(
                "the key of another head",
                DELTA_NATIVE,
                "g = h * p.G / p.H",
                "g = h % p.G",
            ),
            Fault(
                "columns that are no whole block are left out",
                DELTA_NATIVE,
                "take_blocks<float, 1>(p, head, c, S.data());",
                "",
            ),
            Fault(
                "keys of tokens that are still read give way",
                "model/elementwise/native.py",
                "        out = torch.empty(v.shape)\n        sizes =",
                "        out = torch.empty(v.shape)\n"
                "        keep_shared(held, places, k, tokens)\n        sizes =",
            ),
            Fault(
                "the base moves to the newest token",
                DELTA_NATIVE,
                "if (!head.settled.empty()) s.write(state);\n        take(s, head.open, d);",
                "take(s, head.open, d);\n        if (!head.settled.empty()) s.write(state);",
            ),
            Fault(
                "a token decays as the one before it",
                DELTA_NATIVE,
                "s.multiply(next->decay);",
                "s.multiply(token.decay);",
            ),
            Fault(
                "what is written leaves the slots as they were",
                DELTA_NATIVE,
                "correction.write(token.correction + c);",
                "",
            ),
        ),
    ),
    Property(
        "Native prompts of linear attention are the rule.",
        f"{HYBRID}test_prompts_of_kernels_are_the_rule[native-{(2, 8, 6, 43)}]",
        (
            Fault(
                "a chunk has the keys of the one before",
                CHUNKS_NATIVE,
                "chunk.take_keys(p, b, begin, count, first / all);",
                "if (!begin) chunk.take_keys(p, b, begin, count, first / all);",
            ),
            Fault(
                "a value head has the decays of the first",
                CHUNKS_NATIVE,
                "chunk.take_decays(p, b, begin, count, h);",
                "chunk.take_decays(p, b, begin, count, first);",
            ),
            Fault(
                "rows of a tile are solved without each other",
                CHUNKS_NATIVE,
                "for (int m = 0; m < n; ++m)",
                "for (int m = 0; m < 0; ++m)",
            ),
            Fault(
                "the state does not decay",
                CHUNKS_NATIVE,
                "scale(sums, &total, 0);",
                "",
            ),
            Fault(
                "keys do not decay to the end of the chunk",
                CHUNKS_NATIVE,
                "left[i] = sum - decays[i];",
                "left[i] = 0;",
            ),
            Fault(
                "tokens see themselves not",
                CHUNKS_NATIVE,
                "scores[i][j] = j <= i ?",
                "scores[i][j] = j < i ?",
            ),
        ),
    ),
    Property(
        "The native convolution before linear attention is torch's.",
        f"{HYBRID}test_kernels_convolve_as_torch[native-{(2, 8, 6, 43)}-16]",
        (
            Fault(
                "the tokens before a row's are those of the first row",
                CONVOLUTION_NATIVE,
                "p.before + (b * (p.K - 1)",
                "p.before + (0 * (p.K - 1)",
            ),
            Fault(
                "keys are divided as queries are",
                CONVOLUTION_NATIVE,
                "p.G * p.D, true, 1};",
                "p.G * p.D, true, 1 / std::sqrt(float(p.D))};",
            ),
            Fault(
                "the newest token has the oldest one's weight",
                CONVOLUTION_NATIVE,
                "*weight = weights + i * C",
                "*weight = weights + (p.K - 1 - i) * C",
            ),
        ),
    ),
    Property(
        "Triton's prompts of linear attention are the rule.",
        f"{HYBRID}test_prompts_of_kernels_are_the_rule[triton-{(1, 3, 5, 34)}]",
        (
            Fault(
                "the state is that before the prompt for all chunks",
                DELTA_TRITON,
                "tl.store(place, state, mask=in_state)",
                "tl.store(place, state, mask=in_state & (chunk == num_chunks - 1))",
            ),
            Fault(
                "a solution has no columns' rates",
                DELTA_TRITON,
                "solution * rates[None, :])",
                "solution)",
            ),
            Fault(
                "a chunk is solved in a step",
                DELTA_TRITON,
                "tl.sum(factors[:, None] * solution, 0)",
                "factors",
            ),
        ),
    ),
    Property(
        "Triton's convolution before linear attention is torch's.",
        f"{HYBRID}test_kernels_convolve_as_torch[triton-{(1, 3, 5, 34)}-16]",
        (
            Fault(
                "a block has no tokens of the one before",
                DELTA_TRITON,
                "mask=inside & (at >= 0), other=0.0)",
                "mask=inside & (at >= begin), other=0.0)",
            ),
            Fault(
                "queries are not divided",
                DELTA_TRITON,
                "mixed * SCALE",
                "mixed",
            ),
        ),
    ),
    Property(
        "Triton's steps of linear attention are those of torch.",
        f"{HYBRID}test_steps_of_kernels_are_those_of_torch[triton-{(1, 3, 5, 34)}]",
        (
            Fault(
                "a program has the key of another head",
                DELTA_TRITON,
                "key_head = head // (HEADS // KEY_HEADS)\n    row =",
                "key_head = head % KEY_HEADS + 1\n    row =",
            ),
            Fault(
                "a program stores its state a token late",
                DELTA_TRITON,
                "if start + number + 1 == kept:",
                "if start + number == kept:",
            ),
            Fault(
                "corrections lie where those of the base do",
                DELTA_TRITON,
                "slot = row * SLOTS + (end + number) % SLOTS",
                "slot = row * SLOTS + (start + number) % SLOTS",
            ),
        ),
    ),
    Property(
        "The experts of a layer are read from one tensor as published.",
        f"{HYBRID}test_experts_of_a_layer_are_stored_as_one",
        (
            Fault(
                "gates and ups by turns",
                "model/families/hybrids.py",
                "stacked_experts=ExpertStack()",
                "stacked_experts=ExpertStack(takes_turns=True)",
            ),
        ),
    ),
    Property(
        "The check of forwards takes each layer's own state to its parts.",
        f"{HYBRID}test_forwards_are_measured_in_parts_of_the_layers",
        (
            Fault(
                "a part has the first layers' states",
                STATES,
                "own[layer, rows] = others[number, source].to(own.dtype)",
                "own[layer, rows] = others[layer, source].to(own.dtype)",
            ),
            Fault(
                "a part ends anywhere",
                "bench/check/wider.py",
                "ends = [n + 1 for n, kind in enumerate(model.config.kinds) if kind.mixer is None]",
                "ends = [n + 1 for n, kind in enumerate(model.config.kinds)]",
            ),
        ),
    ),
    Property(
        "What a forward reads of states is counted.",
        f"{HYBRID}test_forwards_read_the_states_of_their_rows",
        (
            Fault(
                "states cost nothing",
                "bench/roofline.py",
                " + counts.kv_bytes_read + counts.state_bytes",
                " + counts.kv_bytes_read",
            ),
        ),
    ),
)
