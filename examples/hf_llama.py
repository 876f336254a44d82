"""A Hugging Face Llama, sharded by decoder layer, saved and loaded with torch Distributed Checkpoint.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/hf_llama.py --steps 30 --checkpoint /tmp/llama
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import weft

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make_model(seed: int, device: torch.device) -> LlamaForCausalLM:
    """Return a model with random weights, the same on every rank; use `from_pretrained` instead to start from a trained
    model."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(CONFIG).to(device)


def make_batch(sequences: int, device: torch.device) -> torch.Tensor:
    """Return random tokens `[sequences, 33]`, the same on every rank and in every step, for the model to memorize."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(CONFIG.vocab_size, (sequences, 33), generator=generator).to(device)


def shard(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Shard each decoder layer as one unit; the root unit has the embedding, the final norm and the head."""
    for layer in model.model.layers:
        weft.fully_shard(layer)
    return weft.fully_shard(model)


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    """Run one step on this rank's sequences; return their mean loss before the update."""
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--checkpoint", help="a new folder that all hosts see (default: a temporary one)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    def mean(loss: torch.Tensor) -> float:
        dist.all_reduce(loss)
        return loss.item() / ranks

    tokens = make_batch(4 * ranks, device).chunk(ranks)[rank]
    model = shard(make_model(0, device))
    optimizer = make_optimizer(model)
    for step in range(options.steps):
        say(f"step {step} loss {mean(train_step(model, optimizer, tokens)):.6f}")

    with tempfile.TemporaryDirectory() as temporary:
        folder = [options.checkpoint or os.path.join(temporary, "llama")]
        dist.broadcast_object_list(folder)  # all ranks use the folder of rank 0
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
        say(f"saved to {folder[0]}")

        loaded = shard(make_model(1, device))  # different weights, which the load below replaces
        loaded_optimizer = make_optimizer(loaded)
        weights, moments = get_state_dict(loaded, loaded_optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])
        set_state_dict(loaded, loaded_optimizer, model_state_dict=weights, optim_state_dict=moments)

    # The second loss is computed after a step, so it also depends on the loaded state of the optimizer.
    for name, pair in {"uninterrupted": (model, optimizer), "loaded": (loaded, loaded_optimizer)}.items():
        say(f"{name} losses " + " ".join(f"{mean(train_step(*pair, tokens)):.6f}" for _ in range(2)))
    dist.barrier()  # without it, Python may exit while gloo's threads still run, which aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
