"""The target of an EAGLE-3 head in training: its hidden states, probabilities and continuations,
computed for each window when they are needed.

Shapes: B windows, T tokens, C captured states, E hidden size, V draft vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.source import ModelSource, load_transformer
from train.eagle_head import KeyValue, forked_attention

CHUNK = 1024  # tokens whose logits over the whole vocabulary are in memory together


class Target:
    """A frozen target that says what a head needs of it. `capture`: the numbers of layers after
    which the residual stream is read; 0 is the embeddings."""

    def __init__(
        self,
        source: ModelSource,
        capture: Sequence[int],
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = source.config
        self.capture = tuple(capture)
        self.device = device
        self.model = load_transformer(source.config, source.weights, Shard(), None, dtype, device)
        self.model.set_positions(max_positions, device)
        self._residuals: dict[int, Tensor] = {}
        self._watch()

    def _watch(self) -> None:
        """Keep the captured states and the last one of every forward."""
        num_layers = self.config.num_layers

        def keep_input(layer: int, inputs: tuple[Any, ...]) -> None:
            x, y = inputs[:2]
            self._residuals[layer] = x if y is None else x + y

        def keep_output(module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            self._residuals[num_layers] = output[0] + output[1]

        for layer in self.capture:
            if layer < num_layers:
                self.model.blocks[layer].register_forward_pre_hook(
                    lambda module, inputs, layer=layer: keep_input(layer, inputs)
                )
        self.model.blocks[-1].register_forward_hook(keep_output)

    @torch.no_grad()
    def read(
        self, ids: Tensor, past: dict[int, list[KeyValue]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The captured states [B,T,C*E] of token ids [B,T], and the last layer's [B,T,E].

        `past` holds, by layer, the steps of chains that went on from every position so far (see
        `forked_attention`); ids are then the chains' next tokens."""
        past = defaultdict(list) if past is None else past
        num_steps = len(past[0])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            past[layer].append((k, v))
            return forked_attention(q, past[layer])

        positions = torch.arange(ids.shape[1], device=self.device).expand_as(ids) + num_steps
        self.model(ids, positions, attend, lambda t: t, num_outputs=0)
        captured = torch.cat([self._residuals[layer] for layer in self.capture], dim=-1)
        return captured, self._residuals[self.config.num_layers]

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding table, [B,T,E]."""
        return self.model.embedding(ids)

    @torch.no_grad()
    def judge(self, last: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
        """From the last layer's states [B,T,E]: the next token's probabilities among the draft
        vocabulary, float32 [B,T,V], and the most probable token of all, [B,T]."""
        probabilities = []
        best = []
        for part in last.split(CHUNK, dim=1):
            logits = self.model.logits(part)
            best.append(logits.max(dim=-1).indices)  # faster than argmax in bfloat16
            probabilities.append(logits[..., draft_ids].float().softmax(dim=-1))
        return torch.cat(probabilities, dim=1), torch.cat(best, dim=1)

    @torch.no_grad()
    def continue_greedily(self, ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The captured states [B,T,C*E] of token ids [B,T], and the `num_tokens` most probable
        tokens that follow each position, [B,T,num_tokens], one after the other."""
        past: dict[int, list[KeyValue]] = defaultdict(list)
        captured, last = self.read(ids, past)
        found = [self._best(last)]
        while len(found) < num_tokens:
            found.append(self._best(self.read(found[-1], past)[1]))
        return captured, torch.stack(found, dim=-1)

    def _best(self, last: Tensor) -> Tensor:
        parts = [self.model.logits(part).max(dim=-1).indices for part in last.split(CHUNK, dim=1)]
        return torch.cat(parts, dim=1)
