"""A mixture of experts written as its definition reads, one token after another."""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.moe import MoE
from weft.moe.router import Routing


def plain(layer: MoE, hidden: Tensor) -> tuple[Tensor, Tensor | None, Routing]:
    """Output, loss and routing of a layer that holds all experts."""
    routing = layer.router(hidden)
    tokens = hidden.flatten(0, 1)
    outputs = []
    for token, row in enumerate(tokens):
        output = torch.zeros_like(row, dtype=torch.float32)
        for slot in range(routing.experts.shape[1]):
            if routing.kept is None or routing.kept[token, slot]:
                mixed = swiglu(row, layer.experts, int(routing.experts[token, slot]))
                output = output + routing.weights[token, slot] * mixed
        outputs.append(output.to(row.dtype))
    output = torch.stack(outputs).view_as(hidden)
    if layer.shared_expert is not None:
        shared = layer.shared_expert(hidden)
        if layer.shared_expert_gate is not None:
            shared = layer.shared_expert_gate(hidden).sigmoid() * shared
        output = output + shared
    return output, routing.loss, routing


def swiglu(row: Tensor, experts, number: int) -> Tensor:
    inner = F.silu(row @ experts.gate_proj[number]) * (row @ experts.up_proj[number])
    return inner @ experts.down_proj[number]


def enlarge(module: torch.nn.Module, factor: float = 15.0) -> None:
    """Initial weights are so small that a wrong term would hide: make them count."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(factor)
