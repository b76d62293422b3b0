"""RunConfig: the user's settings, and the checks that need no model and no machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from magicdec.config.capabilities import check_standalone, policy_name
from magicdec.config.sections import (
    EAGLE_PREFIX,
    MODEL_PREFIX,
    NAMED,
    NO_MTP_WEIGHTS,
    NONE,
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
from magicdec.names import (
    BASELINE,
    DEFAULT_KV_POLICY,
    DRAFTERS,
    EAGLE,
    FULL_KV_POLICY,
    MTP,
    NGRAM_AND,
)

MODEL = f"{MODEL_PREFIX}NAME"
HEAD = f"{EAGLE_PREFIX}DIR"
HEAD_POLICIES = (FULL_KV_POLICY, DEFAULT_KV_POLICY)
EXAMPLES = {"model": MODEL, EAGLE: HEAD}


def split_draft(draft: str) -> tuple[str, str | None]:
    """The drafter of `--draft`, and the name of the model that it names: ngram+model:NAME is
    ngram+model with NAME."""
    drafter, colon, name = draft.partition(":")
    is_named = colon and name and drafter.removeprefix(NGRAM_AND) in NAMED
    return (drafter, name) if is_named else (draft, None)


def join_draft(drafter: str, name: str | None) -> str:
    """The inverse of `split_draft`. Other drafters have no name of a model."""
    return f"{drafter}:{name}" if drafter.removeprefix(NGRAM_AND) in NAMED else drafter


def example_of(drafter: str) -> str:
    """What `--draft` says for a drafter: ngram+model:NAME for ngram+model."""
    looked_up, plus, last = drafter.rpartition("+")
    return looked_up + plus + EXAMPLES.get(last, last)


DRAFTS = (*map(example_of, DRAFTERS), NONE)


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
        drafter, name = split_draft(draft)
        if (draft if name is None else example_of(drafter)) not in choices:
            first, _, second = draft.partition("+")
            if first and first == second:
                raise ValueError(f"--draft {draft} names one source twice; give {first}")
            raise ValueError(f"--draft {draft} is not known; choose from {', '.join(choices)}")
        decoding = replace(
            self.decoding,
            strategy=BASELINE if draft == NONE else "speculative",
            drafter=None if draft == NONE else drafter,
        )
        if decoding.has_mtp_head:
            name = self.model.model
        section = None if name is None else replace(self.draft or DraftSection(), model=name)
        return replace(self, draft=section, decoding=decoding)

    def without_drafts(self) -> RunConfig:
        """The config of what does not draft, beside others that do as this one says."""
        decoding = replace(self.decoding, draft_weights=None, emulate_acceptance=None)
        return replace(self, decoding=decoding).with_draft(NONE)

    def check(self, world_size: int) -> None:
        """Raises ValueError, one line naming the flag, for values that are wrong for every
        model."""
        kv = self.kv
        d = self.decoding
        for section in dataclasses.fields(self):
            if (values := getattr(self, section.name)) is not None:
                check_values(values)
        for applies, refusal in self._refusals():
            if applies:
                raise ValueError(refusal)
        kv.check(d.max_gamma)
        check_rank_group("--rank_group", self.parallel.rank_group, world_size, is_target=True)
        check_filters_act(self.sampling)
        policy = policy_name(kv.policy, kv.budget)
        if self.draft is not None:
            check_rank_group("--draft_ranks", self.draft.rank_group, world_size, is_target=False)
            if not d.has_head:
                check_standalone(policy)
            elif policy not in HEAD_POLICIES:
                raise ValueError(
                    f"--kv_policy {policy}: a draft head keeps its whole cache or a window of it; "
                    f"choose from {', '.join(HEAD_POLICIES)}"
                )
            if self.draft.eagle_layers is not None and not d.has_eagle_head:
                layers = " ".join(map(str, self.draft.eagle_layers))
                raise ValueError(
                    f"--eagle_layers {layers}: no EAGLE-3 head drafts here; leave it out"
                )

    def _refusals(self) -> list[tuple[bool, str]]:
        """Settings that exclude each other: whether they do here, and the refusal."""
        d = self.decoding
        drafter = self.decoding.drafter
        draft = self.draft
        has_draft = draft is not None
        draft_ranks = None if draft is None else draft.rank_group
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
                d.has_draft_model and not has_draft,
                f"--drafter {drafter}: no draft is named here; that is longspec",
            ),
            (
                has_draft and not d.has_draft_model,
                f"--drafter {drafter}: the draft --model would do nothing; choose model, or run "
                "selfspec",
            ),
            (
                d.draft_weights is not None and d.model_drafter is None,
                f"--draft_weights {d.draft_weights}: no model drafts here; leave it out",
            ),
            (
                d.has_mtp_head and d.draft_weights is not None,
                f"--draft_weights {d.draft_weights}: {NO_MTP_WEIGHTS}",
            ),
            (
                d.has_mtp_head and draft_ranks is not None,
                f"--draft_ranks {' '.join(map(str, draft_ranks or ()))}: the head of --draft {MTP} "
                "is on all ranks of the target, whose matrix of logits it shares; leave it out",
            ),
            *_refusals_of_emulation(d),
            (
                has_draft and self.kv.reselect_every > 0,
                f"--reselect_every {self.kv.reselect_every}: a standalone draft keeps no whole "
                "context to choose from anew; leave it at 0",
            ),
        ]


def _refusals_of_emulation(d: DecodingSection) -> list[tuple[bool, str]]:
    rates = d.emulate_acceptance or ()
    flag = f"--emulate_acceptance {' '.join(f'{rate:g}' for rate in rates)}"
    is_length = len(rates) == 1 and rates[0] >= 1
    most = d.max_gamma + 1
    falls = all(a >= b for a, b in pairwise(rates))
    return [
        (bool(rates) and d.drafter is None, f"{flag}: nothing drafts here; leave it out"),
        (
            is_length and rates[0] > most,
            f"{flag}: a step emits at most {most} tokens; give a smaller one, or a larger --gamma",
        ),
        (
            not is_length and (any(rate > 1 for rate in rates) or not falls),
            f"{flag}: rates are from 0 to 1 and never rise, because a draft is accepted only with "
            "all before it",
        ),
        (
            not is_length and len(rates) > d.max_gamma,
            f"{flag}: a step drafts at most {d.max_gamma} tokens; give fewer rates, or a larger "
            "--gamma",
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
