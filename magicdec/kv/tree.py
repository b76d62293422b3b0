"""DraftTree: draft tokens of which several may follow the same token.

Owns how the tokens of a tree are numbered, and what each of them sees. Source: SpecInfer (Miao et
al. 2024), section 4: a tree is verified in one forward with a mask that shows each token its
ancestors alone.

Shapes: B rows, U nodes, T nodes of one forward, N keys, G KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """The tokens after the first `base` tokens of each row, as a tree. Each token is a node.

    Node u of a row lies in cell base + u of the cache and has position base + depth. It sees the
    visible tokens before the tree, its ancestors and itself. A forward of T tokens computes the
    last T nodes; the U - T nodes before them are in the cache from earlier forwards of the same
    tree. So a tree can be drafted level by level, and it is verified with T = U.

    Rows may have trees of different shapes. All have U nodes: a smaller tree is filled up with
    nodes whose results are ignored, for example with parent -1.
    """

    base: Tensor  # int64 [B]
    parents: Tensor  # int64 [B, U], smaller than the node's own number; -1: no node before it

    def __post_init__(self) -> None:
        assert len(self.base) == len(self.parents), "one tree a row"
        if self.parents.device.type == "cpu":  # on a GPU this would wait for the device
            numbers = torch.arange(self.num_nodes)
            assert bool(((self.parents >= -1) & (self.parents < numbers)).all()), "parents first"

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    def num_cached(self, num_new: int) -> int:
        """The number of nodes that the lengths of the rows include before a forward of `num_new`
        nodes."""
        return self.num_nodes - num_new

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Base and parents, with adjacent numbers."""
        return self.base.contiguous(), self.parents.contiguous()

    @cached_property
    def ancestors(self) -> Tensor:
        """Which nodes a node sees, itself included: bool [B, U, U], true at [b, u, a] if row b's
        node u sees node a."""
        numbers = torch.arange(self.num_nodes, device=self.parents.device)
        steps = (self.parents.unsqueeze(2) == numbers) | (numbers.unsqueeze(1) == numbers)
        reached, distance = steps.float(), 1
        while distance < self.num_nodes:  # products of 0 and 1: counts of ways, 0 or more
            reached, distance = (reached @ reached).clamp(max=1), 2 * distance
        return reached > 0

    @cached_property
    def positions(self) -> Tensor:
        """The position of each node, int64 [B, U]."""
        return self.base.unsqueeze(1) + self.ancestors.sum(2) - 1

    @cached_property
    def node_cells(self) -> Tensor:
        """The cell of each node, int64 [B, U]."""
        return self.base.unsqueeze(1) + torch.arange(self.num_nodes, device=self.base.device)

    def rows(self, first: int, last: int | None) -> DraftTree:
        """The trees of rows `first` to `last` - 1."""
        return DraftTree(self.base[first:last], self.parents[first:last])

    def find(self, cells: Tensor) -> Tensor:
        """The node that lies in each cell of `cells` [B, G or 1, N], or -1."""
        nodes = cells - self.base.view(-1, 1, 1)
        return torch.where((nodes >= 0) & (nodes < self.num_nodes), nodes, -1)

    def positions_of(self, cells: Tensor) -> Tensor:
        """The positions of the tokens in `cells` [B, G or 1, N]. Padding, -1, stays."""
        nodes = self.find(cells)
        own = self.positions.unsqueeze(1).expand(-1, nodes.shape[1], -1)
        return torch.where(nodes >= 0, own.gather(2, nodes.clamp(min=0)), cells)

    def sees(self, cells: Tensor) -> Tensor:
        """Which of the keys in `cells` [B, G or 1, N] each node sees: bool [B, G or 1, U, N]."""
        # A later cell that no node has holds nothing.
        nodes, is_before = self.find(cells), (cells >= 0) & (cells < self.base.view(-1, 1, 1))
        rows = torch.arange(len(nodes), device=nodes.device).view(-1, 1, 1)
        is_descendant = self.ancestors.transpose(1, 2)[rows, nodes.clamp(min=0)]  # [.., N, U]
        is_node = (nodes >= 0).unsqueeze(2)
        return torch.where(is_node, is_descendant.transpose(2, 3), is_before.unsqueeze(2))
