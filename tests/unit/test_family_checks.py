"""What a model family does not support is refused before a run, with the reason and the choices."""

from dataclasses import replace

import pytest

from magicdec.config.capabilities import capabilities_of
from magicdec.config.choices.backend import AttentionCase
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, DraftSection, KVSection, WorkloadSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import Hardware
from magicdec.hardware.costs import Deployment, kv_bytes_per_token
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import ModelSource, expected_shapes, find_model
from magicdec.model.config import ExpertsConfig, LayerKind, ModelConfig, RopeConfig
from magicdec.setup.model_checks import (
    check_choice,
    check_experts,
    check_length,
    check_reach,
    check_rolling,
    check_scores,
    check_sinks,
    check_window,
)

PLAIN = ModelConfig("plain", 96, 2, 32, 48, 4, 4, 8, 128)
LONGSPEC = resolve(
    RunConfig(
        draft=DraftSection(),
        decoding=DecodingSection("speculative", "model", 4),
        workload=WorkloadSection(prefix_len=200, gen_len=20),
    ),
    Machine(2),
)


def source(**changes: object) -> ModelSource:
    config = replace(PLAIN, **changes)  # type: ignore[arg-type]
    return ModelSource("plain", config, RandomWeights({}), None, is_random=True)


@pytest.mark.parametrize(
    ("positions", "shown"), [("learned", "learned positions"), ("alibi", "ALiBi")]
)
def test_a_rolling_draft_needs_rotary_positions(positions: str, shown: str) -> None:
    rolling = replace(LONGSPEC, kv=KVSection("streaming_llm", 64, 4))
    check_rolling(rolling, "--model plain", source())
    for policy in ("full", "snapkv"):
        other = replace(LONGSPEC, kv=KVSection(policy, 64, 4))
        check_rolling(other, "--model plain", source(positions=positions))
    with pytest.raises(ValueError, match=rf"--kv_policy streaming_llm .*{shown}.* full, snapkv"):
        check_rolling(rolling, "--model plain", source(positions=positions))


def test_a_short_draft_is_offered_only_what_serves_it() -> None:
    config = replace(LONGSPEC, kv=KVSection("full"))
    with pytest.raises(ValueError, match=r"128 positions.*streaming_llm would serve"):
        check_reach(config, "--model plain", source())
    with pytest.raises(ValueError, match="128 positions") as caught:
        check_reach(config, "--model plain", source(positions="learned"))
    assert "would serve" not in str(caught.value)


def test_how_far_scaled_rope_reaches() -> None:
    yarn = RopeConfig(1e4, "yarn", 4.0, original_max_position_embeddings=128)
    check_length("--prefix_len 512", 512, "--model", source(rope=yarn))
    with pytest.raises(ValueError, match="--prefix_len 513 exceeds the 512 positions"):
        check_length("--prefix_len 513", 513, "--model", source(rope=yarn))
    dynamic = source(rope=RopeConfig(1e4, "dynamic", 4.0))
    check_length("--prefix_len 128", 128, "--model", dynamic)
    with pytest.raises(ValueError, match="128 positions of --model plain; dynamic RoPE scaling"):
        check_length("--prefix_len 129", 129, "--model", dynamic)


def test_texts_may_get_past_a_window() -> None:
    check_length("--prefix_len 128", 128, "--model", source(layer_kinds=(LayerKind(64),)))


def test_a_windowed_draft_reaches_past_its_window_unless_it_rolls() -> None:
    draft = source(layer_kinds=(LayerKind(64),), max_position_embeddings=1024)
    check_reach(replace(LONGSPEC, kv=KVSection("full")), "--model plain", draft)
    check_reach(replace(LONGSPEC, kv=KVSection("snapkv", 60)), "--model plain", draft)
    small = replace(LONGSPEC, attention=replace(LONGSPEC.attention, prefill_chunk=16))
    check_reach(replace(small, kv=KVSection("streaming_llm", 48)), "--model plain", draft)
    with pytest.raises(ValueError, match=r"--budget 49 .* exceed the 64 positions"):
        check_reach(replace(small, kv=KVSection("streaming_llm", 49)), "--model plain", draft)


def test_what_snapkv_chose_once_must_not_all_leave_the_window() -> None:
    config = replace(LONGSPEC, kv=KVSection("snapkv", 20, window_size=8))  # 20 + 4 tokens follow
    check_choice(config, "--model", source(layer_kinds=(LayerKind(25),)))
    with pytest.raises(ValueError, match=r"window of --model plain \(24\) after 24 .*--gen_len$"):
        check_choice(config, "--model", source(layer_kinds=(LayerKind(24),)))
    alone = replace(config, draft=None, decoding=replace(config.decoding, drafter="self"))
    with pytest.raises(ValueError, match=r"--gen_len or --reselect_every$"):
        check_choice(alone, "--model", source(layer_kinds=(LayerKind(24),)))
    again = replace(alone, kv=KVSection("snapkv", 20, window_size=8, reselect_every=4))
    check_choice(again, "--model", source(layer_kinds=(LayerKind(24),)))


def test_costs_of_a_window() -> None:
    """Beyond the window, a forward reads and multiplies only the window for each token."""
    plain = PLAIN
    windowed = replace(PLAIN, layer_kinds=(LayerKind(64),))
    hardware = Hardware(1e9, 1e9)
    for S in (10, 59, 60, 61, 100):
        whole, cut = (Deployment(c, hardware, 4).forward(2, 5, S) for c in (plain, windowed))
        assert cut.kv_bytes == 2 * (min(S, 63) + 5) * kv_bytes_per_token(plain, Shard(), 4)
        seen = [min(S + t, 64) for t in range(1, 6)]
        assert cut.attention_flops == 2 * 4 * 2 * 4 * 8 * sum(seen)
        assert (cut == whole) == (S + 5 <= 64)


def test_costs_of_layers_with_and_without_a_window() -> None:
    """Each layer costs what it costs in a model of its kind."""
    kinds = (LayerKind(64), LayerKind(), LayerKind(64))
    mixed = replace(PLAIN, num_layers=3, layer_kinds=kinds)
    alone = [replace(PLAIN, num_layers=1, layer_kinds=(kind,)) for kind in kinds]
    for S in (10, 61, 100):
        whole, *parts = (
            Deployment(c, Hardware(1e9, 1e9), 4).forward(2, 5, S) for c in (mixed, *alone)
        )
        assert whole.kv_bytes == sum(cost.kv_bytes for cost in parts)
        assert whole.attention_flops == sum(cost.attention_flops for cost in parts)


def test_a_rolling_draft_reaches_as_far_as_its_widest_window() -> None:
    draft = source(layer_kinds=(LayerKind(64), LayerKind()), max_position_embeddings=1024)
    check_reach(replace(LONGSPEC, kv=KVSection("streaming_llm", 80)), "--model plain", draft)


def test_experts_are_refused_on_a_gpu() -> None:
    mixture = source(experts=ExpertsConfig(4, 2, 16))
    check_experts("cpu", "--model", mixture)
    check_experts("cuda", "--model", source())
    with pytest.raises(ValueError, match=r"^--device cuda: the experts of --model plain .* cpu$"):
        check_experts("cuda", "--model", mixture)


def test_alibi_needs_scores_that_are_not_rounded() -> None:
    alibi = source(positions="alibi")
    for backend, dtype in (("native", "bfloat16"), ("sdpa", "bfloat16"), ("grouped", "float32")):
        check_scores(backend, dtype, "--model", alibi)
    check_scores("grouped", "bfloat16", "--model", source())
    with pytest.raises(ValueError, match=r"--attention grouped .* choose from auto, sdpa, or --d"):
        check_scores("grouped", "bfloat16", "--model", alibi)


@pytest.mark.parametrize("name", ["gpt2", "falcon-40b", "bloom-7b1", "baichuan-13b"])
def test_random_presets_are_found(name: str) -> None:
    found = find_model("--model", f"random:{name}")
    shapes = {name: tensor.shape for name, tensor in found.tensors.items()}
    assert found.is_random and shapes == expected_shapes(found.config)
    assert found.tokenizer_path is None
    assert (found.name, found.config.name) == (f"random:{name}", name)


def test_a_library_that_keeps_to_no_window_serves_texts_within_it() -> None:
    windowed = source(layer_kinds=(LayerKind(64),))
    check_window("flash_attn", 64, "--model", windowed)
    check_window("triton", 65, "--model", windowed)
    with pytest.raises(
        ValueError, match=r"^--attention flash_attn does not support the sliding window of 64"
    ):
        check_window("flash_attn", 65, "--model", windowed)


def test_a_library_without_sink_logits_is_refused() -> None:
    sinks = source(sink_logits=True)
    for backend in ("native", "grouped", "sdpa", "triton"):
        check_sinks(backend, "--model", sinks)
    check_sinks("flash_attn", "--model", source())
    with pytest.raises(
        ValueError, match=r"^--attention flash_attn does not compute the sink logits of --model"
    ):
        check_sinks("flash_attn", "--model", sinks)
    case = AttentionCase("cuda", "bfloat16", ModelTraits(has_sinks=True))
    obstacle = case.obstacle(capabilities_of("flash_attn"), Machine(1, has_cuda=True))
    assert obstacle is not None
