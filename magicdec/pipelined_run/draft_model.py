"""ModelDrafter: a whole model drafts on a KV cache of its own, of which it reads what a KV policy
says. The model is a smaller one, or the target itself: then this is self-speculation, with a cache
of its own because the target's KV is divided among the ranks of the stages.

Owns which tokens the cache holds. All paths of a step are computed in one forward, as a draft tree
if they are no chain. Its tokens are chosen as the target's are. Must not know what of the drafts
is launched.

Ranks that share the model have a ModelDrafter each, which do the same: what is computed never
depends on candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from magicdec.config.sections import KVSection, SamplingSection
from magicdec.drafting.draft_kv import AcceptedPath
from magicdec.drafting.drafter import DraftModel
from magicdec.drafting.policies.policy import make_draft_kv
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.pipelined_run.parcel import DraftRequest
from magicdec.pipelined_speculation.messages import Candidates
from magicdec.pipelined_speculation.options import NUM_CANDIDATES
from magicdec.prefill import take
from magicdec.request import Request, SamplingParams
from magicdec.sampling.coupled import CoupledSampling
from magicdec.sampling.model_tokens import gather_vocab
from magicdec.scheduling.plan import Part


@dataclass(frozen=True)
class Node:
    """A token of which the cache holds K and V. `parent` is the number of the node before it, -1
    for the committed text. `candidates` follow it."""

    token: int
    parent: int
    candidates: Candidates = ()


@dataclass
class HeldText:
    """What a row of the cache holds: the first `committed` tokens of the text of `request`, and
    after them a tree. Node i of it lies in the i-th place. `candidates` follow the committed
    tokens."""

    request: int = 0
    committed: int = 0
    candidates: Candidates = ()
    nodes: list[Node] = field(default_factory=list)

    @property
    def following(self) -> list[int]:
        """The position in the text of the candidates of each node."""
        found: list[int] = []
        for node in self.nodes:
            found.append(1 + (found[node.parent] if node.parent >= 0 else self.committed))
        return found

    def follow(self, path: Sequence[int]) -> list[int]:
        """The numbers of the nodes along `path`, as far as the tree has it."""
        places = {(node.parent, node.token): i for i, node in enumerate(self.nodes)}
        found = [-1]
        for token in path:
            if (found[-1], token) not in places:
                break
            found.append(places[found[-1], token])
        return found[1:]

    def add(self, path: Sequence[int]) -> int:
        """The number of the last node of `path`, -1 if it is empty. New nodes get no candidates."""
        found = self.follow(path)
        last = found[-1] if found else -1
        for token in path[len(found) :]:
            self.nodes.append(Node(token, last))
            last = len(self.nodes) - 1
        return last

    def keep(self, kept: Sequence[int]) -> None:
        """Renumber the tree, which keeps these nodes, parents first."""
        numbers = {-1: -1} | {old: new for new, old in enumerate(kept)}
        self.nodes = [
            replace(self.nodes[old], parent=numbers[self.nodes[old].parent]) for old in kept
        ]

    def commit(self, count: int) -> None:
        """The first `count` nodes, on which all others hang, are committed."""
        if count:
            self.committed += count
            self.candidates = self.nodes[count - 1].candidates
            rest = self.nodes[count:]
            self.nodes = [replace(node, parent=max(-1, node.parent - count)) for node in rest]


class ModelDrafter:
    """`draft` has a row for each lane. Candidates are ids below `vocab_size`, the target's. They
    are the best that `sampling` could choose, with probabilities of being chosen."""

    def __init__(
        self,
        draft: DraftModel,
        kv: KVSection,
        vocab_size: int,
        sampling: CoupledSampling = CoupledSampling(SamplingSection()),
    ) -> None:
        assert draft.runner is not None, "this rank drafts"
        self.runner, self.kv = draft.runner, make_draft_kv(draft.runner, kv)
        self.prefill_chunk, self.vocab_size = draft.prefill_chunk, vocab_size
        self.sampling = sampling
        self.held = [HeldText() for _ in range(draft.runner.num_rows)]

    def propose(self, asked: DraftRequest, text: list[int]) -> list[Candidates]:
        """As `drafter.Drafter.propose`. The cache keeps what lies on the asked paths."""
        lane = asked.lane
        if asked.kept == 0:
            self._begin(asked.request, lane, text)
        if not asked.paths:
            return []
        held = self.held[lane]
        new = text[held.committed :]
        paths = [(*new, *path) for path in asked.paths]
        self._forget_others(lane, paths)
        num_computed = len(held.nodes)
        num_known = len(held.follow(new))
        held.commit(num_known)
        ends = [held.add(path[num_known:]) for path in paths]
        self._compute(lane, num_computed - num_known)
        found = [held.nodes[end].candidates if end >= 0 else held.candidates for end in ends]
        held.commit(len(new) - num_known)
        return found

    def _begin(self, number: int, lane: int, text: Sequence[int]) -> None:
        """Prefill the text of another request."""
        request = Request(lane, tuple(text), SamplingParams(1), row=lane)
        self.runner.cache.release(lane)
        self.runner.allocate(lane)
        (part,) = Part.whole([request])
        logits = take(self.runner, part, self.prefill_chunk)
        self.kv.admit([request])
        (candidates,) = self._candidates(logits, number, [len(text)])
        self.held[lane] = HeldText(number, len(text), candidates)

    def _forget_others(self, lane: int, paths: Sequence[Sequence[int]]) -> None:
        """Forget the nodes that are not on `paths`."""
        held, device = self.held[lane], self.runner.device
        rows = BatchRows.of([lane], device)
        on_paths = dict.fromkeys(node for path in paths for node in held.follow(path))
        kept, base = list(on_paths), Lengths.of([held.committed], device)
        if kept == list(range(len(kept))):
            self.kv.rewind(rows, base.plus(len(kept)))
        else:
            accepted = AcceptedPath(base, upload([len(kept) - 1], device), upload([kept], device))
            self.kv.keep_path(rows, accepted, len(kept))
        held.keep(kept)

    def _compute(self, lane: int, first: int) -> None:
        """Append the nodes from `first` on to the row, and learn their candidates."""
        held, device = self.held[lane], self.runner.device
        committed = Lengths.of([held.committed], device)
        tokens = [node.token for node in held.nodes]
        parents = [node.parent for node in held.nodes]
        is_chain = parents == list(range(-1, len(parents) - 1))
        for begin in range(first, len(tokens), self.prefill_chunk):
            end = begin + self.prefill_chunk
            ids = upload([tokens[begin:end]], device)
            tree = None if is_chain else upload([parents[:end]], device)
            logits = self.kv.forward(self._known(ids), [lane], committed, tree)
            found = self._candidates(logits, held.request, held.following[begin:end])
            for place, candidates in enumerate(found, begin):
                held.nodes[place] = replace(held.nodes[place], candidates=candidates)

    def _known(self, token_ids: Tensor) -> Tensor:
        """`token_ids` limited to the draft's vocabulary, which may be padded to another size."""
        return token_ids.clamp(max=self.runner.model.config.vocab_size - 1)

    def _candidates(
        self, logits: Tensor, request: int, positions: Sequence[int]
    ) -> list[Candidates]:
        """For these positions of the text, from this rank's logits [1, T, V]. The same on every
        rank."""
        whole = gather_vocab(logits, self.runner.vocab_places, self.runner.group)
        known = whole[0, :, : self.vocab_size]
        probs = self.sampling.perturbed(known, request, positions).float().softmax(dim=-1)
        best = probs.topk(min(NUM_CANDIDATES, probs.shape[1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [tuple(zip(*row, strict=True)) for row in rows]
