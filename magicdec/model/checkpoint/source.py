"""From a model's name to its loaded shard: finds, checks and loads weights. Checkpoints are checked
by file headers, before loading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor, nn

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.eagle_weights import head_as_stored, target_ids
from magicdec.model.checkpoint.finite import WeightsRefused, check_finite
from magicdec.model.checkpoint.gguf_weights import GgufWeights
from magicdec.model.checkpoint.quantization import QuantizedWeights, with_head
from magicdec.model.checkpoint.quantized.converted import converted
from magicdec.model.checkpoint.quantized.stated import read_method
from magicdec.model.checkpoint.quantized.weights import dequantized
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.stacked_experts import UnstackedExperts
from magicdec.model.checkpoint.tying import as_stored
from magicdec.model.checkpoint.weight_files import (
    WEIGHT_FILES,
    StoredTensor,
    WeightSource,
    open_weights,
    row_spans,
    with_body,
)
from magicdec.model.checkpoint.weight_map import (
    NO_MATRIX,
    Piece,
    expected_shapes,
    untie_head,
    weight_map,
)
from magicdec.model.config import ModelConfig
from magicdec.model.draft_head import DraftHead
from magicdec.model.eagle import EagleHead
from magicdec.model.families.family import check_computed, find_family
from magicdec.model.gguf.named import is_gguf
from magicdec.model.linear.grouped import (
    GroupedLinear,
    GroupedNumbers,
    common_format,
    have_one_order,
    stack_rows,
)
from magicdec.model.linear.packed import PartialLinear
from magicdec.model.mtp import MtpHead
from magicdec.model.presets.presets import (
    DEMO_DIRECTORIES,
    RANDOM_PREFIX,
    WEIGHT_SUFFIXES,
    demo_directory,
    find_config,
    unknown_model,
)
from magicdec.model.transformer import Transformer
from magicdec.names import QUANTIZERS, STORED, load_named
from magicdec.output.files import AGAIN

PROBLEMS_SHOWN = 3
OTHER_BIASES = (
    "set attention_bias or mlp_bias in config.json if the model was trained with these biases, or "
    "take the checkpoint of a model without them"
)
GPT_FAST_NAME = "tok_embeddings.weight"  # in the files of the original suite's converter


def check_weights(config: ModelConfig, source: WeightSource) -> None:
    """Compare names, shapes and dtypes of stored tensors with the config.

    Raises:
        ValueError: names the file and the first tensors that are missing, wrong or foreign.
    """
    num_tensors = len(source.tensors)
    if config.num_layers > num_tensors:  # a broken config may ask for a huge number of layers
        raise ValueError(
            f"{source.where('') or config.name}: the weights do not fit the config: "
            f"{num_tensors} tensors cannot make {config.num_layers} layers; {AGAIN}"
        )
    expected = expected_shapes(config)
    problems = _problems(config, source, expected)
    if problems:
        file = source.where(next(iter(problems))) or config.name
        listing = "; ".join([f"{name} {what}" for name, what in problems.items()][:PROBLEMS_SHOWN])
        more = len(problems) - PROBLEMS_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        has_other_biases = all(_is_bias(name, expected) for name in problems)
        way_out = OTHER_BIASES if has_other_biases else AGAIN
        raise ValueError(f"{file}: the weights do not fit the config: {listing}{rest}; {way_out}")


def _problems(
    config: ModelConfig, source: WeightSource, expected: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Faults by tensor, missing ones first. Integer weights are faulty. A bias of zeros is none:
    programs for GPTQ store one for each matrix."""
    # Rotary frequencies and masks that old checkpoints store, and a stored copy of a tied head.
    family = find_family(config.architecture)
    tied_head = f"{family.names(config).head}.weight" if config.tie_word_embeddings else None
    missing = {}
    misshapen = {}
    unexpected = {}
    mistyped = {}
    for name, shape in expected.items():
        stored = source.tensors.get(name)
        if stored is None:
            missing[name] = f"is missing, expected shape {shape}"
            continue
        if stored.shape != shape:
            misshapen[name] = f"has shape {stored.shape}, expected {shape}"
        if not stored.dtype.startswith(("float", "bfloat")):
            mistyped[name] = f"is stored as {stored.dtype}, expected floating-point"
    for name, stored in source.tensors.items():
        is_known = name in expected or name == tied_head or name.endswith(family.buffers)
        if is_known or (name.startswith(family.other_parts) and not config.is_head):
            continue
        if _is_bias(name, expected) and not source.read(name).any():
            continue
        unexpected[name] = f"of shape {stored.shape} is not part of the model"
    return mistyped | missing | misshapen | unexpected


def _is_bias(name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor is the bias of a layer that has none in the model."""
    module, _, leaf = name.rpartition(".")
    return leaf == "bias" and name not in expected and f"{module}.weight" in expected


CHOICES = (
    "demo, demo-draft, random:<preset>, a Hugging Face directory, a model's name on the Hugging "
    "Face hub (owner/name), a .gguf file, or a .safetensors/.pth/.bin file beside its config.json"
)


@dataclass(frozen=True)
class ModelSource:
    """A model that was found and checked, not loaded. `tokenizer_path`: the directory, or the
    GGUF file, that has its tokenizer; random weights have none."""

    name: str
    config: ModelConfig
    weights: WeightSource
    tokenizer_path: Path | None
    is_random: bool

    @property
    def has_groups(self) -> bool:
        """Whether matrices are stored as numbers in groups."""
        return self.config.stored_bytes is not None

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {n: self.weights.tensors[n] for n in expected_shapes(self.config)}


def find_model(flag: str, name: str) -> ModelSource:
    """The model that a user named with `flag` ("--model"). `demo` and `demo-draft` precede
    directories.

    Raises:
        ValueError: the name is unknown, or the checkpoint broken or unfit for its config.
    """
    path = demo_directory(name) if name in DEMO_DIRECTORIES else Path(name).expanduser()
    if name.startswith(RANDOM_PREFIX):
        config = find_config(flag, name)
        check_computed(f"{flag} {name}", config, name.removeprefix(RANDOM_PREFIX))
        weights: WeightSource = RandomWeights(expected_shapes(config))
        source = ModelSource(name, config, weights, tokenizer_path=None, is_random=True)
    elif path.is_dir() or (path.is_file() and path.suffix in WEIGHT_SUFFIXES):
        config = find_config(flag, name)
        check_computed(f"{flag} {name}", config, name)
        tokenizer_path: Path | None = None
        if config.eagle is not None:
            config, weights = head_as_stored(config, open_weights(path))
        else:
            config, weights = as_stored(config, _stored(path, config))
            config = with_stored_bytes(config, weights)
            tokenizer_path = path if path.is_dir() or is_gguf(path) else path.parent
        source = ModelSource(config.name, config, weights, tokenizer_path, is_random=False)
    else:
        raise unknown_model(flag, name, CHOICES)
    check_weights(source.config, source.weights)
    return source


def find_stored_config(flag: str, name: str) -> ModelConfig:
    """The config of a named model, as in `find_config`, with its head as stored where weights
    are there. Raises ValueError if they are broken."""
    config = find_config(flag, name)
    if config.planned_only:  # whose config.json says all that is counted
        return config
    path = Path(name).expanduser()
    is_file = path.is_file() and path.suffix in WEIGHT_SUFFIXES
    has_weights = is_file or any((path / f).exists() for f in WEIGHT_FILES)
    stated = read_method(path) if path.is_dir() and not has_weights else None
    if stated is not None:
        raise ValueError(
            f"{flag} {name}: {stated.by} does not say how large the weights are, and there are no "
            "weights; fetch them, or name a preset"
        )
    if name in DEMO_DIRECTORIES or not has_weights:
        return config
    config, weights = as_stored(config, _stored(path, config))
    return with_stored_bytes(config, weights)


def load_transformer(
    config: ModelConfig,
    source: WeightSource,
    shard: Shard,
    layers: range | None,
    dtype: torch.dtype,
    device: torch.device,
    stored_as: str | None = None,
    has_ends: bool | None = None,
) -> Transformer:
    """Layers `layers` (None: all) of the shard, frozen, in eval mode, without a rotary table.
    `has_ends`: see `Transformer`.

    Reads only this rank's slices, into tensors of `dtype` on `device`. `stored_as`: STORED, numbers
    in groups, or one of LOW_BIT, to which matrices are quantised here.

    Raises:
        ValueError: a file became unreadable after `find_model`.
        WeightsRefused: a value is not finite in `dtype`.
    """
    layers = range(config.num_layers) if layers is None else layers
    if stored_as is not None and stored_as != STORED:
        source = QuantizedWeights(source, config, load_named(QUANTIZERS, stored_as))
    elif stored_as == STORED:
        source = with_head(source, config)
    elif isinstance(source, RandomWeights):
        source = source.on(device)
    config = untie_head(config) if stored_as else config
    with torch.device("meta"):
        model = _kind_of(config)(config, shard, layers, has_ends)
    for parameter, pieces in weight_map(config, shard, layers, has_ends).items():
        module_name, _, leaf = parameter.rpartition(".")
        module = model.get_submodule(module_name)
        template = module.get_parameter(leaf)
        if stored_as and leaf == "weight" and isinstance(module, nn.Linear):
            layer = _grouped(module, pieces, source, device)
            if layer is not None:
                parent, _, name = module_name.rpartition(".")
                setattr(model.get_submodule(parent), name, layer)
                continue
        tensor = torch.empty(template.shape, dtype=dtype, device=device)
        _fill(tensor, pieces, source)
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))
    assert not any(parameter.is_meta for parameter in model.parameters()), "a weight was not loaded"
    if isinstance(model, DraftHead):
        model.target_ids = target_ids(config, source).to(device)
    return model.eval()


def _kind_of(config: ModelConfig) -> type[Transformer]:
    if config.is_mtp:
        return MtpHead
    return Transformer if config.eagle is None else EagleHead


def _grouped(
    module: nn.Linear, pieces: list[Piece], source: WeightSource, device: torch.device
) -> GroupedLinear | None:
    """The layer with its pieces' numbers in groups; None unless `are_in_groups`. Its bias, if it
    has one, is still to be filled."""
    if not are_in_groups(pieces, source):
        return None
    numbers = stack_rows([_numbers(piece, source) for piece in pieces])
    adds_bias = not isinstance(module, PartialLinear)
    layer = GroupedLinear(numbers, None, adds_bias).to(device)
    for part in (layer.scale, layer.minimum):
        if part is not None and not part.isfinite().all():
            name = pieces[0].name
            raise WeightsRefused(
                f"{source.where(name)}: {name} has a scale that is not finite; {AGAIN}"
            )
    layer.bias = module.bias
    return layer


def are_in_groups(pieces: list[Piece], source: WeightSource) -> bool:
    """Whether a parameter is held as numbers in groups: all its pieces are stored so, with columns
    in one order, which the ranks do not cut."""
    if any(source.tensors[piece.name].numbers is None for piece in pieces):
        return False
    orders = [source.input_order(piece.name) for piece in pieces]
    is_cut = any(piece.inputs != (0, piece.width) for piece in pieces)
    return have_one_order(orders) and (orders[0] is None or not is_cut)


def _numbers(piece: Piece, source: WeightSource) -> GroupedNumbers:
    """In smaller groups where a rank's inputs begin or end within one."""
    kind = source.tensors[piece.name].numbers
    assert kind is not None, "it is stored in groups"
    first, last = piece.inputs
    start = first // kind.group * kind.group
    stop = -(-last // kind.group) * kind.group
    numbers = source.read_numbers(piece.name, (slice(*piece.rows), slice(start, stop)))
    return numbers.inputs(first - start, last - start)


def with_stored_bytes(config: ModelConfig, source: WeightSource) -> ModelConfig:
    """The config with the bytes of what is stored in groups. It is left as it is if tensors are
    missing, which `check_weights` says."""
    try:
        head = bytes_in_groups(source, config, lambda parameter: parameter == "head.weight")
        layers = bytes_in_groups(source, config, lambda parameter: parameter != "head.weight")
    except KeyError:
        return config
    if head is None and layers is None:
        return config
    stored, plain_share, cut_share = layers or (0.0, 1.0, 0.0)
    experts = config.experts
    return replace(
        config,
        experts=None if experts is None else replace(experts, stored_bytes=None),
        stored_bytes=stored,
        plain_share=plain_share,
        cut_share=cut_share,
        head_bytes=None if head is None else head[0],
    )


def bytes_in_groups(
    source: WeightSource, config: ModelConfig, counts: Callable[[str], bool]
) -> tuple[float, float, float] | None:
    """Of the matrices whose parameters count: the bytes of a weight of those that
    `load_transformer` holds in groups, on average, the share of the others in the weights, and the
    share of those that only one rank holds in groups; None if all are others."""
    whole = with_head(source, config)
    total = Fraction(0)
    in_groups = 0
    cut = 0
    count = 0
    for parameter, pieces in weight_map(
        untie_head(config), Shard(), range(config.num_layers)
    ).items():
        is_matrix = parameter.endswith(".weight") and len(pieces[0].full_shape) == 2
        if not is_matrix or NO_MATRIX.search(parameter) or not counts(parameter):
            continue
        size = sum((piece.rows[1] - piece.rows[0]) * piece.width for piece in pieces)
        count += size
        if not are_in_groups(pieces, whole):
            continue
        formats = [whole.tensors[piece.name].numbers for piece in pieces]
        known = [quantization for quantization in formats if quantization is not None]
        total += size * common_format(known).bytes_per_weight
        in_groups += size
        if pieces[0].columns is not None and whole.input_order(pieces[0].name) is not None:
            cut += size
    if in_groups == 0:
        return None
    return float(total / in_groups), 1 - in_groups / count, cut / count


def _fill(tensor: Tensor, pieces: list[Piece], source: WeightSource) -> None:
    """Copy the pieces into `tensor` one below the other, in bounded parts. Raises WeightsRefused
    if a value is not finite."""
    filled = 0
    for piece in pieces:
        for rows in row_spans(piece.rows, piece.width):
            index = replace(piece, rows=rows).stored
            values = source.read(piece.name, index)
            assert values.is_floating_point(), "dtypes are checked"
            num_rows = rows[1] - rows[0]
            filling = tensor[filled : filled + num_rows]
            filling = filling.T if piece.transposed else filling
            is_drawn = isinstance(source, RandomWeights)  # as the model computes with them
            has_offset = piece.offset != 0 and not is_drawn
            filling.copy_(values.float() + piece.offset if has_offset else values)
            if not is_drawn:  # on the device, which nothing waits for
                check_finite(filling, values, source, piece.name, index)
            filled += num_rows
    assert filled == len(tensor), "the pieces fill the parameter"


def _stored(path: Path, config: ModelConfig) -> WeightSource:
    source = GgufWeights(path) if is_gguf(path) else open_weights(path)
    family = find_family(config.architecture)
    body = family.body
    head = family.names(config).head
    if GPT_FAST_NAME in source.tensors:
        raise ValueError(
            f"{source.path} was written by the original suite's converter, whose names are not "
            "read; run convert_hf_checkpoint.py, or name the directory of the checkpoint itself"
        )
    is_bare = body and not any(name.startswith(body) for name in source.tensors)
    whole = with_body(source, body, head) if is_bare else source
    if is_gguf(path):
        return whole
    stack = family.names(config).stacked_experts
    if stack is not None:
        whole = UnstackedExperts(whole, stack)
    stated = read_method(path if path.is_dir() else path.parent)
    if stated is None:
        return converted(whole, config)
    return dequantized(whole, stated, config)


def fingerprint(source: ModelSource) -> str:
    """A hash that tells models of one shape apart. Of the values it reads only vectors."""
    shapes = {name: tensor.shape for name, tensor in source.weights.tensors.items()}
    digest = hashlib.sha256(repr(sorted(shapes.items())).encode())
    config = source.config
    for pieces in weight_map(config, Shard(), range(config.num_layers)).values():
        for piece in pieces:
            if len(piece.full_shape) == 1:
                digest.update(source.weights.read(piece.name).float().numpy().tobytes())
    return digest.hexdigest()
