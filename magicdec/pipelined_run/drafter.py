"""Drafters of pipelined speculation, and the loop in which one serves the head's draft steps, on a
rank of its own or in a thread of the head's. A drafter gives the most probable tokens after each
path that follows the committed text of a request.

ModelDrafter: a whole model drafts on a KV cache of its own, of which it reads what a KV policy
says. The model is a smaller one, or the target itself: then this is self-speculation, with a cache
of its own because the target's KV is divided among the ranks of the stages. All paths of a step are
computed in one forward, as a draft tree if they are no chain. Its tokens are chosen as the target's
are. Ranks that share the model have a ModelDrafter each, which do the same: what is computed never
depends on candidates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.channels.message import Kind, Receiver, Sender
from magicdec.drafting.draft_kv import AcceptedPath
from magicdec.drafting.drafter import DraftModel
from magicdec.drafting.ngram import MAX_NGRAM, Lookup
from magicdec.drafting.policies.policy import make_draft_kv
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.pipeline.tracing import Spans, What
from magicdec.pipelined_run.channels import DraftRequest, pack_candidates
from magicdec.pipelined_speculation.messages import Candidates
from magicdec.pipelined_speculation.options import NUM_CANDIDATES
from magicdec.prefill import take
from magicdec.request import Request, SamplingParams
from magicdec.sampling.coupled import CoupledSampling
from magicdec.sampling.model_tokens import gather_vocab
from magicdec.scheduling.plan import Part


class Drafter(Protocol):
    def propose(self, step: DraftRequest, text: list[int]) -> list[Candidates]:
        """The candidates after each of the paths that follow `text`. A request without paths tells
        the drafter a text that it will be asked about."""


class DraftLoop:
    """Ranks that share a draft model have a loop each. All of them do the same steps in the same
    order, and so meet in the collectives of each forward."""

    def __init__(self, drafter: Drafter, inbound: Receiver, outbound: Sender, spans: Spans) -> None:
        self.drafter, self.inbound, self.outbound, self.spans = drafter, inbound, outbound, spans
        self.texts: dict[int, list[int]] = {}  # the committed text of each lane

    def serve(self) -> None:
        """Serve draft steps until the head has no more."""
        while (message := self.inbound.receive()).kind is not Kind.END:
            step = DraftRequest.from_message(message)
            text = self.texts.setdefault(step.lane, [])
            text[step.kept :] = step.new
            if not step.paths:
                self.drafter.propose(step, text)
                continue
            with self.spans.during(What.DRAFT, message.run):
                candidates = self.drafter.propose(step, text)
            self.outbound.send(pack_candidates(message.run, candidates))
        self.outbound.send(message)
        self.outbound.close()


class LookupDrafter:
    """Prompt lookup: the token that followed the longest suffix of the path which occurred in the
    committed text, with probability 1."""

    def __init__(self, max_ngram: int = MAX_NGRAM) -> None:
        self.max_ngram = max_ngram
        self.lookups: dict[int, Lookup] = {}  # by lane

    def propose(self, step: DraftRequest, text: list[int]) -> list[Candidates]:
        if step.kept == 0 or step.lane not in self.lookups:
            self.lookups[step.lane] = Lookup(self.max_ngram)
        lookup = self.lookups[step.lane]
        lookup.extend(text[len(lookup.tokens) :])
        tokens = [lookup.following(path) for path in step.paths]
        return [() if token is None else ((token, 1.0),) for token in tokens]


class ScriptedDrafter:
    """Knows what the target will write. `ranks[i]` is the place of output token i among the
    candidates, -1 if it is none of them; `probabilities` are those of the candidates. A step takes
    `seconds`. For emulated acceptance, and for tests."""

    def __init__(
        self,
        outputs: Sequence[Sequence[int]],
        prompt_lens: Sequence[int],
        ranks: Sequence[Sequence[int]],
        probabilities: Sequence[float],
        seconds: float = 0.0,
    ) -> None:
        self.outputs, self.prompt_lens, self.ranks = outputs, prompt_lens, ranks
        self.probabilities, self.seconds = probabilities, seconds

    def propose(self, step: DraftRequest, text: list[int]) -> list[Candidates]:
        if step.paths:
            time.sleep(self.seconds)
        return [self._after(step.request, len(text), path) for path in step.paths]

    def _after(self, request: int, num_committed: int, path: Sequence[int]) -> Candidates:
        output, begin = self.outputs[request], num_committed - self.prompt_lens[request]
        place = begin + len(path)
        if begin < 0 or place >= len(output):
            return ()  # a shortened request, or past the end
        is_right = tuple(output[begin:place]) == tuple(path)
        rank = self.ranks[request][place] if is_right else -1
        others = (token for token in range(len(self.probabilities) + 1) if token != output[place])
        return tuple(
            (output[place] if index == rank else next(others), probability)
            for index, probability in enumerate(self.probabilities)
        )


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
    tokens, of which `output` are those behind the prompt."""

    request: int = 0
    prompt: tuple[int, ...] = ()
    committed: int = 0
    candidates: Candidates = ()
    nodes: list[Node] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    @property
    def texts(self) -> list[list[int]]:
        """The output tokens up to each node."""
        texts: list[list[int]] = []
        for node in self.nodes:
            before = texts[node.parent] if node.parent >= 0 else self.output
            texts.append([*before, node.token])
        return texts

    @property
    def following(self) -> list[int]:
        """The position in the text of the candidates of each node."""
        positions: list[int] = []
        for node in self.nodes:
            positions.append(1 + (positions[node.parent] if node.parent >= 0 else self.committed))
        return positions

    def follow(self, path: Sequence[int]) -> list[int]:
        """The numbers of the nodes along `path`, as far as the tree has it."""
        places = {(node.parent, node.token): i for i, node in enumerate(self.nodes)}
        numbers = [-1]
        for token in path:
            if (numbers[-1], token) not in places:
                break
            numbers.append(places[numbers[-1], token])
        return numbers[1:]

    def add(self, path: Sequence[int]) -> int:
        """The number of the last node of `path`, -1 if it is empty. New nodes get no candidates."""
        known = self.follow(path)
        last = known[-1] if known else -1
        for token in path[len(known) :]:
            self.nodes.append(Node(token, last))
            last = len(self.nodes) - 1
        return last

    def keep(self, old_numbers: Sequence[int]) -> None:
        """Renumber the tree, which keeps these nodes, parents first."""
        numbers = {-1: -1} | {old: new for new, old in enumerate(old_numbers)}
        self.nodes = [
            replace(self.nodes[old], parent=numbers[self.nodes[old].parent]) for old in old_numbers
        ]

    def commit(self, count: int) -> None:
        """The first `count` nodes, on which all others hang, are committed."""
        if count:
            self.committed += count
            self.output += [node.token for node in self.nodes[:count]]
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

    def propose(self, step: DraftRequest, text: list[int]) -> list[Candidates]:
        """The candidates as `Drafter.propose` gives them. The cache keeps what lies on the paths of
        the step."""
        lane = step.lane
        if step.kept == 0:
            self._begin(step.request, lane, text)
        if not step.paths:
            return []
        held = self.held[lane]
        new = text[held.committed :]
        paths = [(*new, *path) for path in step.paths]
        self._forget_others(lane, paths)
        num_computed = len(held.nodes)
        num_known = len(held.follow(new))
        held.commit(num_known)
        ends = [held.add(path[num_known:]) for path in paths]
        self._compute(lane, num_computed - num_known)
        candidates = [held.nodes[end].candidates if end >= 0 else held.candidates for end in ends]
        held.commit(len(new) - num_known)
        return candidates

    def _begin(self, number: int, lane: int, text: Sequence[int]) -> None:
        """Prefill the text of another request."""
        request = Request(lane, tuple(text), SamplingParams(1), row=lane)
        self.runner.cache.release(lane)
        self.runner.allocate(lane)
        (part,) = Part.whole([request])
        logits = take(self.runner, part, self.prefill_chunk)
        self.kv.admit([request])
        held = HeldText(number, tuple(text), len(text))
        (held.candidates,) = self._candidates(logits, held, [len(text)], [[]])
        self.held[lane] = held

    def _forget_others(self, lane: int, paths: Sequence[Sequence[int]]) -> None:
        """Forget the nodes that are not on `paths`."""
        held, device = self.held[lane], self.runner.device
        rows = BatchRows.of([lane], device)
        on_paths = dict.fromkeys(node for path in paths for node in held.follow(path))
        numbers, base = list(on_paths), Lengths.of([held.committed], device)
        count = len(numbers)
        if numbers == list(range(count)):
            self.kv.rewind(rows, base.plus(count))
        else:
            path = AcceptedPath(base, upload([count - 1], device), upload([numbers], device))
            self.kv.keep_path(rows, path, count)
        held.keep(numbers)

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
            positions, texts = held.following[begin:end], held.texts[begin:end]
            of_nodes = self._candidates(logits, held, positions, texts)
            for place, candidates in enumerate(of_nodes, begin):
                held.nodes[place] = replace(held.nodes[place], candidates=candidates)

    def _known(self, token_ids: Tensor) -> Tensor:
        """`token_ids` limited to the draft's vocabulary, which may be padded to another size."""
        return token_ids.clamp(max=self.runner.model.config.vocab_size - 1)

    def _candidates(
        self,
        logits: Tensor,
        held: HeldText,
        positions: Sequence[int],
        outputs: Sequence[Sequence[int]],
    ) -> list[Candidates]:
        """The candidates for these positions of the text, from this rank's logits [1, T, V].
        `outputs` are the output tokens before each. They are the same on every rank."""
        whole = gather_vocab(logits, self.runner.vocab_places, self.runner.group)
        known = whole[0, :, : self.vocab_size]
        if self.sampling.has_penalties:
            known = self.sampling.penalised(known, held.prompt, outputs)
        probs = self.sampling.perturbed(known, held.request, positions).float().softmax(dim=-1)
        best = probs.topk(min(NUM_CANDIDATES, probs.shape[1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [tuple(zip(*row, strict=True)) for row in rows]
