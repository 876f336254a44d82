"""A training loop with Accelerate, sharded by its FSDP2 plugin, with weft in place of torch's FSDP2.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/accelerate_loop.py [--torch]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import weft


class Block(nn.Module):
    """A layer that becomes one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 11), nn.Linear(11, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="leave torch's FSDP2 in place")
    if not parser.parse_args().torch:
        print(weft.drop_in())
    # On CPU, Accelerate would use DDP, since it shards only on accelerators. This makes it treat ranks as GPU ranks.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Block(), Block(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rows = TensorDataset(torch.randn(32, 5, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=2), scheduler
    )
    assert all(isinstance(each, DTensor) for each in model.parameters())

    def epoch() -> list[str]:
        """Train four steps of two microbatches each; return losses over all processes, and norms."""
        lines, mean = [], torch.zeros(())
        for (row,) in loader:
            with accelerator.accumulate(model):
                loss = model(row).square().mean()
                accelerator.backward(loss)
                mean += accelerator.reduce(loss.detach(), "mean") / 2
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
                    lines.append(f"loss {mean.item():.8f} norm {norm.item():.8f}")
                    mean.zero_()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return lines

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        torch.distributed.broadcast_object_list(folders)
        before = epoch()
        accelerator.save_state(str(Path(folders[0]) / "state"))
        after = epoch()
        accelerator.load_state(str(Path(folders[0]) / "state"))
        assert epoch() == after
        accelerator.wait_for_everyone()
    accelerator.print(*before, *after, "loaded, and trained to the same numbers again", sep="\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
