"""transformers with PyTorch's `scaled_dot_product_attention`: its forward in a plain loop, and its
`generate` with and without assisted generation."""

from __future__ import annotations

from typing import Any

from peers.peer import CHUNK, Peer, log_probs_of


class Transformers(Peer):
    """The library's forward with its cache in a plain loop, without the overhead of `generate`."""

    can_verify = True
    can_score = True

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    def version(self) -> str:
        import torch
        import transformers

        return f"transformers {transformers.__version__} (torch {torch.__version__})"

    def prefill(self, prompts: list[list[int]]) -> None:
        import torch
        from transformers import DynamicCache

        self.cache = DynamicCache()
        for part in torch.tensor(prompts).split(CHUNK, dim=1):
            newest = self._forward(part, keep=1)
        self.emitted = [newest]

    def step(self) -> None:
        self.emitted.append(self._forward(self.emitted[-1], keep=1))

    def tokens(self) -> list[list[int]]:
        import torch

        rows: list[list[int]] = torch.cat(self.emitted, dim=1).tolist()
        return rows

    def verify(self, drafts: list[list[int]]) -> list[list[int]]:
        import torch

        together = torch.cat([self.emitted[-1], torch.tensor(drafts)], dim=1)
        ids: list[list[int]] = self._forward(together, keep=0).tolist()
        self.cache.crop(-together.shape[1])
        return ids

    def score(self, texts: list[list[int]]) -> list[list[float]]:
        import torch
        from transformers import DynamicCache

        self.cache = DynamicCache()
        ids = torch.tensor(texts)
        found = []
        for first in range(0, ids.shape[1] - 1, CHUNK):
            following = ids[:, first + 1 : first + CHUNK + 1]
            logits = self._logits(ids[:, first : first + following.shape[1]], keep=0)
            found.append(log_probs_of(logits, following))
        rows: list[list[float]] = torch.cat(found, dim=1).tolist()
        return rows

    def _forward(self, ids: Any, keep: int) -> Any:
        """Greedy ids after the last `keep` tokens of `ids` [B, T]; 0: after all of them."""
        return self._logits(ids, keep).argmax(-1)

    def _logits(self, ids: Any, keep: int) -> Any:
        import torch

        with torch.inference_mode():
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep)
        return out.logits


class TransformersGenerate(Transformers):
    """`generate` with all prompts in one call."""

    assistant: Any = None

    def generate(self, prompts: list[list[int]], num_new: int) -> None:
        import torch

        ids = torch.tensor(prompts)
        together = [ids] if self.assistant is None else ids.split(1)  # assisted: one row per call
        rows = [
            self.model.generate(
                part,
                attention_mask=torch.ones_like(part),
                do_sample=False,
                max_new_tokens=num_new,
                eos_token_id=None,
                pad_token_id=0,
                assistant_model=self.assistant,
            )
            for part in together
        ]
        self.emitted = [torch.cat(rows)[:, ids.shape[1] :]]


class TransformersAssisted(TransformersGenerate):
    """Assisted generation with the small model in the directory `draft` beside the target."""

    def __init__(self, model: str, dtype: str, threads: int, max_tokens: int, batch: int) -> None:
        from pathlib import Path

        super().__init__(model, dtype, threads, max_tokens, batch)
        draft = str(Path(model).with_name("draft"))
        self.assistant = Transformers(draft, dtype, threads, max_tokens, batch).model
