"""A module for FSDP2 with Lightning's Trainer and ModelParallelStrategy, trained with weft in place of torch's FSDP2.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/lightning_trainer.py [--torch]
"""

import argparse
import tempfile
from pathlib import Path

import lightning
import torch
import torch.distributed.fsdp as fsdp
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import weft


class Regression(lightning.LightningModule):
    """A module written for FSDP2: `configure_model` builds and shards the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 3))
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net[::2]:
            fsdp.fully_shard(layer, mesh=mesh)
        fsdp.fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.mean = self.all_gather(loss.detach()).mean()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = nn.utils.get_total_norm([each.grad for each in self.parameters()])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.lines.append(f"step {self.global_step} loss {self.mean.item():.8f} norm {norm.item():.8f}")

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        mean = self.all_gather(self.net(batch[0]).square().mean()).mean()
        self.lines.append(f"step {self.global_step} evaluation {mean.item():.8f}")


def fit(folder: Path, resume: Path | None = None) -> Regression:
    """Train a new module with a new Trainer for two epochs of two steps; save after each epoch."""
    rows = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(
        module,
        DataLoader(TensorDataset(rows), batch_size=2),
        DataLoader(TensorDataset(rows[:8]), batch_size=4),
        ckpt_path=resume,
    )
    assert all(isinstance(each, DTensor) for each in module.parameters())
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="leave torch's FSDP2 in place")
    if not parser.parse_args().torch:
        print(weft.drop_in())
    torch.distributed.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        torch.distributed.broadcast_object_list(folders)
        path = Path(folders[0])
        whole = fit(path / "whole")
        resumed = fit(path / "resumed", resume=path / "whole" / "epoch=0.ckpt")
        torch.distributed.barrier()
    assert resumed.lines == whole.lines[len(whole.lines) // 2 :], (resumed.lines, whole.lines)
    if torch.distributed.get_rank() == 0:
        print(*whole.lines, "resumed from the first epoch to the same numbers", sep="\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
