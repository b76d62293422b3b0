"""RopeConfig from a `config.json`, with the precedence of transformers 5. Imports no torch.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`. A
`rope_scaling` replaces `rope_parameters`; the base may stand at the top level. Fields that would be
ignored silently are refused.
"""

from __future__ import annotations

import math
from typing import Any

from magicdec.model.config import RopeConfig
from magicdec.model.families.fields import ConfigFields, only, positive, shown, size

DEFAULT_THETA = 10000.0
# Values of a table's fields that change nothing, also under a scaling that does not read the field.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "factor": (1.0,),
    "attention_factor": (1.0,),
    "attn_factor": (1.0,),
    "finetuned": (True, False),
}
TRAINED = "original_max_position_embeddings"


def rope(raw: ConfigFields) -> RopeConfig:
    """The RopeConfig of a config. Raises ValueError for contradictions, or unread fields of the
    table."""
    table = ConfigFields(rope_table(raw))
    for fields in (raw, table):
        only(fields, "partial_rotary_factor", 1.0)
    config = rope_config(raw, table)
    for field, value in table.unread().items():
        if value not in NEUTRAL.get(field, ()):
            raise ValueError(
                f"{table_name(raw)}: {field} {shown(value)} is not read with rope type "
                f"{config.rope_type!r}; leave it out"
            )
    return config


def rope_config(raw: ConfigFields, table: ConfigFields) -> RopeConfig:
    rope_type = rope_type_of(table)
    theta = rope_theta(raw, table)
    trained = trained_length(raw, table)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(theta, rope_type, factor=positive(table, "factor"))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            rope_type,
            factor=positive(table, "factor"),
            low_freq_factor=positive(table, "low_freq_factor"),
            high_freq_factor=positive(table, "high_freq_factor"),
            original_max_position_embeddings=trained,
        )
    return (
        _yarn(raw, table, theta, trained) if rope_type == "yarn" else RopeConfig(theta, rope_type)
    )


def table_name(raw: ConfigFields) -> str:
    return "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"


def rope_table(raw: ConfigFields) -> dict[str, Any]:
    """The table that counts: `rope_scaling` if it states anything, else `rope_parameters`."""
    names = ("rope_parameters", "rope_scaling")
    parameters, scaling = (raw.get(name) or {} for name in names)
    for name, table in zip(names, (parameters, scaling), strict=True):
        if not isinstance(table, dict):
            raise ValueError(f"{name} {shown(table)} is not a JSON object")
    if not (parameters and scaling):
        return scaling or parameters
    is_plain = rope_type_of(ConfigFields(parameters)) == "default"
    differing = [name for name in scaling if parameters.get(name) != scaling[name]]
    if not is_plain and differing:
        raise ValueError(
            f"rope_parameters {shown(parameters)} and rope_scaling {shown(scaling)} contradict "
            "each other; keep one of them"
        )
    theta = parameters.get("rope_theta")
    used = scaling.get("rope_theta")
    used = raw.get("rope_theta") if used is None else used
    if used is None and theta not in (None, DEFAULT_THETA):
        raise ValueError(
            f"rope_scaling replaces rope_parameters, and with it rope_theta {shown(theta)}; state "
            "rope_theta in rope_scaling too"
        )
    return scaling


def rope_type_of(table: ConfigFields) -> str:
    old = table.get("type")
    new = table.get("rope_type")
    if None not in (old, new) and old != new:
        raise ValueError(
            f"the RoPE type is stated twice: type {shown(old)} and rope_type {shown(new)} "
            "contradict each other"
        )
    return str(new or old or "default")


def rope_theta(raw: ConfigFields, table: ConfigFields) -> float:
    stated = [fields for fields in (table, raw) if fields.get("rope_theta") is not None]
    values = [positive(fields, "rope_theta") for fields in stated]
    if len(set(values)) > 1:
        raise ValueError(
            f"rope_theta {values[1]} contradicts the {values[0]} of rope_parameters or "
            "rope_scaling; state one of them"
        )
    return values[0] if values else DEFAULT_THETA


def trained_length(raw: ConfigFields, table: ConfigFields) -> int:
    """The length before scaling, from top level or table."""
    longest = size(raw, "max_position_embeddings", default=2048)
    outer, inner = (size(fields, TRAINED, default=longest) for fields in (raw, table))
    if None not in (raw.get(TRAINED), table.get(TRAINED)) and outer != inner:
        raise ValueError(f"{TRAINED} {outer} contradicts the {inner} of rope_scaling")
    return outer if raw.get(TRAINED) is not None else inner


def _yarn(raw: ConfigFields, table: ConfigFields, theta: float, trained: int) -> RopeConfig:
    if "factor" in table and table["factor"] is None:
        factor = size(raw, "max_position_embeddings") / trained
    else:
        factor = positive(table, "factor")
    scale = table.get("attention_factor")
    truncate = table.get("truncate", True)
    over = table.get("mscale")
    under = table.get("mscale_all_dim")
    if scale is None:
        scale = _temperature(factor)
        if over and under:
            scale = _temperature(factor, over) / _temperature(factor, under)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position_embeddings=trained,
        attention_factor=float(scale),
        beta_fast=float(table.get("beta_fast") or 32),
        beta_slow=float(table.get("beta_slow") or 1),
        truncate=bool(truncate),
    )


def _temperature(factor: float, mscale: float = 1.0) -> float:
    """The factor of q and k (YaRN, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
