"""A wrong configuration fails at construction, in one line with the value, the rule and the fix."""

import re
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

import weft
from tests.fsdp import nets
from tests.pool import distributed


@contextmanager
def refused(kind: type[Exception], *said: str):
    """Expect an error of one line that contains each of `said`, in this order."""
    with pytest.raises(kind, match=".*".join(re.escape(part) for part in said)) as caught:
        yield
    assert "\n" not in str(caught.value)


@distributed(2)
def test_modules_that_cannot_be_a_unit_are_refused():
    with refused(ValueError, "Block is sharded already", "once per module"):
        weft.fully_shard(weft.fully_shard(nets.Block(4, 4)))
    with refused(ValueError, "'norm.weight' of Block", "sharded already", "children first"):
        net = weft.fully_shard(nets.make())
        weft.fully_shard(net.blocks[0])
    with refused(ValueError, "ModuleList", "no forward", "members"):
        weft.fully_shard(nets.make().blocks)
    with refused(ValueError, "ModuleDict", "no forward", "members"):
        weft.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    with refused(TypeError, "got a str", "nn.Module"):
        weft.fully_shard("model")
    with refused(TypeError, "got a Parameter", "nn.Module"):
        weft.fully_shard(nn.Parameter(torch.ones(1)))
    with refused(ValueError, "empty list", "at least one"):
        weft.fully_shard([])


@distributed(2)
def test_parameters_on_another_device_are_refused():
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    linear.reset_parameters = None
    with refused(ValueError, "Linear", "meta device", "reset_parameters"):
        weft.fully_shard(linear, mesh=mesh)


@distributed(4)
def test_meshes_that_do_not_fit_are_refused():
    block = nets.Block(4, 4)
    with refused(ValueError, "3 axes", "pass a 1-D"):
        weft.fully_shard(block, mesh=init_device_mesh("cpu", (2, 2, 1)))
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        weft.fully_shard(block, mesh=half)
    else:
        with refused(ValueError, "mesh [0, 1]", f"this rank ({dist.get_rank()})", "only on the ranks of its mesh"):
            weft.fully_shard(block, mesh=half)


@distributed(2)
def test_unknown_strategies_and_placements_are_refused():
    block = nets.Block(4, 4)
    for strategy in ("zero3", "full_shard", "", None):
        with refused(ValueError, f"strategy={strategy!r}", "'no_shard'", "'optim_grads_params'", "Placements"):
            weft.fully_shard(block, strategy=strategy)
    with refused(ValueError, "S(0), P(sum), R", "choose one of", "optim_grads_params"):
        weft.Placements(Shard(0), Partial(), Replicate())
    with refused(ValueError, "S(1), S(1), S(1)", "choose one of"):
        weft.Placements(parameter=Shard(1), gradient=Shard(1), optimizer=Shard(1))
    assert not isinstance(block, weft.FSDPModule)


@distributed(2)
def test_options_that_cannot_be_honoured_are_refused_and_not_ignored():
    block = nets.Block(4, 4)
    with refused(ValueError, "outer_strategy='optim'", "1-D"):
        weft.fully_shard(block, outer_strategy="optim")
    with refused(ValueError, "gradient_divide_factor=0", "positive"):
        weft.fully_shard(block, gradient_divide_factor=0)
    with refused(TypeError, "mp_policy='bf16'", "MixedPrecisionPolicy"):
        weft.fully_shard(block, mp_policy="bf16")
    with refused(TypeError, "offload_policy=True", "OffloadPolicy"):
        weft.fully_shard(block, offload_policy=True)
    sharded = weft.fully_shard(block)
    with refused(ValueError, "set_requires_all_reduce(False)", "set_requires_gradient_sync"):
        sharded.set_requires_all_reduce(False)
    with refused(ValueError, "gradient divide factor -1", "positive"):
        sharded.set_gradient_divide_factor(-1)


@pytest.mark.parametrize(
    "option, said",
    [
        ({"allocator": "arena"}, ["allocator='arena'", "'trace'", "'caching'"]),
        ({"max_live_reduce_buffers": 0}, ["max_live_reduce_buffers=0", "at least 1"]),
        ({"prefetch_bytes": -1}, ["prefetch_bytes=-1", "None"]),
    ],
)
def test_runtime_options_are_checked(option, said):
    with refused(ValueError, *said):
        weft.RuntimeOptions(**option)


def test_without_a_process_group_the_message_says_how_to_get_one():
    with refused(ValueError, "needs a process group", "torchrun"):
        weft.fully_shard(nets.Block(4, 4))


def test_a_model_without_sharded_modules_has_no_report():
    for report in (weft.describe, weft.memory_report):
        with refused(TypeError, "Block has no sharded module", "fully_shard"):
            report(nets.Block(4, 4))
