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

    `cells` says for each node in which cell it lies, in any order. Then a row's length is `base`
    before and after a forward: the caller keeps account of the cells, and must have allocated
    them. Cell numbers are those of the row's block table. The tokens before the tree are still
    chosen by the `Visible` rule, as ranges of cells; they need not be adjacent, and no range may
    contain the cell of a node. Node positions follow from `base` in any case. Under a sliding
    window, every token before the tree must lie in the cell of its position.
    """

    base: Tensor  # int64 [B]
    parents: Tensor  # int64 [B, U], smaller than the node's own number; -1: no node before it
    cells: Tensor | None = None  # int64 [B, U]

    def __post_init__(self) -> None:
        assert len(self.base) == len(self.parents), "one tree a row"
        assert self.cells is None or self.cells.shape == self.parents.shape, "a cell a node"
        if self.parents.device.type == "cpu":  # on a GPU this would wait for the device
            numbers = torch.arange(self.num_nodes)
            assert bool(((self.parents >= -1) & (self.parents < numbers)).all()), "parents first"

    @property
    def num_nodes(self) -> int:
        return self.parents.shape[1]

    def num_cached(self, num_new: int) -> int:
        """The number of nodes that the lengths of the rows include before a forward of `num_new`
        nodes."""
        return 0 if self.cells is not None else self.num_nodes - num_new

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Base, parents and cells, with adjacent numbers."""
        cells = None if self.cells is None else self.cells.contiguous()
        return self.base.contiguous(), self.parents.contiguous(), cells

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
        if self.cells is not None:
            return self.cells
        return self.base.unsqueeze(1) + torch.arange(self.num_nodes, device=self.base.device)

    def rows(self, first: int, last: int | None) -> DraftTree:
        """The trees of rows `first` to `last` - 1."""
        cells = None if self.cells is None else self.cells[first:last]
        return DraftTree(self.base[first:last], self.parents[first:last], cells)

    def find(self, cells: Tensor) -> Tensor:
        """The node that lies in each cell of `cells` [B, G or 1, N], or -1."""
        if self.cells is None:
            nodes = cells - self.base.view(-1, 1, 1)
            return torch.where((nodes >= 0) & (nodes < self.num_nodes), nodes, -1)
        is_node = cells.unsqueeze(3) == self.cells[:, None, None]  # [B, G or 1, N, U]
        return torch.where(is_node.any(3), is_node.int().argmax(3), -1)

    def positions_of(self, cells: Tensor) -> Tensor:
        """The positions of the tokens in `cells` [B, G or 1, N]. Padding, -1, stays."""
        nodes = self.find(cells)
        own = self.positions.unsqueeze(1).expand(-1, nodes.shape[1], -1)
        return torch.where(nodes >= 0, own.gather(2, nodes.clamp(min=0)), cells)

    def sees(self, cells: Tensor) -> Tensor:
        """Which of the keys in `cells` [B, G or 1, N] each node sees: bool [B, G or 1, U, N]."""
        nodes, is_before = self.find(cells), cells >= 0
        if self.cells is None:  # a later cell that no node has holds nothing
            is_before = is_before & (cells < self.base.view(-1, 1, 1))
        rows = torch.arange(len(nodes), device=nodes.device).view(-1, 1, 1)
        is_descendant = self.ancestors.transpose(1, 2)[rows, nodes.clamp(min=0)]  # [.., N, U]
        is_node = (nodes >= 0).unsqueeze(2)
        return torch.where(is_node, is_descendant.transpose(2, 3), is_before.unsqueeze(2))
