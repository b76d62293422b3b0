"""A model's sliding window by its `config.json`, as transformers 5 reads it: one on all layers, or
none. Contradictory configs and windows by layer are refused. Imports no torch.
"""

from __future__ import annotations

from magicdec.model.families.fields import ConfigFields, shown, size, switch

FULL = "full_attention"
SLIDING = "sliding_attention"
OLD_NAMES = {"attention": FULL}  # of `layer_types`
DEFAULT_WINDOW = 4096  # of Mistral and Qwen, if the field is missing


def layer_type(raw: ConfigFields) -> str | None:
    """The type of all layers by `layer_types`; None if missing. Raises ValueError if they
    differ."""
    stated = raw.get("layer_types")
    num_layers = size(raw, "num_hidden_layers")
    if stated is None:
        return None
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise ValueError(
            f"layer_types {shown(stated)} is no list of {num_layers} types, one for each layer"
        )
    types = [OLD_NAMES.get(str(each), str(each)) for each in stated]
    odd = next((each for each in types if each not in (FULL, SLIDING)), None)
    if odd is not None:
        raise ValueError(f"layer_types: {odd!r} is not supported; choose from {FULL}, {SLIDING}")
    if len(set(types)) > 1:
        first = next(i for i, each in enumerate(types) if each != types[0])
        raise ValueError(
            f"layer_types mixes {types[0]} (layer 0) and {types[first]} (layer {first}), which is "
            "not supported; all layers must be alike"
        )
    return types[0]


def stated_window(raw: ConfigFields) -> int | None:
    if "sliding_window" in raw and raw["sliding_window"] is None:
        return None
    return size(raw, "sliding_window", default=DEFAULT_WINDOW)


def uniform_window(kind: str | None, window: int | None) -> int | None:
    """`window`, unless all layers are of another type. Raises ValueError for a window without
    size."""
    if kind == SLIDING and window is None:
        raise ValueError(f"layer_types is {SLIDING}, but no sliding_window is set")
    return None if kind == FULL else window


def check_no_window(raw: ConfigFields) -> None:
    """Raise ValueError if a Llama config asks for a window that would matter."""
    window = raw.get("sliding_window")
    longest = size(raw, "max_position_embeddings")
    is_used = switch(raw, "use_sliding_window", window is not None)
    raw.get("max_window_layers")
    if layer_type(raw) == SLIDING or (is_used and window is not None and window < longest):
        raise ValueError(
            f"sliding_window {shown(window)} is not supported for this architecture; choose null"
        )


def mistral_window(raw: ConfigFields) -> int | None:
    """The window, on all layers unless null or `layer_types` says otherwise."""
    window = stated_window(raw)
    kind = layer_type(raw)
    is_used = switch(raw, "use_sliding_window", True)
    if window is not None and kind is None and not is_used:
        raise ValueError(
            f"use_sliding_window false and sliding_window {window} contradict each other; set "
            "sliding_window to null for no window"
        )
    raw.get("max_window_layers")  # of Qwen alone
    return uniform_window(kind, window)


def qwen_window(raw: ConfigFields) -> int | None:
    """The window; None unless `use_sliding_window`. Without `layer_types`, it begins at layer
    `max_window_layers`."""
    num_layers = size(raw, "num_hidden_layers")
    is_used = switch(raw, "use_sliding_window", False)
    first = raw.get("max_window_layers", 28)
    window = stated_window(raw) if is_used else None
    kind = layer_type(raw)
    raw.get("sliding_window")
    if kind is None and window is not None:
        if not isinstance(first, int):
            raise ValueError(f"max_window_layers {shown(first)} is not a whole number")
        if 0 < first < num_layers:
            raise ValueError(
                f"max_window_layers {first} is not supported, because the layers from there on "
                f"alone have a window; choose 0 or {num_layers}"
            )
        kind = FULL if first >= num_layers else SLIDING
    return uniform_window(kind, window)
