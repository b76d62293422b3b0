"""WiderTexts: logits of the model in a wider dtype, by torch's own operators, for texts whose
prompts are in a cache of the run.

The prompts' K and V are taken from that cache, so that the error of the passes' own forwards is
measured. Parts of the layers are loaded in turn, which takes little memory and reads the weights
once.

Shapes: R rows, N tokens after the prompt, V vocabulary rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.config.resolved import ResolvedConfig
from magicdec.hardware.costs import linear_parameters
from magicdec.kv.cache import upload
from magicdec.model.transformer import Transformer
from magicdec.names import NARROW
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, Request
from magicdec.setup.model_plan import Kinds, StagePart

PART_BYTES = 1 << 30  # of layers, with K and V, that are in memory together, unless one is larger
LOGIT_BYTES = 1 << 26  # of the logits that are computed together, unless one position has more
NUMBER_BYTES = 8  # of a weight, a logit, or a number of K and V, at most
WIDER = {"float32": "float64", "bfloat16": "float32"}
TILE_TOKENS = 1024  # of a prompt that are copied together


def wider_kinds(config: ResolvedConfig) -> Kinds:
    """The kinds of the target in a wider dtype, by torch's own operators."""
    dtype = WIDER[config.model.dtype]
    weights = config.model.target_dtype
    return Kinds(dtype, weights if weights in NARROW else dtype)


def rows_of(requests: Sequence[Request]) -> tuple[int, ...]:
    return Batch(tuple(requests)).rows


@dataclass(frozen=True)
class WiderTexts:
    """A source of logits in a wider dtype. `source` is the run's runner; `load` loads this rank's
    shard of a part; `hold` gives the rows of the cache that have the prompts of requests."""

    source: ModelRunner
    load: Callable[[StagePart], Transformer]
    make_backend: Callable[[], AttentionBackend]
    hold: Callable[[Sequence[Request]], Sequence[int]] = rows_of

    def kv_bytes(self, num_tokens: int) -> int:
        shape = self.source.cache.shape
        return 2 * NUMBER_BYTES * shape.num_kv_heads * shape.head_dim * num_tokens

    def most_rows(self, num_tokens: int) -> int:
        """The rows of `num_tokens` whose K and V in one layer take at most PART_BYTES."""
        return max(1, PART_BYTES // self.kv_bytes(num_tokens))

    def room(self, num_tokens: int) -> int:
        """The rows of `num_tokens` that the cache holds at once."""
        num_rows = self.source.num_rows
        size, num_blocks = self.source.caches.limits
        if num_blocks is None:
            return num_rows
        return max(1, min(num_rows, num_blocks // -(-num_tokens // size)))

    def parts(self, num_tokens: int) -> list[StagePart]:
        """The parts that are loaded in turn, for these tokens in all rows. Each has a layer with
        attention, by whose cache a runner knows its tokens."""
        model = self.source.model
        num_layers = model.config.num_layers
        weights = NUMBER_BYTES * linear_parameters(model.config, model.shard) // num_layers
        layer_bytes = weights + self.kv_bytes(num_tokens)
        size = max(1, min(num_layers, PART_BYTES // layer_bytes))
        if size == num_layers:
            return [StagePart()]
        ends = [n + 1 for n, kind in enumerate(model.config.kinds) if kind.mixer is None]
        ends[-1] = num_layers
        parts = list[StagePart]()
        start = 0
        while start < num_layers:
            left = [end for end in ends if end > start]
            end = max((end for end in left if end <= start + size), default=left[0])
            parts.append(StagePart(range(start, end)))
            start = end
        return parts

    @torch.inference_mode()
    def logits(
        self, rows: Sequence[int], prompt_lens: Sequence[int], ids: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Yields this rank's logits after the tokens ids [R, N], which follow the prompts in `rows`
        of the cache, in chunks: (first token, [R, n, V]). Every rank of the group must take all of
        them."""
        x = ids
        (first, last) = self.source.model.head_rows
        step = max(1, LOGIT_BYTES // (NUMBER_BYTES * len(rows) * (last - first)))
        num_tokens = len(rows) * (max(prompt_lens) + ids.shape[1])
        for part in self.parts(num_tokens):
            model = self.load(part)
            runner = self.runner_of(model, rows, prompt_lens, ids.shape[1])
            places = list(range(len(rows)))
            hidden = list[Tensor]()
            for at in range(0, ids.shape[1], step):
                out = runner.forward(ForwardBatch(x[:, at : at + step], places))
                if model.is_last:
                    yield at, out
                else:
                    hidden.append(out)
            del model, runner
            x = x if not hidden else torch.cat(hidden, dim=1)

    def runner_of(
        self, model: Transformer, rows: Sequence[int], prompt_lens: Sequence[int], num_new: int
    ) -> ModelRunner:
        longest = max(prompt_lens) + num_new
        runner = ModelRunner(
            model,
            self.make_backend(),
            self.source.group,
            len(rows),
            longest,
            kv_dtype=self.source.kv_dtype,
            state_room=self.source.state_room,
        )
        numbers = self.numbers_of(model, is_linear=False)
        for place, (row, length) in enumerate(zip(rows, prompt_lens, strict=True)):
            runner.allocate(place)
            for layer, index in enumerate(numbers):
                self._copy(runner, layer, index, place, row, length)
            runner.cache.advance([place], length)
        if runner.states is not None:
            assert self.source.states is not None, "it is the same model"
            source = upload(list(rows), self.source.device)
            places = torch.arange(len(rows), device=self.source.device)
            layers = self.numbers_of(model, is_linear=True)
            runner.states.copy_prompts(places, self.source.states, source, layers)
        return runner

    def numbers_of(self, model: Transformer, is_linear: bool) -> list[int]:
        """The numbers that layers of one kind of a part of the source's model have there."""
        first = model.layers.start - self.source.model.layers.start
        numbers = self.source.layer_numbers[first : first + len(model.layers)]
        kinds = model.part_config.kinds
        pairs = zip(numbers, kinds, strict=True)
        return [number for number, kind in pairs if (kind.mixer is not None) == is_linear]

    def _copy(
        self, runner: ModelRunner, layer: int, index: int, place: int, row: int, length: int
    ) -> None:
        device = self.source.device
        cache, _ = self.source.caches.cache_of(index)
        source = upload([row], device)
        target = upload([place], device)
        dtype = next(runner.model.parameters()).dtype
        # A layer with a window may have lost the tokens that none after the prompt can see.
        for at in range(cache.first_held[row], length, TILE_TOKENS):
            positions = torch.arange(at, min(at + TILE_TOKENS, length), device=device)[None]
            entries = self.source.caches.read(index, source, positions)  # [1, G, tokens, D] each
            k, v = (entry.to(dtype) for entry in entries)
            runner.caches.write(layer, target, positions, k, v)
