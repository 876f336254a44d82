"""Chooses which weights of a hybrid model are quantized when they are gathered.

quantized        projections of attention, recurrent layers, MLPs and experts (routed and shared), also the gate_proj of
                 MLPs and experts, and projections to and from the latent of experts
unquantized      norms, biases, attention sinks, convolutions, decay parameters, D of Mamba-2, routers, the single
                 output that gates a whole shared expert, embedding, head, and the projection of each prediction depth
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import nn

from weft.fsdp.precision import MixedPrecisionPolicy
from weft.models.model import HybridModel
from weft.models.pattern import LAYER_KEYS
from weft.moe.experts import GroupedExperts
from weft.quantize import ExceptEnds
from weft.words import counted

_MARK = "is_quantized"


def choose_weights(model: HybridModel, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return a copy of `policy` whose `quantize` function selects weights of `model` (see the top of this file).

    Return `policy` itself if it has no `param_quantization`, or if its `quantize` is your own function. With
    `except_ends(first, last)`, the first `first` and the last `last` layers are not quantized. Each symbol of the
    pattern counts as a layer, including the symbols of prediction depths (multi-token prediction).

    Raises `ValueError` if no layer would be quantized, or if experts whose weights would be quantized are parametrized.
    """
    if policy.param_quantization is None or not (policy.quantize is None or isinstance(policy.quantize, ExceptEnds)):
        return policy
    ends = policy.quantize or ExceptEnds(0, 0)
    parsed = model.cfg.parsed
    count = sum(len(each.symbols) for each in parsed.layers)
    count += parsed.depths * sum(len(each.symbols) for each in parsed.prediction)
    if ends.first + ends.last >= count:
        raise ValueError(
            f"except_ends({ends.first}, {ends.last}) of a model with {counted(count, 'layer')} leaves none to "
            f"quantize; choose smaller numbers"
        )
    for parameter in model.parameters():
        vars(parameter).pop(_MARK, None)  # of an earlier call with other ends
    for number, block in _blocks(model):
        if ends.first <= number < count - ends.last:
            for weight in _weights(block):
                vars(weight)[_MARK] = True  # an attribute: `spread` replaces experts' parameters, but keeps attributes
    return replace(policy, quantize=lambda name, parameter: _MARK in vars(parameter))


def _blocks(model: HybridModel) -> Iterator[tuple[int, nn.Module]]:
    """Yield this rank's blocks, each with its number in the whole model, from 0."""
    parsed = model.cfg.parsed
    of_main = sum(len(each.symbols) for each in parsed.layers)
    of_depth = sum(len(each.symbols) for each in parsed.prediction)
    stacks = [(0, model.decoder.layers, parsed.layers)]
    stacks += [(of_main + n * of_depth, depth.layers, parsed.prediction) for n, depth in enumerate(model.depths)]
    for start, layers, logical in stacks:
        for key, layer in layers._modules.items():
            before = sum(len(each.symbols) for each in logical[: int(key)])
            for member, symbol in enumerate(logical[int(key)].symbols):
                yield start + before + member, getattr(layer, LAYER_KEYS[symbol])


def _weights(block: nn.Module) -> Iterator[nn.Parameter]:
    for module in block.modules():
        if isinstance(module, nn.Linear):
            if module.out_features > 1:  # the gate of the shared expert has one output, and is not quantized
                yield cast(nn.Parameter, module.weight)
        elif isinstance(module, GroupedExperts):
            if hasattr(module, "parametrizations"):
                raise ValueError(
                    "param_quantization of a model with parametrized experts, whose weights are computed: leave it "
                    "out, or choose the weights with a `quantize` function of your own"
                )
            for name, weight in module.named_parameters(recurse=False):
                if name in module.multiplied_parameters:
                    yield weight
