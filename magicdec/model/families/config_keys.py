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
    "shared_expert_intermediate_size": (0,),  # of Qwen3 Coder, which has none
    "sliding_window": (),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
FOREIGN = "quantization_config"
QUANTIZATION = (FOREIGN, "compression_config", "quantization")
# Files beside config.json that say what FOREIGN says, or say it alone, and the program of those
# that name none.
QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
WAY_OUT = (
    "choose a checkpoint in bfloat16, float16 or float32 (--target_dtype int8 quantises one), or "
    f"quantised by {', '.join(QUANTIZATIONS)} as "
    "docs/models.md lists"
)
IRRELEVANT_FIELDS = """
# What the checkpoint is and who made it.
architectures auto_map author base_model custom_pipelines dataset date description
finetuning_task internal_version is_llama_config language license model_name name_or_path tags task
transformers_version transformers.js_config unsloth_version version vocab_file
# Token ids and texts, and how to generate, which the flags of a run say: among them all that a
# `generation_config.json` may hold, which configs held before there was such a file.
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
assistant_lookbehind bad_words_ids begin_suppress_tokens bos_token cache_config
cache_implementation chat_template compile_config constraints continuous_batching_config
disable_compile diversity_penalty do_sample dola_layers early_stopping
encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_decoder_ids guidance_scale is_assistant
length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens
max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits
output_scores pad_token penalty_alpha prefill_chunk_size prefix prompt_lookup_num_tokens
remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate
return_legacy_cache sep_token sequence_bias speculation_type stop_strings suppress_tokens
target_lookbehind task_specific_params temperature token_healing tokenizer_class top_h top_k
top_p typical_p unk_token use_mtp watermarking_config
# How the original code ran: memory, kernels, precision, caching.
attn_implementation attention_softmax_in_fp32 bias_dropout_fusion chunk_size_feed_forward
experts_implementation gradient_checkpointing inference_runner is_decoder
masked_softmax_fusion max_batch_size max_sequence_length model_max_length n_ctx
offset_alibi output_attentions output_hidden_states output_past pad_key_length
pre_allocate_kv_cache pretraining_tp reorder_and_upcast_attn return_dict
runner_max_sequence_length scale_attention_softmax_in_fp32 seq_length skip_bias_add
skip_bias_add_qkv slow_but_exact tf_legacy_loss tie_last_hidden_states torchscript
use_bfloat16 use_cache use_return_dict validate_runner_input
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
            choices = ", ".join(
                [str(choice) for choice in FIXED[field] if choice != {}] or ["null"]
            )
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
        what = shown(table)
        if isinstance(table, dict):
            if field == FOREIGN and table.get("quant_method") in QUANTIZATIONS:
                continue
            named = [key for key in ("quant_method", "quant_algo") if table.get(key)]
            what = f"{named[0]} {table[named[0]]}" if named else what
        raise ValueError(f"{field}: {what} is not supported; {WAY_OUT}")
