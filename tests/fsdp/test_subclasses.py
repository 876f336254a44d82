"""Parameters whose class says what operators do: a flat buffer would keep the elements and lose the class."""

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import weft
from tests.pool import distributed


class Pair(torch.Tensor):
    """Two tensors that go everywhere together, as weights in a quantized format and their scales do."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, other: torch.Tensor) -> "Pair":
        made = torch.Tensor._make_wrapper_subclass(
            cls, one.size(), strides=one.stride(), dtype=one.dtype, device=one.device
        )
        made.one, made.other = one, other
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        one, other = (
            func(*pytree.tree_map_only(Pair, pick, args), **(kwargs or {}))
            for pick in (lambda pair: pair.one, lambda pair: pair.other)
        )
        return cls(one, other) if isinstance(one, torch.Tensor) else one


class Extended(Pair):
    """Says how it is gathered."""

    def fsdp_pre_all_gather(self, *args):
        return (self.one, self.other), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return Extended(*gathered), gathered


class Watched(nn.Parameter):
    """Sees functions, not operators."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Tagged(nn.Parameter):
    """A name for a plain parameter."""


def linear(parameter: nn.Parameter) -> nn.Module:
    module = nn.Linear(4, 4, bias=False)
    module.weight = parameter
    return module


@distributed(2)
def test_a_parameter_with_operators_of_its_own_is_refused_by_name():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    one, other = torch.ones(4, 4), torch.zeros(4, 4)
    inside = DTensor.from_local(Pair(one, other), mesh["tp"], [Replicate()], run_check=False)
    for parameter, kind in (
        (nn.Parameter(Pair(one, other)), "Pair"),
        (Watched(one), "Watched"),
        (nn.Parameter(inside), "Pair"),
    ):
        module = linear(parameter)
        with pytest.raises(ValueError, match=rf"'weight' of Linear is a {kind}, .*its own operators.*ignored_params"):
            weft.fully_shard(module, mesh=mesh["dp"])
        assert module.weight is parameter
    with pytest.raises(ValueError, match="its fsdp_pre_all_gather would never be called"):
        weft.fully_shard(linear(nn.Parameter(Extended(one, other))))
    with pytest.raises(ValueError, match=r"'weight' of LazyLinear has no shape yet: run one forward"):
        weft.fully_shard(nn.LazyLinear(4))


@distributed(2)
def test_what_is_plain_or_ignored_is_not_refused():
    kept = nn.Parameter(Pair(torch.ones(4, 4), torch.zeros(4, 4)))
    model = nn.Sequential(linear(Tagged(torch.ones(4, 4))), linear(kept))
    weft.fully_shard(model, ignored_params={kept})
    assert model[1].weight is kept and isinstance(model[0].weight, DTensor)
    torch.testing.assert_close(model[0].weight.full_tensor().detach(), torch.ones(4, 4))
