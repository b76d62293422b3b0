"""Fields of a `config.json` that no family reads. Imports no torch.

Such a field must have the only value that is computed (FIXED), or be irrelevant to greedy decoding
(IRRELEVANT, PATTERNS); else the config is refused. A test walks the config classes of transformers.
"""

from __future__ import annotations

import re
from typing import Any

from magicdec.model.families.fields import ConfigFields, shown
from magicdec.names import QUANTIZATIONS

# The values of a field under which all that reads it would compute what is computed here.
FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "bias": (False,),
    "cross_attention_hidden_size": (),
    "ff_factor": (4,),  # of Falcon 11B, which states the width too
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "qkv_bias": (False,),
    "rope_interleaved": (False,),
    "rope_scaling": ({},),
    "rope_theta": (10000.0,),
    "rotary": (True,),  # of GPT-J
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
FOREIGN = "quantization_config"
QUANTIZATION = (FOREIGN, "compression_config", "quantization")
WAY_OUT = (
    "choose a checkpoint in bfloat16, float16 or float32 (--target_dtype int8 quantises one), or "
    f"quantised by {', '.join(QUANTIZATIONS)} as "
    "docs/models.md lists"
)
IRRELEVANT_FIELDS = """
# What the checkpoint is and who made it.
architectures auto_map author base_model custom_pipelines dataset date description
finetuning_task is_llama_config language license model_name name_or_path tags task
transformers_version transformers.js_config unsloth_version version vocab_file
# Token ids and texts, and how to generate, which the flags of a run say.
bad_words_ids begin_suppress_tokens bos_token chat_template diversity_penalty do_sample
early_stopping encoder_no_repeat_ngram_size eos_token exponential_decay_length_penalty
length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_scores pad_token prefix remove_invalid_values
repetition_penalty return_dict_in_generate sep_token suppress_tokens
task_specific_params temperature tokenizer_class top_k top_p typical_p unk_token
# How the original code ran: memory, kernels, precision, caching.
attn_implementation attention_softmax_in_fp32 bias_dropout_fusion chunk_size_feed_forward
experts_implementation gradient_checkpointing inference_runner is_decoder
masked_softmax_fusion max_batch_size max_sequence_length model_max_length n_ctx
offset_alibi output_attentions output_hidden_states output_past pad_key_length
pre_allocate_kv_cache pretraining_tp reorder_and_upcast_attn return_dict
runner_max_sequence_length scale_attention_softmax_in_fp32 seq_length skip_bias_add
skip_bias_add_qkv slow_but_exact tie_last_hidden_states torchscript use_bfloat16 use_cache
use_return_dict validate_runner_input
# Training, and heads other than that of a language model.
attn_pdrop classifier_dropout embd_pdrop id2label init_device init_method init_method_std
initializer_range label2id n_special neftune_noise_alpha num_labels
output_router_logits predict_special_tokens problem_type resid_pdrop router_aux_loss_coef
# Qwen's attention beyond its trained context, of other programs: transformers does not read it.
dual_chunk_attention_config
"""
IRRELEVANT = frozenset(
    field
    for line in IRRELEVANT_FIELDS.splitlines()
    if not line.startswith("#")
    for field in line.split()
)
PATTERNS = re.compile(
    r"_.*|unsloth_.*|summary_.*|.*_token_ids?|.*dropout.*|use_flash_attn.*|use_flash_attention.*"
)


def is_irrelevant(field: str) -> bool:
    return field in IRRELEVANT or PATTERNS.fullmatch(field) is not None


def check_unread(raw: ConfigFields, architecture: str) -> None:
    """Raise ValueError for an unread field that might change the model."""
    for field, value in raw.unread().items():
        if is_irrelevant(field):
            continue
        if field not in FIXED:
            raise ValueError(
                f"{field} {shown(value)} is not known for {architecture}, and might change what "
                "it computes; remove the field if it does not"
            )
        if value not in FIXED[field]:
            choices = ", ".join([str(each) for each in FIXED[field] if each != {}] or ["null"])
            raise ValueError(
                f"{field} {shown(value)} is not supported for {architecture}; choose from {choices}"
            )


def check_quantization(raw: ConfigFields) -> None:
    """Raise ValueError unless weights are plain or by a program of QUANTIZATIONS, whose settings
    are checked with the tensors."""
    for field in QUANTIZATION:
        table = raw.get(field)
        if not table:
            continue
        method = None
        if isinstance(table, dict):
            method = table.get("quant_method") or table.get("quant_algo")
            if field == FOREIGN and table.get("quant_method") in QUANTIZATIONS:
                continue
        what = f"{method} weights are" if method else f"{shown(table)} is"
        raise ValueError(f"{field}: {what} not supported; {WAY_OUT}")
