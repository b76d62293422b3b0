"""The systems whose published tables are reproduced. For each line of their tables: the command
that measures it, the same line at the size of the packaged models, and what the project's models of
cost predict for it.

A line is a `Row`: its texts by column, empty where nothing is published. A new table is a line in
`TABLES` and a file in `results/paper/`; a new system is also a `System`. Sources: MagicDec's
project page; Flover (Yao et al. 2023, arXiv 2305.13484) and the figures of its repository; the
figures in the README of MDI-LLM at d647b97 (Macario et al. 2025, arXiv 2505.18164); and of
PipeInfer (Butler et al. 2024, arXiv 2407.11798) the README, the models and the launch scripts at
123a824.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from magicdec.distributed.layer_split import MDI_LLM, split_layers
from magicdec.model.presets.presets import PRESETS, find_config
from magicdec.names import SEQUENTIAL

Row = dict[str, str]
PACKAGED = Path(__file__).with_name("published")
DEMO, DEMO_DRAFT = "demo", "demo-draft"  # the packaged models
# Published models that are no presets, by their names on the hub.
HUB = {
    "llama-13b": "huggyllama/llama-13b",
    "llama-33b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
    "dolphin-70b": "cognitivecomputations/dolphin-2.2-70b",
    "tinyllama-openorca-1.1b": "jeff31415/TinyLlama-1.1B-1T-OpenOrca",
    "orca-2-7b": "microsoft/Orca-2-7b",
    "goliath-120b": "alpindale/goliath-120b",
    "xwin-7b": "Xwin-LM/Xwin-LM-7B-V0.2",
    "xwin-13b": "Xwin-LM/Xwin-LM-13B-V0.2",
    "falcon-180b": "tiiuae/falcon-180B",
}


class Missing(Exception):
    """A number does not exist. The message says why."""


@dataclass(frozen=True)
class Metric:
    """Where the records of a command have a quantity: the metric `name` of the pass `of` (empty:
    the last one), divided by that of the pass `over` if it is named. It is written with `digits`
    digits."""

    name: str
    digits: int
    of: str = ""
    over: str = ""


@dataclass(frozen=True)
class System:
    """`columns` describe what a line measured; the last but one or the last is its `quantity`.
    `quantities` has the metric of each quantity, or why it cannot be measured. `needs` says which
    hardware the published line needs, such as `8 A100 GPUs`. `predict` gets the folder of the
    tables too, and raises Missing if there is no prediction."""

    columns: tuple[str, ...]
    quantities: Mapping[str, Metric | str]
    command: Callable[[Row], str]  # the words after `magicdec`, without `--out`
    shrink: Callable[[Row], Row]  # the columns that are others at demo size
    needs: Callable[[Row], str]
    predict: Callable[[Row, Path], str]
    on_gpus: bool = False  # each rank has a GPU of one host; otherwise each is a host

    def at_demo_size(self, row: Row) -> Row:
        """The setting of the line for the packaged models, on a small machine without a GPU."""
        return {name: row[name] for name in self.columns} | {"model": DEMO} | self.shrink(row)

    def read(self, row: Row, records: Path) -> tuple[str, str]:
        """The number of a line in the file that its command wrote, and its 95 % interval, empty if
        it has none. Raises Missing if the records do not have the number."""
        from magicdec.records.performance import SUFFIX as INTERVAL

        metric = self.quantities[row["quantity"]]
        if isinstance(metric, str):
            raise Missing(metric)
        contents = map(json.loads, records.read_text(encoding="utf-8").splitlines())
        passes = {content.get("name"): content["metrics"] for content in contents}
        of = metric.of or [*passes][-1]
        if None in [passes[name] for name in (of, metric.over) if name != ""]:
            raise Missing("the tokens of its run were wrong")
        value = passes[of][metric.name]
        if value is None:
            raise Missing(f"the run has no {metric.name}")
        if metric.over:
            value /= passes[metric.over][metric.name]
        ends = passes[of].get(f"{metric.name}{INTERVAL}") or ()
        interval = " to ".join(f"{end:.{metric.digits}f}" for end in ends)
        return f"{value:.{metric.digits}f}", interval


def hub_name(model: str) -> str:
    """What a published model is called on the hub; others keep their names."""
    return PRESETS[model].repo_id if model in PRESETS else HUB.get(model, model)


def file_of(folder: Path, table: str) -> Path:
    """The file of a table in the folder, or the packaged one where the folder has none."""
    path = folder / f"{table}.csv"
    return path if path.exists() else PACKAGED / path.name


def read_published(folder: Path, table: str, **values: str) -> list[Row]:
    """The rows of a table that have a published number and these values in their columns."""
    with file_of(folder, table).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if row["published"] and values.items() <= row.items()]


def name_gpus(row: Row) -> str:
    return f"{row['ranks']} {row['hardware']} GPUs".lstrip()


# MagicDec. `draft` is `self`, `none` or a model; `budget` is the KV budget of the draft.
OWN_CACHE = ("self", "none")  # the drafts that are no model
# Published peak rates of one GPU in bfloat16 (bytes/s, operations/s), and assumed links (bytes/s).
GPUS = {"A100": (2039e9, 312e12, 300e9), "H100": (3352e9, 989e12, 450e9)}
LATENCY_S, OVERHEAD_S = 15e-6, 160e-6 / 32  # of a link and of one of 32 layers; as in docs/plan.md


def magicdec_command(row: Row) -> str:
    """A run of `magicdec run`, with enough batches for intervals."""
    draft, is_demo = row["draft"], row["model"] == DEMO
    drafter = draft if draft in OWN_CACHE else f"model:{hub_name(draft)}"
    drafting = f"--budget {row['budget']} --gamma {row['gamma'] or 4} " * (draft != "none")
    return (
        f"run --model {hub_name(row['model'])} --draft {drafter} --nproc {row['ranks'] or 1} "
        f"--B {row['batch_size'] or 1} --prefix_len {row['prefix_len']} --gen_len 64 "
        f"--num_batches 4 {drafting}--dataset {'demo' if is_demo else 'pg19'}"
    )


def shrink_magicdec(row: Row) -> Row:
    """Shorter prefixes and smaller batches, on one rank."""
    return {
        "draft": row["draft"] if row["draft"] in OWN_CACHE else DEMO_DRAFT,
        "hardware": "CPU",
        "ranks": "1",
        "budget": "129",
        "prefix_len": str(min(4096, max(512, int(row["prefix_len"]) // 16))),
        "batch_size": str(max(1, int(row["batch_size"] or 32) // 32)),
    }


def predict_magicdec(row: Row, folder: Path) -> str:
    """The prediction of `magicdec plan`. The published acceptance is taken as a conditional rate,
    as in the formula of the paper."""
    from magicdec.cost_model.costs import Deployment
    from magicdec.cost_model.speculation import Speculation
    from magicdec.hardware.ceiling_file import Hardware, Link

    place = {"model": row["model"], "prefix_len": row["prefix_len"]}
    rates = [float(r["published"]) for r in read_published(folder, "magicdec_acceptance", **place)]
    if row["quantity"] == "acceptance_rate":
        raise Missing("the plan takes acceptance as given")
    if not row["ranks"]:
        raise Missing("the number of GPUs is not published")
    if row["draft"] != "none" and (row["draft"] != "self" or not rates):
        raise Missing("no acceptance is published for this pair and prefix")
    bandwidth, flops, link_bandwidth = GPUS[row["hardware"]]
    gpu = Hardware(bandwidth, flops, OVERHEAD_S, link=Link(LATENCY_S, link_bandwidth))
    target = Deployment(find_config("--model", row["model"]), gpu, 2, int(row["ranks"]))
    S, B = int(row["prefix_len"]), int(row["batch_size"])
    if row["draft"] == "none":
        step_s = target.seconds(B, 1, S)
        return f"{1e3 * step_s if row['quantity'] == 'tpot_ms' else B / step_s:.2f}"
    speculation = Speculation(target, target, int(row["budget"]), rates[-1])
    return f"{speculation.predict_step(B, S, int(row['gamma'])).speedup:.2f}"


# Flover. Requests of `prompt_len` tokens arrive over time (`--arrival`, the mean time in ms), emit
# `output_len` tokens, and may all be in flight together.
LONE_REQUEST_S = 5.8  # published beside the Poisson table


def flover_command(row: Row) -> str:
    return (
        f"inflight --model {hub_name(row['model'])} --nproc {row['ranks']} --num_requests "
        f"{row['num_requests']} --arrival {row['arrival']} --prefix_len {row['prompt_len']} "
        f"--gen_len {row['output_len']} --B {row['num_requests']} --modes inflight --dataset demo"
    )


def shrink_flover(row: Row) -> Row:
    """Outputs an eighth as long, and arrivals a hundred times as fast, on one rank."""
    process, _, mean_ms = row["arrival"].partition(":")
    return {
        "hardware": "CPU",
        "ranks": "1",
        "arrival": f"{process}:{float(mean_ms) / 100:g}",
        "output_len": str(int(row["output_len"]) // 8),
    }


def predict_flover(row: Row, folder: Path) -> str:
    """What arrivals alone give, if requests never slow each other down: each takes as long as a
    lone one."""
    process, _, mean_ms = row["arrival"].partition(":")
    count, mean_s = int(row["num_requests"]), float(mean_ms) / 1e3
    if row["quantity"] == "speedup_over_instances":
        raise Missing("there is no model of concurrent instances here")
    if process == "constant":
        if count == 1:
            raise Missing("it is what the other lines are predicted from")
        place = {"model": row["model"], "num_requests": "1", "quantity": "makespan_s"}
        (lone,) = read_published(folder, "flover_constant", **place)
        return f"{float(lone['published']) + (count - 1) * mean_s:.2f}"
    # Between two arrivals something runs for the shorter of the gap and the lone request.
    gap_s = mean_s * (1 - math.exp(-LONE_REQUEST_S / mean_s))
    busy_s = LONE_REQUEST_S + (count - 1) * gap_s
    if row["quantity"] == "mean_in_flight":
        return f"{count * LONE_REQUEST_S / busy_s:.1f}"
    num_tokens = int(row["prompt_len"]) + int(row["output_len"])  # steps count the prompt too
    return f"{num_tokens * busy_s / LONE_REQUEST_S:.0f}"


# MDI-LLM. `num_tokens` are those of all samples together, on `num_nodes` boards. The speedup is
# that over one board, which decodes one sample after the other.
NUM_LAYERS = {"nanollama-304m": 12, "tinyllama-1.1b": 22, "gpt2-large": 36, "gpt2-xl": 48}


def mdi_llm_command(row: Row) -> str:
    """The paper does not publish the lengths of its prompts; its default is a short question."""
    samples, threads = row["num_samples"] or "1", "--threads 1 " * (row["model"] == DEMO)
    return (
        f"recurrent --model {hub_name(row['model'])} --nproc {row['num_nodes']} --layer_split "
        f"{MDI_LLM} --n_samples {samples} --num_requests {samples} --B 1 --prefix_len 32 --modes "
        f"sequential ring {threads}--gen_len {int(row['num_tokens']) // int(samples)}"
    )


def shrink_mdi_llm(row: Row) -> Row:
    """A tenth of the tokens, always with a KV cache. Only times, because on one host the baseline
    has the cores of all ranks, not those of one board."""
    return {
        "kv_cache": "yes",
        "hardware": "CPU",
        "num_samples": "3",
        "num_tokens": "240",
        "quantity": "seconds",
    }


def name_boards(row: Row) -> str:
    return f"{row['num_nodes']} {row['hardware']} board{'s' * (row['num_nodes'] != '1')}"


def predict_mdi_llm(row: Row, folder: Path) -> str:
    """From the published run of the same model on the fewest boards, if all time is spent in layers
    of equal cost, and links take none."""
    table = "mdi_llm_generation_time"
    rows = read_published(folder, table, model=row["model"], quantity="seconds")
    base = min(rows, key=lambda row: int(row["num_nodes"]))
    if base["num_nodes"] == row["num_nodes"]:
        raise Missing("no run of its model on fewer boards is published")
    if row["kv_cache"] == "no" and not row["num_samples"]:
        raise Missing("the number of samples is not published")
    seconds = float(base["published"]) * mdi_llm_cost(row) / mdi_llm_cost(base)
    if row["quantity"] == "seconds":
        return f"{seconds:.1f}"
    return f"{float(base['published']) / seconds:.2f}"


def mdi_llm_cost(row: Row) -> float:
    """The time of all tokens in units of one layer and one token. Without a KV cache a token costs
    as much as all tokens before it, together with it."""
    num_layers, num_nodes = NUM_LAYERS[row["model"]], int(row["num_nodes"])
    num_samples = int(row["num_samples"] or 1)
    stages = split_layers(MDI_LLM if num_nodes > 1 else None, num_nodes, num_layers)
    # In a round every sample gains a token.
    round_cost = max(num_samples * max(map(len, stages)), num_layers)
    length = int(row["num_tokens"]) / num_samples
    return length * round_cost * (1 if row["kv_cache"] == "yes" else length / 2)


# PipeInfer. `alignment` is how well the draft guesses the target, `well` or `poor`; `bound` says
# what the published speedup is a bound of, because none belongs to one pair. The other columns are
# flags of `magicdec pipeline`. Where nothing is published, they are those of the only launch script
# for speculation.
SHIPPED = {
    "nodes": "8", "layer_split": "0.1,0.15,0.15,0.15,0.15,0.15,0.15/1.0", "draft_tokens": "3",
    "pa": "0.1", "ps": "0.9", "pr": "0", "np": "3", "gen_len": "128",
}  # fmt: skip


def pipeinfer_command(row: Row) -> str:
    """A model drafts from all of its context. In the demo each rank has a core; at full size no
    node has room for a whole target, which one rank alone needs."""
    flags = {name: row[name] or value for name, value in SHIPPED.items()}
    draft, is_demo = row["draft"], row["model"] == DEMO
    return (
        f"pipeline --model {hub_name(row['model'])} --draft "
        + ("ngram" if draft == "ngram" else f"model:{hub_name(draft)} --budget -1")
        + " --nproc {nodes} --layer_split {layer_split} --gamma {draft_tokens} --pa {pa} --ps {ps}"
        " --pr {pr} --np {np}".format_map(flags)
        + f" --num_requests {4 if is_demo else 1} --prefix_len 64 --gen_len {flags['gen_len']} "
        f"--ignore_eos {'--threads 1 ' * is_demo}--modes {f'{SEQUENTIAL} ' * is_demo}"
        "iterative sync async"
    )


def shrink_pipeinfer(row: Row) -> Row:
    """Four ranks, divided as in the example of the README, whose head has the fewest layers; half
    the tokens. Prompt lookup stands for a draft that guesses poorly but is sure of itself."""
    draft = "ngram" if row["alignment"] == "poor" else DEMO_DRAFT
    unpublished = dict.fromkeys(("alignment", "draft_tokens", "pa", "ps", "pr", "np", "bound"), "")
    split = {"nodes": "4", "layer_split": "0.1,0.4,0.5/1.0", "gen_len": "64"}
    return {**unpublished, **split, "draft": draft}


def predict_pipeinfer(row: Row, folder: Path) -> str:
    """`magicdec simulate` would predict it from what is missing."""
    raise Missing("the times of the nodes and links and the acceptance were not found")


MAGICDEC_SYSTEM = System(
    columns=("model", "draft", "hardware", "ranks", "budget", "prefix_len", "batch_size", "gamma",
             "quantity"),
    quantities={
        "speedup": Metric("speedup", 3),
        "acceptance_rate": Metric("acceptance_rate", 3),
        "tpot_ms": Metric("mean_tpot_ms", 2),
        "tokens_per_s": Metric("decode_tokens_per_s", 1),
    },
    command=magicdec_command, shrink=shrink_magicdec, needs=name_gpus, predict=predict_magicdec,
    on_gpus=True,
)  # fmt: skip
FLOVER_SYSTEM = System(
    columns=("model", "hardware", "ranks", "num_requests", "arrival", "prompt_len", "output_len",
             "quantity"),
    quantities={
        "makespan_s": Metric("makespan_s", 2),
        "mean_in_flight": Metric("mean_in_flight", 1),
        "num_steps": Metric("num_steps", 0),
        "speedup_over_instances": "there is no baseline of concurrent instances here",
    },
    command=flover_command, shrink=shrink_flover, needs=name_gpus, predict=predict_flover,
    on_gpus=True,
)  # fmt: skip
MDI_LLM_SYSTEM = System(
    columns=("model", "kv_cache", "hardware", "num_nodes", "num_samples", "num_tokens",
             "quantity"),
    quantities={
        "seconds": Metric("makespan_s", 2, "ring"),
        "speedup": Metric("makespan_s", 2, "sequential", over="ring"),
    },
    command=mdi_llm_command, shrink=shrink_mdi_llm, needs=name_boards, predict=predict_mdi_llm,
)  # fmt: skip
PIPEINFER_SYSTEM = System(
    columns=("model", "draft", "alignment", "nodes", "layer_split", "draft_tokens", "pa", "ps",
             "pr", "np", "gen_len", "quantity", "bound"),
    quantities={
        "speedup_over_sync": Metric("request_tokens_per_s", 2, "async", over="sync"),
    },
    command=pipeinfer_command, shrink=shrink_pipeinfer, predict=predict_pipeinfer,
    needs=lambda row: f"{row['nodes'] or SHIPPED['nodes']} nodes",
)  # fmt: skip

TABLES = {
    "magicdec_acceptance": ("acceptance of Llama-3.1-8B by prefix length", MAGICDEC_SYSTEM),
    "magicdec_speedups_a100": ("speedups on 8 A100", MAGICDEC_SYSTEM),
    "magicdec_speedups_h100": ("speedups on 8 H100", MAGICDEC_SYSTEM),
    "magicdec_speedups_h100_early": ("speedups on H100, from an early draft", MAGICDEC_SYSTEM),
    "magicdec_speedups_budget512": ("speedups by batch size at KV budget 512", MAGICDEC_SYSTEM),
    "magicdec_throughput_latency": (
        "throughput against time per token on 8 A100", MAGICDEC_SYSTEM,
    ),
    "flover_constant": ("Flover: requests in flight, one every 500 ms", FLOVER_SYSTEM),
    "flover_poisson": ("Flover: 32 requests in flight, Poisson arrivals", FLOVER_SYSTEM),
    "mdi_llm_generation_time": (
        "MDI-LLM: samples that circulate through 1 to 3 boards", MDI_LLM_SYSTEM,
    ),
    "pipeinfer_speedups": (
        "PipeInfer: asynchronous over synchronous speculation", PIPEINFER_SYSTEM,
    ),
}  # fmt: skip
"""What each table shows, and the system that published it."""
