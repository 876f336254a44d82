"""A hundred wrong settings and more: each is one line with the setting, its value, the rule and the fix."""

import re

import pytest

from weft.train.config import ConfigError, parse_config

WRONG = """
model.pattern=
model.pattern=[*-
model.pattern=*-]
model.pattern=[]
model.pattern=[[*-]]
model.pattern=[*-][*Q]
model.pattern=Q
model.pattern=[Q]
model.pattern=*x
model.pattern=7
model.vocab_size=0
model.vocab_size=255
model.vocab_size=-1
model.vocab_size=2.5
model.vocab_size=many
model.hidden_size=0
model.hidden_size=true
model.hidden_size=99999999999999999999
model.num_attention_heads=3
model.num_attention_heads=0
model.num_key_value_heads=3
model.num_key_value_heads=0
model.head_dim=3
model.head_dim=0
model.rope_theta=-1
model.rope_theta=nan
model.rope_theta=inf
model.intermediate_size=0
model.num_experts=0
model.num_experts_per_tok=0
model.moe_intermediate_size=-2
model.shared_expert_intermediate_size=-1
model.router_score=tanh
model.norm_topk_prob=1
model.routed_scaling_factor=0
model.n_group=0
model.topk_group=0
model.expert_bias=yes
model.aux_loss_coef=-1
model.z_loss_coef=-0.1
model.mtp_loss_coef=-1
model.capacity_factor=0
model.rms_norm_eps=0
model.tie_word_embeddings=2
model.recompute=["everything"]
model.recompute=attend
data.paths=text.txt
data.paths=[1, 2]
data.paths=["a\\u0000b"]
data.include=[]
data.kind=csv
data.kind=jsonl
data.field=body
data.weights=[1.0]
data.weights=1
data.packing=tight
data.token_dtype=uint8
data.token_dtype=float32
data.validation_paths=["a.txt"]
data.include=["*.md"]
data.include=*.md
data.tokenizer=absent.json
data.tokenizer=3.5e
data.sequence_length=0
data.sequence_length=-5
data.sequence_length=1e3
data.validation_fraction=0
data.validation_fraction=1
data.validation_fraction=nan
data.seed=-1
data.seed=9223372036854775808
train.steps=0
train.steps=-1
train.steps=1e2
train.steps=ten
train.steps=
train.steps=[3]
train.global_batch_size=0
train.global_batch_size=7
train.global_batch_size=8
train.global_batch_size=100
train.microbatch_size=0
train.microbatch_size=3
train.microbatch_size=64
train.precision=fp16
train.precision=BF16
train.precision=16
train.seed=-1
train.seed=1099511627776
train.seed=18446744073709551616
train.validate_every=-1
train.validation_batches=0
train.gradient_clip=-1
train.gradient_clip=nan
train.log_every=0
train.parameter_norms_every=-2
train.watchdog=-1
train.watchdog=soon
train.activation_checkpointing=1
train.skip_spikes=1
train.skip_spikes=-3
train.stop_after=-1
train.profile_step=-1
train.profile_step=1001
train.profile_steps=5
train.profile_steps=0
train.peak_tflops=-1
checkpoint.keep_best=1
run.loggers=["mlflow"]
run.loggers=wandb
train.recompute_every=2
train.recompute_every=0
train.keep_products=true
train.overlap=true
train.overlap=on
train.delay_wgrad=true
train.early_release=true
train.expert_bias_rate=0
train.expert_bias_rate=0.5
optimizer.lr=0
optimizer.lr=-1
optimizer.lr=nan
optimizer.lr=1e999
optimizer.betas=[0.9]
optimizer.betas=[0.9, 1.0]
optimizer.betas=0.9
optimizer.betas=[-0.1, 0.9]
optimizer.eps=0
optimizer.weight_decay=-0.1
optimizer.name=
optimizer.name=AdamX
optimizer.name=torch.optim.AdamW
optimizer.name=pkg:
optimizer.name=3
optimizer.options=3
optimizer.options={lr = 3.0}
optimizer.flat=Muon
optimizer.adamw_for=["x*"]
schedule.warmup_steps=-1
schedule.warmup_steps=1001
schedule.warmup_steps=1.5
schedule.shape=step
schedule.shape=1
schedule.decay_fraction=0
schedule.decay_fraction=0.5
train.ema_decay=1
train.ema_decay=-0.5
schedule.min_lr_ratio=-0.1
schedule.min_lr_ratio=1.1
sharding.strategy=zero3
sharding.strategy=3
sharding.dp_shard=0
sharding.dp_shard=3
sharding.dp_shard=-2
sharding.dp_replicate=0
sharding.dp_replicate=3
sharding.outer_strategy=optim
sharding.outer_strategy=grads
sharding.reshard_after_forward=-2
sharding.reshard_after_forward=3
sharding.reshard_after_forward=maybe
sharding.offload=1
sharding.ep=0
sharding.ep=2
sharding.ep=3
sharding.graphs=["experts"]
sharding.graphs=["attention"]
checkpoint.every=-1
checkpoint.keep=0
checkpoint.memory_every=-1
checkpoint.asynchronous=1
run.name=
run.name=..
run.name=a/b
run.name=two\\nlines
run.resume=maybe
run.patience=0
""".strip().splitlines()

UNKNOWN = """
train.stesp=3
train.lr=1
trian.steps=3
steps=3
train.steps
=3
.steps=3
train.=3
model.hiden_size=3
data.zzz=3
""".strip().splitlines()


def refusal(override):
    """What a person reads who starts two ranks with this setting."""
    with pytest.raises(ConfigError) as caught:
        parse_config("", [override]).validate(2)
    line = str(caught.value)
    assert line.isprintable() and len(line) < 500, line
    return line


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_a_one_line_error_with_the_setting_its_value_the_rule_and_the_fix(override):
    override = override.replace("\\n", "\n")
    line = refusal(override)
    setting, _, value = override.partition("=")
    section, _, name = setting.partition(".")
    assert setting in line or (line.startswith(f"[{section}]") and (name in line or section == "model")), line
    digits = re.sub(r"[^\w]", "", value.split("\n")[0].split("\\")[0]).removesuffix("0")
    assert digits in re.sub(r"[^\w]", "", line) or value in ("1e3", "1e2", "1e999"), line
    rules = ("must", "has no", "cannot", "is not", "needs", "expected", "unknown", "without", "at least", "available")
    assert any(word in line for word in (*rules, "hides", "never", "opens", "closes", "do not")), line


@pytest.mark.parametrize("override", UNKNOWN)
def test_an_unknown_setting_is_one_line_with_what_there_is(override):
    line = refusal(override)
    assert any(words in line for words in ("did you mean", "sections:", "knows", "must be SECTION.NAME=VALUE")), line


def test_there_are_more_than_a_hundred():
    assert len(set(WRONG + UNKNOWN)) == len(WRONG + UNKNOWN) >= 120


def test_the_default_configuration_needs_no_setting():
    parse_config("").validate(2)
