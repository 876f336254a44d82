"""Schedules in which one microbatch exchanges tokens with experts on other ranks while another microbatch computes."""

from weft.overlap.hidden import hidden_fraction
from weft.overlap.layer import Crossing, StagedDepth, StagedLayer, StagedModel, StagedPredictor, run_stages
from weft.overlap.node import UndeclaredTensor
from weft.overlap.schedule import evaluate, forward_backward

__all__ = [
    "Crossing",
    "StagedDepth",
    "StagedLayer",
    "StagedModel",
    "StagedPredictor",
    "UndeclaredTensor",
    "evaluate",
    "forward_backward",
    "hidden_fraction",
    "run_stages",
]
