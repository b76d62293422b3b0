"""RunConfig: every check of what a user can write, and the resolution of `auto`. Imports no torch.

Owns how the sections of a run go together. Must not know how any choice is implemented.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from magicdec.config.backend_choice import (
    check_tells_mass,
    choose_backend,
    choose_draft_kv,
    choose_graphs,
    settled,
)
from magicdec.config.checks import (
    check_budget,
    check_draft_kv,
    check_filters_act,
    check_lengths,
    check_rank_group,
    check_sampling,
)
from magicdec.config.collectives_choice import choose_collectives
from magicdec.config.draft_section import DraftSection
from magicdec.config.layer_choice import (
    choose_dtype,
    choose_elementwise,
    choose_linear,
    choose_weights,
)
from magicdec.config.machine import Machine
from magicdec.config.model_section import ModelSection
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    OutputSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)


@dataclass(frozen=True)
class RunConfig:
    model: ModelSection = ModelSection()
    draft: DraftSection | None = None
    parallel: ParallelSection = ParallelSection()
    kv: KVSection = KVSection()
    attention: AttentionSection = AttentionSection()
    decoding: DecodingSection = DecodingSection()
    sampling: SamplingSection = SamplingSection()
    workload: WorkloadSection = WorkloadSection()
    output: OutputSection = OutputSection()

    def check(self, world_size: int) -> None:
        """Raise ValueError, one line naming the flag, for anything that is wrong whatever the
        model."""
        w, kv = self.workload, self.kv
        for flag, value, least in (
            ("--gamma", self.decoding.most_draft_tokens, 1),
            ("--B", w.batch_size, 1),
            ("--prefix_len", w.prefix_len, 1),
            ("--num_batches", w.num_batches, 1),
            ("--warmup_batches", w.warmup_batches, 0),
            ("--prefill_chunk", self.attention.prefill_chunk, 1),
            ("--num_sink_tokens", kv.num_sink_tokens, 0),
            ("--window_size", kv.window_size, 1),
            ("--reselect_every", kv.reselect_every, 0),
            ("--recent_window", kv.num_recent_tokens, 1),
            ("--threads", 1 if self.parallel.threads is None else self.parallel.threads, 1),
        ):
            if value < least:
                raise ValueError(f"{flag} {value} is too small; it must be at least {least}")
        check_lengths(w.prefix_len, w.gen_len, w.max_len)
        if self.decoding.strategy == "autoregressive" and self.decoding.drafter is not None:
            raise ValueError(
                f"--drafter {self.decoding.drafter}: the baseline drafts nothing; "
                "that flag is for selfspec and longspec"
            )
        check_budget(kv, self.decoding.most_draft_tokens)
        check_rank_group("--rank_group", self.parallel.rank_group, world_size)
        check_sampling(self.sampling)
        check_filters_act(self.sampling)
        self._check_draft(world_size)
        policy = "full" if kv.budget == -1 else kv.policy
        check_draft_kv(kv.draft_kv_dtype, self.decoding.drafter, policy)

    def _check_draft(self, world_size: int) -> None:
        drafter = self.decoding.drafter
        if self.draft is None:
            if drafter == "model":
                raise ValueError("--drafter model: no draft is named here; that is longspec")
            return
        self.draft.check(world_size)
        if drafter != "model":
            raise ValueError(
                f"--drafter {drafter}: the draft --model would do nothing; "
                "choose model, or run selfspec"
            )
        if self.kv.policy == "verified" and self.kv.budget != -1:
            raise ValueError(
                "--kv_policy verified: a standalone draft is never verified itself; "
                "choose from full, streaming_llm, snapkv"
            )
        if self.kv.reselect_every:
            raise ValueError(
                f"--reselect_every {self.kv.reselect_every}: a standalone draft keeps no whole "
                "context to choose from anew; leave it at 0"
            )

    def resolve(self, machine: Machine, head_dim: int = 64, draft_head_dim: int = 64) -> RunConfig:
        """Turn every `auto` and every None into what will run, for models of these head sizes.

        Raises ValueError for what is not there: a device, a compiler, a way to exchange."""
        device = self.parallel.device
        if device == "auto":
            device = "cuda" if machine.has_cuda else "cpu"
        elif device == "cuda" and not machine.has_cuda:
            raise ValueError("--device cuda: no CUDA device here; choose from auto, cpu")
        fast_bfloat16 = device == "cuda" or machine.has_fast_bfloat16
        dtype = choose_dtype(self.model.dtype, self.model.target_dtype, fast_bfloat16)
        collectives, reason = self.parallel.collectives, self.parallel.collectives_reason
        if reason is None:
            collectives, reason = choose_collectives(collectives, device, machine)
        backend, backend_reason = self.attention.backend, self.attention.backend_reason
        if backend_reason is None:
            backend, backend_reason = choose_backend(backend, device, machine, head_dim, dtype)
        linear = choose_linear(self.model.linear, device, dtype, machine)
        elementwise, elementwise_reason = self.model.elementwise, self.model.elementwise_reason
        if elementwise_reason is None:
            elementwise, elementwise_reason = choose_elementwise(
                elementwise, device, dtype, linear, machine
            )
        if self.decoding.drafter == "self":
            check_tells_mass(backend, self.kv.resolve().policy)
        rank_group = self.parallel.rank_group or tuple(range(machine.world_size))
        draft = self.draft and self.draft.resolve(
            self.attention.backend, rank_group, device, machine, draft_head_dim, dtype
        )
        replace = dataclasses.replace
        resolved = replace(
            self,
            draft=draft,
            kv=replace(
                self.kv.resolve(),
                draft_kv_dtype=choose_draft_kv(
                    self.kv.draft_kv_dtype,
                    dtype,
                    draft.backend if draft and draft.backend else backend,
                    machine,
                    head_dim if draft is None else draft_head_dim,
                ),
            ),
            model=replace(
                self.model,
                dtype=dtype,
                linear=linear,
                elementwise=elementwise,
                elementwise_reason=elementwise_reason,
                target_dtype=choose_weights("--target_dtype", self.model.target_dtype, dtype),
            ),
            parallel=replace(
                self.parallel,
                device=device,
                collectives=collectives,
                collectives_reason=reason,
                rank_group=rank_group,
                threads=self.parallel.threads
                or max(1, machine.num_cpus // machine.local_world_size),
            ),
            attention=replace(self.attention, backend=backend, backend_reason=backend_reason),
            workload=replace(
                self.workload,
                gen_len=self.workload.num_new_tokens,
                max_len=self.workload.prefix_len + self.workload.num_new_tokens,
            ),
        )
        return resolved.resolve_graphs()

    def resolve_graphs(self) -> RunConfig:
        """With `--cuda_graphs auto` as it will run; again when a measurement has named a backend.
        Raises ValueError where they were asked for and cannot be."""
        d, draft = self.decoding, self.draft
        backends = [settled(self.attention.backend, self.attention.backend_reason)]
        if draft is not None:
            backends.append(settled(draft.backend, draft.backend_reason))
        asked = "auto" if (d.cuda_graphs_reason or "").startswith("auto") else d.cuda_graphs
        graphs, reason = choose_graphs(asked, self.parallel.device, backends)
        decoding = dataclasses.replace(d, cuda_graphs=graphs, cuda_graphs_reason=reason)
        return dataclasses.replace(self, decoding=decoding)

    def to_dict(self) -> dict[str, Any]:
        """Nested by section, for the record."""
        return dataclasses.asdict(self)
