"""The sliding windows of a model's layers by its `config.json`, as transformers 5 reads them.
Contradictory configs are refused. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from magicdec.model.config import LayerKind, RopeConfig
from magicdec.model.families.fields import ConfigFields, shown, size, switch

FULL = "full_attention"
SLIDING = "sliding_attention"
OLD_NAMES = {"attention": FULL}  # of `layer_types`
DEFAULT_WINDOW = 4096  # of Mistral, Qwen and Gemma 3, if the field is missing


def layer_types(raw: ConfigFields) -> list[str] | None:
    """The type of each layer by `layer_types`; None if missing."""
    stated = raw.get("layer_types")
    num_layers = size(raw, "num_hidden_layers")
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise ValueError(
            f"layer_types {shown(stated)} is no list of {num_layers} types, one for each layer"
        )
    types = [OLD_NAMES.get(str(name), str(name)) for name in stated]
    odd = next((name for name in types if name not in (FULL, SLIDING)), None)
    if odd is not None:
        raise ValueError(f"layer_types: {odd!r} is not supported; choose from {FULL}, {SLIDING}")
    return types


def check_alike(types: Sequence[str]) -> None:
    """Raise ValueError if a family whose layers all have one window has types that differ."""
    if len(set(types)) > 1:
        first = next(i for i, layer_type in enumerate(types) if layer_type != types[0])
        raise ValueError(
            f"layer_types mixes {types[0]} (layer 0) and {types[first]} (layer {first}), which "
            "this architecture does not compute; MinistralForCausalLM does"
        )


def check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} {shown(value)} is not a whole number")


def stated_window(raw: ConfigFields) -> int | None:
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return None
    return size(raw, "sliding_window", default=DEFAULT_WINDOW)


def kinds(
    types: Sequence[str], window: int | None, ropes: Mapping[str, RopeConfig] | None = None
) -> tuple[LayerKind, ...]:
    """The kinds of layers of these types, one if they are alike. `ropes`: by type, where they
    differ. Raises ValueError for a window without size."""
    if SLIDING in types and window is None:
        named = "layer_types is" if len(set(types)) == 1 else "layer_types has"
        raise ValueError(f"{named} {SLIDING}, but no sliding_window is set")
    rope_of = ropes or {}
    by_layer = tuple(
        LayerKind(window if kind == SLIDING else None, rope_of.get(kind)) for kind in types
    )
    return by_layer[:1] if len(set(by_layer)) == 1 else by_layer


def types_of(kinds: Sequence[LayerKind]) -> list[str]:
    """The inverse of `kinds`."""
    return [FULL if kind.window is None else SLIDING for kind in kinds]


def check_no_window(raw: ConfigFields) -> None:
    """Raise ValueError if a Llama config asks for a window that would matter."""
    window = raw.get("sliding_window")
    longest = size(raw, "max_position_embeddings")
    is_used = switch(raw, "use_sliding_window", window is not None)
    raw.get("max_window_layers")
    if SLIDING in (layer_types(raw) or ()) or (is_used and window is not None and window < longest):
        raise ValueError(
            f"sliding_window {shown(window)} is not supported for this architecture; choose null"
        )


def mistral_kinds(raw: ConfigFields) -> tuple[LayerKind, ...]:
    """The window is on all layers, unless null or `layer_types` says otherwise."""
    types = layer_types(raw)
    check_alike(types or ())
    return ministral_kinds(raw)


def ministral_kinds(raw: ConfigFields) -> tuple[LayerKind, ...]:
    """As `mistral_kinds`, of layers that may differ."""
    window = stated_window(raw)
    types = layer_types(raw)
    is_used = switch(raw, "use_sliding_window", True)
    if window is not None and types is None and not is_used:
        raise ValueError(
            f"use_sliding_window false and sliding_window {window} contradict each other; set "
            "sliding_window to null for no window"
        )
    raw.get("max_window_layers")  # of Qwen alone
    return (LayerKind(window),) if types is None else kinds(types, window)


def qwen_kinds(raw: ConfigFields) -> tuple[LayerKind, ...]:
    """No window unless `use_sliding_window`. Without `layer_types`, it begins at layer
    `max_window_layers`."""
    num_layers = size(raw, "num_hidden_layers")
    is_used = switch(raw, "use_sliding_window", False)
    first = raw.get("max_window_layers", 28)
    window = stated_window(raw) if is_used else None
    types = layer_types(raw)
    raw.get("sliding_window")
    if types is None and window is not None:
        check_whole("max_window_layers", first)
        types = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return (LayerKind(),) if types is None else kinds(types, window)
