"""What a draft must read under each policy, written from the definitions; holds no tests itself.

`PlainModel` runs a whole text in float64 with a mask that is written out: it has no cache, no view
and no policy. Every reference here computes its scores from the keys and queries of that forward,
and knows of the package only the settings of the run.

Shapes: L layers, H query heads, G KV heads, T tokens, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from conftest import tiny_transformer
from torch import Tensor

from magicdec.config.sections import MAX_AUTO_GAMMA, KVSection
from magicdec.model.config import ModelConfig

BLOCK = 16  # tokens of a block that is read or not as a whole
RERUN = 16  # newest prompt tokens whose attention counts before anything was verified
KERNEL = 5  # neighbours that share a score
LONGEST = 400  # tokens of a text of these tests
MOST_KNOWN = 16  # texts whose forward is kept, of a megabyte each


@dataclass(frozen=True)
class Seen:
    """What a whole forward computed: logits [T, V], and after the rotation, of each layer, queries
    [H, T, D], keys [G, T, D] and attention weights [H, T, T]."""

    logits: Tensor
    queries: list[Tensor]
    keys: list[Tensor]
    weights: list[Tensor]

    def first(self, count: int) -> "Seen":
        """Of the first tokens alone, which see none of the later ones."""
        keys, queries = ([x[:, :count] for x in part] for part in (self.keys, self.queries))
        weights = [x[:, :count, :count] for x in self.weights]
        return Seen(self.logits[:count], queries, keys, weights)


class PlainModel:
    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.windows = [kind.window for kind in config.kinds]
        self.model = tiny_transformer(config, seed, torch.float64)
        self.model.set_positions(LONGEST, torch.device("cpu"))
        self.known: dict[tuple[int, ...], Seen] = {}  # the newest texts

    def read(self, ids: Sequence[int]) -> Seen:
        """A text as the target reads it. Of the beginning of a known text there is no forward."""
        key = tuple(ids)
        count = len(ids)
        for text, seen in self.known.items():
            if text[:count] == key:
                return seen.first(count)
        self.known[key] = self.run(ids)
        if len(self.known) > MOST_KNOWN:
            del self.known[next(iter(self.known))]
        return self.known[key]

    def causal(self, num_tokens: int) -> Tensor:
        """Which positions each of the tokens sees in each layer and head, bool [L, G, T, T]: those
        before it, within the layer's sliding window."""
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
        layer_masks = [mask if w is None else mask.triu(1 - w) for w in self.windows]
        return torch.stack(layer_masks)[:, None].repeat(1, self.config.num_kv_heads, 1, 1)

    def run(self, ids: Sequence[int], masks: Tensor | None = None) -> Seen:
        """`masks` bool [L, G, T, T] say what each token sees, by default what the target's do."""
        count = len(ids)
        groups = self.config.num_kv_heads
        if masks is None:
            masks = self.causal(count)
        parts = [list[Tensor](), list[Tensor](), list[Tensor]()]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, keys, values = (x[0].transpose(0, 1).clone() for x in (q, k, v))
            group_size = len(queries) // groups
            scores = queries @ keys.repeat_interleave(group_size, 0).mT * queries.shape[-1] ** -0.5
            hidden = ~masks[layer].repeat_interleave(group_size, 0)
            scores = scores.masked_fill(hidden, -torch.inf)
            sinks = self.model.blocks[layer].attention.sinks
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, count, 1)], dim=-1)
            weights = scores.softmax(dim=-1)[..., :count]
            for part, tensor in zip(parts, (queries, keys, weights), strict=True):
                part.append(tensor)
            return (weights @ values.repeat_interleave(group_size, 0)).transpose(0, 1)[None]

        positions = torch.arange(count)[None]
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(ids)]), positions, attend, lambda x: x)[0]
        return Seen(logits, *parts)

    def by_group(self, by_head: Tensor) -> Tensor:
        """Sum over the query heads of each KV head: [H, ...] to [G, ...]."""
        return by_head.unflatten(0, (self.config.num_kv_heads, -1)).sum(dim=1)


@dataclass(frozen=True)
class WantedChoice:
    """What one KV head of a layer must read of the committed positions: all of `always`, and the
    `count` of the `units` with the best scores."""

    always: frozenset[int]
    units: tuple[frozenset[int], ...] = ()
    scores: tuple[float, ...] = ()
    count: int = 0

    def complaint(self, read: frozenset[int], tolerance: float) -> str | None:
        """What is wrong with these positions; None if nothing is. Units whose scores are equal
        within the tolerance may stand for each other."""
        if not self.always <= read:
            return f"{sorted(self.always - read)} are not read"
        rest = read - self.always
        taken = [unit <= rest for unit in self.units]
        taken_units = frozenset[int]().union(
            *(u for u, t in zip(self.units, taken, strict=True) if t)
        )
        if rest != taken_units:
            return f"{sorted(rest - taken_units)} are read"
        if sum(taken) != min(self.count, len(self.units)):
            return f"{sum(taken)} units are read in place of {self.count}"
        kept = [score for score, take in zip(self.scores, taken, strict=True) if take]
        left = [score for score, take in zip(self.scores, taken, strict=True) if not take]
        if kept and left and min(kept) < max(left) - tolerance:
            return f"a score of {min(kept)} is read, and one of {max(left)} is not"
        return None


Heads = list[list[WantedChoice]]
"""By layer and KV head."""


class PlainReference:
    """One request. `admitted`, `verified` and `drafts` are told what happens to it, in this order;
    `text` are always its committed tokens. Every token of `text` is read here: the policy that
    drops nothing."""

    def __init__(self, plain: PlainModel, kv: KVSection, num_rows_tokens: tuple[int, int]) -> None:
        self.plain = plain
        self.kv = kv
        self.most_tokens, self.most_following = num_rows_tokens
        self.window = self.plain.config.windows[0]
        self.num_choices = 0

    def admitted(self, text: Sequence[int]) -> None:
        """The text is in the cache."""

    def verified(self, text: Sequence[int], chain: Sequence[int], num_accepted: int) -> None:
        """After `text`, the `chain` of its newest token and of drafts was verified, of which so
        many drafts were accepted."""

    def drafts(self, text: Sequence[int], gamma: int) -> Heads:
        """What is read of `text` if as many tokens are drafted after it, in the layers with the
        widest window."""
        return self.same(range(self.first_of(len(text)), len(text)))

    def narrow(self, count: int) -> Sequence[int]:
        """What of `count` tokens is read in layers with another window, as far as that goes."""
        return range(count)

    def wanted(self, text: Sequence[int], gamma: int) -> Heads:
        heads = self.drafts(text, gamma)
        for layer, window in enumerate(self.plain.windows):
            if window != self.window:
                first = self.first_of(len(text), layer)
                seen = frozenset(p for p in self.narrow(len(text)) if p >= first)
                heads[layer] = [WantedChoice(seen)] * len(heads[layer])
        return heads

    def first_of(self, position: int, layer: int | None = None) -> int:
        """The first position that a token at `position` sees, in a layer or in the widest ones."""
        window = self.window if layer is None else self.plain.windows[layer]
        return 0 if window is None else max(0, position - window + 1)

    def same(self, positions: Sequence[int]) -> Heads:
        """In all layers and heads the same."""
        config = self.plain.config
        wanted = WantedChoice(frozenset(positions))
        return [[wanted] * config.num_kv_heads for _ in range(config.num_layers)]


class SinksAndNewest(PlainReference):
    """StreamingLLM: the first tokens and the newest, `budget` in all (Xiao et al. 2023)."""

    def drafts(self, text: Sequence[int], gamma: int) -> Heads:
        count = len(text)
        sinks = self.kv.num_sink_tokens
        newest = range(max(0, count - (self.kv.budget - sinks)), count)
        seen = {*range(min(sinks, count)), *newest}
        return self.same([p for p in seen if p >= self.first_of(count)])

    def narrow(self, count: int) -> Sequence[int]:
        sinks = min(count, self.kv.num_sink_tokens)
        return [*range(sinks), *range(max(sinks, count - (self.kv.budget - sinks)), count)]


class ByPastAttention(PlainReference):
    """SnapKV: `budget` tokens: of the choice the newest `window_size`, and those that they attended
    to most; each later token takes the place of the one with the lowest score (Li et al. 2024)."""

    def admitted(self, text: Sequence[int]) -> None:
        self.choose(text, MAX_AUTO_GAMMA)

    def narrow(self, count: int) -> Sequence[int]:
        return range(max(0, count - self.kv.budget), count)

    def choose(self, text: Sequence[int], gamma: int) -> None:
        """With a sliding window, only of what stays in it until the next choice or the end."""
        self.num_choices += 1
        self.chosen = tuple(text)
        self.until = self.most_tokens
        self.until = min(self.until, len(text) + self.most_following)
        every = self.kv.reselect_every
        if every and self.window is not None:
            self.until = min(self.until, len(text) + every + gamma)

    def drafts(self, text: Sequence[int], gamma: int) -> Heads:
        every = self.kv.reselect_every
        is_due = every > 0 and len(text) - len(self.chosen) >= every
        if is_due or len(text) + gamma > self.until:
            self.choose(text, gamma)
        # A standalone draft may go back by a token.
        at = len(self.chosen)
        now = len(text)
        first = min(at, self.first_of(self.until - 1))
        begin = max(first, at - self.kv.window_size)
        count = self.kv.budget - (max(at, now) - begin)
        if count <= 0 or first == begin:
            return self.same(range(max(first, now - self.kv.budget), now))
        always = frozenset(range(begin, now))
        units = tuple(frozenset([p]) for p in range(first, begin))
        return [
            [
                WantedChoice(always, units, tuple(head_scores.tolist()), count)
                for head_scores in scores
            ]
            for scores in self.scores(first, begin, at)
        ]

    def scores(self, first: int, begin: int, at: int) -> list[Tensor]:
        """Of each layer [G, tokens from `first` to `begin`]: the attention of the tokens from
        `begin` on to those from `first` on, shared by neighbours."""
        seen = self.plain.read(self.chosen)
        found = []
        for queries, keys in zip(seen.queries, seen.keys, strict=True):
            group_size = len(queries) // len(keys)
            products = queries[:, begin:at] @ keys.repeat_interleave(group_size, 0)[:, first:at].mT
            later = torch.ones(at - begin, at - first, dtype=torch.bool).triu(begin - first + 1)
            weights = (products * queries.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
            votes = self.plain.by_group(weights.softmax(dim=-1).sum(dim=1))[:, : begin - first]
            near = F.pad(votes, (KERNEL // 2, KERNEL // 2)).unfold(1, KERNEL, 1)
            found.append(near.mean(dim=2) if self.kv.pooling == "avg" else near.amax(dim=2))
        return found


class BestBlocks(PlainReference):
    """`budget` tokens: sinks, the newest `recent_window` and up to 15 more, so that blocks end
    where they begin, and between them whole blocks with the best scores."""

    def narrow(self, count: int) -> Sequence[int]:
        return range(max(0, count - self.kv.budget), count)

    def drafts(self, text: Sequence[int], gamma: int) -> Heads:
        count = len(text)
        first = self.first_of(len(text))
        if count - first <= self.kv.budget:
            return self.same(range(first, count))
        sinks = range(first, max(first, self.kv.num_sink_tokens))
        room = self.kv.budget - len(sinks)
        begin = (count - self.kv.num_recent_tokens) // BLOCK * BLOCK
        if count - begin > room:
            return self.same([*sinks, *range(count - room, count)])
        after_sinks = max(first, self.kv.num_sink_tokens)
        numbers = [b for b in range(begin // BLOCK) if b * BLOCK >= after_sinks]
        units = tuple(frozenset(range(b * BLOCK, (b + 1) * BLOCK)) for b in numbers)
        always = frozenset([*sinks, *range(begin, count)])
        num_blocks = (room - (count - begin)) // BLOCK
        return [
            [
                WantedChoice(always, units, tuple(head_scores[numbers].tolist()), num_blocks)
                for head_scores in self.block_scores(text, layer)
            ]
            for layer in range(self.plain.config.num_layers)
        ]

    def block_scores(self, text: Sequence[int], layer: int) -> Tensor:
        """[G, blocks]"""
        raise NotImplementedError


class ByMeanKeys(BestBlocks):
    """Retrieval: the newest committed query that a verification has shown, against the mean key of
    each complete block (Sun et al. 2024, section 4) within the window of all layers."""

    def admitted(self, text: Sequence[int]) -> None:
        self.place = len(text) - 1

    def verified(self, text: Sequence[int], chain: Sequence[int], num_accepted: int) -> None:
        self.place = len(text) + num_accepted

    def block_scores(self, text: Sequence[int], layer: int) -> Tensor:
        seen = self.plain.read(text)
        complete = len(text) // BLOCK
        keys = seen.keys[layer][:, : complete * BLOCK].unflatten(1, (complete, BLOCK)).mean(dim=2)
        queries = seen.queries[layer][:, self.place].unflatten(0, (len(keys), -1))
        products = queries @ keys.mT * keys.shape[-1] ** -0.5  # [G, H/G, blocks]
        num_gone = -(-self.first_of(len(text)) // BLOCK)
        products[..., :num_gone] = -torch.inf
        return products.softmax(dim=-1).sum(dim=1)


class ByLastVerification(BestBlocks):
    """Verified: the attention that blocks received from all tokens of the last verification,
    rejected ones included; before the first, from the newest 16 of the text."""

    def admitted(self, text: Sequence[int]) -> None:
        self.weights = self.plain.read(text).weights
        self.observed = range(max(0, len(text) - RERUN), len(text))

    def verified(self, text: Sequence[int], chain: Sequence[int], num_accepted: int) -> None:
        self.weights = self.plain.run([*text, *chain]).weights
        self.observed = range(len(text), len(text) + len(chain))

    def block_scores(self, text: Sequence[int], layer: int) -> Tensor:
        received = self.plain.by_group(self.weights[layer][:, list(self.observed)].sum(dim=1))
        count = received.shape[1]
        num_blocks = -(-max(len(text), count) // BLOCK)
        block = torch.arange(count) // BLOCK
        return received.new_zeros(len(received), num_blocks).index_add(1, block, received)


REFERENCES: dict[str, type[PlainReference]] = {
    "full": PlainReference,
    "quantised": PlainReference,
    "streaming_llm": SinksAndNewest,
    "snapkv": ByPastAttention,
    "retrieval": ByMeanKeys,
    "verified": ByLastVerification,
}
