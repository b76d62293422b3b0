"""Of sink logits in the softmax, and of gpt-oss's experts."""

from __future__ import annotations

from faults.fault import Fault, Property

SINKS = "test_sink_logits.py::"
CASE = "sdpa, blocks of 4-(6, 2, 16)-FullKV()-None-torch.float32"
GPT_OSS = "test_gpt_oss.py::"
STACKED = "model/checkpoint/stacked_experts.py"

PROPERTIES = (
    Property(
        "A sink logit takes weight in the softmax of its head and has no value.",
        f"{SINKS}test_a_backend_equals_attention_written_out[{CASE}]",
        (
            Fault(
                "the layer before",
                "attention/backend.py",
                "self.sinks[layer]",
                "self.sinks[layer - 1]",
            ),
            Fault(
                "weights that add up to one",
                "attention/sinks.py",
                "dim=-1)[..., :-1]",
                "dim=-1)[..., :-1] * 1.5",
            ),
            Fault(
                "a score that is divided by the root of the head size",
                "attention/sinks.py",
                "sinks * size**0.5",
                "sinks",
            ),
        ),
    ),
    Property(
        "SnapKV's scores are weights beside the sink logits.",
        f"{SINKS}test_weights_that_keys_receive[torch.float32]",
        (
            Fault(
                "the queries of a window in another order",
                "speculation/observation.py",
                "sinks.repeat_interleave(window).view(groups, -1)",
                "sinks.repeat(window).view(groups, -1)",
            ),
        ),
    ),
    Property(
        "A gpt-oss as it is published has transformers' logits.",
        f"{GPT_OSS}test_logits_are_transformers",
        (
            Fault(
                "gates and ups that are not by turns",
                STACKED,
                "Share(name, expert, number * apart, step, is_transposed)",
                "Share(name, expert, 0, step, is_transposed)",
            ),
            Fault(
                "a gate without its limit",
                "model/elementwise/operators.py",
                "gate = gate.clamp(max=limit)",
                "pass",
            ),
            Fault(
                "no 1 beside the factor",
                "model/elementwise/operators.py",
                "(up.clamp(-limit, limit) + 1)",
                "up.clamp(-limit, limit)",
            ),
            Fault(
                "no bias of what experts give",
                "model/experts.py",
                "bias = down.bias if self.is_first else None",
                "bias = None",
            ),
            Fault(
                "windows on the other layers",
                "model/families/gpt_oss.py",
                "kinds(types, window)",
                "kinds(types[1:] + types[:1], window)",
            ),
        ),
    ),
)
