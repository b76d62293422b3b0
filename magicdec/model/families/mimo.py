"""MiMo (arXiv 2505.07608): Qwen2 with a head for multi-token prediction in its checkpoints, as its
`modeling_mimo.py` has it.
"""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families.family import Family, MtpNames, Names
from magicdec.model.families.fields import ConfigFields, size
from magicdec.model.families.llama import read_qwen2

HEAD = "model.mtp_layers."
PARTS = f"{HEAD}0."  # of the head beside its layer, where there is one


def read(raw: ConfigFields) -> dict[str, Any]:
    field = "num_nextn_predict_layers"
    num_layers = 0 if raw.get(field) == 0 else size(raw, field, default=1)
    return read_qwen2(raw) | {"num_mtp_layers": num_layers, "mtp_state_first": True}


def names(config: ModelConfig) -> Names:
    head = MtpNames(
        prefix=HEAD,
        layer=f"{HEAD}{{}}.",
        norm=f"{PARTS}final_layernorm",
        token_norm=f"{PARTS}token_layernorm",
        state_norm=f"{PARTS}hidden_layernorm",
        projection=f"{PARTS}input_proj",
    )
    return Names(mtp=head)


MIMO = Family("mimo", read, names, other_parts=(HEAD,))
