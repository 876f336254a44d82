"""Trains LoRA adapters (`peft`) on a frozen Hugging Face model with weft's trainer; `--resume` resumes the newest run.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/hf_lora.py
"""

import sys

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.train import Trainer

SIZES = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIG = LlamaConfig(vocab_size=128, **SIZES)


def adapted():
    """Return a model with random weights and adapters; use `from_pretrained` instead to adapt a trained model."""
    torch.manual_seed(0)
    return get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(r=8, target_modules="all-linear"))


def shard(model, **options):
    for layer in model.get_base_model().model.layers:  # adapters lie beside the frozen weights of their layer
        weft.fully_shard(layer, **options)
    weft.fully_shard(model, **options)


def sentences(rank, ranks):
    """Return this rank's microbatches, in the form that a tokenizer returns. Rows count up from random numbers."""
    starts = torch.randint(CONFIG.vocab_size, (16, 4, 1), generator=torch.Generator().manual_seed(rank))
    return [{"input_ids": batch, "labels": batch} for batch in (starts + torch.arange(33)) % CONFIG.vocab_size]


def save_adapter(trainer, numbers):
    """Save only the adapters, for `PeftModel.from_pretrained(base, "adapter")`."""
    weights = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        trainer.model.save_pretrained(trainer.run_place.directory / "adapter", state_dict=weights)


trainer = Trainer(
    model=adapted(),
    loss=lambda model, batch: model(**batch).loss,
    data=sentences,
    shard=shard,
    config={
        "train": {"steps": 60, "global_batch_size": 8, "microbatch_size": 4},
        "optimizer": {"lr": 1e-2},
        "run": {"name": "hf-lora"},
    },
    callbacks={"end": save_adapter},
    resume="--resume" in sys.argv,
)
trainer.run()
