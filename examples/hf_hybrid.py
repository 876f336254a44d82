"""Loads a model with experts from a Hugging Face directory, trains it sharded and overlapped, and saves it.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/hf_hybrid.py SOURCE TARGET
"""

import argparse

import torch
import torch.distributed as dist

import weft
from weft.models import HybridModel, hf, shard
from weft.overlap import forward_backward

parser = argparse.ArgumentParser()
parser.add_argument("source", help="config.json and safetensors of a family with experts, such as Mixtral")
parser.add_argument("target", help="a new directory, of the same family")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

cfg = hf.config_of(options.source)
meshes = weft.init_meshes(device.type, ep=dist.get_world_size())  # each rank holds some of the experts
with torch.device("meta"):
    model = HybridModel(cfg, meshes)
shard(model, meshes)
hf.load(model, options.source)  # each rank reads its part
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

generator = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own data
tokens = torch.randint(cfg.vocab_size, (4, 2, 65), generator=generator).to(device)
microbatches = [(each[:, :-1], each[:, 1:]) for each in tokens]
for step in range(options.steps):
    losses = forward_backward(model, microbatches, loss_scale=1 / len(microbatches))  # overlaps the token exchange
    weft.optim.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {torch.stack(losses).mean().item():.4f}")
hf.save(model, options.target, hf.family_for(cfg)[0].model_type)
dist.destroy_process_group()
