"""`magicdec recurrent`: samples that circulate through a pipeline of stages, each on a rank of its
own (recurrent pipeline parallelism), beside one process and tensor parallelism.

    magicdec recurrent --nproc 2 --n_samples 4 --prefix_len 512 --gen_len 64
    torchrun --nproc_per_node 3 tests/recurrent_benchmark.py --layer_split 0.25,0.25,0.5

Owns the flags of the command and its steps. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.flags import add_section, read_sections, run_on_ranks
from magicdec.cli.front.run import MODEL_PREFIX, config_of_draft, last_value
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.rank_checks import check_stages
from magicdec.cli.serving.common_flags import add_requests
from magicdec.cli.serving.ring_outputs import RingOutputs, add_outputs, read_outputs
from magicdec.cli.serving.steps import FAILED, Kept, announce, conclude, run_command
from magicdec.config.run_config import RunConfig
from magicdec.console import labelled, spinner
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.watching.watch import watch_ranks
from magicdec.pipeline.options import (
    MODES,
    NO_DRAFT,
    RingOptions,
    read_modes,
)
from magicdec.workload.arrivals import BURST, Arrival
from magicdec.workload.request_shapes import make_shapes

if TYPE_CHECKING:
    from magicdec.pipeline.measured_pass import Outcome
    from magicdec.pipeline.record import PipelineRecord

EVERYDAY = (
    *("--model", "--dataset", "--layer_split", "--n_samples", "--B", "--num_requests"),
    *("--prefix_len", "--gen_len", "--modes", "--draft", "--temperature", "--nproc"),
    "--out",
)
SECTIONS = {  # of a run's config, and which of its fields have a flag here
    "model": None,
    "parallel": ("device", "collectives", "threads", "nproc"),
    "attention": None,
    "decoding": ("num_draft_tokens", "ignore_eos"),
    "draft": ("draft_dtype",),
    "kv": None,
    "sampling": None,
    "workload": ("dataset", "seed"),
}
TEXTS = {"num_draft_tokens": "Draft tokens of each sample in a message; the ring needs a number."}


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    config: RunConfig
    options: RingOptions
    out: Path
    outputs: RingOutputs


def main() -> NoReturn:
    """Serve the requests in every pass, and print one table."""
    run_command(serve)


def serve(launch: Launch, words: Sequence[str]) -> int:
    """The whole command on this rank. Returns its exit code."""
    asked = parse(words, launch)
    asked = replace(asked, config=with_local_models(asked.config))
    check = partial(check_stages, asked.config, asked.options.layer_split)
    run_on_ranks(asked.config.parallel.nproc, words, launch, check)
    watch_ranks(launch)
    with spinner("preparing", launch.rank == 0):
        from magicdec.pipeline.prepare import prepare

        prepared = prepare(asked.config, asked.options, launch)
    if launch.rank == 0 and prepared.split:
        print(labelled("split", prepared.split))
    if launch.rank == 0 and prepared.transport is not None:
        print(labelled("messages", prepared.transport.describe()))
    announce(prepared.run)
    from magicdec.pipeline.measure import measure

    kept, outputs = Kept(asked.out), asked.outputs

    def keep(record: PipelineRecord, outcome: Outcome) -> None:
        kept.append(record)
        if record.metrics is not None:
            outputs.write(prepared, record.name, outcome)

    records = measure(prepared, keep)
    if launch.rank != 0:
        return 0
    outputs.draw()
    from magicdec.pipeline.showing.table import print_table

    print_table(records)
    code = conclude(kept, records)
    return FAILED if outputs.failures else code


def parse(argv: Sequence[str], launch: Launch) -> Asked:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    draft = last_value(argv, "--draft") or NO_DRAFT
    base = config_of_draft(draft)
    if base.decoding.drafter == "self":
        raise ValueError(
            f"--draft {draft}: the first stage lacks layers to draft with; choose from ngram, "
            f"{MODEL_PREFIX}NAME, {NO_DRAFT}"
        )
    parser = build_parser(base)
    args, given = parser.read(argv)
    config = read_sections(base, args)
    if config.decoding.drafter != "model":
        config = replace(config, draft=None)
    if config.decoding.num_draft_tokens == "auto":
        raise ValueError("--gamma auto: a ring drafts a fixed number of tokens; name one")
    world_size = find_world_size(config.parallel.nproc, launch)
    config.check(world_size)
    refuse_ignored(config, parser, given)
    lengths = args.num_requests, args.prefix_len, args.gen_len
    shapes = make_shapes(Arrival(BURST), *lengths, config.workload.seed)
    options = RingOptions(
        layer_split=args.layer_split,
        machine=args.machine,
        lane_size=args.lane_size,
        n_samples=args.n_samples,
        prefill_tokens=args.prefill_tokens,
        gen_len=args.gen_len,
        baselines=read_modes(args.modes, world_size, args.emulate_stage_ms is not None),
        shapes=tuple(shapes),
        emulate_stage_ms=args.emulate_stage_ms,
        emulate_link_ms=args.emulate_link_ms,
        emulate_link_mbps=args.emulate_link_mbps,
        has_spans=args.plot is not None,
        pad_stage_ms=args.pad_stage_ms,
        draft=args.draft,
        has_memory=args.curves is not None,
    )
    return Asked(config, options, args.out, read_outputs(args, launch.rank == 0))


def build_parser(base: RunConfig) -> Parser:
    parser = Parser(
        description="Divide a model by its layers among ranks, and let samples circulate through "
        "them, so that every stage works on a different one. All tokens are compared with those "
        "of one process.",
        everyday=EVERYDAY,
    )
    for section, fields in SECTIONS.items():
        add_section(parser, section, getattr(base, section), only=fields, texts=TEXTS)
    add_requests(parser)
    add_pipeline(parser)
    add_outputs(parser)
    return parser


def add_pipeline(parser: Parser) -> None:
    add = parser.add_argument_group("pipeline").add_argument
    add("--layer_split", metavar="SPLIT",
        help="layers of each stage: counts (10,12), shares (0.25,0.75), auto, which minimises the "
        "slowest stage by times of layers that are measured before the run, or mdi_llm, the table "
        "of that system. With more ranks than stages, the ranks of a stage share its layers by "
        "tensor parallelism; auto:2 and mdi_llm:2 have two stages. Default: a stage for each rank, "
        "with equal shares")  # fmt: skip
    add("--machine", type=Path, metavar="FILE",
        help="the file that `magicdec probe` wrote with as many ranks: --layer_split auto takes "
        "its times from there. Default: it measures them")  # fmt: skip
    add("--n_samples", type=int, metavar="R",
        help="samples that are in flight together, a multiple of --B. Default: --B for each stage",
    )  # fmt: skip
    add("--B", dest="lane_size", type=int, default=1, metavar="N",
        help="samples that travel together in one message [1]")  # fmt: skip
    add("--prefill_tokens", type=int, metavar="N",
        help="prompt tokens that a step of a message's samples prefills at most. Default: "
        "--prefill_chunk for each stage")  # fmt: skip
    add("--modes", nargs="+", metavar="NAME",
        help=f"ways to serve the requests, of {', '.join(MODES)}; the tokens of the first are the "
        "reference, and those of the ring alone are not checked. Default: all; on one rank without "
        "tensor_parallel, and with --emulate_stage_ms the ring alone")  # fmt: skip
    add("--draft", default=NO_DRAFT, metavar="DRAFT",
        help="serve the requests once more by the ring, whose messages then carry --gamma draft "
        f"tokens of each sample, by a smaller model on the first rank ({MODEL_PREFIX}NAME) or from "
        f"the text so far (ngram) [{NO_DRAFT}]")  # fmt: skip
    add("--emulate_stage_ms", type=float, metavar="MS",
        help="stages sleep for so long for a message of any size, in place of computing. Their "
        "tokens mean nothing, so there are no baselines. Default: stages compute")  # fmt: skip
    add("--pad_stage_ms", type=float, metavar="MS",
        help="stages compute, and then sleep until a message has taken so long. Default: they do "
        "not sleep")  # fmt: skip
    add("--emulate_link_ms", type=float, metavar="MS",
        help="messages arrive later by so much. Default: as fast as the link is")  # fmt: skip
    add("--emulate_link_mbps", type=float, metavar="X",
        help="megabits a second that a link carries at most. Default: without limit")  # fmt: skip
