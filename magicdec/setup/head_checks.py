"""Checks of a draft head against its target, and the layers whose states it takes. They raise
ValueError, one line naming the flags, before any process group starts."""

from __future__ import annotations

from magicdec.config.run_config import RunConfig
from magicdec.config.sections import EAGLE_PREFIX, MODEL_PREFIX
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.config import EagleConfig
from magicdec.names import MTP


def check_kind(run_config: RunConfig, draft: ModelSource) -> None:
    """A head is no model, and a model is no head."""
    is_head = draft.config.is_head
    if is_head and not run_config.decoding.has_head:
        raise ValueError(
            f"--draft {draft.name}: it is an EAGLE-3 head; name it as --draft {EAGLE_PREFIX}DIR"
        )
    if not is_head and run_config.decoding.has_head:
        raise ValueError(
            f"--draft {EAGLE_PREFIX}{draft.name}: it is a model, not an EAGLE-3 head; name it as "
            f"--draft {MODEL_PREFIX}NAME"
        )


def check_target(flag: str, source: ModelSource) -> None:
    if source.config.eagle is not None:
        raise ValueError(
            f"{flag} {source.name}: it is an EAGLE-3 head, which drafts for another model; name "
            f"that model, and the head as --draft {EAGLE_PREFIX}DIR"
        )


def check_head(target: ModelSource, draft: ModelSource, is_staged: bool) -> None:
    """The head must take states of the target's size, and know its vocabulary. One for multi-token
    prediction comes from the target's own checkpoint, so that it does."""
    is_mtp = draft.config.is_mtp
    label = f"--draft {MTP if is_mtp else f'{EAGLE_PREFIX}{draft.name}'}"
    model = target.config
    if is_mtp:
        return
    if is_staged:
        raise ValueError(
            f"{label}: a head takes states of layers that stages hold apart; choose "
            "ngram or model:NAME"
        )
    eagle = _eagle_of(draft)
    if model.embedding_scale != 1:
        raise ValueError(
            f"{label} takes embedded tokens as they are, but {target.name} scales them; no head of "
            "such a model is known: choose self, ngram or model:NAME"
        )
    if eagle.state_size != model.hidden_size:
        raise ValueError(
            f"{label} takes hidden states of {eagle.state_size} numbers, but those of "
            f"{target.name} have {model.hidden_size}; choose the head of this model"
        )
    if eagle.target_vocab_size != model.vocab_size:
        raise ValueError(
            f"{label} is for a vocabulary of {eagle.target_vocab_size} ids, but {target.name} has "
            f"{model.vocab_size}; choose the head of this model"
        )
    if not eagle.has_embedding and draft.config.hidden_size != model.hidden_size:
        raise ValueError(
            f"{label} has a hidden size of {draft.config.hidden_size} and no embedding; the "
            f"embedding of {target.name} has {model.hidden_size} columns"
        )


def state_layers(run_config: RunConfig, target: ModelSource, draft: ModelSource) -> tuple[int, ...]:
    """The numbers of layers after which the head takes states: the last for multi-token prediction,
    else those of `--eagle_layers`, of the head's config, or the three of EAGLE-3. A config that
    counts as SGLang does, from the output of a layer, is recognised by its numbers."""
    num_layers = target.config.num_layers
    if draft.config.is_mtp:
        return (num_layers,)
    eagle = _eagle_of(draft)
    label = f"--draft {EAGLE_PREFIX}{draft.name}"
    assert run_config.draft is not None, "a head was found for it"
    asked = run_config.draft.eagle_layers
    usual = (2, num_layers // 2, num_layers - 3)
    shifted = tuple(layer - 1 for layer in usual)
    listed = eagle.capture
    if asked is not None:
        layers = asked
        source = f"--eagle_layers {' '.join(map(str, asked))}"
        if len(asked) != eagle.num_states:
            raise ValueError(f"{source}: {label} takes {eagle.num_states} states, not {len(asked)}")
    elif listed is None:
        layers = usual
        source = label
        if eagle.num_states != len(usual):
            raise ValueError(
                f"{label} takes {eagle.num_states} states and does not say of which layers; give "
                "--eagle_layers"
            )
    elif listed == shifted:
        layers = usual
        source = label
    elif listed == usual or eagle.is_exact:
        layers = listed
        source = label
    else:
        raise ValueError(
            f"{label} lists the layers {', '.join(map(str, listed))}, which some programs count "
            "from the embedding and others from the first layer's output; say which they are: "
            f"--eagle_layers {' '.join(map(str, listed))}, or each one more"
        )
    if min(layers) < 0 or max(layers) > num_layers:
        raise ValueError(
            f"{source}: the layers {', '.join(map(str, layers))} are not all from 0 to the "
            f"{num_layers} of {target.name}; give --eagle_layers, or choose the head of this model"
        )
    return layers


def _eagle_of(draft: ModelSource) -> EagleConfig:
    assert draft.config.eagle is not None, "checked before"
    return draft.config.eagle
