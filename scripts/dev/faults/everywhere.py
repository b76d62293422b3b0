"""Of acceptance at every position, counted and by probabilities."""

from __future__ import annotations

from faults.fault import Fault, Property

VERIFICATION = "test_verification.py::"
COMMAND = "test_acceptance_command.py::"
SAMPLED = "test_sampled_acceptance.py::"
RECORD = "bench/acceptance/record.py"
MEMORY = "test_acceptance_memory.py::"
EVERYWHERE = "test_acceptance_everywhere.py::"

PROPERTIES = (
    Property(
        "What drafts behind layers with states follows from its own row.",
        f"{EVERYWHERE}test_a_draft_model_with_states_does_not_fork",
        (
            Fault(
                "a draft model with states forks",
                "bench/acceptance/forks.py",
                "models.draft is not None and models.draft.mixers",
                "False",
            ),
        ),
    ),
    Property(
        "The probability of acceptance has the mean of what is accepted, and its first value is "
        "that of every draft.",
        f"{VERIFICATION}test_the_probability_of_acceptance_is_unbiased_over_drafts_from_q[0]",
        (
            Fault(
                "accepted drafts taken for drawn ones",
                "runner/sampling/verification.py",
                "ratio[:, :-1].cumprod(dim=1)",
                "overlap[:, :-1].cumprod(dim=1)",
            ),
            Fault(
                "the probability of the draft that was drawn",
                "runner/sampling/verification.py",
                "    return before * overlap\n",
                "    return before * ratio\n",
            ),
        ),
    ),
    Property(
        "Padding is never accepted.",
        f"{VERIFICATION}test_the_probability_of_acceptance_by_its_definition",
        (
            Fault(
                "padding counts with its overlap",
                "runner/sampling/verification.py",
                "        overlap = overlap * is_real\n",
                "",
            ),
        ),
    ),
    Property(
        "At a temperature a run accepts drafts with the probabilities of the table.",
        f"{SAMPLED}test_a_run_accepts_drafts_with_the_probabilities_of_the_table[model]",
        (
            Fault(
                "drawn drafts judged like lookups",
                "runner/sampling/model_tokens.py",
                "proposal.ids, proposal.probabilities, probs, proposal.counts_on_device",
                "proposal.ids, None, probs, proposal.counts_on_device",
            ),
            Fault(
                "a position has the probabilities of another row",
                "speculation/steps/speculative.py",
                "zip(acceptance, counts, strict=True)",
                "zip(reversed(acceptance), counts, strict=True)",
            ),
        ),
    ),
    Property(
        "Over its own sampled text a run has the steps that forks expect.",
        f"{SAMPLED}test_steps_of_a_run_over_its_text_are_those_that_forks_expect[model]",
        (
            Fault(
                "the chance of a drawn draft",
                "bench/acceptance/forks.py",
                "acceptance = (q / p).clamp(max=1).cumprod(dim=1)",
                "acceptance = (p / q).clamp(max=1).cumprod(dim=1)",
            ),
            Fault(
                "drafts drawn in place of given ones",
                "runner/sampling/model_tokens.py",
                "if sampling.given is not None:",
                "if False:",
            ),
        ),
    ),
    Property(
        "A model accepts what it drafts itself with its whole cache.",
        f"{SAMPLED}test_a_model_accepts_what_it_drafts_itself_with_its_whole_cache",
        (
            Fault(
                "the chances of the tokens before",
                "bench/acceptance/forks.py",
                "        first = self.number - 1\n",
                "        first = max(0, self.number - 2)\n",
            ),
            Fault(
                "texts without their penalties",
                "bench/acceptance/forks.py",
                "whole = whole_logits(self.runner, step.logits, sampling)",
                "whole = whole_logits(self.runner, step.logits, replace(sampling, penalties=None))",
            ),
        ),
    ),
    Property(
        "Sampled texts are those of decoding without drafts.",
        f"{SAMPLED}test_sampled_texts_are_those_of_decoding_without_drafts",
        (
            Fault(
                "texts follow the drafts that were accepted",
                "runner/sampling/model_tokens.py",
                "ids = torch.cat([token.unsqueeze(1), target.ids[:, 1:]], dim=1)",
                "ids = target.ids",
            ),
        ),
    ),
    Property(
        "A category has the acceptance of its texts alone.",
        f"{COMMAND}test_a_category_has_the_acceptance_of_its_texts_alone",
        (
            Fault(
                "drafts of the first texts for those of a category",
                RECORD,
                "counts = [drafted[place] for place in places]",
                "counts = drafted[: len(places)]",
            ),
            Fault(
                "a category without a position",
                RECORD,
                "        if any(map(len, texts)):\n",
                "        if True:\n",
            ),
        ),
    ),
    Property(
        "Probabilities count as shares of positions.",
        f"{COMMAND}test_probabilities_count_as_shares_of_positions",
        (
            Fault(
                "a draft token judged where none was drafted",
                RECORD,
                "return np.where(is_drafted, before, 0.0)",
                "return before",
            ),
        ),
    ),
    Property(
        "What a step of a run emits follows from the counts at every position.",
        f"{COMMAND}test_tokens_a_step_are_those_of_counts",
        (
            Fault(
                "a step that begins at what the last one rejected",
                RECORD,
                "begins[position + 1 : position + gamma + 2]",
                "begins[position + 1 : position + gamma + 2][::-1]",
            ),
        ),
    ),
    Property(
        "Forks of what snapkv has copied accept what verifications step by step accept.",
        f"{EVERYWHERE}test_forks_accept_what_verifications_step_by_step_accept[snapkv-128]",
        (
            Fault(
                "a copy without what follows the prompt",
                "bench/acceptance/forks.py",
                "        drafter.prepare([text], 0)\n",
                "        pass\n",
            ),
            Fault(
                "chosen at the end of the continuation",
                "bench/acceptance/forks.py",
                "replace(request, output_ids=tokens[:1])",
                "replace(request, output_ids=tokens[:])",
            ),
            Fault(
                "forks of a copy with a row's own positions",
                "speculation/copied_kv.py",
                "self._offsets[row] = self.shifts[row] = self.shifts[text.row]",
                "self.shifts[row] = self.shifts[text.row]",
            ),
        ),
    ),
    Property(
        "Forks choose blocks by the query of their own newest cached token.",
        f"{EVERYWHERE}test_forks_accept_what_verifications_step_by_step_accept[retrieval-128]",
        (
            Fault(
                "no verification is seen",
                "bench/acceptance/forks.py",
                "            see_last(runner, drafter, forks)\n",
                "",
            ),
            Fault(
                "mean keys of the first text",
                "speculation/policies/retrieval.py",
                "        self._texts[rows] = self._texts[text_rows]\n",
                "        self._texts[rows] = 0\n",
            ),
        ),
    ),
    Property(
        "Forks of a head read the states of their texts.",
        f"{EVERYWHERE}test_forks_accept_what_verifications_step_by_step_accept[eagle-128]",
        (
            Fault(
                "states of the first text",
                "runner/observers/hidden_states.py",
                "        self._texts[rows] = self._texts[texts]\n",
                "        self._texts[rows] = 0\n",
            ),
        ),
    ),
    Property(
        "Forks of neighbouring positions take no more blocks than are planned.",
        f"{MEMORY}test_forks_take_no_more_blocks_than_are_planned",
        (
            Fault(
                "drafts that end in the next block forgotten",
                "kv/layer_caches.py",
                "self.num_rows * (1 + num_whole) + rest * (-(-self.num_rows // block) + num_texts)",
                "self.num_rows * (1 + num_whole)",
            ),
        ),
    ),
    Property(
        "The caches of acceptance are as large as planned.",
        f"{MEMORY}test_caches_are_as_large_as_planned",
        (
            Fault(
                "a draft model planned without its forks",
                "bench/acceptance/memory.py",
                "plan_of([plan.with_forks(num_forks) for plan in plans_of_models])",
                "plan_of(plans_of_models)",
            ),
        ),
    ),
    Property(
        "A draft is freed before the next one takes memory.",
        f"{MEMORY}test_a_draft_is_freed_before_the_next_one_takes_memory",
        (
            Fault(
                "the first system kept with its prompts",
                "systems/shared_prefill.py",
                "self.make_runner = make_runner if is_kept else None",
                "self.make_runner = make_runner",
            ),
        ),
    ),
    Property(
        "Contexts that share a prefill accept what they accept alone.",
        f"{EVERYWHERE}test_contexts_that_share_a_prefill_accept_what_they_accept_alone",
        (
            Fault(
                "continuations of the longer context kept",
                "systems/shared_prefill.py",
                "            self.results.clear()\n",
                "            pass\n",
            ),
        ),
    ),
)
