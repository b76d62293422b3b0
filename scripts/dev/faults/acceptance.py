"""Regressions of acceptance for `plant_regressions.py`: faults of what drafts, which change no
token of the output, and the cases of the gate that each of them can touch."""

from __future__ import annotations

from dataclasses import dataclass

from faults.fault import Fault

SELF = "--draft self --kv_policy streaming_llm --budget"
SNAPKV = "--draft self --kv_policy snapkv --budget"
VERIFIED = "--draft self --kv_policy verified --budget"
RETRIEVAL = "--draft self --kv_policy retrieval --budget"
MODEL = "--draft model:demo-draft --kv_policy"
FULL = "--draft model:demo-draft --kv_policy full"
PLAIN = f"{SELF} 257 --gamma 4"
CHOSEN = (f"{VERIFIED} 257", f"{RETRIEVAL} 257")
ANEW = "--reselect_every"
SAMPLED = "--temperature 0.8"
LOOKUP = "--draft ngram --gamma 4"
LONG_LOOKUP = "--draft ngram --gamma 31"
MIXED = "ngram+self"
AUTO = f"{SELF} 257 --gamma auto"
EVERY = "--gamma 4, every position"

STEPS = "speculation/steps/steps.py"
MODELS = "speculation/model_drafter.py"
VERIFICATION = "runner/sampling/verification.py"
INDEX = "speculation/suffix_index.py"
LENGTH = "speculation/draft_length.py"
FORECAST = "speculation/forecast.py"
SNAP = "speculation/policies/snapkv.py"
COPIED = "speculation/copied_kv.py"
BLOCKS = "speculation/block_kv.py"
MIXTURE = "speculation/mixed.py"
RETRIEVED = "speculation/policies/retrieval.py"
WEIGHED = "speculation/policies/verified.py"
STREAMING = "speculation/policies/streaming_llm.py"
FORKS = "bench/acceptance/forks.py"
PATH_DRAFTER = "systems/pipeinfer/path_drafter.py"
POLICIES = {
    "full": "policy:FullKV",
    "streaming_llm": "streaming_llm:StreamingLLM",
    "snapkv": "snapkv:SnapKV",
    "verified": "verified:VerifiedKV",
    "retrieval": "retrieval:Retrieval",
}


@dataclass(frozen=True)
class Regression:
    """`cases` are texts of the names of the cases that the fault can touch."""

    fault: Fault
    cases: tuple[str, ...]


def regression(name: str, file: str, text: str, replacement: str, *cases: str) -> Regression:
    return Regression(Fault(name, file, text, replacement), cases)


def swapped(policy: str, other: str, *cases: str) -> Regression:
    """`policy` is silently another one."""
    line = '"{}": "magicdec.speculation.policies.{}"'
    return regression(
        f"{policy} is {other}: {cases[0]}",
        "names.py",
        line.format(policy, POLICIES[policy]),
        line.format(policy, POLICIES[other]),
        *cases,
    )


PROPOSE = "return self.drafter.propose(self._batch, DraftShape(gamma, pending))"
ACCEPTED = "return leading(draft_ids == target_ids[:, :-1], counts)"


def drafts(name: str, change: str, *cases: str) -> Regression:
    """The drafts `ids` [B, K] of a step are changed."""
    lines = [PROPOSE.replace("return", "found ="), "ids = found.ids", change, "return found"]
    return regression(name, STEPS, PROPOSE, "\n        ".join(lines), *cases or (PLAIN,))


def accepted(name: str, change: str, *cases: str) -> Regression:
    """Rows accept fewer tokens than they could."""
    text = f"found = {ACCEPTED.removeprefix('return ')}\n    row = torch.arange(len(found))"
    return regression(
        name, VERIFICATION, ACCEPTED, f"{text}\n    return {change}", *cases or (PLAIN,)
    )


ROWS = (
    accepted("row 3 accepts nothing", "found * (row != 3)", PLAIN, f"{SNAPKV} 257 --gamma"),
    accepted("row 0 accepts nothing under retrieval", "found * (row != 0)", f"{RETRIEVAL} 257"),
    accepted("row 5 accepts two at most", "torch.where(row == 5, found.clamp(max=2), found)"),
    accepted("no row accepts a fourth token", "found.clamp(max=3)"),
    accepted(
        "row 1 accepts one less of a lookup",
        "(found - (row == 1).long()).clamp(min=0)",
        LONG_LOOKUP,
        LOOKUP,
    ),
    drafts("the drafts of prompt 2 are wrong", "ids[[r.request_id == 2 for r in self._shown]] = 7"),
    drafts(
        "the drafts of prompt 6 are wrong under verified",
        "ids[[r.request_id == 6 for r in self._shown]] = 7",
        f"{VERIFIED} 257",
    ),
    drafts(
        "the drafts of prompt 1 are wrong from a draft model",
        "ids[[r.request_id == 1 for r in self._shown]] = 7",
        f"{FULL} --gamma 4",
    ),
    drafts("the last draft of a row is wrong", "ids[len(ids) // 3, -1] = 7"),
    drafts(
        "one draft in about 100 is wrong",
        "self._n = getattr(self, '_n', 0) + 1; ids[self._n % len(ids), 0] = "
        "7 if self._n % 3 == 0 else ids[self._n % len(ids), 0]",
    ),
    drafts(
        "one draft of the whole run is wrong",
        "self._n = getattr(self, '_n', 0) + 1; ids[0, 0] = 7 if self._n == 9 else ids[0, 0]",
    ),
    drafts("two rows swap their drafts", "ids[:2] = ids[:2].flip(0)"),
    regression(
        "a draft follows the token before the newest",
        MODELS,
        "newest = batch.newest[:, -1:]",
        "newest = batch.newest[:, -2:-1]",
        PLAIN,
    ),
)
SWAPPED = (
    *(swapped("snapkv", "streaming_llm", f"{SNAPKV} {b} --gamma 4") for b in (129, 257, 513)),
    swapped("snapkv", "streaming_llm", f"{MODEL} snapkv"),
    *(swapped("verified", "retrieval", f"{VERIFIED} {b}") for b in (129, 257, 513)),
    *(swapped("retrieval", "verified", f"{RETRIEVAL} {b}") for b in (129, 257, 513)),
    swapped("verified", "streaming_llm", f"{VERIFIED} 257"),
    swapped("retrieval", "streaming_llm", f"{RETRIEVAL} 257"),
    swapped("streaming_llm", "full", f"{MODEL} streaming_llm"),
)
BUILD = "return cls(kv.num_sink_tokens, kv.budget)"
BUILD_BLOCKS = "return cls(kv.num_sink_tokens, kv.num_recent_tokens, kv.budget)"
BUILD_SNAP = "return cls(kv.budget, kv.window_size, kv.pooling, kv.reselect_every)"
WINDOW = "start = torch.maximum(sinks, committed - (self.budget - self.num_sink_tokens))"
BUDGETS = (
    regression(
        "the budget is one less",
        STREAMING,
        BUILD,
        "return cls(kv.num_sink_tokens, kv.budget - 1)",
        PLAIN,
        f"{SELF} 33 --gamma 2",
    ),
    regression(
        "the budget is one more",
        STREAMING,
        BUILD,
        "return cls(kv.num_sink_tokens, kv.budget + 1)",
        f"{SELF} 513 --gamma 4",
    ),
    regression(
        "sinks are one fewer",
        STREAMING,
        BUILD,
        "return cls(kv.num_sink_tokens - 1, kv.budget)",
        PLAIN,
    ),
    regression(
        "the window is one less and the sinks one more",
        STREAMING,
        BUILD,
        "return cls(kv.num_sink_tokens + 1, kv.budget)",
        f"{SELF} 65 --gamma 4",
    ),
    regression("the window is short by one", "kv/view.py", WINDOW, f"{WINDOW} + 1", PLAIN),
    regression(
        "the window is shifted by one",
        "kv/view.py",
        "start, committed], 1)], 1)",
        "start - 1, committed - 1], 1)], 1)",
        PLAIN,
    ),
    regression(
        "snapkv's budget is one less",
        SNAP,
        BUILD_SNAP,
        BUILD_SNAP.replace("budget,", "budget - 1,"),
        f"{SNAPKV} 257 --gamma 4",
    ),
    regression(
        "snapkv observes one token fewer",
        SNAP,
        BUILD_SNAP,
        BUILD_SNAP.replace("window_size", "window_size - 1"),
        f"{SNAPKV} 129",
    ),
    regression(
        "snapkv's drafts read one entry fewer",
        SNAP,
        "SinksAndWindow(0, policy.budget)",
        "SinksAndWindow(0, policy.budget - 1)",
        f"{SNAPKV} 513",
    ),
    regression(
        "a block's sinks are one fewer",
        BLOCKS,
        BUILD_BLOCKS,
        BUILD_BLOCKS.replace("sink_tokens", "sink_tokens - 1"),
        *CHOSEN,
    ),
    regression(
        "the recent window of blocks is one less",
        BLOCKS,
        BUILD_BLOCKS,
        BUILD_BLOCKS.replace("recent_tokens", "recent_tokens - 1"),
        *CHOSEN,
    ),
    regression(
        "the budget of blocks is one less",
        BLOCKS,
        BUILD_BLOCKS,
        BUILD_BLOCKS.replace("budget", "budget - 1"),
        *CHOSEN,
    ),
    regression(
        "one block fewer is read",
        BLOCKS,
        "is_long * begin, is_long * num_blocks",
        "is_long * begin, is_long * _positive(num_blocks - 1)",
        CHOSEN[0],
    ),
)
NEWEST = "place = (lengths.tensor - before - 1).clamp(0, queries.shape[1] - 1)"
CHOICES = (
    regression(
        "retrieval by the query of a rejected draft",
        RETRIEVED,
        NEWEST,
        NEWEST.replace("before - 1", "before"),
        f"{RETRIEVAL} 257",
    ),
    regression(
        "retrieval by the first query of a verification",
        RETRIEVED,
        NEWEST,
        NEWEST.replace("lengths.tensor - before - 1", "0 * before"),
        f"{RETRIEVAL} 129",
    ),
    regression(
        "retrieval by the query of the prompt alone",
        RETRIEVED,
        "in self.in_widest(self._seen.layers):",
        "in ():",
        f"{RETRIEVAL} 257",
    ),
    regression(
        "stale mean keys: blocks of the output have none",
        RETRIEVED,
        "def prepare(self, requests: Sequence[Request], gamma: int) -> None:\n"
        "        self._add_means(requests)",
        "def prepare(self, requests: Sequence[Request], gamma: int) -> None:\n        pass",
        f"{RETRIEVAL} 129",
    ),
    regression(
        "verified does not see what a verification attends to",
        WEIGHED,
        "in self.in_widest(self._seen.layers):",
        "in ():",
        f"{VERIFIED} 257",
    ),
    regression(
        "verified runs one token fewer again",
        WEIGHED,
        "RERUN_TOKENS = 16",
        "RERUN_TOKENS = 15",
        f"{VERIFIED} 257",
    ),
    regression(
        "snapkv keeps the worst of the chosen longest",
        SNAP,
        "best.flip(2)",
        "best",
        f"{SNAPKV} 257 --gamma 4",
    ),
    regression("fewer neighbours share a score", SNAP, "KERNEL = 5", "KERNEL = 3", f"{SNAPKV} 129"),
    regression(
        "the largest score of neighbours counts",
        SNAP,
        'self.pooling == "avg"',
        'self.pooling == "max"',
        f"{SNAPKV} 129",
    ),
    regression(
        "snapkv copies the token before",
        COPIED,
        "num_held + offsets + steps,",
        "num_held + offsets + steps - 1,",
        f"{SNAPKV} 257 --gamma 4",
    ),
    regression(
        "a choice is never made anew", SNAP, "is_due = every and", "is_due = False and", ANEW
    ),
    regression(
        "a choice is made anew a token late",
        SNAP,
        "self.chosen_at[row] + every\n",
        "self.chosen_at[row] + every + 1\n",
        ANEW,
    ),
    regression(
        "the first queries of a prompt's last chunk choose",
        "runner/observers/prompt_queries.py",
        "newest = queries[0, -self._num_kept(forward) :]",
        "newest = queries[0, : self._num_kept(forward)]",
        f"{SNAPKV} 257 --gamma 4",
        f"{RETRIEVAL} 257",
    ),
)
CHAINS = (
    regression(
        "row 0 drafts one token fewer",
        LENGTH,
        "return [self.max_gamma] * len(batch.requests)",
        "return [self.max_gamma - (i == 0) for i in range(len(batch.requests))]",
        PLAIN,
    ),
    regression(
        "gamma is one fewer",
        LENGTH,
        "return [self.max_gamma] * len(batch.requests)",
        "return [self.max_gamma - 1] * len(batch.requests)",
        f"{SELF} 257 --gamma 2",
    ),
    regression(
        "--pa is not read",
        MODELS,
        "return cls(kv, setup.decoding.pa or 0.0)",
        "return cls(kv, 0.0)",
        "--pa",
    ),
    regression(
        "--pa is a tenth larger",
        "runner/native_steps/executor.py",
        "call.pa = pa",
        "call.pa = 1.1 * pa",
        f"{SELF} 257 --gamma 4 --pa",
    ),
    regression("--gamma auto needs a larger gain", LENGTH, "MARGIN = 1.03", "MARGIN = 1.9", AUTO),
    regression("--gamma auto forgets sooner", FORECAST, "KEEP = 0.98", "KEEP = 0.8", AUTO),
    regression(
        "--gamma auto expects more",
        FORECAST,
        "PRIOR = 0.8\nPRIOR_WEIGHT = 4.0",
        "PRIOR = 0.9\nPRIOR_WEIGHT = 40.0",
        AUTO,
    ),
    regression(
        "--gamma auto decides half as often",
        LENGTH,
        "else 2\n        self._left -= 1",
        "else 4\n        self._left -= 1",
        AUTO,
    ),
    *(
        regression(
            f"2 % noise on the scales of {bits} drafts",
            "model/checkpoint/quantization.py",
            "numbers = quantized(weight, load_named(QUANTIZERS, weights))",
            "numbers = quantized(weight, load_named(QUANTIZERS, weights))\n"
            "    numbers.scale.mul_(1 + 0.02 * __import__('torch').randn(numbers.scale.shape))",
            f"{PLAIN} --draft_weights {bits}",
        )
        for bits in ("int8", "int4")
    ),
    regression(
        "2 % noise on the weights of a draft model",
        "setup/loading.py",
        "        keep_queries(runner, config.kv)\n",
        "        keep_queries(runner, config.kv)\n"
        "        for p in runner.model.parameters():\n"
        "            p.data.mul_(1 + 0.02 * torch.randn_like(p))\n",
        f"{FULL} --gamma 4",
    ),
    regression(
        "an int8 copy is one of int4",
        "setup/loading.py",
        "low_bit_copy(model, kinds.weights, is_packed)",
        "low_bit_copy(model, 'int4', is_packed)",
        f"{PLAIN} --draft_weights int8",
    ),
)
JUDGED = "                if token != actual:\n                    break\n"
LOOKUPS = (
    # Where lookups alone draft, the first wrong token is the last that is emitted.
    regression(
        "a lookup learns past the first wrong token",
        INDEX,
        JUDGED,
        "",
        MIXED,
        "ngram+model:demo-draft --kv_policy full --gamma 4",
    ),
    regression(
        "a lookup needs a longer match", INDEX, "LEAST_MATCH = 3", "LEAST_MATCH = 4", LOOKUP, MIXED
    ),
    regression(
        "a lookup compares fewer places",
        INDEX,
        "MOST_PLACES = 16",
        "MOST_PLACES = 2",
        LOOKUP,
        LONG_LOOKUP,
    ),
    regression(
        "a lookup takes the newest place",
        INDEX,
        "token = max(followers, key=followers.count)",
        "token = followers[-1]",
        LOOKUP,
        LONG_LOOKUP,
    ),
    regression(
        "a lookup trusts its first matches less",
        INDEX,
        "PRIORS = (0.3, 0.45,",
        "PRIORS = (0.2, 0.35,",
        LONG_LOOKUP,
    ),
    regression(
        "the rates of all texts count more",
        INDEX,
        "TEXT_WEIGHT = 4.0",
        "TEXT_WEIGHT = 16.0",
        LONG_LOOKUP,
    ),
    regression(
        "a lookup goes on with less evidence",
        INDEX,
        "LEAST_SURVIVAL = 0.1",
        "LEAST_SURVIVAL = 0.02",
        LONG_LOOKUP,
    ),
    regression(
        "a lookup is not told of the output",
        "speculation/ngram.py",
        "lookup.extend(request.output_ids[lookup.length - len(request.prompt_ids) :])",
        "pass",
        LOOKUP,
    ),
    regression(
        "lookups need more gain",
        "speculation/ngram.py",
        "MARGIN = 1.03",
        "MARGIN = 1.2",
        LONG_LOOKUP,
    ),
    regression(
        "a mixture prefers its model",
        MIXTURE,
        "sum(a) > sum(b)",
        "sum(a) > 1.5 * sum(b)",
        MIXED,
        "ngram+model:demo-draft --kv_policy full --gamma 4",
    ),
    regression(
        "a mixture prefers its lookups",
        MIXTURE,
        "sum(a) > sum(b)",
        "1.5 * sum(a) > sum(b)",
        MIXED,
        "ngram+model:demo-draft --kv_policy full --gamma 4",
    ),
)
DRAWN = "leading(u_accept * q < p, counts)"
SAMPLES = (
    regression(
        "sampled drafts are refused more often",
        VERIFICATION,
        DRAWN,
        DRAWN.replace("u_accept", "1.05 * u_accept"),
        f"{PLAIN} {SAMPLED}",
    ),
    regression(
        "sampled drafts share a random number",
        "runner/sampling/model_tokens.py",
        "Purpose.DRAFT, skip=place)",
        "Purpose.DRAFT)",
        f"{PLAIN} {SAMPLED}",
    ),
    regression(
        "sampled drafts of a draft model are drawn anew",
        "runner/sampling/model_tokens.py",
        "u = draws.ahead(1, Purpose.DRAFT, skip=place)",
        "u = draws.ahead(1, Purpose.ACCEPT, skip=place)",
        f"{FULL} --gamma 4 {SAMPLED}",
    ),
)
SECOND = "__import__('os').environ.get('RANK') == '1'"
ON_RANKS = "--gamma 4 --nproc 2"
RANKS = (
    regression(
        "the second rank's window is short by one",
        "kv/view.py",
        WINDOW,
        f"{WINDOW} + int({SECOND})",
        f"{PLAIN} --nproc 2",
    ),
    regression(
        "the second rank retrieves by the query of the prompt",
        RETRIEVED,
        "in self.in_widest(self._seen.layers):",
        f"in () if {SECOND} else self.in_widest(self._seen.layers):",
        f"{RETRIEVAL} 257 {ON_RANKS}",
    ),
    regression(
        "snapkv of the second rank copies the token before",
        COPIED,
        "num_held + offsets + steps,",
        f"num_held + offsets + steps - int({SECOND}),",
        f"{SNAPKV} 257 {ON_RANKS}",
    ),
    regression(
        "the drafts are those of a rank without the draft model",
        "speculation/drafter.py",
        "ids = target.group.broadcast(ids, draft.source)",
        "ids = target.group.broadcast(ids, 0)",
        "--draft_ranks 1",
    ),
    regression(
        "2 % noise on the second rank's draft model",
        "setup/loading.py",
        "        keep_queries(runner, config.kv)\n",
        "        keep_queries(runner, config.kv)\n"
        f"        for p in runner.model.parameters() if {SECOND} else ():\n"
        "            p.data.mul_(1 + 0.02 * torch.randn_like(p))\n",
        "--draft_ranks 1",
    ),
)
MODEL_FLAGS = f"{FULL} --gamma 4"
IN_FLIGHT = f"--modes inflight+draft {MODEL_FLAGS}"
SYNC = f"--modes pipeline+draft {MODEL_FLAGS} --nproc 2"
ASYNC = SYNC.replace("pipeline+draft", "pipeinfer")
SYSTEMS = (
    regression(
        "a request that joins is drafted for after another one's prompt",
        MODELS,
        "        prefill(runner, parts, self.draft.prefill_chunk)\n",
        "        first = next(iter(self._requests.values()))\n"
        "        others = [replace(part, request=first) for part in parts]\n"
        "        prefill(runner, others, self.draft.prefill_chunk)\n",
        IN_FLIGHT,
    ),
    regression(
        "the last draft of a ring's message is another token",
        "systems/mdi_llm/recurrent.py",
        "        self.counts.num_messages += 1\n",
        "        proposal.ids[:, -1] = 5\n        self.counts.num_messages += 1\n",
        f"--modes ring+draft {MODEL_FLAGS} --nproc 2",
    ),
    regression(
        "a pipeline's drafter never proposes every 16th token",
        PATH_DRAFTER,
        "best = probs.max(dim=-1)",
        "best = (probs * (torch.arange(probs.shape[-1]) % 16 > 0)).max(dim=-1)",
        SYNC,
        ASYNC,
    ),
    regression(
        "a pipeline forgets that a draft was rejected",
        "systems/pipeinfer/scheduler.py",
        "run.num_accepted += not is_ended",
        "run.num_accepted += 1",
        SYNC,
    ),
    regression(
        "a pipeline's drafter keeps what was rejected",
        PATH_DRAFTER,
        "self._forget(step.lane, num_known(tokens, held.tokens))",
        "self._forget(step.lane, len(held.tokens))",
        SYNC,
    ),
)
HEAD = "--draft eagle:demo-eagle --kv_policy full --gamma 4"
HEADS = (
    regression(
        "a head reads the states of the token before",
        "runner/observers/hidden_states.py",
        "return self.values[self._place(self._texts[rows], positions)]",
        "return self.values[self._place(self._texts[rows], (positions - 1).clamp(min=0))]",
        "eagle:demo-eagle",
    ),
    regression(
        "a head is filled with the token itself",
        "speculation/head_drafter.py",
        "following = self.states.ids_at(rows.index, positions + 1)",
        "following = self.states.ids_at(rows.index, positions)",
        HEAD,
    ),
)
FORKED = (
    regression(
        "forks have no copy of their last block",
        "kv/cache.py",
        "self.copy_block(self.blocks[source][num_borrowed], self.blocks[row][num_borrowed])",
        "pass",
        f"{SELF} 65 {EVERY}",
    ),
    regression(
        "a lookup in forks does not know the newest token",
        FORKS,
        "                known.output_ids = position.known\n",
        "                known.output_ids = position.known[:-1]\n",
        f"--draft ngram {EVERY}",
    ),
)
REGRESSIONS = (
    *ROWS,
    *SWAPPED,
    *BUDGETS,
    *CHOICES,
    *CHAINS,
    *LOOKUPS,
    *SAMPLES,
    *RANKS,
    *SYSTEMS,
    *HEADS,
    *FORKED,
)
