"""GLM-4.7-Flash: the layers of DeepSeek-V3. By default, only the first layer is dense."""

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf import deepseek_v3, depths
from weft.models.hf.deepseek_v3 import DEEPSEEK_V3, EXPERTS, LATENT, dense_first
from weft.models.hf.family import Family, Raw
from weft.models.hf.llama import MLP


def read(raw: Raw) -> Raw:
    """Return the fields of `HybridConfig` that are computed from the config.json `raw` (see `Family`)."""
    layers = raw.get("num_hidden_layers", 47)
    kinds = raw.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    dense = kinds.count("dense")
    if len(kinds) != layers or set(kinds[:dense]) - {"dense"} or set(kinds[dense:]) - {"sparse"}:
        raise ConversionError(
            f"mlp_layer_types={kinds}: must be 'dense' for the first layers and 'sparse' for the others"
        )
    if raw.get("first_k_dense_replace", dense) != dense:
        raise ConversionError(
            f"first_k_dense_replace={raw['first_k_dense_replace']}: transformers takes the number of dense "
            f"layers, {dense}, from mlp_layer_types or its default; use the same number for both"
        )
    wide = {"qk_nope_head_dim": 192, "moe_intermediate_size": 1536, **raw}
    return deepseek_v3.read({**wide, "num_hidden_layers": layers, "first_k_dense_replace": dense})


def write(cfg: HybridConfig) -> Raw:
    """Return the fields of config.json that are computed from `cfg` (see `Family`)."""
    theirs, dense = deepseek_v3.write(cfg), dense_first(cfg, "glm4_moe_lite")
    kinds = ["dense"] * dense + ["sparse"] * (theirs["num_hidden_layers"] - dense)
    return {**theirs, "mlp_layer_types": kinds}


GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    tensors={"+": LATENT, "-": MLP, "E": EXPERTS},
    fields={
        **DEEPSEEK_V3.fields,
        "hidden_size": ("hidden_size", 2048),
        "num_attention_heads": ("num_attention_heads", 20),
        "vocab_size": ("vocab_size", 154880),
        "intermediate_size": ("intermediate_size", 10240),
        "moe_intermediate_size": ("moe_intermediate_size", 1536),
        "n_routed_experts": ("num_experts", 64),
        "num_experts_per_tok": ("num_experts_per_tok", 4),
        "n_group": ("n_group", 1),
        "topk_group": ("topk_group", 1),
        "routed_scaling_factor": ("routed_scaling_factor", 1.8),
        "q_lora_rank": ("q_lora_rank", 768),
        "qk_nope_head_dim": ("qk_nope_head_dim", 192),
        "v_head_dim": ("v_head_dim", 256),
        "rms_norm_eps": ("rms_norm_eps", 1e-5),
    },
    read=read,
    write=write,
    required={"topk_method": "noaux_tc"},
    kept=frozenset(("pretraining_tp", "num_nextn_predict_layers", "num_mtp_layers")),
    depths=depths.behind_the_trunk("+E"),
)
