import dataclasses

import pytest

from weft.models import HybridConfig

WRONG = [  # options, what the message shows
    ({"vocab_size": 0}, ["vocab_size=0", "positive integer"]),
    ({"hidden_size": 64.0}, ["hidden_size=64.0", "positive integer"]),
    ({"intermediate_size": True}, ["intermediate_size=True", "positive integer"]),
    ({"num_attention_heads": -1}, ["num_attention_heads=-1", "positive integer"]),
    ({"num_key_value_heads": None}, ["num_key_value_heads=None", "positive integer"]),
    (
        {"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8},
        ["=4 must divide", "=6", "[1, 2, 3, 6]"],
    ),
    (
        {"hidden_size": 100, "num_attention_heads": 8},
        ["hidden_size=100", "num_attention_heads=8", "set head_dim"],
    ),
    ({"head_dim": 0}, ["head_dim=0", "or None"]),
    ({"head_dim": 7}, ["head_dim=7", "even"]),
    ({"hidden_size": 12, "num_attention_heads": 4}, ["3 wide", "hidden_size=12", "even"]),
    ({"rope_theta": -1}, ["rope_theta=-1", "0 for none"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan", "positive number"]),
    ({"rope_theta": float("inf")}, ["rope_theta=inf", "number, 0 for none"]),
    ({"num_experts": 0}, ["num_experts=0", "positive integer"]),
    ({"shared_expert_intermediate_size": -8}, ["shared_expert_intermediate_size=-8", "0 for no"]),
    ({"router_score": "relu"}, ["router_score='relu'", "'softmax' or 'sigmoid'"]),
    ({"aux_loss_coef": -0.1}, ["aux_loss_coef=-0.1", "0 for none"]),
    ({"capacity_factor": 0}, ["capacity_factor=0", "or None"]),
    ({"pattern": "E", "pad_to_capacity": True}, ["pad_to_capacity=True", "set capacity_factor"]),
    ({"pattern": "E", "capacity_factor": 1.0, "pad_to_capacity": True}, ['set moe_rows_per="expert"']),
    ({"norm_topk_prob": 1}, ["norm_topk_prob=1", "True or False"]),
    ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "True or False"]),
    ({"mtp_loss_coef": "0.3"}, ["mtp_loss_coef='0.3'", "number"]),
    ({"pattern": None}, ["pattern=None", "string"]),
    ({"head_dim": 9}, ["9 wide", "even head_dim"]),
    ({"pattern": "[+-]", "qk_rope_head_dim": 7}, ["qk_rope_head_dim=7", "even"]),
    ({"pattern": "[+-]", "attention_bias": "qkv"}, ["attention_bias='qkv'", "'none' or 'all' with layers '+'"]),
    ({"rope_theta": 0, "rope_local_theta": 100.0}, ["rope_local_theta=100.0", "None if rope_theta is 0"]),
    ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5", "at most 1"]),
    ({"head_dim": 8, "partial_rotary_factor": 0.4}, ["of which 3 are rotated", "even"]),
    ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling={'factor': 2.0}", "rope_type is 'linear' or"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["'linear' needs factor", "nothing else"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "gamma": 1}}, ["'gamma'", "and nothing else"]),
    (
        {"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}},
        ["'dynamic' needs at least 2 rotated pairs, not 1"],
    ),
    ({"rope_scaling": {"rope_type": "linear"}, "rope_theta": 0.0}, ["None if rope_theta is 0"]),
    ({"attention_bias": True}, ["attention_bias=True", "'none' or 'qkv' or 'all'"]),
    ({"sliding_window": 0}, ["sliding_window=0", "or None"]),
    ({"windowed": [0]}, ["windowed=[0]", "without sliding_window; set one"]),
    ({"windowed": [1], "sliding_window": 4}, ["windowed=[1]", "from 0 to 0"]),
    ({"windowed": [0, 0], "sliding_window": 4}, ["windowed=[0, 0]", "distinct"]),
    ({"residual_multiplier": 0}, ["residual_multiplier=0", "positive number"]),
    ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu' or 'clamped_swiglu' or 'gelu_tanh' or 'relu2'"]),
    ({"recompute": None}, ["recompute=None", "a list of some of 'attend' and 'experts'"]),
    ({"recompute": "attend"}, ["recompute='attend'", "a list of some of 'attend' and 'experts'"]),
    ({"recompute": [["attend"]]}, ["recompute=[['attend']]", "a list of some of 'attend' and 'experts'"]),
    ({"pad_token_id": 256}, ["pad_token_id=256", "below vocab_size=256"]),
    ({"pattern": "M", "mamba_n_groups": 3}, ["mamba_n_groups=3", "divisor of mamba_num_heads=8"]),
    (
        {"pattern": "M", "time_step_limit_max": 0.5, "time_step_limit_min": 1.0},
        ["time_step_limit_max=0.5", "more than"],
    ),
    ({"pattern": "M", "time_step_min": 1.0}, ["time_step_min=1.0", "at most time_step_max=0.1"]),
    ({"pattern": "G", "linear_num_value_heads": 6}, ["linear_num_value_heads=6", "multiple of linear_num_key_heads=4"]),
    ({"pattern": "[*E]", "shared_expert_gate": True}, ["shared_expert_gate=True", "set shared_expert_intermediate"]),
    ({"pattern": "[*E]", "n_group": 3}, ["n_group=3", "divisor of num_experts=8"]),
    ({"pattern": "[*E]", "topk_group": 2}, ["topk_group=2", "at most n_group=1"]),
    (
        {"pattern": "[*E]", "n_group": 8, "num_experts_per_tok": 2},
        ["num_experts_per_tok=2", "at most 1, the experts of"],
    ),
]


@pytest.mark.parametrize("options, shown", WRONG, ids=[str(case[0]) for case in WRONG])
def test_a_wrong_value_is_refused_with_the_value_the_rule_and_the_fix(options, shown):
    with pytest.raises(ValueError) as error:
        HybridConfig(**{"pattern": "[*-]", **options})
    assert all(part in str(error.value) for part in shown), str(error.value)
    assert "\n" not in str(error.value)


def test_attention_fields_do_not_matter_to_a_pattern_without_attention():
    HybridConfig(pattern="-", hidden_size=10, num_attention_heads=4)


def test_a_configuration_cannot_change_but_can_be_replaced():
    cfg = HybridConfig(pattern="[*-]")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.hidden_size = 64
    wider = dataclasses.replace(cfg, pattern="*", hidden_size=2 * cfg.hidden_size)
    assert [layer.symbols for layer in wider.parsed.layers] == ["*"]
    assert HybridConfig(**dataclasses.asdict(wider)) == wider


def test_a_head_that_is_not_rotated_may_have_an_odd_width():
    assert HybridConfig(pattern="*", head_dim=9, rope_theta=0.0).attention_head_dim == 9


def test_the_width_of_a_head_follows_from_the_hidden_size_unless_given():
    free = HybridConfig(pattern="*", hidden_size=96, num_attention_heads=4)
    assert free.attention_head_dim * free.num_attention_heads == free.hidden_size
    assert dataclasses.replace(free, head_dim=10).attention_head_dim == 10
