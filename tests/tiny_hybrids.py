"""Tiny models with linear attention, made by transformers, and their heads for multi-token
prediction, which transformers ignores: those are written from the definition."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from magicdec.llm import LLM

# Classes of transformers, their configs, and what these have of their own.
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 40}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", {"intermediate_size": 64}),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeTextConfig", EXPERTS),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", EXPERTS),
}


def the_model(
    vocab_size: int,
    kind: str = "Qwen3_5ForCausalLM",
    layer_types: list[str] | None = None,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A tiny model of transformers, whose states and gates matter."""
    torch.manual_seed(seed)
    config_name, own = KINDS[kind]
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "num_hidden_layers": 4 if layer_types is None else len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    config = getattr(transformers, config_name)(**fields | own | changes)
    model = getattr(transformers, kind)(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "A_log" in name or "dt_bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.mul_(3)
    return model


def save_with_tokenizer(model: Any, folder: Path, other: Path) -> None:
    model.save_pretrained(folder)
    for path in other.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())


def check_greedy_tokens(llm: LLM, folder: Path, num_new: int) -> None:
    """Those of ragged prompts that are served together are transformers'."""
    other = transformers.Qwen3_5ForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(4)
    prompts = [
        torch.randint(other.config.vocab_size, (length,), generator=generator).tolist()
        for length in (7, 90, 33, 131)
    ]
    streams = [llm.submit(prompt, num_new, ignore_eos=True) for prompt in prompts]
    outputs = [list(stream) for stream in streams]
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = other(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output


class PlainMtpHead:
    """The head of a model of transformers, from the definition (DeepSeek-V3, arXiv 2412.19437,
    equations 21 to 23): its layer is a model of one layer, which takes projections in place of
    embedded tokens, and whose final norm is the head's. Nothing is cached."""

    norm_offset = 1.0  # added to the weights of its norms

    def __init__(
        self, target: Any, kind: str = "Qwen3_5ForCausalLM", seed: int = 1, **changes: Any
    ) -> None:
        self.target = target
        vocab_size = target.config.vocab_size
        self.layer = the_model(vocab_size, kind, ["full_attention"], seed, **changes)
        size = target.config.hidden_size
        self.fc = torch.randn(size, 2 * size) * 1.5 * size**-0.5
        self.token_norm, self.state_norm = (0.5 * torch.randn(size) for _ in "eh")

    @torch.no_grad()
    def fit(self) -> None:
        """Let the target accept some of the drafts: its last layer, which has attention, decides
        most of its tokens and is the head's, which takes little more than the embedding."""
        for layer in self.target.model.layers[:-1]:
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "out_proj.weight")) or "down_proj" in name:
                    parameter.mul_(0.1)
        embedding = self.target.model.embed_tokens.weight
        embedding.div_(embedding.square().mean(-1, keepdim=True).sqrt())
        last = self.target.model.layers[-1]
        self.layer.model.layers[0].load_state_dict(last.state_dict())
        self.layer.model.norm.load_state_dict(self.target.model.norm.state_dict())
        size = len(self.token_norm)
        self.fc = torch.cat([torch.eye(size), 0.05 * self.fc[:, size:]], dim=1)
        self.token_norm = torch.zeros(size)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * (mean + self.target.config.rms_norm_eps).rsqrt() * (self.norm_offset + weight)

    @torch.no_grad()
    def chain(
        self, text: list[int], count: int, drafts: Sequence[int] | None = None
    ) -> list[Tensor]:
        """The logits of drafts that follow a text; None: of greedy ones."""
        states = self.target.model(torch.tensor([text[:-1]])).last_hidden_state[0]
        tokens = list(text[1:])
        found: list[Tensor] = []
        while True:
            embedded = self.target.model.embed_tokens(torch.tensor(tokens))
            both = self.norm(embedded, self.token_norm), self.norm(states, self.state_norm)
            x = torch.cat(both, dim=-1) @ self.fc.T
            outputs = self.layer.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            found.append(self.target.lm_head(outputs[-1]))
            if len(found) == count:
                return found
            place = len(found) - 1
            tokens.append(int(found[-1].argmax()) if drafts is None else drafts[place])
            states = torch.cat([states, outputs[-1:]])

    def add_to(self, checkpoint: Path) -> None:
        """Write the head's tensors beside those of its target, under `mtp.`."""
        aside = checkpoint / "layer"
        self.layer.save_pretrained(aside)
        layer = load_file(aside / "model.safetensors")
        for path in aside.iterdir():
            path.unlink()
        aside.rmdir()
        head = {
            name.replace("model.", "mtp."): tensor
            for name, tensor in layer.items()
            if name.startswith(("model.layers.", "model.norm."))
        }
        head |= {
            "mtp.fc.weight": self.fc,
            "mtp.pre_fc_norm_embedding.weight": self.token_norm,
            "mtp.pre_fc_norm_hidden.weight": self.state_norm,
        }
        file = checkpoint / "model.safetensors"
        save_file(load_file(file) | head, file, {"format": "pt"})
