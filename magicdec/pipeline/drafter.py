"""Drafters of pipelined speculation, what the head asks them, and the loop in which one serves the
head's draft steps, on a rank of its own or in a thread of the head's. A drafter gives the most
probable tokens after each path that follows the committed text of a request.

ModelDrafter: a whole model drafts on a KV cache of its own, of which it reads what a KV policy
says. The model is a smaller one, or the target itself: then this is self-speculation, with a cache
of its own because the target's KV is divided among the ranks of the stages. All paths of a step are
computed in one forward, as a draft tree if they are no chain. Its tokens are chosen as the target's
are. Ranks that share the model have a ModelDrafter each, which do the same: what is computed never
depends on candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.channels.message import (
    DUE,
    Kind,
    Message,
    Receiver,
    Sender,
    floats_of,
    words_of,
)
from magicdec.drafting.draft_kv import AcceptedPath
from magicdec.drafting.drafter import DraftModel
from magicdec.drafting.policies.policy import make_draft_kv
from magicdec.drafting.suffix_index import Lookup, SuffixIndex
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.pipeline.spans import Spans, What
from magicdec.pipelined_speculation.messages import Candidates
from magicdec.pipelined_speculation.options import NUM_CANDIDATES
from magicdec.prefill import take
from magicdec.request import Request, SamplingParams
from magicdec.runner import gather_vocab
from magicdec.sampling.coupled import CoupledSampling
from magicdec.scheduling.plan import Part

Path = tuple[int, ...]
"""Tokens that follow the committed text."""


@dataclass(frozen=True)
class DraftRequest:
    """The text of `request`, whose first `kept` tokens the drafter has, goes on with `new`. `paths`
    are the continuations after which candidates are asked for; without any there is no answer."""

    request: int
    lane: int
    kept: int
    new: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...] = ()

    def to_message(self, draft: int) -> Message:
        lengths = [len(path) for path in self.paths]
        header = [self.request, self.lane, self.kept, len(self.new), len(self.paths), *lengths]
        tokens = [token for path in self.paths for token in path]
        return Message(Kind.NUMBERS, draft, words=(*header, *self.new, *tokens))

    @classmethod
    def from_message(cls, message: Message) -> DraftRequest:
        numbers = iter(message.words)
        request, lane, kept, num_new, num_paths = islice(numbers, 5)
        lengths = list(islice(numbers, num_paths))
        new = tuple(islice(numbers, num_new))
        return cls(request, lane, kept, new, tuple(tuple(islice(numbers, n)) for n in lengths))


def pack_candidates(draft: int, candidates: Sequence[Candidates]) -> Message:
    """The answer to a DraftRequest: the candidates of each path in order."""
    pairs = [pair for each in candidates for pair in each]
    probabilities = words_of(p for _, p in pairs)
    counts = (len(candidates), *map(len, candidates))
    return Message(
        Kind.NUMBERS, draft, words=(*counts, *(token for token, _ in pairs), *probabilities)
    )


def candidates_of(message: Message) -> list[Candidates]:
    numbers = iter(message.words)
    counts = list(islice(numbers, next(numbers)))
    tokens = list(islice(numbers, sum(counts)))
    pairs = iter(zip(tokens, floats_of(list(numbers)), strict=True))
    return [tuple(islice(pairs, count)) for count in counts]


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
            DUE.reach(message.due_s)
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

    def __init__(self, corpus: Sequence[int] = ()) -> None:
        self.corpus = SuffixIndex(corpus, len(corpus)) if corpus else None
        self.lookups: dict[int, Lookup] = {}  # by lane

    def propose(self, step: DraftRequest, text: list[int]) -> list[Candidates]:
        if step.kept == 0 or step.lane not in self.lookups:
            self.lookups[step.lane] = Lookup(self.corpus)
        lookup = self.lookups[step.lane]
        lookup.extend(text[lookup.length :])
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
            DUE.sleep(self.seconds)
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


@dataclass
class HeldText:
    """What a row of the cache holds: the first `committed` tokens of the text of `request`, of
    which `output` are those behind the prompt, and after them a tree of `nodes`, in the order of
    their places: each is the path to a token, with the candidates after it. Those of the empty path
    follow the committed tokens."""

    request: int = 0
    prompt: Path = ()
    committed: int = 0
    output: list[int] = field(default_factory=list)
    nodes: dict[Path, Candidates] = field(default_factory=dict)
    candidates: Candidates = ()

    def known(self, path: Path) -> list[Path]:
        """The nodes along `path`, as far as the tree has it."""
        prefixes = [path[:end] for end in range(1, len(path) + 1)]
        count = next((i for i, each in enumerate(prefixes) if each not in self.nodes), len(path))
        return prefixes[:count]

    def commit(self, count: int) -> None:
        """The first `count` nodes, on which all others hang, are committed."""
        if count:
            chain = [*self.nodes][:count]
            self.committed += count
            self.output += chain[-1]
            self.candidates = self.nodes[chain[-1]]
            rest = [*self.nodes.items()][count:]
            self.nodes = {path[count:]: candidates for path, candidates in rest}


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
        new = tuple(text[held.committed :])
        paths = [(*new, *path) for path in step.paths]
        self._forget_others(lane, paths)
        num_computed, num_known = len(held.nodes), len(held.known(new))
        held.commit(num_known)
        paths = [path[num_known:] for path in paths]
        for path in paths:
            for end in range(1, len(path) + 1):
                held.nodes.setdefault(path[:end], ())
        self._compute(lane, num_computed - num_known)
        candidates = [held.nodes[path] if path else held.candidates for path in paths]
        held.commit(len(new) - num_known)
        return candidates

    def _begin(self, number: int, lane: int, text: Sequence[int]) -> None:
        """Prefill the text of another request."""
        request = Request(lane, tuple(text), SamplingParams(1), row=lane)
        self.runner.cache.release(lane)
        self.runner.allocate(lane)
        (part,) = Part.whole([request])
        logits = take(self.runner, part, self.prefill_chunk)
        assert logits is not None, "a whole text is complete"
        self.kv.admit([request])
        held = HeldText(number, tuple(text), len(text))
        (held.candidates,) = self._candidates(logits, held, [()])
        self.held[lane] = held

    def _forget_others(self, lane: int, paths: Sequence[Path]) -> None:
        """Forget the nodes that are not on `paths`."""
        held, device = self.held[lane], self.runner.device
        rows, base = BatchRows.of([lane], device), Lengths.of([held.committed], device)
        on_paths = dict.fromkeys(node for path in paths for node in held.known(path))
        places, count = {node: place for place, node in enumerate(held.nodes)}, len(on_paths)
        numbers = [places[node] for node in on_paths]
        if numbers == list(range(count)):
            self.kv.rewind(rows, base.plus(count))
        else:
            kept = AcceptedPath(base, upload([count - 1], device), upload([numbers], device))
            self.kv.keep_path(rows, kept, count)
        held.nodes = {node: held.nodes[node] for node in on_paths}

    def _compute(self, lane: int, first: int) -> None:
        """Append the nodes from `first` on to the row, and learn their candidates."""
        held, device = self.held[lane], self.runner.device
        committed, nodes = Lengths.of([held.committed], device), [*held.nodes]
        places = {node: place for place, node in enumerate(nodes)}
        parents = [places.get(node[:-1], -1) for node in nodes]
        is_chain = parents == list(range(-1, len(parents) - 1))
        for begin in range(first, len(nodes), self.prefill_chunk):
            end = begin + self.prefill_chunk
            chunk = nodes[begin:end]
            ids = upload([[node[-1] for node in chunk]], device)
            tree = None if is_chain else upload([parents[:end]], device)
            # The draft's vocabulary may be padded to another size than the target's.
            ids = ids.clamp(max=self.runner.model.config.vocab_size - 1)
            logits = self.kv.forward(ids, [lane], committed, tree)
            held.nodes |= zip(chunk, self._candidates(logits, held, chunk), strict=True)

    def _candidates(self, logits: Tensor, held: HeldText, nodes: list[Path]) -> list[Candidates]:
        """The candidates after each of `nodes`, from this rank's logits [1, T, V]. They are the
        same on every rank."""
        whole = gather_vocab(logits, self.runner.vocab_places, self.runner.group)
        logits = whole[0, :, : self.vocab_size]
        if self.sampling.has_penalties:
            texts = [[*held.output, *node] for node in nodes]
            logits = self.sampling.penalised(logits, held.prompt, texts)
        positions = [held.committed + len(node) for node in nodes]
        probs = self.sampling.perturbed(logits, held.request, positions).float().softmax(dim=-1)
        best = probs.topk(min(NUM_CANDIDATES, probs.shape[1]))
        # A token is exact in float64, so that the host reads once.
        both = torch.stack([best.indices.double(), best.values.double()], dim=1).tolist()
        return [tuple(zip(map(int, ids), shares, strict=True)) for ids, shares in both]
