"""Checks a checkpoint: what the loader made of it, and a comparison of logits and greedy tokens
with `transformers`, in float32 on the CPU, the prompt in chunks and then token by token; of a GGUF
file also with llama.cpp, if it is installed. `model/checkpoint/checked.py` remembers the outcome.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import chain, islice, repeat, zip_longest
from typing import Any

import torch
from torch import Tensor

from magicdec.bench.gguf_reference import LlamaCpp, values_of
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Group, Launch
from magicdec.model.checkpoint.checked import (
    DIFFERS,
    EQUAL,
    NOT_COMPARED,
    is_exempt,
    remember,
)
from magicdec.model.checkpoint.gguf_weights import GgufWeights
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.model.checkpoint.quantized.converted import ConvertedWeights
from magicdec.model.checkpoint.quantized.weights import PrequantizedWeights
from magicdec.model.checkpoint.source import ModelSource
from magicdec.model.checkpoint.stacked_experts import stacked
from magicdec.model.checkpoint.weight_files import WEIGHT_FILES
from magicdec.model.config import ModelConfig
from magicdec.model.families.config_keys import FOREIGN
from magicdec.model.families.family import find_family
from magicdec.model.families.hf_config import to_hf_config
from magicdec.model.gguf.named import is_gguf
from magicdec.model.tokenizer import Tokenizer
from magicdec.names import BASELINE
from magicdec.output.console import Silent
from magicdec.output.files import load_object
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.setup.loading import LoadedModels, make_runner
from magicdec.setup.memory_check import free_device_memory
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import SetupCache, find, find_tokenizer
from magicdec.workload.books import read_books

# tokens of the texts; the last behind a window or a switch
SHORT = 16
USUAL = 200
BEYOND = 64
NUM_NEW = 8  # greedy tokens after each text
KEPT = 16  # last positions of a text whose logits are compared
CHUNK = 512
# Of the largest logit, how much two implementations may differ by the rounding of float32.
TOLERANCE = 2e-4
# The same of llama.cpp, which computes GELU by a table; and where it rounds what it multiplies with
# to the bits of the weights.
LLAMA_TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 0.3
TRIED_TEXT = "\n\n    if x:\n\t  They'LL don't, 12345.  Gr\u00f6\u00dfe \u4f60\u597d  "
SIDES = 2  # this project computes each text too, in about the same time
Text = tuple[int, ...]
"""Token ids."""
READ_BY_OTHERS = tuple(name for name in WEIGHT_FILES if not name.endswith(".pth"))


@dataclass
class ModelCheck:
    """The `outcome` EQUAL, DIFFERS or NOT_COMPARED, and its `lines`, which `say` gets at once."""

    say: Callable[[str], None] = lambda line: None
    outcome: str = NOT_COMPARED
    lines: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.outcome == DIFFERS

    def tell(self, line: str) -> None:
        self.lines.append(line)
        self.say(line)


@dataclass(frozen=True)
class Continued:
    """The float32 logits [N, V] of a text's last KEPT tokens and of all greedy tokens after it but
    the last, and the seconds that this took."""

    logits: Tensor
    tokens: list[int]
    seconds: float


def check_model(
    name: str, most_s: float, say: Callable[[str], None] = lambda line: None
) -> ModelCheck:
    """Describes a model, compares it with that of transformers, and remembers the outcome. `say`
    gets lines at once. A text that would take more than about `most_s` seconds is left out. Raises
    ValueError as a run of the model does."""
    cache = SetupCache()
    check = ModelCheck(say)
    config = with_local_models(config_of(name, "auto", USUAL))
    name = config.model.model
    source = find(config, Launch(), cache).source
    _, tokenizer = find_tokenizer(source, cache)
    for line in describe(source, tokenizer):
        check.tell(line)
    texts = [text_of(tokenizer, source.config, n) for n in text_lengths(source.config)]
    runner: ModelRunner | None = None
    why = obstacle(source)
    if why is not None:
        check.tell(f"not compared with transformers: {why}")
    elif expected := by_transformers(check, source, texts, most_s):
        texts = list(expected)
        runner = make_checked_runner(name, max(map(len, texts)) + NUM_NEW)
        judge(check, runner, name, expected, TOLERANCE, "transformers")
    if is_gguf_file(source) and importlib.util.find_spec("llama_cpp") is not None:
        expected = by_llama_cpp(check, source, name, tokenizer, texts, most_s)
        tolerance = llama_tolerance(source)
        if expected and tolerance is not None:
            runner = runner or make_checked_runner(name, max(map(len, expected)) + NUM_NEW)
            judge(check, runner, name, expected, tolerance, "llama.cpp")
    if not is_exempt(source):
        remember(source, check.outcome)
    return check


def config_of(name: str, dtype: str, longest: int, linear: str = "auto") -> RunConfig:
    return RunConfig(
        model=ModelSection(name, dtype, linear),
        parallel=ParallelSection(device="cpu"),
        decoding=DecodingSection(strategy=BASELINE),
        workload=WorkloadSection(batch_size=1, prefix_len=longest, gen_len=1),
    )


def describe(source: ModelSource, tokenizer: Tokenizer) -> list[str]:
    c = source.config
    tensors = source.tensors.values()
    dtypes = sorted({tensor.dtype for tensor in tensors})
    files = {tensor.file for tensor in tensors}
    num_parameters = sum(torch.Size(tensor.shape).numel() for tensor in tensors)
    biases = {
        "q, k, v": c.qkv_bias,
        "output": c.output_bias,
        "MLP": c.mlp_bias,
        "head": c.head_bias,
    }
    norm = {"rms": "RMS norm", "layer": "layer norm"}[c.norm]
    word = "How to check a model."
    ids = tokenizer.encode(word)
    ends = " ".join(map(str, c.eos_token_ids)) or None
    lines = {
        "model": f"{c.architecture}, {num_parameters:,} numbers in {len(tensors)} tensors, "
        f"{' and '.join(dtypes)}, {len(files)} file{'s' * (len(files) != 1)}",
        "layers": f"{c.num_layers} of width {c.hidden_size}, "
        f"{c.residual.replace('_', ' ')} residuals",
        "attention": f"{c.num_heads} heads of {c.head_dim}, {c.num_kv_heads} KV heads"
        + (", norms on q and k" if c.qk_norm else ""),
        "MLP": describe_mlp(c),
        "norm": f"{norm}, epsilon {c.norm_eps:g}"
        + (", one behind the embedding" * c.embedding_norm),
        "biases": ", ".join(part for part, has_bias in biases.items() if has_bias) or "none",
        "positions": describe_positions(c),
        "window": describe_windows(c),
        "vocabulary": f"{c.vocab_size}, {'tied head' if c.tie_word_embeddings else 'own head'}, "
        f"BOS {tokenizer.bos_of(c.bos_token_id)}, EOS {ends}",
        "tokenizer": f"{tokenizer.path.name}, {tokenizer.vocab_size} ids; {word!r} is {ids}",
    }
    return [f"{label:<10} {text}" for label, text in lines.items()]


def describe_mlp(c: ModelConfig) -> str:
    text = f"width {c.intermediate_size}, {c.activation}, {'a' if c.gated_mlp else 'no'} gate"
    if c.experts is None:
        return text
    e = c.experts
    mixture = f"{e.num_used} of {e.num_experts} experts of width {e.width}"
    own = c.num_layers - c.num_mixtures
    return f"{mixture}, {c.activation}" + (f"; in {own} layers {text}" if own else "")


def describe_windows(c: ModelConfig) -> str:
    if c.windows == (None,):
        return "none"
    counts = [(window, n) for window, n in c.layers_by_window.items() if window is not None]
    return ", ".join(
        f"{window} tokens, {'all' if n == c.num_layers else f'{n} of {c.num_layers}'} layers"
        for window, n in counts
    )


def describe_positions(c: ModelConfig) -> str:
    longest = f"at most {c.max_length} tokens"
    if c.positions != "rope":
        return f"{c.positions}, {longest}"
    r = c.rope
    text = f"rotary, theta {r.theta:g}"
    if r.rope_type != "default":
        text += f", {r.rope_type} by {r.factor:g}"
    if switch_of(c) is not None:
        text += f", trained with {r.original_max_position_embeddings}"
    if r.rotary_dim is not None:
        text += f", on {r.rotary_dim} dimensions of a head"
    return f"{text}, {longest}"


def switch_of(c: ModelConfig) -> int | None:
    """The length from which on the scaling of RoPE matters, if any."""
    if c.positions != "rope" or c.rope.rope_type not in ("llama3", "yarn"):
        return None
    return c.rope.original_max_position_embeddings


def obstacle(source: ModelSource) -> str | None:
    if importlib.util.find_spec("transformers") is None:
        return "it is not installed (pip install transformers)"
    if is_gguf_file(source) and importlib.util.find_spec("gguf") is None:
        return "gguf is not installed (pip install gguf)"
    import transformers

    path = source.weights.path
    architecture = source.config.architecture
    if source.is_random or path is None:
        return "random weights are in no file"
    if getattr(transformers, architecture, None) is None:
        return f"it has no class {architecture}"
    if isinstance(source.weights, ConvertedWeights):
        return "it does not read weights in groups of this project; check what they were made from"
    if path.name not in READ_BY_OTHERS and not is_dequantised(source):
        return f"it does not read {path.name}; check the directory that it was made from"
    num_bytes = _float32_bytes(source)
    free = free_device_memory("cpu", 0)
    if free is not None and num_bytes > free:
        return f"in float32 it takes {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return None


def is_dequantised(source: ModelSource) -> bool:
    """Whether transformers gets dequantised weights, in its own model: it computes others with the
    kernels of the program that quantised them, or reads them only with more packages."""
    return isinstance(source.weights, PrequantizedWeights | GgufWeights)


def _float32_bytes(source: ModelSource) -> int:
    sizes = [4 * torch.Size(tensor.shape).numel() for tensor in source.tensors.values()]
    return sum(sizes) + 2 * max(sizes)


def text_lengths(c: ModelConfig) -> list[int]:
    """The usual text, a short one, and one past the window and the switch of RoPE."""
    most = c.max_length - NUM_NEW
    edges = [edge for edge in (c.narrowest_window, switch_of(c)) if edge is not None]
    lengths = [USUAL, SHORT, *([max(edges) + BEYOND] if edges else [])]
    return list(dict.fromkeys(min(length, most) for length in lengths))


def is_gguf_file(source: ModelSource) -> bool:
    return source.tokenizer_path is not None and is_gguf(source.tokenizer_path)


def by_transformers(
    check: ModelCheck, source: ModelSource, texts: Sequence[Text], most_s: float
) -> dict[Text, Continued]:
    """The texts with the results of transformers; none if it cannot load the model, which is told.
    The models are in memory one after the other."""
    import transformers

    weights = ""
    if is_dequantised(source):
        reader = f" as gguf {version('gguf')} reads them" if is_gguf_file(source) else ""
        weights = f" on the dequantised weights{reader}"
    check.tell(f"compared with transformers {transformers.__version__}{weights}, float32, CPU:")
    with quiet(transformers):
        model, why = load_reference(transformers, source)
        if why is not None:
            check.tell(f"not compared: {why}")
            return {}
        return continue_texts(check, lambda ids: continued_by_others(model, ids), texts, most_s)


def by_llama_cpp(
    check: ModelCheck,
    source: ModelSource,
    name: str,
    tokenizer: Tokenizer,
    texts: Sequence[Text],
    most_s: float,
) -> dict[Text, Continued]:
    """The same of llama.cpp, after a comparison of the ids of a text and of the tokens that end an
    answer."""
    path = source.tokenizer_path
    assert path is not None, "a GGUF file has its tokenizer"
    try:
        model = LlamaCpp(path, max(map(len, texts)) + NUM_NEW, torch.get_num_threads())
    except Exception as error:  # of a library that may raise anything
        check.tell(f"not compared with llama.cpp: {' '.join(str(error).split())[:200]}")
        return {}
    check.tell(f"compared with llama.cpp (llama-cpp-python {model.version}), float32 cache, CPU:")
    text = next(iter(read_books("demo", 1)))[:2000] + TRIED_TEXT
    for what, ours, theirs in (
        ("ids of a text", prompt_of(tokenizer, source.config, text), model.encode(text)),
        ("end tokens", sorted(source.config.eos_token_ids), sorted(model.end_ids())),
    ):
        at = next((i for i, pair in enumerate(zip_longest(ours, theirs)) if len({*pair}) > 1), None)
        if at is None:
            check.tell(f"{len(ours)} {what} are equal")
        else:
            check.outcome = DIFFERS
            shown = f"{ours[at : at + 4]} here and {theirs[at : at + 4]} there"
            check.tell(f"{what} are NOT llama.cpp's: from number {at} on {shown}")
    if llama_tolerance(source) is None:
        check.tell("its logits are not compared: it rounds what chooses experts, or YaRN's bounds")
        return {}
    found = continue_texts(check, lambda ids: continued_by_llama_cpp(model, ids), texts, most_s)
    model.close()
    return found


def llama_tolerance(source: ModelSource) -> float | None:
    """Of the largest logit, by how much llama.cpp may differ; None: another expert, or another
    rotation, may change it as a whole."""
    if not source.config.rope.truncate:
        return None
    if all(tensor.dtype == "float32" and not tensor.numbers for tensor in source.tensors.values()):
        return LLAMA_TOLERANCE
    return ROUNDED_TOLERANCE if source.config.experts is None else None


def judge(
    check: ModelCheck,
    runner: ModelRunner,
    name: str,
    expected: Mapping[Text, Continued],
    tolerance: float,
    by: str,
) -> None:
    """Tells how far the logits of each text differ, and sets the outcome."""
    worst = 0.0
    for ids, theirs in expected.items():
        ours = continued(runner, ids, theirs.tokens)
        error, limit = difference(ours, theirs, tolerance)
        if not math.isfinite(error):
            worst = math.inf
            check.tell(f"text of {len(ids)} tokens: the logits are not finite numbers")
            continue
        worst = max(worst, error / limit)
        num_equal = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
        check.tell(
            f"text of {len(ids)} tokens: {num_equal} of {NUM_NEW} greedy tokens are equal, logits "
            f"differ by {error:.2g} at most (rounding: less than {limit:.2g})"
        )
    is_equal = worst <= 1
    if not is_equal or check.outcome == NOT_COMPARED:
        check.outcome = EQUAL if is_equal else DIFFERS
    check.tell(f"{name} {'is' if is_equal else 'is NOT'} computed as {by} computes it")


def load_reference(transformers: Any, source: ModelSource) -> tuple[Any, str | None]:
    kind = getattr(transformers, source.config.architecture)
    if is_dequantised(source):
        return load_dequantised(kind, source)
    directory = source.tokenizer_path
    try:
        model, info = kind.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # of a library that may raise anything
        return None, f"transformers cannot load it: {' '.join(str(error).split())[:200]}"
    if missing := sorted(info["missing_keys"]):
        return None, f"transformers does not find {', '.join(missing[:3])}"
    return model.eval(), None


def load_dequantised(kind: Any, source: ModelSource) -> tuple[Any, str | None]:
    """A model of the class `kind` with the dequantised weights in float32: those of a GGUF file as
    the `gguf` package reads them, others as this project does. Its config is the checkpoint's,
    without the settings of quantisation; a GGUF file has none."""
    path = source.tokenizer_path
    assert path is not None, "it is a file or a directory"
    fields = to_hf_config(source.config) if is_gguf(path) else load_object(path / "config.json")
    fields.pop(FOREIGN, None)
    try:
        stored = source.tensors
        if is_gguf(path):
            parts = {tensor.file for tensor in stored.values() if tensor.file is not None}
            weights = values_of([path, *(parts - {path})], stored)
        else:
            weights = {name: source.weights.read(name).float() for name in stored}
        stack = find_family(source.config.architecture).names(source.config).stacked_experts
        if stack is not None and stack.takes_turns:
            weights = stacked(weights)
        model, found = kind.from_pretrained(  # it stacks the experts of other mixtures
            None,
            config=kind.config_class.from_dict(fields),
            state_dict=weights,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # of a library that may raise anything
        return None, f"transformers cannot load it: {' '.join(str(error).split())[:200]}"
    tied = {"lm_head.weight"} if source.config.tie_word_embeddings else set()
    names = sorted({*found["missing_keys"], *found["unexpected_keys"]} - tied)
    if names:
        return None, f"transformers has no place for, or does not find, {', '.join(names[:3])}"
    return model.eval(), None


def continue_texts(
    check: ModelCheck,
    continue_by: Callable[[Text], Continued],
    texts: Sequence[Text],
    most_s: float,
) -> dict[Text, Continued]:
    """Texts with the results of another program, as far as the time allows, at least one."""
    found = dict[Text, Continued]()
    left_s = most_s
    rate = 0.0
    for ids in texts:
        needed_s = SIDES * rate * len(ids)
        if needed_s > left_s:
            check.tell(f"text of {len(ids)} tokens: left out, it would take {needed_s:.0f} s")
            continue
        found[ids] = theirs = continue_by(ids)
        left_s -= SIDES * theirs.seconds
        rate = max(rate, theirs.seconds / len(ids))
    return found


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    shows_bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if shows_bars:
            transformers.logging.enable_progress_bar()


def prompt_of(tokenizer: Tokenizer, config: ModelConfig, text: str) -> list[int]:
    bos = tokenizer.bos_of(config.bos_token_id)
    return [*([] if bos is None else [bos]), *tokenizer.encode(text)]


def text_of(tokenizer: Tokenizer, config: ModelConfig, length: int) -> Text:
    start = prompt_of(tokenizer, config, "")
    words = tokenizer.encode(next(iter(read_books("demo", 1)))[: 16 * length])
    return tuple(islice(chain(start, chain.from_iterable(repeat(words))), length))


@torch.inference_mode()
def continued_by_others(model: Any, ids: Sequence[int]) -> Continued:
    """The result of a model of transformers, with its cache."""
    started = time.perf_counter()
    new = list[int]()
    out = model(torch.tensor([list(ids)]), use_cache=True, logits_to_keep=min(KEPT, len(ids)))
    parts = [out.logits[0].float()]
    while True:
        new.append(int(parts[-1][-1].argmax()))
        if len(new) == NUM_NEW:
            return Continued(torch.cat(parts), new, time.perf_counter() - started)
        past = out.past_key_values
        out = model(torch.tensor([new[-1:]]), past_key_values=past, use_cache=True)
        parts.append(out.logits[0].float())


def continued_by_llama_cpp(model: LlamaCpp, ids: Sequence[int]) -> Continued:
    started = time.perf_counter()
    model.restart()
    first = max(len(ids) - KEPT, 0)
    if first:
        model.forward(ids[:first])
    parts = [model.forward([token]) for token in ids[first:]]
    new = [int(parts[-1].argmax())]
    while len(new) < NUM_NEW:
        parts.append(model.forward(new[-1:]))
        new.append(int(parts[-1].argmax()))
    return Continued(torch.cat(parts), new, time.perf_counter() - started)


def make_checked_runner(name: str, longest: int) -> ModelRunner:
    """A float32 runner with the kernels that a run on this CPU takes, of those that round no
    activations."""
    cache = SetupCache()
    run = find(config_of(name, "float32", longest), Launch(), cache)
    if run.config.model.linear == "packed_a8":
        run = find(config_of(name, "float32", longest, "packed"), Launch(), cache)
    group = Group((0,), 0)
    device = torch.device("cpu")
    torch.set_num_threads(run.config.parallel.threads)
    plan = ModelPlan(run.config, run.source.config, group.ranks, 0, row_tokens=longest)
    return make_runner(plan, run.source, group, LoadedModels(device, Silent()))


@torch.inference_mode()
def continued(runner: ModelRunner, ids: Sequence[int], following: Sequence[int]) -> Continued:
    """This project's result after the text and `following`; `tokens` are its own choices in their
    places."""
    started = time.perf_counter()
    runner.release(0)
    runner.allocate(0)
    first = len(ids) % CHUNK or CHUNK  # the last chunk is whole, or the only one
    starts = [0, *range(first, len(ids), CHUNK)]
    for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
        kept = min(KEPT, stop - start)
        parts = [runner.forward(ForwardBatch([ids[start:stop]], [0], num_outputs=kept))[0]]
    for token in following[:-1]:
        parts.append(runner.forward(ForwardBatch([[token]], [0]))[0])
    logits = torch.cat(parts).float()
    tokens = logits[-NUM_NEW:].argmax(dim=1).tolist()
    return Continued(logits, tokens, time.perf_counter() - started)


def difference(found: Continued, expected: Continued, tolerance: float) -> tuple[float, float]:
    limit = tolerance * float(expected.logits.abs().max())
    return float((found.logits - expected.logits).abs().max()), limit
