"""Trains a small vision transformer to classify shapes with weft's trainer; `--resume` resumes the newest run.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/vision.py
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from weft.train import Trainer


class Classifier(nn.Module):
    """Classifies images [batch, 16, 16], cut into 16 patches, as one of three shapes."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(16, 48)
        self.places = nn.Embedding(16, 48)
        layer = {"d_model": 48, "nhead": 4, "dim_feedforward": 96, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(**layer) for _ in range(3)))  # one unit each
        self.head = nn.Linear(48, 3)

    def forward(self, images):
        patches = images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(images), 16, 16)
        return self.head(self.blocks(self.patches(patches) + self.places.weight).mean(1))


def images(rank, ranks, steps=64, seed=0):
    """Return this rank's microbatches: noisy images of a square, a cross or a ring, and the label of each."""
    generator = torch.Generator().manual_seed(seed * ranks + rank)
    square, cross, ring = torch.ones(5, 5), torch.eye(5).maximum(torch.eye(5).flip(0)), torch.ones(5, 5)
    ring[1:4, 1:4] = 0
    shapes = torch.randint(3, (steps, 8), generator=generator)
    pictures = 0.7 * torch.randn(steps, 8, 16, 16, generator=generator)
    pictures[..., 5:10, 5:10] += torch.stack([square, cross, ring])[shapes]
    return list(zip(pictures, shapes))


def loss(model, batch):
    logits, shapes = model(batch[0]), batch[1]
    return cross_entropy(logits, shapes), {"accuracy": (logits.argmax(-1) == shapes).float().mean()}


trainer = Trainer(
    model=Classifier(),
    loss=loss,
    data=images,
    validation=lambda rank, ranks: images(rank, ranks, steps=8, seed=1),
    config={
        "train": {"steps": 120, "global_batch_size": 16, "microbatch_size": 8, "validate_every": 40},
        "optimizer": {"lr": 3e-3},
        "run": {"name": "vision"},
    },
    resume="--resume" in sys.argv,
)
trainer.run()
