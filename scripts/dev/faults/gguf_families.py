"""Of GGUF files of Gemma 3 and of mixtures: names, offsets of norms, experts in stacked tensors."""

from __future__ import annotations

from faults.fault import Fault, Property

FILE = "test_gguf_families.py::"
WEIGHTS = "model/checkpoint/gguf_weights.py"
TENSORS = "model/checkpoint/gguf_tensors.py"
KEYS = "model/families/gguf_architectures.py"

PROPERTIES = (
    Property(
        "Experts of a GGUF file are whole rows of its stacked tensors.",
        f"{FILE}test_tensors_are_those_of_the_checkpoint[qwen3moe]",
        (
            Fault(
                "each expert the first",
                TENSORS,
                "offset=tensor.offset + number * size",
                "offset=tensor.offset",
            ),
            Fault(
                "gate in place of up",
                TENSORS,
                '"ffn_gate_exps": [gate]',
                '"ffn_gate_exps": [up]',
            ),
        ),
    ),
    Property(
        "Norms of Gemma's GGUF files are those of its checkpoints.",
        f"{FILE}test_tensors_are_those_of_the_checkpoint[gemma3, all keys]",
        (
            Fault(
                "an offset that stays",
                TENSORS,
                "offset=self.names.norm_offset if has_offset else 0.0",
                "offset=0.0",
            ),
            Fault(
                "the norm before the MLP after attention",
                TENSORS,
                "mlp_norm: names.mlp_norm,",
                "mlp_norm: names.post_attention_norm,",
            ),
        ),
    ),
    Property(
        "Layers of Gemma's GGUF files have the windows and bases of llama.cpp.",
        f"{FILE}test_layers_of_gemma_are_those_of_llama_cpp",
        (
            Fault(
                "the first of six layers without a window",
                KEYS,
                "layer % pattern < pattern - 1",
                "layer % pattern > 0",
            ),
            Fault(
                "a scaled base of layers with a window",
                KEYS,
                'SLIDING: {"rope_type": "default", "rope_theta": base}',
                'SLIDING: {"rope_type": "default"} | scaling | {"rope_theta": base}',
            ),
            Fault(
                "the 27B's scores divided as others'",
                KEYS,
                "is_27b = num_layers == GEMMA3_27B_LAYERS",
                "is_27b = False",
            ),
            Fault(
                "a factor without a type that is ignored",
                "model/families/gguf_config.py",
                '"linear" if "rope.scaling.factor" in own else "none"',
                '"none"',
            ),
        ),
    ),
    Property(
        "Experts of a GGUF file that the metadata contradict are refused by their tensor.",
        f"{FILE}test_experts_that_are_missing_or_of_another_shape_are_named",
        (
            Fault(
                "shapes of experts that nobody compares",
                KEYS,
                "if tensor.shape != expected:",
                "if False:",
            ),
        ),
    ),
    Property(
        "Keys that would change a mixture of a GGUF file are refused.",
        f"{FILE}test_keys_that_would_change_a_mixture_are_refused",
        (
            Fault(
                "weights of experts that are scaled",
                KEYS,
                '"expert_weights_scale": (0.0, 1.0)',
                '"expert_weights_scale": (0.0, 1.0, 2.5)',
            ),
            Fault("another width of Mixtral's experts", KEYS, "if stated != width:", "if False:"),
        ),
    ),
    Property(
        "Experts are held in groups, the router is not, and the plan counts both.",
        f"{FILE}test_experts_are_held_in_groups_on_every_rank",
        (
            Fault(
                "a router in groups",
                WEIGHTS,
                "numbers = None if name.endswith(self._never_in_groups) else format_of(placed)",
                "numbers = format_of(placed)",
            ),
            Fault(
                "a router that is counted among the matrices",
                "model/checkpoint/source.py",
                "NO_MATRIX.search(parameter)",
                '"embedding" in parameter',
            ),
        ),
    ),
)
