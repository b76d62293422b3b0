"""Of choices, which tokens do not show: what drafts read, what lookups propose and learn, who is
served first; and of what is counted of drafts."""

from __future__ import annotations

from faults.fault import Fault, Property

READS = "test_draft_choices.py::test_self_speculation_reads_what_its_policy_says"
LOOKUPS = "test_lookup_choices.py::"

PROPERTIES = (
    Property(
        "Drafts under streaming_llm read the sinks and the newest tokens.",
        f"{READS}[streaming_llm-window-layers]",
        (
            Fault(
                "a window without the sinks' part of the budget off it",
                "kv/view.py",
                "committed - (self.budget - self.num_sink_tokens))",
                "committed - self.budget)",
            ),
            Fault(
                "a window short by one",
                "kv/view.py",
                "committed - (self.budget - self.num_sink_tokens))",
                "committed - (self.budget - self.num_sink_tokens) + 1)",
            ),
            Fault(
                "a sink too few",
                "kv/view.py",
                "sinks = committed.clamp(max=self.num_sink_tokens)",
                "sinks = committed.clamp(max=max(0, self.num_sink_tokens - 1))",
            ),
            Fault(
                "a sliding window of one more",
                "kv/view.py",
                "first_keys = (before.tensor + 1 - window).clamp(min=0)",
                "first_keys = (before.tensor - window).clamp(min=0)",
            ),
        ),
    ),
    Property(
        "Drafts under snapkv read what the newest tokens attended to, and all tokens since.",
        f"{READS}[snapkv-grouped-layers]",
        (
            Fault(
                "a copy of one more than the budget",
                "speculation/policies/snapkv.py",
                "super().__init__(source, SinksAndWindow(0, policy.budget))",
                "super().__init__(source, SinksAndWindow(0, policy.budget + 1))",
            ),
            Fault(
                "the best entry leaves first",
                "speculation/policies/snapkv.py",
                "torch.cat([best.flip(2), newest], dim=2)",
                "torch.cat([best, newest], dim=2)",
            ),
            Fault(
                "an observed window short by one",
                "speculation/policies/snapkv.py",
                "window = min(newest.shape[1], length - first)",
                "window = max(1, min(newest.shape[1], length - first) - 1)",
            ),
            Fault(
                "scores shared by fewer neighbours",
                "speculation/policies/snapkv.py",
                "KERNEL = 5  #",
                "KERNEL = 3  #",
            ),
            Fault(
                "a choice for another row of the same length",
                "speculation/policies/snapkv.py",
                "entries = self.source.caches.read(layer, rows.index, positions)",
                "entries = self.source.caches.read(layer, rows.index * 0, positions)",
            ),
        ),
    ),
    Property(
        "With a sliding window, snapkv chooses what stays in it.",
        f"{READS}[snapkv-window-layers]",
        (
            Fault(
                "tokens chosen that leave the window one before the end",
                "speculation/policies/snapkv.py",
                "first_key(until - 1, self.source.window)",
                "first_key(until - 2, self.source.window)",
            ),
        ),
    ),
    Property(
        "Layers with a narrower window than others read the newest tokens of the budget.",
        f"{READS}[snapkv-window of some layers-layers]",
        (
            Fault(
                "the window of the first layer",
                "kv/layer_views.py",
                "tuple(distinct.index(window) for window in used)",
                "tuple(distinct.index(used[0]) for window in used)",
            ),
            Fault(
                "copies of other tokens",
                "speculation/policies/snapkv.py",
                "torch.arange(length - count, length, device=source.device)",
                "torch.arange(length - count - 1, length - 1, device=source.device)",
            ),
            Fault(
                "a choice by attention in them too",
                "speculation/policies/snapkv.py",
                "if source.windows.is_narrow(layer):",
                "if False:",
            ),
        ),
    ),
    Property(
        "Blocks are chosen for the layers with the widest window alone.",
        f"{READS}[verified-window of some layers-native]",
        (
            Fault(
                "blocks of all layers",
                "kv/layer_views.py",
                "narrow = rule.in_narrow_layers() if others else rule",
                "narrow = rule",
            ),
            Fault(
                "their window is that of the policy",
                "speculation/block_kv.py",
                "return SinksAndWindow(0, self.budget)",
                "return SinksAndWindow(0, self.window)",
            ),
        ),
    ),
    Property(
        "snapkv chooses anew when that is due.",
        "test_draft_choices.py::test_snapkv_chooses_anew_when_that_is_due",
        (
            Fault(
                "no choice is due",
                "speculation/policies/snapkv.py",
                "is_due = every and request.num_cached >= self.chosen_at[row] + every",
                "is_due = False",
            ),
            Fault(
                "a choice a token late",
                "speculation/policies/snapkv.py",
                "is_due = every and request.num_cached >= self.chosen_at[row] + every",
                "is_due = every and request.num_cached > self.chosen_at[row] + every",
            ),
            Fault(
                "a choice counted from the prompt",
                "speculation/policies/snapkv.py",
                "self.chosen_at[row] = length\n",
                "pass\n",
            ),
        ),
    ),
    Property(
        "Drafts under retrieval read the blocks that the newest verified query points to.",
        f"{READS}[retrieval-grouped-layers]",
        (
            Fault(
                "the query of a rejected draft",
                "speculation/policies/retrieval.py",
                "place = (lengths.tensor - before - 1).clamp(0, queries.shape[1] - 1)",
                "place = (0 * before - 1 + queries.shape[1]).clamp(0, queries.shape[1] - 1)",
            ),
            Fault(
                "mean keys of a row's former request",
                "speculation/policies/retrieval.py",
                "            self._complete[row] = 0\n",
                "",
            ),
            Fault(
                "the query of one head alone",
                "speculation/policies/retrieval.py",
                "return weights.sum(dim=3)",
                "return weights[:, :, :, 0]",
            ),
            Fault(
                "a block that is not complete among the scored",
                "speculation/policies/retrieval.py",
                "is_partial = block >= (committed",
                "is_partial = block > (committed",
            ),
            Fault(
                "mean keys of another row",
                "speculation/policies/retrieval.py",
                "keys = self._mean_keys[:, self._texts[index], :, :num_blocks]",
                "keys = self._mean_keys[:, index - 1, :, :num_blocks]",
            ),
            Fault(
                "a text's length at its admission not kept",
                "speculation/policies/retrieval.py",
                "            self._committed[row] = request.num_cached\n",
                "",
            ),
        ),
    ),
    Property(
        "A standalone draft takes what it lacks and drafts after the newest token.",
        "test_draft_choices.py::test_a_standalone_draft_reads_what_its_policy_says[streaming_llm]",
        (
            Fault(
                "a draft that goes back by a token too many",
                "speculation/model_drafter.py",
                "self.target.cache.lengths_of(batch.rows).plus(1 - shape.pending))",
                "self.target.cache.lengths_of(batch.rows).plus(-shape.pending))",
            ),
        ),
    ),
    Property(
        "Native steps choose the same blocks.",
        f"{READS}[retrieval-grouped-native]",
        (
            Fault(
                "scores of another row",
                "speculation/policies/retrieval.py",
                "self._query, self._mean_keys, rows.index, texts, blocks, num_blocks",
                "self._query, self._mean_keys, rows.index * 0, texts, blocks, num_blocks",
            ),
            Fault(
                "the best blocks of another row",
                "speculation/block_kv.py",
                "return top_blocks(scores, index, split, most)",
                "return top_blocks(scores, index * 0, split, most)",
            ),
        ),
    ),
    Property(
        "Drafts under verified read the blocks that the last verification attended to.",
        f"{READS}[verified-grouped-layers]",
        (
            Fault(
                "weights of another row",
                "speculation/policies/verified.py",
                "return self._weights, rows.index",
                "return self._weights, (rows.index + 1) % self._weights.shape[1]",
            ),
            Fault(
                "weights of the prompt for ever",
                "speculation/policies/verified.py",
                "in self.in_widest(self._seen.layers):",
                "in () if len(rows) > 1 else self.in_widest(self._seen.layers):",
            ),
            Fault(
                "a window of blocks short by one",
                "speculation/block_kv.py",
                "start = (committed - self.window) // BLOCK * BLOCK",
                "start = (committed - self.window + 1) // BLOCK * BLOCK",
            ),
            Fault(
                "the block at the window's border passed over",
                "speculation/block_kv.py",
                "eligible &= block < starts.unsqueeze(1) // BLOCK",
                "eligible &= block < starts.unsqueeze(1) // BLOCK - 1",
            ),
            Fault(
                "a block beside the sinks read twice",
                "speculation/block_kv.py",
                "eligible = block * BLOCK >= lasts.unsqueeze(1)  #",
                "eligible = (block + 1) * BLOCK > lasts.unsqueeze(1)  #",
            ),
            Fault(
                "a budget of one less for blocks",
                "speculation/block_kv.py",
                "room = self.budget - (last - first)\n        start",
                "room = self.budget - (last - first) - 1\n        start",
            ),
        ),
    ),
    Property(
        "With a sliding window, blocks are chosen in it.",
        f"{READS}[verified-window-layers]",
        (
            Fault(
                "blocks chosen before the window",
                "speculation/block_kv.py",
                "first = _positive(committed + 1 - self.sliding_window)",
                "first = _positive(committed - self.sliding_window)",
            ),
        ),
    ),
    Property(
        "A lookup learns from its tokens up to the first wrong one.",
        f"{LOOKUPS}test_nothing_is_learned_of_what_follows_a_wrong_token",
        (
            Fault(
                "a lookup that learns past a wrong token",
                "speculation/suffix_index.py",
                "                if token != actual:\n                    break\n",
                "",
            ),
        ),
    ),
    Property(
        "A lookup proposes what followed most of the longest matches.",
        f"{LOOKUPS}test_lookups_propose_and_learn_what_a_search_of_the_whole_text_does",
        (
            Fault(
                "a wrong token not learned",
                "speculation/suffix_index.py",
                "                self.rates.observe(evidence, token == actual)\n"
                "                if token != actual:\n                    break\n",
                "                if token != actual:\n                    break\n"
                "                self.rates.observe(evidence, token == actual)\n",
            ),
            Fault(
                "places that disagree taken for one",
                "speculation/suffix_index.py",
                "agreement = 2 if votes < len(places) else int(votes > 1)",
                "agreement = int(votes > 1)",
            ),
            Fault(
                "shorter matches than half of the longest",
                "speculation/suffix_index.py",
                "if 2 * found[0] >= places[0][0]]",
                "if 3 * found[0] >= places[0][0]]",
            ),
            Fault(
                "the evidence of the first token for all",
                "speculation/suffix_index.py",
                "(length + 1, known, place + 1)",
                "(length, known, place + 1)",
            ),
            Fault(
                "a text without rates of its own",
                "speculation/suffix_index.py",
                "return (right + TEXT_WEIGHT * self.general(evidence)) / (count + TEXT_WEIGHT)",
                "return self.general(evidence)",
            ),
        ),
    ),
    Property(
        "No request overtakes one that waits for blocks.",
        "test_order_of_requests.py::test_requests_are_served_in_the_order_of_the_rules",
        (
            Fault(
                "a later request overtakes one without blocks",
                "engine/scheduler.py",
                "                if free < 0:\n                    break\n",
                "                if free < 0:\n"
                "                    free += limits.num_blocks_of(tokens)\n"
                "                    continue\n",
            ),
            Fault(
                "the plan of before repeated when a request joins",
                "engine/scheduler.py",
                "        self._repeated = None  # of before: who joins now",
                "        #",
            ),
            Fault(
                "the oldest request preempted",
                "engine/scheduler.py",
                "preempted.append(survivors.pop())",
                "preempted.append(survivors.pop(0))",
            ),
            Fault(
                "requests admitted in a step that preempts",
                "engine/scheduler.py",
                "admitted = [] if preempted else self._admit(leaving, reserved, shared)",
                "admitted = self._admit(leaving, reserved, shared)",
            ),
            Fault(
                "blocks promised to growing rows given away",
                "engine/scheduler.py",
                "            free -= sum(blocks.lacking(row, num_tokens) "
                "for row, num_tokens in reserved.items())\n",
                "",
            ),
            Fault(
                "blocks of leaving rows not free yet",
                "engine/scheduler.py",
                "free = blocks.free(_rows_of(leaving))\n",
                "free = blocks.free()\n",
            ),
        ),
    ),
    Property(
        "A ring counts what was proposed and accepted of each row.",
        "test_recurrent_order.py::test_a_ring_counts_what_was_proposed_and_accepted_of_each_row",
        (
            Fault(
                "accepted padding counted",
                "records/acceptance.py",
                "counts = drafted, min(accepted, drafted), emitted",
                "counts = drafted, accepted, emitted",
            ),
            Fault(
                "rounds counted twice",
                "systems/mdi_llm/recurrent.py",
                "self.counts.num_rounds += len(counts)",
                "self.counts.num_rounds += 2 * len(counts)",
            ),
            Fault(
                "padding counted as drafted",
                "systems/mdi_llm/recurrent.py",
                "counts = [min(count, most) for count in plan.counts]",
                "counts = [count for _ in plan.counts]",
            ),
        ),
    ),
    Property(
        "Pipelined speculation counts the drafts that were judged, and apart those that were not.",
        "test_pipelined_scheduler.py::test_every_schedule_emits_what_plain_decoding_emits[0]",
        (
            Fault(
                "the newest token counted as a draft",
                "systems/pipeinfer/scheduler.py",
                "run.num_drafted = len(drafts)",
                "run.num_drafted = len(nodes)",
            ),
            Fault(
                "a rejected draft counted as accepted",
                "systems/pipeinfer/scheduler.py",
                "run.num_accepted += not is_ended",
                "run.num_accepted += 1",
            ),
            Fault(
                "cancelled drafts counted as judged",
                "systems/pipeinfer/scheduler.py",
                "        if run.is_judged:\n",
                "        if is_ended or run.is_judged:\n",
            ),
            Fault(
                "cancelled drafts counted nowhere",
                "systems/pipeinfer/scheduler.py",
                "            num_cancelled += run.num_drafted\n",
                "            pass\n",
            ),
        ),
    ),
)
