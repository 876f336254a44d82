"""transformers' Trainer, sharded by its own FSDP options, with weft in place of torch's FSDP2.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/hf_trainer.py [--torch]
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from accelerate.state import DistributedType, PartialState
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

import weft

SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


class Tokens(Dataset):
    """Rows of random tokens, the same on every rank."""

    def __init__(self, rows: int) -> None:
        self.rows = torch.randint(0, SIZES["vocab_size"], (rows, 10), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def trainer(folder: str, steps: int) -> transformers.Trainer:
    """Return a Trainer with a new model; only its options determine how the model is sharded."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    options = transformers.TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        fsdp="full_shard",
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        max_steps=steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    # On CPU, Accelerate would use DDP, since it shards only on accelerators. This makes it treat ranks as GPU ranks.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    return transformers.Trainer(model, options, train_dataset=Tokens(64), eval_dataset=Tokens(6))


def numbers(done: transformers.Trainer) -> list[str]:
    """Return the losses, norms and evaluation losses that the finished trainer has logged."""
    lines = []
    for log in done.state.log_history:
        if "grad_norm" in log:
            lines.append(f"step {log['step']} loss {log['loss']:.8f} norm {log['grad_norm']:.8f}")
        elif "eval_loss" in log:
            lines.append(f"step {log['step']} evaluation {log['eval_loss']:.8f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="leave torch's FSDP2 in place")
    if not parser.parse_args().torch:
        print(weft.drop_in())
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        whole = trainer(folders[0], steps=4)
        whole.train()
        resumed = trainer(folders[0], steps=4)
        resumed.train(resume_from_checkpoint=str(Path(folders[0]) / "checkpoint-2"))
        dist.barrier()
    assert all(isinstance(each, DTensor) for each in resumed.model.parameters())
    if dist.get_rank() == 0:
        print(*numbers(whole), sep="\n")
        assert numbers(resumed) == numbers(whole), numbers(resumed)
        print("resumed from step 2 to the same numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
