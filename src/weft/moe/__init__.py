"""Mixture of experts: routing, exchange of tokens between ranks, and expert MLPs as grouped matrix products."""

from typing import TYPE_CHECKING

from weft.lazy import exports

if TYPE_CHECKING:
    from weft.moe.dispatch import AllToAll, Arrival, Dispatcher, Handle, LocalDispatcher, exchange
    from weft.moe.experts import GroupedExperts
    from weft.moe.layer import MoE, Sent
    from weft.moe.router import Router, Routing
    from weft.moe.statistics import exchanged_rows, expert_layers, load_statistics, router_losses

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
    "exchanged_rows",
    "expert_layers",
    "load_statistics",
    "router_losses",
]

__getattr__ = exports(
    "weft.moe",
    {
        "weft.moe.dispatch": ["AllToAll", "Arrival", "Dispatcher", "Handle", "LocalDispatcher", "exchange"],
        "weft.moe.experts": ["GroupedExperts"],
        "weft.moe.layer": ["MoE", "Sent"],
        "weft.moe.router": ["Router", "Routing"],
        "weft.moe.statistics": ["exchanged_rows", "expert_layers", "load_statistics", "router_losses"],
    },
)
