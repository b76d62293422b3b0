"""Models that only `magicdec plan` knows, and those with linear attention: parameters and states
are those of transformers, what a forward reads is counted by hand, and that everything that
computes refuses what only the plan knows."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware import costs
from magicdec.hardware.ceiling_file import Hardware
from magicdec.hardware.costs import Deployment
from magicdec.model.checkpoint import source
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.config import ModelConfig
from magicdec.model.families.config_keys import FIXED, is_irrelevant
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.families.hybrids import IMAGE_ROPE
from magicdec.model.families.planned import FREE, NEXT_TOKENS
from magicdec.model.presets.presets import PRESETS
from magicdec.names import PLANNED

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LINEAR: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 24,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 40}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3NextForCausalLM": ("Qwen3Next", SIZES | LINEAR | SHARED),
    "Qwen3_5ForCausalLM": ("Qwen3_5Text", SIZES | LINEAR | {"intermediate_size": 48}),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeText", SIZES | LINEAR | SHARED),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3",
        SIZES
        | {"intermediate_size": 48, "moe_intermediate_size": 24, "first_k_dense_replace": 2}
        | {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
        | {"v_head_dim": 14, "n_shared_experts": 2},
    ),
    "DeepseekV4ForCausalLM": (
        "DeepseekV4",
        SIZES
        | {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"head_dim": 32, "q_lora_rank": 20, "o_lora_rank": 12, "o_groups": 2}
        | {"index_n_heads": 3, "index_head_dim": 10, "index_topk": 5, "hc_mult": 3}
        | {"compress_ratios": [0, 4, 128, 4, 128, 4], "sliding_window": 16},
    ),
    "KimiLinearForCausalLM": (
        "KimiLinear",
        SIZES
        | {"intermediate_size": 48, "moe_intermediate_size": 24, "num_key_value_heads": 4}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2}
        | {"kv_lora_rank": 12, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
        | {"linear_head_dim": 10, "linear_num_heads": 3, "linear_conv_kernel_dim": 4}
        | {"pad_token_id": 0},
    ),
    "NemotronHForCausalLM": (
        "NemotronH",
        SIZES
        | {"num_hidden_layers": 7, "hybrid_override_pattern": "M-M*EME"}
        | {"intermediate_size": 48, "head_dim": 16}
        | {"num_key_value_heads": 2, "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 2}
        | {"ssm_state_size": 14, "n_routed_experts": 8, "moe_intermediate_size": 24}
        | {"moe_shared_expert_intermediate_size": 40},
    ),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybrid",
        SIZES
        | {"intermediate_size": 24, "shared_intermediate_size": 40, "num_key_value_heads": 2}
        | {"num_local_experts": 8, "mamba_n_heads": 8, "mamba_d_state": 14, "mamba_n_groups": 2}
        | {"layer_types": 2 * ["linear_attention", "linear_attention", "full_attention"]}
        | {"mamba_d_head": 8},
    ),
    "Gemma4ForCausalLM": (
        "Gemma4Text",
        SIZES
        | {"intermediate_size": 48, "head_dim": 16, "num_key_value_heads": 4}
        | {"global_head_dim": 24, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"sliding_window": 16, "hidden_size_per_layer_input": 0},
    ),
}
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())["read"]
COMPUTED = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"}
H = Hardware(1e12, 1e15)


def config_of(architecture: str, changes: dict[str, Any] | None = None) -> Any:
    name, fields = MODELS[architecture]
    return getattr(transformers, f"{name}Config")(**fields | (changes or {}))


def saved(architecture: str) -> dict[str, Any]:
    """The fields of a file, as transformers writes them where it writes those that are read."""
    raw = json.loads(json.dumps(config_of(architecture).to_dict(), default=str))
    for field in ("layer_types", "per_layer_config", "mlp_layer_types", "compress_rates"):
        raw.pop(field, None)
    if architecture == "DeepseekV3ForCausalLM":
        del raw["head_dim"]  # that of the rotated part
    return MODELS[architecture][1] | raw | {"architectures": [architecture]}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return parse_hf_config(raw, "test")


def test_every_planned_family_is_tested() -> None:
    text_models = {name for name in PLANNED if not name.endswith("ForConditionalGeneration")}
    assert set(MODELS) == text_models | COMPUTED


@pytest.mark.parametrize("architecture", MODELS)
def test_transformers_counts_the_same_parameters(architecture: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config_of(architecture))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert costs.stored_bytes(parse(saved(architecture)), Shard(), 1, False) == expected


@pytest.mark.parametrize("architecture", MODELS)
def test_ranks_share_what_transformers_has(architecture: str) -> None:
    """Two ranks have all weights together, and some twice: those of no head."""
    config = parse(saved(architecture))
    whole = costs.linear_parameters(config, Shard())
    both = sum(costs.linear_parameters(config, Shard(rank, 2)) for rank in range(2))
    assert (both == whole) is not architecture.startswith(("Deepseek", "Kimi"))
    assert whole <= both < 2 * whole


def test_a_sequences_state_is_that_of_transformers() -> None:
    """The state of linear layers, whose inputs transformers keeps one more of; and K and V."""
    architecture = "Qwen3_5ForCausalLM"
    model = transformers.Qwen3_5ForCausalLM(config_of(architecture)).eval()
    found = model(torch.arange(10)[None], use_cache=True).past_key_values
    linear = found.layers[0]
    full = found.layers[3]
    config = parse(saved(architecture))
    channels = 2 * 2 * 8 + 4 * 24
    assert linear.recurrent_states[0].numel() == 4 * 8 * 24
    assert linear.conv_states[0].numel() == 4 * channels
    by_hand = 4 * 8 * 24 * 4 + 3 * channels * 2
    assert config.kinds[0].mixer is not None
    assert config.kinds[0].mixer.state_bytes(Shard(), 2) == by_hand
    assert costs.state_bytes(config, Shard(), 2) == 5 * by_hand
    token_bytes = (full.keys.numel() + full.values.numel()) // 10
    assert costs.kv_bytes_per_token(config, Shard(), 2) == 2 * token_bytes


def test_a_tokens_cache_by_hand() -> None:
    def per_token(name: str, num_ranks: int = 1) -> int:
        return costs.kv_bytes_per_token(PRESETS[name].config, Shard(0, num_ranks), 2)

    assert per_token("qwen3.5-27b") == 16 * 2 * 4 * 256 * 2
    assert per_token("deepseek-v3") == per_token("deepseek-v3", 8) == 61 * (512 + 64) * 2
    assert per_token("gemma-4-31b") == (50 * 2 * 16 * 256 + 10 * 2 * 4 * 512) * 2
    assert per_token("deepseek-v4-flash") == 21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128
    states = costs.state_bytes(PRESETS["qwen3.5-27b"].config, Shard(), 2)
    assert states == 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 48 * 128) * 2)


def test_a_forward_of_linear_layers_reads_and_writes_their_states_once() -> None:
    """And of each token that may be forgotten what it writes, which the next forward reads."""
    config = PRESETS["qwen3.5-27b"].config
    deployment = Deployment(config, H, 2)
    entry = 65536
    state = costs.state_bytes(config, Shard(), 2)
    written = 48 * 4 * (16 * 128 + 48 * 128 + 48)
    one, five = (deployment.forward(3, T, 100).kv_bytes for T in (1, 5))
    assert one == 3 * (101 * entry + 2 * (state + written))
    assert five == 3 * (105 * entry + 2 * (state + 5 * written))
    # A part of a prompt: only the last token's state is kept.
    assert deployment.forward(3, 5, 100, num_logits=1).kv_bytes == 3 * (105 * entry + 2 * state)
    assert state == 8 * costs.state_bytes(config, Shard(0, 8), 2)  # two key heads each


def test_the_published_fields_of_kimi_linear_are_read() -> None:
    """Its name says 48 billion parameters, of which 3 are used for a token."""
    published = PUBLISHED["kimi-linear-48b-a3b"]
    config = parse(published)
    fields = {name: value for name, value in published.items() if name != "architectures"}
    other = transformers.KimiLinearConfig(**fields)
    linear, full = (config.kinds[n].mixer for n in (0, 3))
    assert linear is not None and full is not None
    kinds = {"linear_attention": linear, "full_attention": full}
    assert [kind.mixer for kind in config.kinds] == [kinds[name] for name in other.layer_types]
    assert [kind.has_mlp for kind in config.kinds] == [True] + [False] * 26
    total = costs.stored_bytes(config, Shard(), 1, False)
    with torch.device("meta"):
        model = transformers.KimiLinearForCausalLM(other)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert 47e9 < total < 50e9
    used = Deployment(config, H, 2).forward(1, 1, 0).linear_flops / 2
    assert 2.5e9 < used < 3.5e9
    assert costs.kv_bytes_per_token(config, Shard(), 2) == 7 * 576 * 2
    state = 20 * (32 * 128 * 128 * 4 + 3 * 3 * 4096 * 2)
    assert costs.state_bytes(config, Shard(), 2) == state
    four = Deployment(config, H, 2).forward(1, 4, 0).kv_bytes
    assert four == 7 * 4 * 576 * 2 + 2 * (state + 4 * 20 * 3 * 32 * 128 * 4)


@pytest.mark.parametrize(
    ("name", "billions", "used", "alone"),
    [
        ("nemotron-h-8b", (8.0, 8.2), (7.4, 7.7), 4),
        ("nemotron-3-nano-30b-a3b", (31, 32), (3.0, 3.6), 6),
        ("granite-4.0-h-350m", (0.33, 0.35), (0.33, 0.35), 0),
    ],
)
def test_published_state_spaces_are_counted(
    name: str, billions: tuple[float, float], used: tuple[float, float], alone: int
) -> None:
    """As many parameters as transformers has, and as their names say."""
    published = PUBLISHED[name]
    config = parse(published)
    assert config.num_mixers_alone == alone
    fields = {field: value for field, value in published.items() if field != "architectures"}
    architecture = published["architectures"][0]
    kind = architecture.removesuffix("ForCausalLM")
    with torch.device("meta"):
        other = getattr(transformers, f"{kind}Config")(**fields)
        model = getattr(transformers, architecture)(other)
    total = costs.stored_bytes(config, Shard(), 1, False)
    assert total == sum(parameter.numel() for parameter in model.parameters())
    assert billions[0] * 1e9 < total < billions[1] * 1e9
    multiplied = Deployment(config, H, 2).forward(1, 1, 0).linear_flops / 2
    assert used[0] * 1e9 < multiplied < used[1] * 1e9


def test_a_text_and_its_states_of_nemotron_h_by_hand() -> None:
    """24 state spaces, 24 MLPs and 4 layers of attention, which are 28 layers here."""
    config = parse(PUBLISHED["nemotron-h-8b"])
    assert config.num_layers == 28
    assert sum(kind.mixer is None for kind in config.kinds) == 4
    assert costs.kv_bytes_per_token(config, Shard(), 2) == 4 * 2 * 8 * 128 * 2
    state = 24 * (128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2)
    assert costs.state_bytes(config, Shard(), 2) == state
    forward = Deployment(config, H, 2, tp=2).forward(1, 1, 0)
    assert forward.all_reduces[0][0] == 52, "one for each part"


def test_a_state_space_has_the_state_of_transformers() -> None:
    architecture = "NemotronHForCausalLM"
    model = transformers.NemotronHForCausalLM(config_of(architecture)).eval()
    found = model(torch.arange(10)[None], use_cache=True).past_key_values.layers[0]
    numbers = 6 * 10 * 14
    channels = 6 * 10 + 2 * 2 * 14
    assert found.recurrent_states[0].numel() == numbers
    assert found.conv_states[0].numel() == 4 * channels
    mixer = parse(saved(architecture)).kinds[0].mixer
    assert mixer is not None
    assert mixer.state_bytes(Shard(), 2) == 4 * numbers + 2 * 3 * channels
    assert mixer.written_bytes(Shard()) == 4 * (2 * 14 + 6 * 10 + 6)
    # A decay, a product with B added, and a product with C, of each number and token.
    assert mixer.flops(Shard(), 3, 100) == 3 * numbers * (1 + 2 + 2)
    half = mixer.state_bytes(Shard(1, 2), 2)
    assert 2 * half == mixer.state_bytes(Shard(), 2)


def test_the_layers_of_nemotron_h_need_no_number() -> None:
    """As transformers writes its configs, and in older names."""
    raw = saved("NemotronHForCausalLM")
    less = {field: value for field, value in raw.items() if field != "num_hidden_layers"}
    assert parse(less) == parse(raw)
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    names = [older.get(name, name) for name in raw["layers_block_type"]]
    assert parse(less | {"layers_block_type": names}) == parse(raw)


def test_granite_without_experts_has_an_mlp_in_each_layer() -> None:
    architecture = "GraniteMoeHybridForCausalLM"
    changes = {"num_local_experts": 0}
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config_of(architecture, changes))
    config = parse(saved(architecture) | changes)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert costs.stored_bytes(config, Shard(), 1, False) == expected
    names = ["mamba", "mamba", "attention"] * 2
    assert parse(saved(architecture) | changes | {"layer_types": names}) == config


def test_latents_are_read_once_for_all_heads() -> None:
    config = PRESETS["deepseek-v3"].config
    one, eight = (Deployment(config, H, 2, tp).forward(2, 3, 1000) for tp in (1, 8))
    assert one.kv_bytes == eight.kv_bytes == 2 * 1003 * 61 * 1152
    pairs = 3 * 1000 + 1 + 2 + 3
    assert one.attention_flops == 2 * 61 * 128 * (2 * 576 + 2 * 512) * pairs
    assert one.attention_flops == 8 * eight.attention_flops


def test_compressed_caches_are_read_by_window_choice_and_rate() -> None:
    config = PRESETS["deepseek-v4-flash"].config
    cost = Deployment(config, H, 2).forward(1, 2, 100_000)
    window = 2 + 127
    sparse = (window + 2 * 512) * 512 + 100_002 // 4 * 128
    dense = (window + 100_002 // 128) * 512
    assert cost.kv_bytes == 2 * (2 * window * 512 + 21 * sparse + 20 * dense)
    early = Deployment(config, H, 2).forward(1, 1, 7)  # two entries, of which none is left out
    assert early.kv_bytes == 2 * (43 * 8 * 512 + 21 * 2 * (512 + 128))


def test_stored_experts_have_bytes_of_their_own() -> None:
    """FP4 experts beside FP8 layers and plain ends."""
    config = PRESETS["deepseek-v4-flash"].config
    experts = config.experts
    assert experts is not None
    one = costs.expert_parameters(config, Shard()) // experts.num_experts
    assert one == 43 * 3 * 4096 * 2048
    deployment = Deployment(config, H, 2, low_bit="stored")
    whole = costs.weight_bytes(config, Shard(), 2, "stored")
    read = deployment.forward(1, 1, 0).weight_bytes
    assert whole - read == pytest.approx(250 * one * 4.25 / 8, rel=1e-6)
    plain = costs.linear_parameters(config, Shard()) - 256 * one - 129280 * 4096
    matrix_bytes = 256 * one * 4.25 / 8 + plain * (1 + 1 / 128**2) + 129280 * 4096 * 2
    vectors = whole - matrix_bytes
    assert 0 < vectors < 0.002 * whole
    v3 = costs.weight_bytes(PRESETS["deepseek-v3"].config, Shard(), 2, "stored")
    assert v3 == pytest.approx(671.0e9 - 2 * 129280 * 7168 + 2 * 129280 * 7168, rel=1e-3)


def test_weights_that_are_there_say_how_experts_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset of gpt-oss has experts in MXFP4; a checkpoint's are held in other groups, and count
    as its tensors say, on average with the rest."""
    published = PRESETS["gpt-oss-20b"].config
    assert published.experts is not None and published.experts.stored_bytes == 4.25 / 8
    monkeypatch.setattr(source, "bytes_in_groups", lambda *given: (1.125, 0.25, 0.0))
    held = source.with_stored_bytes(published, RandomWeights({}))
    assert held.experts is not None and held.experts.stored_bytes is None
    number = costs.expert_parameters(held, Shard())
    biases = costs.expert_biases(held, Shard()) * 2
    average = 0.75 * 1.125 + 0.25 * 2
    assert costs.expert_bytes(held, Shard(), 2, "stored") == round(number * average) + biases
    assert costs.expert_bytes(published, Shard(), 2, "stored") == number * 4.25 / 8 + biases


def test_every_token_goes_to_the_shared_expert() -> None:
    config = PRESETS["qwen3.5-35b-a3b"].config
    one, many = (Deployment(config, H, 2).forward(B, 1, 0) for B in (1, 10_000))
    assert many.weight_bytes == costs.weight_bytes(config, Shard(), 2)
    unread = 40 * (256 - 8) * 3 * 2048 * 512
    assert many.weight_bytes - one.weight_bytes == 2 * unread
    multiplied = costs.linear_parameters(config, Shard()) - unread
    assert one.linear_flops == 2 * multiplied
    shared = [shape for shape in costs.matrices(config, Shard()) if shape == (1024, 2048)]
    assert len(shared) == 40 * (256 + 1)


WAYS = (
    "run --model {}",
    "serve --model {}",
    "latency --model {}",
    "run --model demo --draft model:{}",
    "model check {}",
    "model convert {} --out out.safetensors",
)


@pytest.mark.parametrize("way", WAYS)
def test_what_computes_refuses_a_model_that_only_the_plan_knows(
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "gemma"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(saved("Gemma4ForCausalLM")))
    names = [str(directory)] + ["random:deepseek-v3"] * (not way.startswith("model"))
    for name, named in zip(names, ("global_head_dim", "kv_lora_rank"), strict=False):
        code, out, err = command(*way.format(name).split())
        assert code == 2 and out == "" and err.count("\n") == 1
        plain = name.removeprefix("random:")
        assert f"its config has {named}" in err and "does not compute" in err
        assert f"`magicdec plan --model {plain}` predicts" in err


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v4-flash", "gemma-4-31b"])
def test_the_plan_says_that_a_run_would_refuse(
    name: str, command: Callable[..., tuple[int, str, str]]
) -> None:
    flags = "--bandwidth 3350 --flops 989 --conditional_acceptance 0.8 --B 1 --prefix_len 4096"
    code, out, _ = command("plan", "--model", name, *flags.split())
    assert code == 0 and out.startswith("predicted, not measured")
    assert f"a run refuses this model: {PRESETS[name].config.planned_only}" in out
    assert ("in stored" in out) is name.startswith("deepseek")


def test_the_text_of_a_model_that_also_sees_is_planned() -> None:
    text = saved("Qwen3_5ForCausalLM")
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "vision_config": {"depth": 27},
        "image_token_id": 5,
    }
    found = parse(whole)
    assert found.architecture == "Qwen3_5ForConditionalGeneration"
    assert dataclasses.replace(found, architecture="Qwen3_5ForCausalLM") == parse(text)
    with pytest.raises(ValueError, match=r"^text_config \[\] is not a JSON object"):
        parse(whole | {"text_config": []})


def other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 2 or 2
    if isinstance(value, float):
        return value * 2 or 0.5
    return "other" if isinstance(value, str) else 16


# Fields that another field of the same file replaces, and the base of a rotary embedding.
STATED_ELSEWHERE = {"rope_parameters", "layer_types", "compress_rates", "mlp_layer_types"}


@pytest.mark.parametrize("architecture", MODELS)
def test_another_value_is_counted_or_refused(architecture: str) -> None:
    raw = saved(architecture)
    base = parse(raw)
    ignored = {field for fields in FREE.values() for field in fields} | STATED_ELSEWHERE
    changed = 0
    for field in (f.name for f in dataclasses.fields(config_of(architecture))):
        if is_irrelevant(field) or field in ignored | set(NEXT_TOKENS):
            continue
        changed += 1
        try:
            assert parse(raw | {field: other(raw.get(field))}) != base, f"{field} changes nothing"
        except ValueError as error:
            follows = field == "num_attention_heads" and "num_key_value_heads" in str(error)
            assert follows or field in str(error) or "experts" in str(error), f"{field}: {error}"
    assert changed > 10


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2]}},
            "linear_attn_config: full_attn_layers and kda_layers are not the numbers 1 to 6",
        ),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"gate": 1}},
            "linear_attn_config: gate is not counted",
        ),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"full_attn_layers": ["1"], "kda_layers": [2, 3, 4, 5, 6]}},
            "linear_attn_config: full_attn_layers and kda_layers are not the numbers 1 to 6",
        ),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": [4]},
            r"linear_attn_config \[4\] is not a JSON object",
        ),
        (
            "KimiLinearForCausalLM",
            {"mlp_layer_types": ["sparse"] * 6},
            "has other layers without experts than the first 1",
        ),
        ("Qwen3_5ForCausalLM", {"logit_scale": 2.0}, "logit_scale 2.0 is not known for Qwen3_5"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["mamba"] * 6}, "'mamba' is not counted; choose"),
        ("Qwen3_5ForCausalLM", {"layer_types": ["full_attention"]}, "is no list of 6 types"),
        ("Qwen3_5ForCausalLM", {"linear_num_key_heads": 3}, "linear_num_value_heads 4 is not a mu"),
        ("Qwen3_5ForCausalLM", {"attn_output_gate": False}, "attn_output_gate False is not supp"),
        (
            "Qwen3_5ForCausalLM",
            {"quantization_config": {"quant_method": "fp8"}},
            "bytes of these weights are not counted",
        ),
        ("Qwen3_5MoeForCausalLM", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supp"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 7}, "first_k_dense_replace 7 is no"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (
            "DeepseekV3ForCausalLM",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "choose fp8 with a weight_block_size",
        ),
        ("DeepseekV4ForCausalLM", {"compress_ratios": [0, 4]}, "for each of 6 layers"),
        ("DeepseekV4ForCausalLM", {"compress_ratios": [2] * 6}, "is no list of 0, 4 or 128"),
        ("DeepseekV4ForCausalLM", {"dspark_block_size": 5}, "dspark_block_size 5 is not known"),
        ("Gemma4ForCausalLM", {"hidden_size_per_layer_input": 256}, r"\(per-layer embeddings\)"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": None, "hybrid_override_pattern": "M-X"},
            "hybrid_override_pattern 'M-X' has parts that are not counted; choose from M,",
        ),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": None, "hybrid_override_pattern": "M--*EME"},
            "layers_block_type: mlp behind mlp is not counted",
        ),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ["moe"] * 7, "hybrid_override_pattern": None},
            "layers_block_type: moe behind nothing is not counted",
        ),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ["gru"] * 7},
            "layers_block_type .* has parts that are not counted; choose from linear_attention",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M-M*EM-"},
            "layers_block_type and hybrid_override_pattern contradict each other",
        ),
        (
            "NemotronHForCausalLM",
            {"num_hidden_layers": 8},
            "layers_block_type has 7 layers, and num_hidden_layers is 8",
        ),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": None, "hybrid_override_pattern": None},
            "layers_block_type is missing",
        ),
        ("NemotronHForCausalLM", {"moe_latent_size": 8}, "moe_latent_size 8 is not supported"),
        (
            "GraniteMoeHybridForCausalLM",
            {"mamba_d_head": 9},
            "mamba_d_head 9 times mamba_n_heads 8 is not mamba_expand times hidden_size, 64",
        ),
        ("Gemma4ForCausalLM", {"enable_moe_block": True}, "enable_moe_block True is not supported"),
    ],
)
def test_refused_by_name(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(saved(architecture) | changes)


def test_names_of_the_images_places_and_of_fixed_fields_do_not_count() -> None:
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    raw = saved("Qwen3_5ForCausalLM") | {"rope_parameters": rope}
    images = dict(zip(IMAGE_ROPE, ([1, 1, 0], True), strict=True))
    assert parse(raw | {"rope_parameters": rope | images}) == parse(raw)
    assert parse(raw).rope.rotary_dim == 4 and math.isclose(parse(raw).rope.theta, 1e7)
    with pytest.raises(ValueError, match="partial_rotary_factor is stated twice"):
        parse(raw | {"partial_rotary_factor": 0.5})
    assert not set(FIXED) & {field for fields in FREE.values() for field in fields} - {
        "rope_scaling",
        "rope_theta",
        "partial_rotary_factor",
    }
