"""From which batch and context on drafts are predicted to pay, by model: drafts of the model itself
with a sparse cache, an EAGLE-3 head, and nothing. Nothing runs; the page
results/predictions/which_models_pay.md explains.

    python scripts/dev/which_models_pay.py              # the tables of the page
    python scripts/dev/which_models_pay.py --write      # renews the tables in the page
    python scripts/dev/which_models_pay.py --plot results/predictions/which_models_pay.svg
    python scripts/dev/which_models_pay.py --gpu h100   # another GPU

Forwards cost what `magicdec plan` says (`hardware/costs.py`), and a cell has the best draft length.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.patches import Patch, Rectangle
from scale_figure import BYTES, COMPUTE, LAYER_S, NVLINK, READ, ROOM, SPECS, Gpu

from magicdec.hardware.ceiling_file import Hardware, Link
from magicdec.hardware.costs import (
    Deployment,
    ForwardCost,
    attention_entry_bytes,
    attention_layers,
    expert_bytes,
    mixers_of,
    slowest_shard,
    state_bytes,
    stored_bytes,
)
from magicdec.model.config import EagleConfig, ModelConfig
from magicdec.model.presets.presets import PRESETS
from magicdec.names import STORED
from magicdec.output.figures import COLOURS, check_picture, saved_figure
from magicdec.predict.speculation import SpeculationCost

PREDICTIONS = Path(__file__).parents[2] / "results" / "predictions"
PAGE = PREDICTIONS / "which_models_pay.md"
BEGIN = "<!-- {}: scripts/dev/which_models_pay.py --write -->"
END = "<!-- end of {} -->"
# GPUs that share each model, and the longest context that is asked for where a release of the same
# shape has more positions than the preset.
MODELS = {
    "llama-3.1-8b": 1,
    "qwen3-30b-a3b": 1,
    "gpt-oss-20b": 1,
    "gpt-oss-120b": 1,
    "gemma-3-27b": 1,
    "gemma-4-31b": 1,
    "qwen3.5-27b": 1,
    "qwen3.5-35b-a3b": 1,
    "nemotron-3-nano-30b-a3b": 1,
    "llama-3.1-70b": 8,
    "llama-3.1-405b": 8,
    "deepseek-v3": 8,
    "deepseek-v4-flash": 8,
}
LONGEST = {"qwen3-30b-a3b": 1 << 18}
CONTEXTS = (4096, 16384, 65536, 131072, 262144)  # of the figure
BATCHES = (1, 4, 16, 64, 256)
TABLE_BATCHES = (1, 8, 64)
SHORTEST = 1024
SHORT = 4096  # of the table of what is needed
GAMMA = 8  # the most drafts of a step
PAYS = 1.05  # the least speedup that counts
LOW, MID, HIGH = range(3)
HEAD_VOCABULARY = 32000
HEAD_SIZE = 128
HEAD_KV_HEADS = 8
ALL = 1 << 30  # a budget that leaves out nothing
GPU = "h200"


@dataclass(frozen=True)
class DraftingWay:
    """A way to draft. `budget`: cached tokens that drafts of the model itself read, None for an
    EAGLE-3 head, which reads all. `acceptances`: conditional rates, low, middle and high."""

    name: str
    budget: int | None
    acceptances: tuple[float, float, float]


WAYS = (
    DraftingWay("self-draft, 512 tokens", 512, (0.65, 0.80, 0.90)),
    DraftingWay("self-draft, 2048 tokens", 2048, (0.70, 0.85, 0.93)),
    DraftingWay("EAGLE-3 head", None, (0.45, 0.65, 0.80)),
)
NOTHING = "#D0D0D0"
NO_ROOM = "#FFFFFF"
# Colours by what pays: self-drafts, a head, and whether self-drafts are the faster of both.
KINDS = {
    (False, True, False): ("a head alone pays", COLOURS[4]),
    (True, True, False): ("both pay, a head more", COLOURS[2]),
    (True, True, True): ("both pay, self-drafts more", COLOURS[5]),
    (True, False, True): ("self-drafts alone pay", COLOURS[1]),
    (False, False, False): (f"nothing pays {PAYS}x", NOTHING),
}


@dataclass(frozen=True)
class CachedDeployment(Deployment):
    """A deployment that computes each time once. `alike`: the drafts of a row go to the experts of
    its newest token, which is the least that a verification can read."""

    alike: bool = False
    times: dict[tuple[int, int, int], float] = field(default_factory=dict, compare=False)

    def seconds(self, B: int, T: int, S: int, num_logits: int | None = None) -> float:
        assert num_logits is None, "of decoding and verifications"
        if (B, T, S) not in self.times:
            self.times[B, T, S] = super().seconds(B, T, S)
        return self.times[B, T, S]

    def forward(self, B: int, T: int, S: int, num_logits: int | None = None) -> ForwardCost:
        cost = super().forward(B, T, S, num_logits)
        experts = self.config.experts
        if not self.alike or experts is None:
            return cost
        shard = slowest_shard(self.config, self.tp)
        expert_total = expert_bytes(self.config, shard, self.dtype_bytes, self.low_bit)
        fewer = (experts.touched(B * T) - experts.touched(B)) / experts.num_experts
        return replace(cost, weight_bytes=round(cost.weight_bytes - fewer * expert_total))


def head_of(model: ModelConfig) -> ModelConfig:
    """An EAGLE-3 head as those that are published are shaped: one layer of Llama as wide as the
    model, whose MLP is 3.5 times as wide, and a head of 32,000 tokens."""
    width = model.hidden_size
    per_group = HEAD_SIZE * HEAD_KV_HEADS
    return ModelConfig(
        name="head",
        vocab_size=HEAD_VOCABULARY,
        num_layers=1,
        hidden_size=width,
        intermediate_size=7 * width // 2,
        num_heads=-(-width // per_group) * HEAD_KV_HEADS,
        num_kv_heads=HEAD_KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=model.max_length,
        eagle=EagleConfig(model.vocab_size, state_size=width),
    )


@dataclass(frozen=True)
class Place:
    """A model on GPUs that share it by tensor parallelism."""

    name: str
    gpu: Gpu
    alike: bool = False

    @property
    def tp(self) -> int:
        return MODELS[self.name]

    @property
    def config(self) -> ModelConfig:
        return PRESETS[self.name].config

    @property
    def longest(self) -> int:
        return LONGEST.get(self.name, self.config.max_length)

    @property
    def hardware(self) -> Hardware:
        """Rates of a GPU, as in scale_figure.py."""
        link = Link(2 * NVLINK.latency_s, NVLINK.bytes_per_s)
        return Hardware(READ * self.gpu.read, COMPUTE * self.gpu.flops, LAYER_S, link=link)

    @cache  # noqa: B019
    def target(self) -> CachedDeployment:
        config = self.config
        own = None if config.experts is None else config.experts.stored_bytes
        low_bit = None if (config.stored_bytes, own) == (None, None) else STORED
        return CachedDeployment(
            config, self.hardware, BYTES, self.tp, low_bit=low_bit, alike=self.alike
        )

    @cache  # noqa: B019
    def head(self) -> CachedDeployment:
        return CachedDeployment(head_of(self.config), self.hardware, BYTES, self.tp)

    def fits(self, B: int, S: int) -> bool:
        """Whether a rank has room for its weights, and for the caches and states of B rows."""
        target = self.target()
        shard = slowest_shard(self.config, self.tp)
        weights = stored_bytes(self.config, shard, BYTES, False, target.low_bit)
        entry = attention_entry_bytes(self.config, shard, BYTES)
        layers = attention_layers(self.config).items()
        cached = sum(n * min(S, window or S) for window, n in layers) * entry
        for mixer, n in mixers_of(self.config).items():
            cached += round(n * S * mixer.entry_bytes(shard, BYTES))
        cached += state_bytes(self.config, shard, BYTES)
        return weights + B * cached <= ROOM * self.gpu.memory

    def speedup_at(self, way: DraftingWay, B: int, S: int, acceptance: float) -> tuple[float, int]:
        """Of steps with the best number of drafts, and that number."""
        target = self.target()
        draft = self.head() if way.budget is None else target
        cost = SpeculationCost(target, draft, way.budget or ALL, acceptance)
        return max((cost.predict_step(B, S, gamma).speedup, gamma) for gamma in range(1, GAMMA + 1))

    def speedup(self, way: DraftingWay, B: int, S: int, level: int = MID) -> tuple[float, int]:
        return self.speedup_at(way, B, S, way.acceptances[level])

    def least(self, way: DraftingWay, B: int, S: int) -> float | None:
        """The least acceptance with which drafts pay, in hundredths; None if 0.99 does not."""
        hundredths = range(1, 100)
        found = bisect_left(
            hundredths, True, key=lambda n: self.speedup_at(way, B, S, n / 100)[0] >= PAYS
        )
        return hundredths[found] / 100 if found < len(hundredths) else None

    def least_text(self, way: DraftingWay, B: int, S: int) -> str:
        least = self.least(way, B, S)
        return "never" if least is None else f"{least:.2f}"

    def contexts(self, B: int) -> list[int]:
        """The contexts that are asked for, in powers of two and the longest, as far as they fit."""
        powers = [1 << n for n in range(SHORTEST.bit_length() - 1, self.longest.bit_length())]
        return [S for S in sorted({*powers, self.longest}) if self.fits(B, S)]

    def pays(self, way: DraftingWay, B: int, level: int = MID) -> str:
        """The contexts in which drafts pay: all, none, or from which on or up to which."""
        asked = self.contexts(B)
        if not asked:
            return "no room"
        paying = [S for S in asked if self.speedup(way, B, S, level)[0] >= PAYS]
        if not paying:
            return "never"
        if paying == asked:
            return "always"
        if paying[-1] == asked[-1] and paying == asked[-len(paying) :]:
            return f"from {thousands(paying[0])}"
        return f"{thousands(paying[0])} to {thousands(paying[-1])}"

    def best(self, B: int, S: int) -> tuple[DraftingWay | None, float, int]:
        """The way with the fastest steps, its speedup and its drafts; None if none pays."""
        found = [(*self.speedup(way, B, S), way) for way in WAYS]
        speedup, gamma, way = max(found, key=lambda measured: measured[0])
        return (way, speedup, gamma) if speedup >= PAYS else (None, 1.0, 0)


def thousands(S: int) -> str:
    return f"{S // 1024}k"


def places(gpu: str = GPU, alike: bool = False) -> list[Place]:
    return [Place(name, SPECS[gpu], alike) for name in MODELS]


def thresholds(gpu: str) -> Iterator[tuple[str, ...]]:
    """A row for each model and batch size: where each way pays, and the best of the longest context
    with room."""
    yield ("model, GPUs", "B", *(way.name for way in WAYS), "longest", "best there")
    yield ("---", "--:", *("---" for _ in WAYS), "--:", "---")
    for place in places(gpu):
        for B in TABLE_BATCHES:
            asked = place.contexts(B)
            label = f"{place.name}, {place.tp}" if TABLE_BATCHES[0] == B else ""
            if not asked:
                yield (label, str(B), *("no room" for _ in WAYS), "", "")
                continue
            way, speedup, gamma = place.best(B, asked[-1])
            text = "nothing" if way is None else f"{way.name}: {speedup:.2f}x (gamma {gamma})"
            ways = (place.pays(way, B) for way in WAYS)
            yield (label, str(B), *ways, thousands(asked[-1]), text)


def sensitivity(gpu: str) -> Iterator[tuple[str, ...]]:
    """Of B = 8: where drafts pay at a low, a middle and a high acceptance, and those of a head if
    they all go to the experts of the row's newest token."""
    B = 8
    shown = (WAYS[0], WAYS[2])
    names = [f"{way.name}, {a:.2f}" for way in shown for a in way.acceptances]
    yield ("model", *names, f"{WAYS[2].name}, {WAYS[2].acceptances[LOW]:.2f}, experts alike")
    yield ("---",) * (len(names) + 2)
    for place, alike in zip(places(gpu), places(gpu, alike=True), strict=True):
        cells = [place.pays(way, B, level) for way in shown for level in (LOW, MID, HIGH)]
        last = alike.pays(WAYS[2], B, LOW) if place.config.experts else ""
        yield (place.name, *cells, last)


def needed(gpu: str) -> Iterator[tuple[str, ...]]:
    """The least acceptance with which drafts pay, in a short and in the longest context with room,
    of few and of many requests."""
    settings = [(B, is_long) for B in (1, 64) for is_long in (False, True)]
    heads = [f"B {B}, {'longest' if is_long else thousands(SHORT)}" for B, is_long in settings]
    shown = (WAYS[0], WAYS[2])
    yield ("model", *(f"{way.name}: {head}" for way in shown for head in heads))
    yield ("---",) + ("--:",) * (len(shown) * len(heads))
    for place in places(gpu):
        cells = []
        for way in shown:
            for B, is_long in settings:
                asked = [S for S in place.contexts(B) if S >= SHORT]
                S = asked[-1 if is_long else 0] if asked else None
                cells.append("no room" if S is None else place.least_text(way, B, S))
        yield (place.name, *cells)


TABLES = {"thresholds": thresholds, "sensitivity": sensitivity, "needed": needed}


def markdown(rows: Iterator[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def written(text: str, gpu: str = GPU) -> str:
    """The page with its tables as they are now."""
    for name, rows in TABLES.items():
        begin = BEGIN.format(name)
        end = END.format(name)
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n\n{markdown(rows(gpu))}\n\n{end}{after}"
    return text


def draw(path: Path, gpu: str) -> None:
    """A map of contexts and batch sizes for each model, coloured by what pays."""
    num_rows = -(-len(MODELS) // 2)
    size = (5.4, 1.6 * num_rows)
    with saved_figure("--plot", path, size, num_rows, 2, sharex=True, sharey=True) as (
        figure,
        axes,
    ):
        for ax in axes[len(MODELS) :]:
            ax.set_visible(False)
        for ax, place in zip(axes, places(gpu), strict=False):
            draw_map(ax, place)
            ax.set_title(f"{place.name}, {place.tp} GPU{'s' * (place.tp > 1)}", fontsize=8)
        for ax in axes[::2]:
            ax.set_ylabel("requests")
        for ax in axes[len(MODELS) - 2 : len(MODELS)]:
            ax.set_xlabel("context, tokens")
            ax.tick_params(labelbottom=True)
        handles = [Patch(facecolor=colour, label=text) for text, colour in KINDS.values()]
        handles.append(Patch(facecolor=NO_ROOM, edgecolor="#BBBBBB", label="no room, or too long"))
        figure.legend(handles=handles, loc="outside lower center", ncol=2, fontsize=9)
        figure.suptitle(
            f"Predicted on {gpu.upper()}, not measured: the drafts that pay, by\n"
            "requests and context, and the speedup of the faster ones",
            fontsize=10,
        )


def draw_map(ax: Any, place: Place) -> None:
    for x, S in enumerate(CONTEXTS):
        for y, B in enumerate(BATCHES):
            if place.longest < S or not place.fits(B, S):
                continue
            own = max(place.speedup(way, B, S)[0] for way in WAYS if way.budget is not None)
            head = max(place.speedup(way, B, S)[0] for way in WAYS if way.budget is None)
            pay = own >= PAYS, head >= PAYS
            _, colour = KINDS[(*pay, any(pay) and own > head)]
            ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white"))
            text = f"{max(own, head):.1f}" if any(pay) else ""
            ax.text(x + 0.5, y + 0.45, text, ha="center", va="center", fontsize=8)
    ax.set(xlim=(0, len(CONTEXTS)), ylim=(0, len(BATCHES)))
    ax.set_xticks([k + 0.5 for k in range(len(CONTEXTS))], [thousands(S) for S in CONTEXTS])
    ax.set_yticks([k + 0.5 for k in range(len(BATCHES))], [str(B) for B in BATCHES])
    ax.grid(visible=False)
    ax.tick_params(length=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--gpu", choices=SPECS, default=GPU)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.plot is not None:
        check_picture("--plot", args.plot)
        draw(args.plot, args.gpu)
    elif args.write:
        PAGE.write_text(written(PAGE.read_text(), args.gpu))
    else:
        print("\n\n".join(markdown(rows(args.gpu)) for rows in TABLES.values()))


if __name__ == "__main__":
    main()
