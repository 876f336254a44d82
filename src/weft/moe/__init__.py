"""Mixture of experts: tokens to experts and back."""

from weft.moe.dispatch import AllToAll, Arrival, Dispatcher, Handle, LocalDispatcher, exchange
from weft.moe.experts import GroupedExperts
from weft.moe.layer import MoE, Sent
from weft.moe.router import Router, Routing
from weft.moe.statistics import expert_layers, load_statistics, router_losses

__all__ = [
    "AllToAll",
    "Arrival",
    "Dispatcher",
    "GroupedExperts",
    "Handle",
    "LocalDispatcher",
    "MoE",
    "Router",
    "Routing",
    "Sent",
    "exchange",
    "expert_layers",
    "load_statistics",
    "router_losses",
]
