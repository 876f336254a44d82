"""What a process has set, and modules that are not like others, change nothing about sharding, or are named."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.fsdp.module import units_under
from weft.quantize import nvfp4, rowwise, tensorwise


@contextmanager
def default(setting: str, value: object, back: object) -> Iterator[None]:
    getattr(torch, f"set_default_{setting}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_default_{setting}")(back)


@distributed(2)
def test_hosts_talk_about_numbers_in_their_memory_whatever_the_default_device_is():
    tokens, net = nets.data(1, 4)[0], nets.shard(nets.make())
    narrow = weft.fully_shard(nn.Linear(64, 64), mp_policy=weft.MixedPrecisionPolicy(param_quantization=tensorwise()))
    x = torch.ones(2, 64)
    with default("device", "meta", None):
        for _ in range(2):
            nets.loss_of(net, tokens).backward()
            narrow(x).sum().backward()
        weft.optim.clip_grad_norm_(net, 1.0)
        weft.parameter_norms(net)
        assert torch.equal(net.gain, net.gain) and net.gain.full_tensor().device.type == "cpu"


@distributed(2)
def test_scales_are_those_of_fp32_whatever_the_default_dtype_is():
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    for recipe in (tensorwise(), nvfp4()):
        outputs = []
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            net = nn.Linear(64, 64)
            with default("dtype", dtype, torch.float32):
                weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))
                outputs.append(net(x))
        assert torch.equal(*outputs), recipe


@distributed(2)
def test_a_model_that_was_sharded_in_inference_mode_trains():
    with torch.inference_mode():
        net = nets.shard(nets.make())
        net(nets.data(1, 4)[0])
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    assert net.gain.grad is not None


class Recurrent(nn.Module):
    """An LSTM has a list of its weights, beside what is registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0])


@distributed(2)
def test_an_rnn_that_is_moved_to_where_it_is_trains_as_in_one_process():
    plain, net = Recurrent(), weft.fully_shard(Recurrent()).to("cpu")
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for model in (plain, net):
            model(x).square().sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
            model.zero_grad()
    for sharded, parameter in zip(net.parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(sharded), parameter.detach())


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.sparse.mm(edges, self.linear(x)), edges, edges.detach().to_sparse_csr()


@distributed(2)
def test_units_take_and_return_sparse_tensors():
    edges = torch.eye(4).to_sparse().requires_grad_()
    net = weft.fully_shard(Graph())
    nodes, coo, csr = net(torch.ones(4, 4), edges)
    assert (coo.layout, csr.layout) == (torch.sparse_coo, torch.sparse_csr)
    nodes.sum().backward()
    assert edges.grad is not None and net.linear.weight.grad is not None


class Table(nn.Module):
    """A parameter and a buffer of dtypes that backends do not reduce or broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.int16), requires_grad=False)
        self.register_buffer("places", torch.arange(5, dtype=torch.int16))

    def reset_parameters(self) -> None:
        self.codes.copy_(torch.arange(7, dtype=torch.int16) + dist.get_rank())
        self.places.copy_(torch.arange(5, dtype=torch.int16) + dist.get_rank())


@distributed(2)
def test_parameters_and_buffers_of_integers_are_filled_copied_and_measured():
    for strategy in ("no_shard", "optim_grads_params"):
        with torch.device("meta"):
            net = Table()
        weft.fully_shard(net, strategy=strategy)
        assert net.places.tolist() == list(range(5)) and nets.full(net.codes).tolist() == list(range(7))
        assert nets.full(copy.deepcopy(net.codes)).tolist() == list(range(7))
        assert weft.parameter_norms(net)["codes"].weight == pytest.approx(91**0.5)


def test_what_is_refused_leaves_a_model_on_meta_as_it_was(world):
    world(0, 4)
    with torch.device("meta"):
        net = nn.Linear(64, 64)
    policy = weft.MixedPrecisionPolicy(param_quantization=rowwise(compute="scaled"))
    with pytest.raises(ValueError, match=r"reshard_after_forward=2: .* remain quantized"):
        weft.fully_shard(net, mp_policy=policy, reshard_after_forward=2)
    assert net.weight.is_meta


@distributed(2)
def test_what_is_changed_under_unshard_counts_or_is_refused():
    net = nets.shard(nets.make())
    net.blocks[0].unshard()
    optimizer = torch.optim.SGD(net.blocks[1].parameters(), lr=0.1)
    gathered = r"SGD got the gathered parameter 'norm.weight' of blocks.0.*reshard\(\)"
    for add in (optimizer.add_param_group, lambda group: torch.optim.SGD(group["params"], lr=0.1)):
        with pytest.raises(ValueError, match=gathered):
            add({"params": [*net.blocks[0].parameters()]})
    assert len(optimizer.param_groups) == 1
    net.blocks[0].requires_grad_(False)
    net.blocks[0].reshard()
    assert not any(parameter.requires_grad for parameter in net.blocks[0].parameters())
    net.blocks[0].unshard()
    net.blocks[0].up.requires_grad_(True)
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    assert {name for name, p in net.blocks[0].named_parameters() if p.grad is not None} == {"up.weight", "up.bias"}
    torch.optim.SGD(net.parameters(), lr=0.1)


@distributed(2)
def test_zero_grad_fills_the_gradients_that_are_there():
    net = nets.shard(nets.make())
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    before = [parameter.grad for parameter in net.parameters()]
    net.zero_grad(set_to_none=False)
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), before))
    assert not any(nets.full(gradient).any() for gradient in before)
    for gradient in before:
        gradient.fill_(1)
    net.unshard()  # other parameters are registered, without gradients
    net.zero_grad(set_to_none=False)
    net.reshard()
    assert not any(nets.full(gradient).any() for gradient in before)


@distributed(2)
def test_a_refused_switch_changes_no_unit():
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    net = nn.Sequential(weft.fully_shard(nn.Linear(4, 4), mesh=replicas), weft.fully_shard(nn.Linear(4, 4)))
    weft.fully_shard(net, mesh=replicas)
    with pytest.raises(ValueError, match=r"set_requires_all_reduce\(False\)"):
        net.set_requires_all_reduce(False)
    assert all(unit.requires_all_reduce for unit in units_under(net))


@distributed(2)
def test_gradients_wait_for_the_reduction_over_replicas_if_a_backward_leaves_it_out():
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    net = weft.fully_shard(nn.Linear(4, 4, bias=False), mesh=replicas)
    for last in (False, True):
        net.set_requires_all_reduce(last)
        net(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
        assert (net.weight.grad is not None) == last
    torch.testing.assert_close(nets.full(net.weight.grad), torch.full((4, 4), 3.0))


class Registered(nn.Module):
    """A class that keeps a list of its subclasses, as registries of models do."""

    kinds: dict[str, type] = {}

    def __init_subclass__(cls, *, kind: str) -> None:
        assert kind not in Registered.kinds
        Registered.kinds[kind] = cls


class Linear(Registered, kind="linear"):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def test_the_class_of_a_sharded_module_is_in_no_registry(world):
    world(0, 2)
    net = weft.fully_shard(Linear())
    assert Registered.kinds == {"linear": Linear} and isinstance(net, Linear)
