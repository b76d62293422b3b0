"""Of draft heads, of acceptance by chance, and of what drafting must bring to pay."""

from __future__ import annotations

from faults.fault import Fault, Property

DRAFTER = "speculation/head_drafter.py"

PROPERTIES = (
    Property(
        "Drafts of a head are those of its definition.",
        "test_eagle.py::test_drafts_equal_the_definition[a norm for each state-layers]",
        (
            Fault(
                "a head's tokens are not the following ones",
                DRAFTER,
                "following = self.states.ids_at(rows.index, positions + 1)",
                "following = self.states.ids_at(rows.index, positions)",
            ),
            Fault(
                "drafts from slots of drafts",
                DRAFTER,
                "        filled = lengths.plus(-shape.pending)",
                "        filled = lengths.plus(-min(1, shape.pending))",
            ),
            Fault(
                "states before a layer's residual",
                "model/transformer.py",
                "keep(layer, x if y is None else x + y)",
                "keep(layer, x)",
            ),
            Fault(
                "output fed back without its norm",
                "model/eagle.py",
                "return logits, normed if self.norm_output else output",
                "return logits, output",
            ),
        ),
    ),
    Property(
        "MiMo's head takes the state before the embedding.",
        "test_mtp.py::test_drafts_have_the_logits_of_the_definition[MiMoForCausalLM-untied]",
        (
            Fault(
                "as the others do", "model/mtp.py", "if self.config.mtp_state_first:", "if False:"
            ),
        ),
    ),
    Property(
        "Drafts of a head for multi-token prediction have the logits of its definition.",
        "test_mtp.py::test_drafts_have_the_logits_of_the_definition[Qwen3_5ForCausalLM-untied]",
        (
            Fault(
                "the state before the embedding",
                "model/mtp.py",
                "self.projection(torch.cat(both, dim=-1))",
                "self.projection(torch.cat(both[::-1], dim=-1))",
            ),
            Fault(
                "norms of a head as they are stored",
                "model/families/family.py",
                "norm=self.mtp.norm)",
                "norm=self.mtp.norm, norm_offset=0.0)",
            ),
            Fault(
                "states before the target's final norm",
                "model/mtp.py",
                "self.target_norm(states[:, :, 0].contiguous())",
                "states[:, :, 0].contiguous()",
            ),
            Fault(
                "an output fed back without the head's norm",
                "model/mtp.py",
                "return self.multiply_head(normed), normed",
                "return self.multiply_head(normed), output",
            ),
            Fault(
                "states of the slot before",
                DRAFTER,
                "x = self.head.pair(following, self.head.reduced(states))",
                "x = self.head.pair(following, self.head.reduced(states.roll(1, dims=1)))",
            ),
            Fault(
                "slots of rejected drafts stay",
                DRAFTER,
                "        filled = lengths.plus(-shape.pending)",
                "        filled = lengths.plus(-min(1, shape.pending))",
            ),
        ),
    ),
    Property(
        "Drafts of a head after a hit of a model with states are those after a prefill.",
        "test_mtp.py::test_drafts_after_a_hit_are_those_after_a_prefill[Qwen3NextForCausalLM]",
        (
            Fault(
                "a copied block without its states",
                "kv/pool.py",
                "tensor[target].copy_(tensor[source])",
                "tensor[target].zero_()",
            ),
        ),
    ),
    Property(
        "A head in a ring drafts from the states of the last stage.",
        "test_mtp.py::test_a_ring_accepts_the_drafts_of_the_definition",
        (
            Fault(
                "states of a place further",
                "systems/mdi_llm/recurrent.py",
                "        return cls(upload(rows, device), lengths.unsqueeze(1) + steps, ids)",
                "        return cls(upload(rows, device), lengths.unsqueeze(1) + steps + 1, ids)",
            ),
            Fault(
                "the last state of a prompt alone",
                "systems/mdi_llm/ring_stage.py",
                "        gives_all = status == VERIFY or self.sends_states",
                "        gives_all = status == VERIFY",
            ),
        ),
    ),
    Property(
        "Drafts of a head that runs ahead are those of the committed text and their path.",
        "test_mtp.py::test_path_drafts_have_the_logits_of_the_definition[Qwen3_5ForCausalLM-full]",
        (
            Fault(
                "true slots on the ends of those of drafts",
                "systems/pipeinfer/mtp_path_drafter.py",
                "        self._rewind(lane, first)",
                "        pass",
            ),
            Fault(
                "slots of another path stay",
                "systems/pipeinfer/mtp_path_drafter.py",
                "        held.cut(known)",
                "        known = len(held.tokens)",
            ),
            Fault(
                "a first token in place of the one that follows",
                "systems/pipeinfer/mtp_path_drafter.py",
                "text[start + 1 : end + 1]",
                "text[start:end]",
            ),
            Fault(
                "the slots of a lane's last request",
                "systems/pipeinfer/mtp_path_drafter.py",
                "            self.held[step.lane] = HeldSlots(step.request, len(text))",
                "            self.held[step.lane].num_prompt = len(text)",
            ),
        ),
    ),
    Property(
        "The plan of a head for multi-token prediction is what it holds, and what it reads.",
        "test_mtp.py::test_the_plan_has_the_bytes_of_the_head[torch]",
        (
            Fault(
                "the target's matrix of logits twice",
                "hardware/costs.py",
                "        if c.is_mtp or (is_tied and",
                "        if (is_tied and",
            ),
            Fault(
                "a projection that nothing reads",
                "hardware/costs.py",
                "        return [(hidden, 2 * hidden), *shapes]",
                "        return shapes",
            ),
            Fault(
                "states before the last layer",
                "setup/head_checks.py",
                "        return (num_layers,)",
                "        return (num_layers - 1,)",
            ),
        ),
    ),
    Property(
        "Heads with a vocabulary of their own sample and are penalised in the ids of the target.",
        "test_eagle.py::test_a_head_samples_and_is_penalised_in_the_ids_of_its_target",
        (
            Fault(
                "a head's own ids",
                DRAFTER,
                "whole[..., head.target_ids] = among",
                "whole[..., : among.shape[-1]] = among",
            ),
            Fault(
                "greedy ids of a head's own",
                DRAFTER,
                "return head.target_ids[ids], None",
                "return ids, None",
            ),
            Fault(
                "drafts are not penalised for drafts",
                DRAFTER,
                "process(whole, sampling.penalties, drafts)",
                "process(whole, sampling.penalties, drafts[:, :0])",
            ),
            Fault(
                "no penalties where tokens are drawn",
                DRAFTER,
                "whole = process(whole, sampling.penalties, drafts)",
                "whole = process(whole, sampling.penalties, drafts) if draws is None else whole",
            ),
        ),
    ),
    Property(
        "A head that lists no layers takes states of those of vLLM.",
        "test_eagle_checks.py::test_a_head_that_lists_no_layers_takes_those_of_vllm",
        (
            Fault(
                "the middle rounded up",
                "setup/head_checks.py",
                "usual = (2, num_layers // 2, num_layers - 3)",
                "usual = (2, (num_layers + 1) // 2, num_layers - 3)",
            ),
            Fault(
                "layers counted from their outputs",
                "setup/head_checks.py",
                "usual = (2, num_layers // 2, num_layers - 3)",
                "usual = (1, num_layers // 2 - 1, num_layers - 4)",
            ),
        ),
    ),
    Property(
        "Emulated acceptance has the rates that were asked for.",
        "test_emulated_acceptance.py::test_drafts_are_accepted_as_often_as_asked_for[self-0.0]",
        (
            Fault(
                "rates of all drafts before, taken for those of one",
                "config/sections.py",
                "return tuple(p / q if q > 0 else 0.0 for p, q in zip(padded, before, "
                "strict=False))",
                "return padded",
            ),
            Fault(
                "the target's verdict beside chance",
                "speculation/steps/steps.py",
                "        if self.rule is not None and proposal.ids.shape[1] > 0:",
                "        if self.rule is not None and proposal.ids.shape[1] > 9:",
            ),
        ),
    ),
    Property(
        "Drafts of a policy that chooses anew begin with a choice.",
        "test_latency.py::test_drafting_pays_from_the_time_of_a_step_by_that_of_a_decode_step",
        (
            Fault(
                "drafts without their choice",
                "bench/latency/record.py",
                "gamma: first_ms.get(draft, ms)",
                "gamma: ms",
            ),
            Fault(
                "verifications that are not watched",
                "bench/latency/record.py",
                "policy = draft[0] if draft in first_ms else None",
                "policy = None",
            ),
        ),
    ),
)
