"""The settings of `magicdec serve` and its short names, and the checks that need no model. Imports
no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from magicdec.config.masking import masked
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    NGRAM,
    SELF,
    DecodingSection,
    StagesSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.distributed.layer_split import FLAG, is_auto
from magicdec.distributed.layout import StageGrid, make_grid, read_split
from magicdec.names import NGRAM_AND, OPENAI_API, SERVER_APIS
from magicdec.runner.step_plan import PREFILL_TOKENS
from magicdec.systems.http_client import read_key
from magicdec.systems.modes import (
    ENDPOINT,
    MODES,
    NAMES,
    RING,
    SPECULATIVE,
    WITH_DRAFT,
    Drafts,
    Mode,
    Pass,
    Ranks,
)
from magicdec.systems.pipeinfer.options import Options
from magicdec.workload.request_shapes import (
    BURST,
    FORMS,
    TRACE,
    RequestShape,
    make_shapes,
    parse_arrival,
)

GOODPUT_OF = ("ttft", "tpot", "e2el")  # what `--goodput` can bound

WINDOW_MS = 1000.0
OF_SAMPLING = ("temperature", "repetition_penalty", "presence_penalty")
FLAGS = ("--prefix_len", "--gen_len")  # the lengths of a request without a trace
WINDOWED = "dynamic"  # the mode that has a time window
NO_URL = "none"  # in `--endpoint_metrics`, of a server whose counters are not read
OF_EACH = ("endpoint_model", "endpoint_prompts", "endpoint_api", "endpoint_metrics")


def parse_url(text: str) -> str:
    """The base URL of a server. Raises ValueError for another text."""
    try:
        url = urlsplit(text)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # an address or a port that is none
        is_url = False
    if not is_url:
        raise ValueError(f"{masked(text)} is no URL; give one such as http://127.0.0.1:8000/v1")
    return text


def parse_urls(words: str | Sequence[str]) -> list[str]:
    return [parse_url(word) for word in ([words] if isinstance(words, str) else words)]


def parse_metrics_urls(words: str | Sequence[str]) -> list[str]:
    """As `parse_urls`, where a server may have `NO_URL`."""
    texts = [words] if isinstance(words, str) else words
    return [word if word == NO_URL else parse_url(word) for word in texts]


def check_credentials(url: str, variable: str | None) -> None:
    """Raises ValueError if the key is missing, or if the URL has credentials too."""
    if variable is None:
        return
    read_key(variable)
    if urlsplit(url).username is not None:
        raise ValueError(
            f"--endpoint_key_env {variable}: --endpoint {masked(url)} has a user already; leave "
            "one out"
        )


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Bounds in ms by metric, from words such as ttft:200. Raises ValueError."""
    bounds: dict[str, float] = {}
    for word in words:
        name, _, most = word.partition(":")
        if name not in GOODPUT_OF:
            forms = ", ".join(f"{name}:MS" for name in GOODPUT_OF)
            raise ValueError(f"{word} is not known; choose from {forms}")
        if name in bounds:
            raise ValueError(f"names {name} twice; name each bound once")
        try:
            bounds[name] = float(most)
        except ValueError:
            bounds[name] = 0.0
        if not 0 < bounds[name] < math.inf:
            raise ValueError(f"{word}: {most!r} is no time in ms larger than 0")
    return bounds


@dataclass(frozen=True)
class ServeOptions(StagesSection):
    """The settings of serving, and what `settle` derives: requests in the order of arrival
    (`shapes`), modes (`passes`), and pipelined speculation. `gen_len` is None if a trace has the
    lengths."""

    num_requests: int | None = setting(
        None, "Requests to serve. Default: 8, or all of a trace.", least=1
    )
    prefix_len: str = same(WorkloadSection, "prefix_len", str(WorkloadSection.prefix_len))
    gen_len: str | None = same(WorkloadSection, "gen_len")
    modes: tuple[str, ...] | None = setting(
        None,
        "Ways to serve the requests that are compared: "
        f"{'; '.join(f'{name} ({mode.text})' for name, mode in MODES.items())}. With {WITH_DRAFT} "
        "behind its name, a mode that can do without a draft has one. The tokens of the first are "
        "the reference of the others. Default: all that these ranks can run.",
        metavar="MODE",
        choices=NAMES,
    )
    arrival: str = setting(
        "poisson:100",
        f"When requests arrive: {FORMS}. MS is the mean time between two arrivals. A line of a "
        f"{TRACE} is a JSON object with arrival_ms, prompt_len and output_len.",
        metavar="PROCESS",
        other_defaults="burst in recurrent and pipeline",
    )
    concurrency: tuple[int, ...] | None = setting(
        None,
        "A closed loop in place of --arrival: so many requests are in flight together, and another "
        "arrives when one of them ends. With several numbers each mode serves once with each of "
        "them. Requests wait where a mode has fewer rows or lanes.",
        metavar="N",
        least=1,
        is_set=True,
    )
    turns: int = setting(
        1,
        "Questions of a conversation that are asked at most, of prompt sets that have several: "
        "mt_bench, spec_bench, speed_bench, and sharegpt and messages, whose questions the model "
        "then answers all itself. A later one is a request that arrives when the answer before it "
        "has ended; its prompt is the conversation up to there, within --prefix_len. Needs "
        "--concurrency, which then counts conversations, as --num_requests does.",
        least=1,
    )
    batch_size: int = same(WorkloadSection, "batch_size")
    batch_ranks: str = setting(
        "first",
        "Ranks that serve in the modes without stages, but for tensor_parallel: the first, with "
        "the threads of all ranks of its host, or all, by tensor parallelism.",
        choices=("first", "all"),
        other_defaults="all in inflight",
    )
    n_samples: int | None = setting(
        None,
        "Requests in flight together: rows of a batch, and in a ring a multiple of --B. Default: "
        "--B; in a ring, and in every mode of recurrent but sequential, --B for each stage; enough "
        "for the most of --concurrency.",
        metavar="R",
        least=1,
    )
    prefill_tokens: int | None = setting(
        None,
        "Prompt tokens that a step prefills at most, beside its decoding. Default: "
        f"{PREFILL_TOKENS}; in a ring, --prefill_chunk for each stage.",
        least=1,
    )
    window_ms: float | None = setting(
        None,
        f"How long the first request of a batch waits for others in {WINDOWED} batching. Default: "
        f"{WINDOW_MS:.0f}.",
        metavar="MS",
        least=0,
    )
    block_tokens: int = setting(
        256, "Tokens of a block of the KV cache, which a request takes as it grows.", least=1
    )
    cache_tokens: int | None = setting(
        None,
        "Tokens that the KV cache holds of all requests together. If it runs out, the youngest "
        "request is preempted. Default: enough for every request to its end.",
        least=1,
    )
    prefix_cache: bool = setting(
        False,
        "Keep the blocks of texts that have ended until others need them, those used longest ago "
        "first, and let requests whose prompts begin alike share what they have in common.",
    )
    repeats: int = setting(
        1,
        "Times that each run, or each forward, is measured, or that all requests are served in "
        "each mode; the modes take turns at going first.",
        least=1,
        other_defaults="20 in latency",
    )
    goodput: dict[str, float] | None = setting(
        None,
        "Count the requests a second that keep all of these bounds, such as ttft:500 tpot:50; of "
        f"{', '.join(GOODPUT_OF)}.",
        metavar="METRIC:MS",
        parse=parse_goodput,
    )
    emulate_draft_ms: float | None = setting(
        None,
        "A step of the drafter of emulated stages takes so long. Default: no time.",
        metavar="MS",
        above=0,
    )
    emulate_acceptance: tuple[float, ...] | None = same(DecodingSection, "emulate_acceptance")
    endpoint: tuple[str, ...] | None = setting(
        None,
        "An OpenAI-compatible server, such as http://127.0.0.1:8000/v1, to which the mode endpoint "
        "sends the same requests. With several, the later ones are endpoint2, endpoint3, ... in "
        "tables and records, and each other flag of endpoints has one value for all or one for "
        "each.",
        metavar="URL",
        parse=parse_urls,
    )
    endpoint_model: tuple[str, ...] | None = setting(
        None, "The model as the server names it. Default: the first that it has."
    )
    endpoint_prompts: tuple[str, ...] = setting(
        ("ids",),
        "Send prompts as token ids, or as text to a server that takes no ids.",
        choices=("ids", "text"),
        can_repeat=True,
    )
    endpoint_api: tuple[str, ...] = setting(
        (OPENAI_API,),
        "The interface by which the server is asked: OpenAI's completions, SGLang's /generate, "
        "which reports drafts, or llama.cpp's /completion, which says token ids.",
        choices=tuple(SERVER_APIS),
        can_repeat=True,
    )
    endpoint_metrics: tuple[str, ...] | None = setting(
        None,
        "Where the server shows its Prometheus counters, such as http://127.0.0.1:8000/metrics, "
        "for the acceptance of drafts that its answers do not report: read before and after the "
        f"requests, which nobody else may disturb; {NO_URL} for none.",
        metavar="URL",
        parse=parse_metrics_urls,
    )
    endpoint_timeout_s: float = setting(
        300.0, "Seconds without a new token of the server after which it has stalled.", above=0
    )
    endpoint_total_s: float = setting(
        3600.0, "Seconds that one answer of the server may take.", above=0
    )
    endpoint_key_env: str | None = setting(
        None,
        "The environment variable whose value is sent to the server as a key (Authorization: "
        "Bearer). It is never shown nor kept.",
        metavar="NAME",
    )
    shapes: tuple[RequestShape, ...] = ()
    passes: tuple[Pass, ...] = ()
    speculation: Options = Options()
    draft: str = "none"
    has_rows_of_ring: bool = False  # batches have as many rows as circulate in a ring

    def settle(self, passes: Sequence[Pass], seed: int, world_size: int) -> ServeOptions:
        """The options for `passes` on `world_size` ranks, with the requests and every default.

        Raises ValueError for flags that exclude each other, and for a malformed trace.
        """
        is_closed = self.concurrency is not None
        if self.turns > 1 and not is_closed:
            raise ValueError(
                f"--turns {self.turns} needs a closed loop, in which a question arrives when the "
                "answer before it has ended; say by --concurrency how many conversations are in "
                "flight"
            )
        arrival = parse_arrival(BURST if is_closed else self.arrival)
        shapes = make_shapes(arrival, self.num_requests, self.prefix_len, self.gen_len, seed)
        if self.most_in_flight > len(shapes):
            raise ValueError(
                f"--concurrency {self.most_in_flight} exceeds the {len(shapes)} requests, which "
                "are never so many in flight; choose a larger --num_requests"
            )
        has_window = WINDOWED in [each.mode for each in passes]
        window_ms = WINDOW_MS if self.window_ms is None else self.window_ms
        settled = replace(
            self,
            arrival=BURST if is_closed else self.arrival,
            gen_len=None if arrival.trace else self.gen_len or str(DEFAULT_GEN_LEN),
            window_ms=window_ms if has_window else None,
            goodput=self.goodput or {},
            shapes=tuple(shapes),
            passes=tuple(passes),
        )
        if settled.has_rows_of_ring and settled.of_system(RING):
            return replace(settled, n_samples=settled.samples(settled.grid(world_size)))
        return settled

    @property
    def most_in_flight(self) -> int:
        """The largest concurrency of a closed loop; 0 of an open one."""
        return max(self.concurrency or (0,))

    def of_system(self, system: str) -> list[Pass]:
        return [each for each in self.passes if each.system == system]

    def of_server(self, name: str, number: int) -> Any:
        """The value that a setting of `OF_EACH` has for the server of that number."""
        values = getattr(self, name)
        return None if values is None else values[0 if len(values) == 1 else number]

    @property
    def is_measured(self) -> bool:
        """Whether measured times decide the layers of the stages."""
        return is_auto(read_split(self.layer_split).stages)

    @property
    def is_coupled(self) -> bool:
        """Whether every mode samples tokens with noise that a drafter can share."""
        return bool(self.of_system(SPECULATIVE))

    def accepts_by_chance(self, each: Pass) -> bool:
        """Whether chance judges the drafts of a pass, so that its tokens mean nothing."""
        return self.emulate_acceptance is not None and each.drafts_in_turns

    @property
    def longest_prompt(self) -> int:
        return max(shape.prompt_len for shape in self.shapes)

    @property
    def longest(self) -> int:
        return max(shape.prompt_len + shape.output_len for shape in self.shapes)

    @property
    def mean_context(self) -> int:
        """Cached tokens of a request halfway through its output, averaged over requests."""
        total = sum(shape.prompt_len + shape.output_len // 2 for shape in self.shapes)
        return total // len(self.shapes)

    def batch_of(self, workload: WorkloadSection, rows: int) -> WorkloadSection:
        """`workload` with one batch of `rows` rows that hold the longest request; another one may
        have the longest prompt or output."""
        prompt = self.longest_prompt
        new = self.longest - prompt
        extra = max(shape.output_len for shape in self.shapes) - new
        return replace(
            workload,
            batch_size=rows,
            prefix_len=prompt,
            gen_len=new,
            num_batches=1,
            extra_new_tokens=extra,
            turns=self.turns,
        )

    @property
    def counted_by(self) -> str:
        if self.shapes[0].place:
            return (
                f"--arrival {self.arrival}, whose longest prompt has {self.longest_prompt} tokens"
            )
        return "--num_requests"

    def check_lengths(self, most: int, model: str) -> None:
        """Raises ValueError, naming the line of the trace or the flags, for a request longer than
        the `most` tokens of the model."""
        for shape in self.shapes:
            total = shape.prompt_len + shape.output_len
            if total > most:
                names = ("prompt_len", "output_len") if shape.place else FLAGS
                text = f"{names[0]} {shape.prompt_len} + {names[1]} {shape.output_len} = {total}"
                place = f"{shape.place}: " if shape.place else ""
                raise ValueError(f"{place}{text} exceeds the {most} positions of {model}")

    def check_cache(self, needed: int) -> None:
        """Raises ValueError if the KV cache is smaller than `needed`, the tokens of the longest
        request with its drafts."""
        if self.cache_tokens is not None and self.cache_tokens < needed:
            raise ValueError(
                f"--cache_tokens {self.cache_tokens} is too small; the longest request takes "
                f"{needed} tokens"
            )

    def grid(self, world_size: int) -> StageGrid:
        """The stages of a ring, without ranks that only draft in other modes. Raises ValueError,
        naming the flag."""
        split = read_split(self.layer_split)
        flag_text = f"{FLAG} {self.layer_split}"
        if split.head:
            raise ValueError(
                f"{flag_text}: a ring has no head without layers; leave the first share of 0 out, "
                "or ring out of --modes"
            )
        num_ranks = world_size - split.is_apart
        if num_ranks < 1:
            raise ValueError(f"{flag_text} leaves no rank for a stage of the {world_size} ranks")
        return make_grid(flag_text, split.num_stages(world_size), num_ranks)

    @property
    def rows(self) -> int:
        return self.n_samples or max(self.batch_size, self.most_in_flight)

    def is_on_all(self, each: Pass, world_size: int) -> bool:
        """Whether all ranks share the model in a pass without stages."""
        is_shared = each.ranks is Ranks.ALL or self.batch_ranks == "all"
        return is_shared and each.ranks is not Ranks.STAGES and world_size > 1

    def samples(self, grid: StageGrid) -> int:
        """Samples in flight in a ring. Raises ValueError, naming the flag."""
        size = self.batch_size
        count = len(self.shapes)
        lanes = max(grid.num_stages, -(-self.most_in_flight // size))
        samples = self.n_samples or min(lanes, max(1, count // size)) * size
        if samples % size:
            raise ValueError(
                f"--n_samples {samples} is not a multiple of --B {size}, the samples of a message"
            )
        if self.n_samples is not None and count < samples:
            raise ValueError(
                f"--num_requests {count} is less than the samples in flight of a ring, "
                f"--n_samples {samples}"
            )
        return samples

    def describe(self) -> dict[str, Any]:
        values = asdict(self) | asdict(self.speculation)
        for name in ("shapes", "passes", "speculation", "mode", "has_rows_of_ring"):
            del values[name]
        for name in ("endpoint", "endpoint_metrics"):
            values[name] = values[name] and [masked(url) for url in values[name]]
        if self.repeats == 1:
            del values["repeats"]
        if self.gen_len is None:  # a trace has the lengths
            values["prefix_len"] = None
        values["modes"] = list(dict.fromkeys(each.name for each in self.passes))
        return values | {"num_requests": len(self.shapes)}


def check_passes(options: ServeOptions, config: RunConfig, world_size: int) -> None:
    """Raises ValueError, naming mode, flag and reason, if a mode cannot serve the settled `options`
    with any model."""
    modes: dict[str, Mode] = {each.name: MODES[each.mode] for each in options.passes}
    for each in options.passes:
        if each.ranks is Ranks.ALL and world_size == 1:
            raise ValueError(f"--modes {each.name} needs several ranks; see --nproc")
        has_script = options.emulate_acceptance is not None and each.drafts_ahead
        if each.is_drafting and options.draft == "none" and not has_script:
            raise ValueError(f"--modes {each.name} drafts; say by --draft what drafts")
    drafting = [each.name for each in options.passes if each.is_drafting]
    if options.draft != "none" and not drafting:
        suffix = next(
            (name for name, mode in modes.items() if mode.drafts is Drafts.MAYBE), "inflight"
        )
        raise ValueError(
            f"--draft {options.draft} does nothing: no mode of --modes {' '.join(modes)} drafts; "
            f"add one, such as {suffix}{WITH_DRAFT}"
        )
    staged = [each for each in options.passes if each.ranks is Ranks.STAGES]
    fixed = [each.name for each in staged if each.is_drafting]
    if fixed and config.decoding.gamma == "auto":
        raise ValueError(
            f"--gamma auto: --modes {fixed[0]} drafts a fixed number of tokens; name one"
        )
    if options.of_system(ENDPOINT):
        if options.endpoint is None:
            raise ValueError("--modes endpoint needs --endpoint URL")
        _check_servers(options)
        _refuse_sampling(config, "--modes endpoint, whose server decodes greedily")
    rings = options.of_system(RING)
    if fixed and options.draft.startswith(NGRAM_AND):
        raise ValueError(
            f"--draft {options.draft}: --modes {fixed[0]} drafts from one source; choose ngram or "
            "model:NAME"
        )
    if any(each.is_drafting for each in rings) and options.draft == SELF:
        raise ValueError(
            f"--draft {SELF}: --modes ring{WITH_DRAFT} lacks layers to draft with on its first "
            "stage; choose ngram or model:NAME"
        )
    if rings:
        options.samples(options.grid(world_size))
    if options.emulate_link_ms is not None and world_size == 1:
        raise ValueError(f"--emulate_link_ms {options.emulate_link_ms}: one rank has no link")
    _check_turns(options)
    _check_emulated_acceptance(options)
    _check_emulated_stages(options, config)


def _check_servers(options: ServeOptions) -> None:
    """Raises ValueError if a setting fits neither all servers nor each of them."""
    servers = options.endpoint or ()
    if len(set(servers)) < len(servers):
        raise ValueError("--endpoint names a server twice; name each once")
    for url in servers:
        check_credentials(url, options.endpoint_key_env)
    for name in OF_EACH:
        values = getattr(options, name)
        if values is not None and len(values) not in (1, len(servers)):
            raise ValueError(
                f"--{name} has {len(values)} values for {len(servers)} servers of --endpoint; give "
                "one for all or one for each"
            )
    of_each = [options.of_server("endpoint_metrics", number) for number in range(len(servers))]
    urls = [url for url in of_each if url not in (None, NO_URL)]
    if len(set(urls)) < len(urls):
        raise ValueError(
            "--endpoint_metrics has the same counters for several servers; give each its own, or "
            f"{NO_URL}"
        )


def _check_turns(options: ServeOptions) -> None:
    """Raises ValueError if the answers that a conversation would go on with mean nothing."""
    emulated = {
        "emulate_acceptance": "accepts drafts by chance",
        "emulate_stage_ms": "chooses no tokens",
    }
    for name, reason in emulated.items():
        if options.turns > 1 and getattr(options, name) is not None:
            raise ValueError(
                f"--turns {options.turns}: a conversation goes on with its answers, but --{name} "
                f"{reason}; leave one out"
            )


def _check_emulated_acceptance(options: ServeOptions) -> None:
    """Raises ValueError if a pass cannot accept drafts by chance."""
    acceptance = options.emulate_acceptance
    if acceptance is None:
        if options.emulate_draft_ms is not None:
            raise ValueError("--emulate_draft_ms is for --emulate_acceptance")
        return
    flag = f"--emulate_acceptance {' '.join(f'{rate:g}' for rate in acceptance)}"
    ahead = [each.name for each in options.passes if each.drafts_ahead]
    in_turns = [each for each in options.passes if options.accepts_by_chance(each)]
    if ahead and options.emulate_stage_ms is None:
        raise ValueError(
            f"{flag}: --modes {ahead[0]} drafts ahead of stages that compute, whose tokens no "
            "drafter knows; give --emulate_stage_ms too, name by --draft what drafts, or predict "
            "it by magicdec simulate"
        )
    if ahead and not (len(acceptance) == 1 and acceptance[0] < 1):
        raise ValueError(
            f"{flag}: pipelined speculation takes one probability below 1, that a token is "
            "drafted right"
        )
    for each in in_turns:
        if each.system == RING:
            raise ValueError(
                f"{flag}: stages judge the drafts of --modes {each.name} by their logits alone; "
                "leave the mode or the flag out"
            )
    if options.passes[0] in in_turns and len(options.passes) > 1:
        raise ValueError(
            f"{flag}: the tokens of --modes {options.passes[0].name}, which mean nothing, would be "
            "the reference of the others; name a mode without drafts first"
        )


def _check_emulated_stages(options: ServeOptions, config: RunConfig) -> None:
    """Raises ValueError for settings that emulated stages make meaningless."""
    if options.emulate_stage_ms is None:
        return
    flag = f"--emulate_stage_ms {options.emulate_stage_ms}"
    acceptance = options.emulate_acceptance
    whole = [each.name for each in options.passes if each.ranks is not Ranks.STAGES]
    if whole:
        raise ValueError(
            f"{flag}: --modes {whole[0]} has no stages that could sleep; choose from ring, "
            "iterative (one request after the other, token by token), sync, async"
        )
    if options.is_measured:
        raise ValueError(
            f"{FLAG} {options.layer_split}: with {flag} a stage takes the same time with any "
            "layers; give layer counts or shares"
        )
    guessing = [
        each.name
        for each in options.passes
        if each.is_drafting and each.system != SPECULATIVE and options.draft != NGRAM
    ]
    if guessing:
        raise ValueError(
            f"{flag}: stages that sleep emit no tokens that --draft {options.draft} could guess in "
            f"--modes {guessing[0]}; choose from sync, async"
        )
    speculative = options.of_system(SPECULATIVE)
    if any(each.is_drafting for each in speculative) and acceptance is None:
        raise ValueError(
            f"{flag}: stages that sleep emit no tokens that a draft could guess; give "
            "--emulate_acceptance"
        )
    _refuse_sampling(config, f"{flag}, whose stages choose no tokens")


def _refuse_sampling(config: RunConfig, reason: str) -> None:
    """Raises ValueError unless tokens are chosen greedily and without penalties."""
    for name in OF_SAMPLING:
        value = getattr(config.sampling, name)
        if value != getattr(type(config.sampling), name):
            raise ValueError(f"--{name} {value:g} does nothing with {reason}; leave it out")
