"""AttentionBackend: the one contract for prefill, decode and verification, which differ only in T.

Owns the protocol and what every backend shares: the causal rule over a view and its window.
Must not know of policies or models. A backend also says of itself what it can serve and what it
allocates, so that nothing elsewhere branches on its name.

Shapes: B rows, T new tokens, H query heads, G KV heads (H a multiple of G), D head size, N visible
keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from magicdec.config.capabilities import Capabilities
from magicdec.kv.layout import Layout
from magicdec.kv.view import WEIGHTS_BLOCK, KVView
from magicdec.names import ATTENTION_BACKENDS, REFERENCE_BACKEND, load_named


@dataclass(frozen=True)
class CallSize:
    """The size of one layer's attention on one rank: B rows of T new tokens over S cached ones."""

    B: int
    T: int
    S: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def kv_bytes(self) -> int:
        """K and V of all cached tokens."""
        return 2 * self.B * self.S * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def mask_bytes(self) -> int:
        """A mask as booleans, and once more as the numbers that are added to scores."""
        return self.B * self.T * self.S * (1 + self.dtype_bytes)


class AttentionBackend(Protocol):
    """One is built for each model. `plan` is called once in a forward, then `run` once in each
    layer with the same view. Backends derive from this class."""

    capabilities: ClassVar[Capabilities]

    @staticmethod
    def load(device: str) -> None:
        """Load what must be loaded before anything else of the run. Most need nothing."""
        return None

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """An estimate of what `run` allocates for one layer beside its inputs and output."""
        return 0

    @staticmethod
    def weights_bytes(size: CallSize) -> int:
        """What `run_with_mass` allocates beyond `run`."""
        return 0

    def block_size(self, max_tokens: int) -> int:
        """Tokens in a KV block, for rows of at most `max_tokens`: a multiple of what the layout
        asks for."""
        ...

    def layout(self, dtype: torch.dtype) -> Layout:
        """The order of a cache of that dtype that `run` reads."""
        ...

    def plan(self, view: KVView) -> None:
        """Prepare what the layers of one forward share."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        """Append k, v [B,T,G,D] to the cache and attend: q [B,T,H,D] -> [B,T,H,D]. Keys are scored
        q.k / sqrt(D)."""
        ...

    def run_with_mass(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """As `run`, to the bit, and where the attention went: float32 [B, G, num_mass_blocks], the
        softmax probability of a block's keys summed over the new tokens and the query heads of a
        KV head. Raises ValueError for what the backend cannot serve."""
        ...


def visible_mask(
    view: KVView, key_positions: Tensor, first: int = 0, last: int | None = None
) -> Tensor:
    """Which of the keys [B, G or 1, N] (position, or -1 for padding) of the view's rows `first` to
    `last` each new token sees: bool [B, G or 1, T, N]."""
    keys = key_positions.unsqueeze(2)
    queries = view.query_positions()[first:last, None, :, None]
    seen = (keys >= 0) & (keys <= queries)
    return seen if view.window is None else seen & (keys > queries - view.window)


def sum_blocks(weights: Tensor, key_positions: Tensor, num_blocks: int) -> Tensor:
    """Probabilities of keys [B, G, N], float32, at positions [B, G or 1, N], added up by block:
    [B, G, num_blocks]."""
    blocks = (key_positions.clamp(min=0) // WEIGHTS_BLOCK).expand_as(weights)  # padding weighs 0
    return weights.new_zeros(*weights.shape[:2], num_blocks).scatter_add_(2, blocks, weights)


def backend_class(name: str) -> type[AttentionBackend]:
    """The backend of that name, not yet built. Its library may be missing."""
    found: type[AttentionBackend] = load_named(ATTENTION_BACKENDS, name)
    return found


def check_mass(backend: str, num_new: int, limit: int) -> None:
    """Raise ValueError for `limit` new tokens or more: their attention cannot be added up."""
    if num_new >= limit:
        raise ValueError(
            f"--attention {backend} tells where the attention of at most {limit - 1} new tokens "
            f"goes, not of {num_new}; choose a smaller --gamma, or --attention "
            f"{REFERENCE_BACKEND}"
        )
