"""Schedules that run the token exchange of one microbatch (for experts on other ranks) during the computation of
another."""

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
