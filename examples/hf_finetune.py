"""Fine-tunes a Hugging Face model with weft's trainer; `--resume` resumes the newest run.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/hf_finetune.py
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.train import Trainer

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make_model():
    """Return a model with random weights; use `from_pretrained` instead to start from a trained model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model.model.embed_tokens.requires_grad_(False)  # a frozen weight does not change, and has no optimizer state
    return model


def shard(model, **options):
    for layer in model.model.layers:
        weft.fully_shard(layer, **options)
    weft.fully_shard(model, **options)


def sentences(rank, ranks):
    """Return this rank's microbatches, in the form that a tokenizer returns."""
    tokens = torch.randint(CONFIG.vocab_size, (16, 4, 33), generator=torch.Generator().manual_seed(rank))
    return [{"input_ids": batch, "labels": batch} for batch in tokens]


trainer = Trainer(
    model=make_model(),
    loss=lambda model, batch: model(**batch).loss,
    data=sentences,
    shard=shard,
    config={
        "train": {"steps": 60, "global_batch_size": 8, "microbatch_size": 4},
        "optimizer": {"lr": 1e-2},
        "run": {"name": "hf-finetune"},
    },
    callbacks={"end": lambda trainer, numbers: trainer.say(f"trained up to step {numbers['step']}")},
    resume="--resume" in sys.argv,
)
trainer.run()
