"""The fields of a config.json: the fields that do not affect the result, and the values that each field may have."""

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, get_args, get_type_hints

from weft.errors import ConversionError
from weft.models.config import HybridConfig

Raw = dict[str, Any]
"""The content of a config.json."""
KEPT = frozenset(
    (
        *("architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range"),
        *("max_position_embeddings", "model_type", "num_hidden_layers", "output_router_logits"),
        *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "torch_dtype", "transformers_version"),
        *("use_cache", "pad_token_id", "rope_theta", "rope_scaling", "rope_parameters"),
        "partial_rotary_factor",
    )
)
"""Fields that every family accepts: either the family reads the field, or the result does not depend on it."""
MEANINGLESS = frozenset(
    (
        # Fields about files, tasks and printing, which older releases of transformers write for every family.
        *("_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset"),
        *("attn_implementation", "_flash_attn_2_enabled", "add_cross_attention", "chunk_size_feed_forward"),
        *("cross_attention_hidden_size", "decoder_start_token_id", "finetuning_task", "id2label", "label2id"),
        *("is_decoder", "is_encoder_decoder", "output_attentions", "output_hidden_states", "prefix", "problem_type"),
        *("pruned_heads", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss"),
        *("tie_encoder_decoder", "tokenizer_class", "torchscript", "use_bfloat16", "model_max_length"),
        *("max_sequence_length", "cache_implementation", "num_logits_to_keep", "logits_to_keep", "unk_token_id"),
        *("_attn_implementation_internal", "_experts_implementation", "_experts_implementation_internal"),
        *("base_model_tp_plan", "base_model_pp_plan", "keys_to_ignore_at_inference", "ignore_index"),
        *("classifier_dropout", "gradient_checkpointing", "model_parallel", "neftune_noise_alpha"),
        # Generation settings, which older releases write into config.json.
        *("bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id"),
        *("forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size"),
        *("num_beam_groups", "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values"),
        *("repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p"),
        "typical_p",
        # Fields of other programs; transformers reads none of them.
        *("is_llama_config", "rope_interleaved", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    )
)
"""Fields that do not affect a model. They are accepted. A saved config.json has them only if it is the original."""
WITHOUT_EFFECT: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"), 0),
    **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop", "activation_dropout", "residual_dropout"), 0),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window", "residual_in_fp32"), False),
    "pretraining_tp": 1,
}
"""Fields, each with the value that switches it off. With this value, every family accepts the field, even a family that
does not know it."""


def lacking(raw: Raw, known: Collection[str]) -> set[str]:
    """Return the fields of `raw` that are not `known` and could change the result. A field that is null is ignored."""
    unknown = {name for name in raw.keys() - set(known) if raw[name] is not None}
    return {name for name in unknown if name not in WITHOUT_EFFECT or raw[name] != WITHOUT_EFFECT[name]}


MOST_LAYERS = 10_000
LARGEST = 1 << 31
"""The largest whole number that a field may have."""
LAYERS = frozenset(("num_hidden_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"))
WHOLE = LAYERS | frozenset(
    (
        *("num_attention_heads", "num_key_value_heads", "num_experts", "num_local_experts", "num_experts_per_tok"),
        *("first_k_dense_replace", "n_shared_experts", "full_attention_interval", "decoder_sparse_step"),
        *("mamba_n_heads", "mamba_expand", "shared_intermediate_size", "intermediate_size", "hidden_size"),
        *("max_window_layers", "rotary_dim", "max_position_embeddings", "original_max_position_embeddings"),
        *("moe_intermediate_size", "sliding_window", "no_rope_layer_interval", "qk_nope_head_dim"),
        *(
            "qk_rope_head_dim",
            "head_dim",
            "expand",
            "num_heads",
            "attn_rotary_emb",
            "attention_head_dim",
            "mamba_d_ssm",
            "linear_head_dim",
        ),
    )
)
NUMBERS = frozenset(
    (
        *("rope_theta", "partial_rotary_factor", "time_step_min", "rope_local_base_freq", "lm_head_multiplier"),
        *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "ssm_in_multiplier"),
    )
)
TRUTHS = frozenset(("attention_bias", "use_qk_norm", "use_sliding_window", "tie_word_embeddings", "qkv_bias"))
LISTS = frozenset(
    (
        *("layer_types", "layers_block_type", "mlp_only_layers", "attn_layer_indices", "time_step_limit"),
        *(
            "no_rope_layers",
            "mtp_layers_block_type",
            "attn_type_list",
            "mlp_layer_types",
            "ssm_multipliers",
            "mlp_multipliers",
        ),
    )
)
TABLES = frozenset(("rope_parameters", "rope_scaling", "quantization_config", "text_config", "linear_attn_config"))
TEXTS = frozenset(("hybrid_override_pattern", "mtp_hybrid_override_pattern", "position_embedding_type"))
"""Fields that must be strings. The sets `WHOLE` to `TEXTS` determine the types of the fields that are not in a family's
`Family.fields`. Their values may also be null."""


def check_values(raw: Raw, fields: Mapping[str, tuple[str, Any]]) -> None:
    """Raise `ConversionError` if a value has the wrong type or is out of range. `fields`: see `Family.fields`."""
    for name, value in raw.items():
        if name in fields:
            kinds = _kinds_of(fields[name][0])
        else:
            named = ((WHOLE, int), (NUMBERS, float), (TRUTHS, bool), (LISTS, list), (TABLES, dict), (TEXTS, str))
            kinds = frozenset(kind for names, kind in named if name in names)
            kinds |= {type(None)} if kinds else set()
        if kinds and not any(_is(value, kind) for kind in kinds):
            raise ConversionError(f"{name}={_shown(value)}: must be {' or '.join(sorted(map(_named, kinds)))}")
        if int in kinds and isinstance(value, int) and not -LARGEST <= value <= LARGEST:
            raise ConversionError(f"{name}={_shown(value)}: must be from {-LARGEST} to {LARGEST}")
        if name in LAYERS and value is not None and not 0 <= value <= MOST_LAYERS:
            raise ConversionError(f"{name}={value}: must be from 0 to {MOST_LAYERS}")


@functools.cache
def _kinds_of(ours: str) -> frozenset[Any]:
    hint = get_type_hints(HybridConfig)[ours]
    return frozenset(get_args(hint)) or frozenset((hint,))


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind) if isinstance(kind, type) else True


def _named(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
    return {**names, dict: "an object", type(None): "null"}.get(kind, str(kind))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
