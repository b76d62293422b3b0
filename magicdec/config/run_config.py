"""RunConfig: the user's settings, and the checks that need no model and no machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.config.capabilities import check_standalone, policy_name
from magicdec.config.sections import (
    MODEL_PREFIX,
    NGRAM,
    NONE,
    SELF,
    AttentionSection,
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.config.setting import check_values
from magicdec.names import BASELINE, NGRAM_AND

MODEL = f"{MODEL_PREFIX}NAME"
DRAFTS = (SELF, MODEL, NGRAM, NGRAM_AND + SELF, NGRAM_AND + MODEL, NONE)


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

    def with_draft(self, draft: str, choices: Sequence[str] = DRAFTS) -> RunConfig:
        """The config with what `--draft` names, with the settings of `self.draft`. Raises
        ValueError outside `choices`."""
        before, prefix, name = draft.partition(MODEL_PREFIX)
        is_named = bool(prefix and name)
        if (f"{before}{MODEL}" if is_named else draft) not in choices:
            first, _, second = draft.partition("+")
            if first and first == second:
                raise ValueError(f"--draft {draft} names one source twice; give {first}")
            raise ValueError(f"--draft {draft} is not known; choose from {', '.join(choices)}")
        drafter = f"{before}model" if is_named else draft
        decoding = replace(
            self.decoding,
            strategy=BASELINE if draft == NONE else "speculative",
            drafter=None if draft == NONE else drafter,
        )
        section = replace(self.draft or DraftSection(), model=name) if is_named else None
        return replace(self, draft=section, decoding=decoding)

    def without_drafts(self) -> RunConfig:
        """The config of what does not draft, beside others that do as this one says."""
        decoding = replace(self.decoding, draft_weights=None)
        return replace(self, decoding=decoding).with_draft(NONE)

    def check(self, world_size: int) -> None:
        """Raises ValueError, one line naming the flag, for values that are wrong for every
        model."""
        w = self.workload
        kv = self.kv
        d = self.decoding
        for section in dataclasses.fields(self):
            if (values := getattr(self, section.name)) is not None:
                check_values(values)
        check_lengths(w.prefix_len, w.gen_len, w.max_len)
        for applies, refusal in self._refusals():
            if applies:
                raise ValueError(refusal)
        kv.check(d.max_gamma)
        check_rank_group("--rank_group", self.parallel.rank_group, world_size, is_target=True)
        check_filters_act(self.sampling)
        policy = policy_name(kv.policy, kv.budget)
        if self.draft is not None:
            check_rank_group("--draft_ranks", self.draft.rank_group, world_size, is_target=False)
            check_standalone(policy)

    def _refusals(self) -> list[tuple[bool, str]]:
        """Settings that exclude each other: whether they do here, and the refusal."""
        d = self.decoding
        drafter = self.decoding.drafter
        has_draft = self.draft is not None
        pa = f"--pa {d.pa}"
        return [
            (
                d.strategy == BASELINE and drafter is not None,
                f"--drafter {drafter}: the baseline drafts nothing; that flag is for selfspec and "
                "longspec",
            ),
            (
                d.looks_up and d.pa is not None,
                f"{pa} --drafter {drafter}: prompt lookup ends where its own evidence does; choose "
                "self or model",
            ),
            (
                d.model_drafter == "model" and not has_draft,
                f"--drafter {drafter}: no draft is named here; that is longspec",
            ),
            (
                d.model_drafter != "model" and has_draft,
                f"--drafter {drafter}: the draft --model would do nothing; choose model, or run "
                "selfspec",
            ),
            (
                d.draft_weights is not None and d.model_drafter is None,
                f"--draft_weights {d.draft_weights}: no model drafts here; leave it out",
            ),
            (
                has_draft and self.kv.reselect_every > 0,
                f"--reselect_every {self.kv.reselect_every}: a standalone draft keeps no whole "
                "context to choose from anew; leave it at 0",
            ),
        ]


def check_filters_act(values: SamplingSection) -> None:
    """Raises ValueError for filters of greedy decoding, which would ignore them."""
    for flag, value, off in (
        ("--top_k", values.top_k, 0),
        ("--top_p", values.top_p, 1),
        ("--min_p", values.min_p, 0),
    ):
        if values.temperature == 0 and value != off:
            raise ValueError(
                f"{flag} {value} does nothing at --temperature 0 (greedy); "
                "give a --temperature larger than 0"
            )


def check_lengths(prefix_len: int, gen_len: int | None, max_len: int | None) -> None:
    """Raises ValueError if the two flags for the generated length disagree or give less than 1."""
    if gen_len is not None and max_len is not None and prefix_len + gen_len != max_len:
        raise ValueError(
            f"--max_len {max_len} is not --prefix_len {prefix_len} + "
            f"--gen_len {gen_len}; give one of the two"
        )
    if max_len is not None and max_len - prefix_len < 1:
        raise ValueError(
            f"--max_len minus --prefix_len is {max_len - prefix_len}; it must be at least 1"
        )


def check_rank_group(
    flag: str, ranks: tuple[int, ...] | None, world_size: int, is_target: bool
) -> None:
    """Raises ValueError unless a group names launched ranks once; the target's names all."""
    if ranks is None:
        return
    launched = set(range(world_size))
    is_unique = len(set(ranks)) == len(ranks)
    fits = set(ranks) <= launched
    if not ranks or not is_unique or not fits or (is_target and set(ranks) != launched):
        which = "all" if is_target else "some"
        raise ValueError(
            f"{flag} {' '.join(map(str, ranks))}: name {which} of the launched ranks, each once: "
            f"{' '.join(map(str, sorted(launched)))}"
        )
