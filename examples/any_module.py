"""Any nn.Module, sharded: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/any_module.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import weft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
steps = parser.parse_args().steps
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)  # the same initial weights on every rank
blocks = [nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(4)]
model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 8)).to(device)
for block in blocks:
    weft.fully_shard(block)  # one unit each, gathered just before it is needed
weft.fully_shard(model)  # last, for the remaining parameters
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())  # every rank has its own data
for step in range(steps):
    x = torch.randn(32, 10, 8, device=device)
    loss = nn.functional.mse_loss(model(x), x.cumsum(-1))
    loss.backward()  # gradients come out averaged over the ranks, and sharded
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item():.4f}")
if dist.get_rank() == 0:
    print(weft.describe(model))
dist.destroy_process_group()
