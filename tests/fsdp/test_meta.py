"""Modules that are sharded on the meta device and get their values later, in each way that scripts for FSDP2 know."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.fsdp.construction.first_values import bring_buffers

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Scale(nn.Module):
    """Owns a parameter and a buffer, and cannot fill them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.register_buffer("offset", torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


class Model(nn.Module):
    """Layers of which some can fill themselves, and `init_weights`, which fills everything."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), Scale(width)) for _ in range(2))
        self.table = nn.Parameter(torch.empty(3, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.table.t()

    def init_weights(self) -> None:
        for linear, scale in self.layers:
            nn.init.trunc_normal_(linear.weight, std=0.3)
            nn.init.zeros_(linear.bias)
            nn.init.normal_(scale.weight)
            scale.offset.fill_(0.5)
        nn.init.uniform_(self.table)


def plain() -> Model:
    model = Model()
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights()
    return model


def on_meta(**options) -> Model:
    with torch.device("meta"):
        model = Model()
    for layer in model.layers:
        weft.fully_shard(layer, **options)
    return weft.fully_shard(model, **options)


def compare(model: Model, reference: Model) -> None:
    """Values, and two steps of training, are those of the plain model."""
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(nets.full(model.state_dict()[name]), value, rtol=0, atol=0, msg=name)
    x = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for batch in x:
        for each, optimizer in zip((model, reference), optimizers):
            each(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(nets.full(model.state_dict()[name]), value, msg=name)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_the_model_s_own_initialisation_after_to_empty_gives_what_one_process_has(strategy):
    model = on_meta(strategy=strategy)
    parameters = list(model.parameters())
    assert model.to_empty(device="cpu") is model
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights()
    compare(model, plain())


@distributed(2)
def test_replicas_that_drew_other_numbers_start_alike():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    for options in ({"strategy": "optim_grads_params", "mesh": mesh}, {"strategy": "no_shard"}):
        model = on_meta(**options)
        model.to_empty(device="cpu")
        torch.manual_seed(3 + dist.get_rank())
        model.init_weights()
        model(torch.ones(1, 7))
        model.reshard()
        for parameter in model.parameters():
            whole = nets.full(parameter)
            first = whole.clone()
            dist.broadcast(first, 0)
            assert torch.equal(whole, first)


@pytest.mark.slow
@distributed(2)
def test_assigned_state_dicts_are_copied_for_any_cuts():
    reference = plain()
    full = {name: value.clone() for name, value in reference.state_dict().items()}

    def even(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if not isinstance(like, DTensor):
            return value.clone()
        return distribute_tensor(value, like.device_mesh, like.placements)

    for cut in (lambda value, like: value.clone(), even):
        model = on_meta()
        parameters = list(model.parameters())
        model.load_state_dict({name: cut(full[name], like) for name, like in model.state_dict().items()}, assign=True)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        compare(model, copy.deepcopy(reference))
    narrow = {name: value.bfloat16() for name, value in full.items()}
    with pytest.raises(ValueError, match=r"'table' is torch.bfloat16, but the sharded parameter is torch.float32"):
        on_meta().load_state_dict(narrow, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch for table"):
        on_meta().load_state_dict({**full, "table": torch.ones(2, 7)}, assign=True)


def test_an_assigned_state_dict_may_lack_names_and_replaces_what_is_ignored(world):
    world(0, 2)
    net = nn.Linear(4, 4)
    weft.fully_shard(net, ignored_params=[net.bias])
    weight, bias = net.weight, torch.ones(4, dtype=torch.float64)
    assert net.load_state_dict({"bias": bias}, assign=True, strict=False).missing_keys == ["weight"]
    assert net.weight is weight and net.bias.dtype == torch.float64 and net.bias.data_ptr() == bias.data_ptr()


def test_buffers_on_meta_stay_there_when_those_of_the_host_are_brought():
    module = nn.Module()
    module.register_buffer("offset", torch.empty(3, device="meta"))
    bring_buffers([module], torch.device("cuda"))
    assert module.offset.is_meta


def test_what_is_filled_whole_and_then_sliced_is_trained_if_it_was(world):
    world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for trained in (True, False):
        with torch.device("meta"):
            net = nn.Linear(4, 4).requires_grad_(trained)
        net.weight = nn.Parameter(distribute_tensor(net.weight.data, mesh["tp"], [Shard(0)]), trained)
        weft.fully_shard(net, mesh=mesh["dp"])
        assert [parameter.requires_grad for parameter in net.parameters()] == [trained] * 2


@distributed(2)
def test_rank_0_may_broadcast_a_full_state_dict_into_a_model_on_meta():
    reference = plain()
    model = on_meta()
    full = reference.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )
    compare(model, reference)


@distributed(2)
def test_what_has_no_values_is_refused_by_name_on_all_ranks_and_may_be_filled_then():
    model = on_meta()
    x = torch.ones(2, 7)
    assert get_model_state_dict(model).keys() == model.state_dict().keys()  # names and shapes are known
    for use in (lambda: model(x), model.unshard, lambda: model.layers[0](x)):
        with pytest.raises(ValueError, match=r"used before its parameters 'table' have values.*to_empty.*state dict"):
            use()
    nn.init.ones_(model.table)
    with pytest.raises(ValueError, match=r"used before its parameters '1.weight' have values"):
        model(x)
    for layer in model.layers:
        nn.init.ones_(layer[1].weight)
    with pytest.raises(ValueError, match=r"buffer 'layers.0.1.offset' is on the meta device"):
        model(x)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    compare(model, plain())


@pytest.mark.slow
@distributed(4)
def test_a_part_that_one_rank_alone_left_empty_is_an_error_everywhere():
    model = on_meta()
    model.to_empty(device="cpu")
    model.init_weights()
    here = model.table.to_local().detach()
    last = torch.tensor([dist.get_rank() if here.numel() else -1])
    dist.all_reduce(last, dist.ReduceOp.MAX)
    if last.item() == dist.get_rank():
        here.view(-1)[:1].view(torch.int32).fill_(-1)  # NaN, every bit set
    with pytest.raises(ValueError, match="parameters 'table' have values"):
        model(torch.ones(2, 7))


@distributed(4)
def test_a_meta_model_with_tensor_parallel_slices_is_filled_by_its_own_initialisation():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = nn.Sequential(Scale(8))
    scale = model[0]
    scale.weight = nn.Parameter(distribute_tensor(scale.weight.data, mesh["tp"], [Shard(0)]))
    weft.fully_shard(model, mesh=mesh["dp"])
    here = scale.weight.to_local().detach()
    if mesh.get_local_rank("tp"):  # ranks with other slices learn of it too
        here.copy_(torch.ones_like(here))
    with pytest.raises(ValueError, match=r"parameters '0\.weight' have values"):
        model(torch.ones(2, 8))
    with torch.no_grad():
        scale.weight.copy_(torch.arange(8.0))
    torch.testing.assert_close(nets.full(scale.weight), torch.arange(8.0))
    with pytest.raises(ValueError, match=r"buffer '0.offset'"):
        model(torch.ones(2, 8))


class WithParameterAsBuffer(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("scale", nn.Parameter(torch.empty(3), requires_grad=False))

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "scale"):
            nn.init.ones_(self.scale)


@distributed(2)
def test_a_parameter_that_is_a_buffer_is_filled_as_one():
    with torch.device("meta"):
        module = WithParameterAsBuffer()
    weft.fully_shard(module)
    assert torch.equal(module.scale, torch.ones(3)) and "scale" not in dict(module.named_parameters())
    assert module(torch.ones(1, 3)).isfinite().all()
