"""A script written for FSDP2 and Lightning Fabric's ModelParallelStrategy, run with weft in place of torch's FSDP2.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/lightning_fabric.py [--torch]
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn

import weft


def parallelize(model: nn.Module, device_mesh) -> nn.Module:
    """Shard the model with the calls of a script for FSDP2."""
    for layer in model:
        fsdp.fully_shard(layer, mesh=device_mesh["data_parallel"])
    return fsdp.fully_shard(model, mesh=device_mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="leave torch's FSDP2 in place")
    if not parser.parse_args().torch:
        print(weft.drop_in())
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(3):
        rows = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(step))[fabric.global_rank]
        mean = torch.zeros(())
        for number, part in enumerate(rows.chunk(2)):
            with fabric.no_backward_sync(model, enabled=number == 0):
                loss = model(part).square().mean() / 2
                fabric.backward(loss)
            mean += loss.detach() / fabric.world_size
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        if fabric.global_rank == 0:
            print(f"step {step} loss {mean.item():.8f} norm {norm.item():.8f}")
    with tempfile.TemporaryDirectory() as folder:
        folder = fabric.broadcast(folder)
        state = {"model": model, "optimizer": optimizer}
        fabric.save(folder, state)
        fabric.load(folder, state)
        fabric.barrier()
    if fabric.global_rank == 0:
        print("saved and loaded")


if __name__ == "__main__":
    main()
