"""A tiny MiMo: Qwen2 of transformers with a head for multi-token prediction, which is written from
its definition."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_hybrids import PlainMtpHead

MIMO = "MiMoForCausalLM"


def a_mimo(vocab_size: int, num_layers: int = 4, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    config = transformers.Qwen2Config(**fields | changes)
    model = transformers.Qwen2ForCausalLM(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(3)
    return model


def call_it_mimo(checkpoint: Path) -> None:
    """Qwen2's config as MiMo's own."""
    path = checkpoint / "config.json"
    own = {"architectures": [MIMO], "model_type": "mimo", "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))


class PlainMimoHead(PlainMtpHead):
    """Its projection takes the normed state before the normed embedding, and its norms multiply by
    their weights as they are."""

    norm_offset = 0.0

    def __init__(self, target: Any) -> None:
        self.target = target
        self.layer = a_mimo(target.config.vocab_size, 1, seed=1)
        size = target.config.hidden_size
        self.fc = torch.randn(size, 2 * size) * 1.5 * size**-0.5
        self.token_norm, self.state_norm = (1 + 0.5 * torch.randn(size) for _ in "eh")

    def fit(self) -> None:
        super().fit()
        self.token_norm = torch.ones(len(self.token_norm))

    def add_to(self, checkpoint: Path) -> None:
        """Write its tensors beside those of its target, as MiMo's checkpoints have them."""
        call_it_mimo(checkpoint)
        prefix = "model.mtp_layers.0."
        layer = self.layer.model.layers[0].state_dict()
        token_part, state_part = self.fc.chunk(2, dim=1)
        head = {f"{prefix}{name}": tensor for name, tensor in layer.items()} | {
            f"{prefix}input_proj.weight": torch.cat([state_part, token_part], dim=1),
            f"{prefix}token_layernorm.weight": self.token_norm,
            f"{prefix}hidden_layernorm.weight": self.state_norm,
            f"{prefix}final_layernorm.weight": self.layer.model.norm.weight.detach(),
        }
        file = checkpoint / "model.safetensors"
        save_file(load_file(file) | head, file, {"format": "pt"})
