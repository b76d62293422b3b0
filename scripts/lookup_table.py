"""What prompt lookup is worth on texts that repeat themselves, and on texts that do not.

    python scripts/lookup_table.py --books books.jsonl --B 1 4
    python scripts/lookup_table.py --books books.jsonl --text code edit --draft ngram ngram+self

The packaged model does not copy what it has read. So that a text decides how much of the output is
a copy, every token that the model chooses is replaced by the next token of a given continuation;
its forwards, and all that drafts, are those of a run. Texts with `own` in their names are decoded
by the model itself. Of `quotes`, the model writes every second piece of 64 tokens itself, and the
others are quotations from its prompt. Each speedup is the median, over repetitions in turns, of the
time that autoregressive decoding takes over that of the drafts; `--gamma auto` has measured its
steps in a pass before. Without --books there are no texts of books.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from magicdec.bench.run.run import Run
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.engine.engine import Engine
from magicdec.hardware.timing import RealClock
from magicdec.model.tokenizer import Tokenizer
from magicdec.names import BASELINE
from magicdec.output.console import make_progress
from magicdec.runner.request import Batch, Request, SamplingParams
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.runner.sampling.verification import Judgement, count_accepted
from magicdec.setup.prepare import prepare
from magicdec.setup.session import RankSession
from magicdec.speculation.draft_length import DraftLength, make_draft_length
from magicdec.speculation.steps import speculative, steps
from magicdec.speculation.steps.build import build_decoder
from magicdec.workload.books import read_books
from magicdec.workload.workload import Wanted, build_workload

ROOT = Path(__file__).parents[1]
OLDER, NEWER = "7abf6ae", "1900e48"  # commits between which files were edited
OWN = -1  # in a continuation: the token that the model chooses
PIECE = 64  # tokens of each quotation, and of the text between two
Way = tuple[str | None, int | str | None]  # what drafts, and --gamma
Sample = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, continuation


class Texts:
    """Makes samples of a prompt and what follows it."""

    def __init__(self, tokenizer: Tokenizer, books: str | None, prompt: int, new: int) -> None:
        self.tokenizer, self.prompt, self.new = tokenizer, prompt, new
        self.books: list[int] = []
        if books is not None:
            for text in read_books(books, 8):
                self.books += tokenizer.encode(text)[8000:40000]

    def _ids(self, pattern: str) -> list[int]:
        files = sorted(ROOT.glob(pattern))
        return self.tokenizer.encode("\n".join(f.read_text() for f in files))

    def _cut(self, ids: Sequence[int], index: int) -> Sample:
        begin = random.Random(index).randrange(len(ids) - self.prompt - self.new)
        middle = begin + self.prompt
        return tuple(ids[begin:middle]), tuple(ids[middle : middle + self.new])

    def book(self, index: int) -> Sample:
        return self._cut(self.books, index)

    def code(self, index: int) -> Sample:
        """Source code, and how it goes on."""
        return self._cut(self._ids("magicdec/[a-m]*/*.py"), index)

    def half(self, index: int) -> Sample:
        """A document, and an answer of which every second piece is a quotation from it."""
        rng, document = random.Random(index), self._ids("docs/*.md")
        prompt, answer = self._cut(document, index)[0], list[int]()
        novel = self._cut(self.books or document[::-1], index + 100)[1]
        while len(answer) < self.new:
            place = rng.randrange(len(prompt) - PIECE)
            begin = len(answer) // 2
            answer += [*novel[begin : begin + PIECE], *prompt[place : place + PIECE]]
        return prompt, tuple(answer[: self.new])

    def quotes(self, index: int) -> Sample:
        """A book, and an answer that the model writes itself (OWN), but for every second piece,
        which is a quotation from the prompt."""
        rng, prompt, answer = random.Random(index), self.book(index)[0], list[int]()
        while len(answer) < self.new:
            place = rng.randrange(len(prompt) - PIECE)
            answer += [*[OWN] * PIECE, *prompt[place : place + PIECE]]
        return prompt, tuple(answer[: self.new])

    def edit(self, index: int) -> Sample:
        """An older version of a source file, after others, and its next version."""
        names = [
            "speculation/steps/speculative",
            "speculation/draft_length",
            "engine/engine",
            "speculation/steps/steps",
        ]
        older, newer = (
            subprocess.run(
                ["git", "show", f"{commit}:magicdec/{names[index % len(names)]}.py"],
                cwd=ROOT, capture_output=True, text=True, check=True,
            ).stdout
            for commit in (OLDER, NEWER)
        )  # fmt: skip
        before = self._ids("magicdec/[a-m]*/*.py")
        before += self.tokenizer.encode(older)[: self.prompt - PIECE]  # from its beginning on
        return tuple(before[-self.prompt :]), tuple(self.tokenizer.encode(newer)[: self.new])


def forced(continuations: dict[int, tuple[int, ...]]) -> Callable[..., Judgement]:
    """A judgement of greedy chains by which requests emit their continuations."""

    def judge(
        runner: object, sampling: object, proposal: Proposal, logits: Tensor, places: Tensor | None
    ) -> Judgement:
        drafts, counts, requests = proposal.ids, proposal.counts, CURRENT[-1].requests
        begins = [(r.request_id, len(r.output_ids)) for r in requests]
        count, own = 1 + drafts.shape[1], logits.argmax(dim=-1)
        rows = [(*continuations[i][n : n + count], *[0] * count)[:count] for i, n in begins]
        own, target = own if places is None else own[0, places], torch.tensor(rows)
        target = torch.where(target == OWN, own, target)
        most = None if counts is None else torch.tensor(counts)
        return Judgement(count_accepted(drafts, target, most), target)

    return judge


CURRENT: list[Batch] = []  # the batch of the step that runs


class NotedSteps(steps.DecodeSteps):
    """Says whose tokens are judged."""

    def _finish(
        self, verification: steps.PendingVerification, tells_drafter: bool = True
    ) -> Tensor:
        CURRENT[:] = [Batch(self._batch.requests)]
        return super()._finish(verification, tells_drafter)


def make_length(run: Run, drafter: str | None, gamma: int | str | None) -> DraftLength:
    decoding = replace(run.config.decoding, drafter=drafter, gamma=gamma)
    return make_draft_length(decoding, run.runner.group, run.runner.device)


def pass_s(run: Run, snapshots: list[Request], drafter: str | None, length: DraftLength) -> float:
    """Seconds of the decode steps of one pass, with what precedes them."""
    run.engine.rewind(snapshots)
    name = BASELINE if drafter is None else "speculative"
    decoding = replace(run.config.decoding, drafter=drafter, gamma=None)
    strategy = build_decoder(run.runner, decoding, run.config.kv, name=name, draft_length=length)
    started = time.perf_counter()
    run.engine.begin(strategy)
    run.engine.decode(strategy)
    return time.perf_counter() - started


def measure(
    run: Run, samples: list[Sample], ways: list[Way], is_forced: bool, repeats: int
) -> dict[str, tuple[float, float, float]]:
    """By way: the median speedup over autoregressive decoding, and its least and largest."""
    new = len(samples[0][1]) or run.config.workload.num_new_tokens
    requests = [Request(i, prompt, SamplingParams(new)) for i, (prompt, _) in enumerate(samples)]
    run.engine = Engine(run.runner, 512, None, RealClock())
    snapshots = run.engine.prefill(requests)
    judge, every = steps.judge, [(None, None), *ways]
    if is_forced:
        steps.judge = forced({i: answer for i, (_, answer) in enumerate(samples)})
        for request, (_, answer) in zip(snapshots, samples, strict=True):
            if answer[0] != OWN:
                request.output_ids[:] = [answer[0]]
    try:
        lengths = {way: make_length(run, *way) for way in every}
        for (drafter, _), length in lengths.items():
            pass_s(run, snapshots, drafter, length)
        ratios: dict[str, list[float]] = {}
        for _ in range(repeats):
            baseline = pass_s(run, snapshots, None, lengths[None, None])
            for drafter, gamma in ways:
                length = lengths[drafter, gamma]
                ratio = baseline / pass_s(run, snapshots, drafter, length)
                ratios.setdefault(f"{drafter}, gamma {gamma}", []).append(ratio)
    finally:
        steps.judge = judge
    return {name: (statistics.median(r), min(r), max(r)) for name, r in ratios.items()}


def own(run: Run, name: str, count: int) -> list[Sample]:
    """Prompts of a dataset, which the model continues by itself."""
    source, w = run.prepared.source.config, run.config.workload
    wanted = Wanted(w.prefix_len, count, w.seed, w.gen_len)
    tokenizer = run.prepared.tokenizer
    workload = build_workload(name, tokenizer, tokenizer.bos_of(source.bos_token_id), wanted)
    return [(prompt, ()) for prompt in workload.prompts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    speculative.DecodeSteps = NotedSteps  # type: ignore[misc]
    parser.add_argument("--books", help="a file of books, as --dataset takes it")
    parser.add_argument("--text", nargs="+", default=["book", "code", "half", "edit"])
    parser.add_argument("--own", nargs="+", default=["recall", "ruler:niah_multikey"])
    parser.add_argument("--draft", nargs="+", default=["ngram", "self", "ngram+self"])
    parser.add_argument("--gamma", nargs="+", default=["none", "auto"])
    parser.add_argument("--B", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--prefix_len", type=int, default=4096)
    parser.add_argument("--gen_len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    gammas = [int(g) if g.isdigit() else None if g == "none" else g for g in args.gamma]
    ways: list[Way] = [(draft, gamma) for draft in args.draft for gamma in gammas]
    for rows in args.B:
        config = RunConfig(
            decoding=DecodingSection("speculative", "ngram", "auto", ignore_eos=True),
            workload=WorkloadSection("demo", rows, args.prefix_len, args.gen_len, num_batches=1),
        )
        launch = Launch(0, 1, 0, 1)
        prepared = prepare(config, launch)
        texts = Texts(prepared.tokenizer, args.books, args.prefix_len, args.gen_len)
        with RankSession(launch, prepared.config.parallel) as session:
            run = Run(prepared, session, make_progress(False))
            for name in args.text:
                samples = [getattr(texts, name)(index) for index in range(rows)]
                show(rows, name, measure(run, samples, ways, True, args.repeats))
            for name in args.own:
                found = measure(run, own(run, name, rows), ways, False, args.repeats)
                show(rows, f"own: {name}", found)


def show(rows: int, name: str, found: dict[str, tuple[float, float, float]]) -> None:
    for way, (middle, least, most) in found.items():
        print(
            f"B {rows}  {name:<24} {way:<24} {middle:.2f}x  [{least:.2f}, {most:.2f}]", flush=True
        )


if __name__ == "__main__":
    main()
