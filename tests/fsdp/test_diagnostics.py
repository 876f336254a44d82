"""What a model says about itself: norms of every parameter, views that must not overlap, names in a profile."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.pool import distributed


def trained(net: nn.Module, ranks: int = 1, rank: int = 0) -> nn.Module:
    nets.loss_of(net, nets.data(1, 4)[0].chunk(ranks)[rank]).backward()
    return net


def trained_here(net: nn.Module) -> nn.Module:
    return trained(net, dist.get_world_size(), dist.get_rank())


def with_spare(net: nets.Net) -> nets.Net:
    """`net` with a parameter that gets no gradient and one that is frozen."""
    net.spare = nn.Parameter(torch.ones(5))
    net.blocks[0].up.weight.requires_grad_(False)
    return net


def all_reduces(work) -> int:
    """How many all-reduces `work` issues; nothing else may communicate."""
    counts: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "broadcast")}

    def counting(name):
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        work()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert set(counts) <= {"all_reduce"}
    return counts.get("all_reduce", 0)


def norms_of(net: nn.Module) -> dict[str, tuple[float, float | None]]:
    """What `parameter_norms` should say, from full tensors."""
    return {
        name: (float(p.detach().norm()), float(p.grad.norm()) if p.grad is not None else None)
        for name, p in net.named_parameters()
    }


def assert_norms(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, (weight, gradient) in expected.items():
        assert math.isclose(actual[name].weight, weight, rel_tol=1e-5), name
        assert (actual[name].gradient is None) == (gradient is None), name
        assert gradient is None or math.isclose(actual[name].gradient, gradient, rel_tol=1e-4, abs_tol=1e-9), name


@pytest.mark.slow
@distributed(4)
def test_norms_of_all_parameters_take_one_collective_per_mesh_axis_and_equal_the_plain_ones():
    expected = norms_of(trained(with_spare(nets.make())))
    two_axes = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))}
    for collectives, options in (
        (1, {"strategy": "optim_grads_params"}),
        (1, {"strategy": "optim"}),
        (0, {"strategy": "no_shard"}),
        (1, two_axes),
        (2, {**two_axes, "outer_strategy": "optim"}),
    ):
        net = nets.shard(with_spare(nets.make()), **options)
        assert all(norms.gradient is None for norms in weft.parameter_norms(net).values())
        trained_here(net)
        found = []
        assert all_reduces(lambda net=net, found=found: found.append(weft.parameter_norms(net))) == collectives
        assert_norms(found[0], expected)


class Routed(nn.Module):
    """A shared layer, then an expert. All experts are here, or one."""

    def __init__(self, experts: int, here: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(6, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(experts))
        if here is not None:
            self.experts = nn.ModuleList([self.experts[here]])

    def forward(self, rows: torch.Tensor, expert: int) -> torch.Tensor:
        return self.experts[expert](self.shared(rows))


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(rank)) * (rank + 1)


@pytest.mark.slow
@distributed(4)
def test_norms_and_clipping_count_every_expert_once_where_meshes_differ():
    """Two experts on two ranks each: rank r has number r % 2, and everything else is shared by all four."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    expert_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same_expert", "ep"))["same_expert"]
    two_axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for mesh, strategy, norm_type in (
        (None, "optim_grads_params", 2.0),
        (None, "no_shard", 2.0),
        (two_axes, "optim_grads", 2.0),
        (two_axes, "optim", math.inf),
    ):
        plain = Routed(2)
        for other in range(ranks):
            (plain(rows_of(other), other % 2).square().mean() / ranks).backward()
        model = Routed(2, here=rank % 2)
        weft.fully_shard(model.experts[0], mesh=expert_mesh, strategy=strategy, gradient_divide_factor=2)
        weft.fully_shard(model, mesh=mesh, strategy=strategy)
        model(rows_of(rank), 0).square().mean().backward()

        expected = norms_of(plain)
        for key in ("weight", "bias"):
            both = [expected.pop(f"experts.{number}.{key}") for number in (0, 1)]
            expected[f"experts.0.{key}"] = tuple(math.hypot(*each) for each in zip(*both))
        assert_norms(weft.parameter_norms(model), expected)

        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        torch.testing.assert_close(weft.optim.clip_grad_norm_(model, 0.1, norm_type), norm)
        clipped = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(nets.full(parameter.grad), clipped[name.replace(".0.", f".{rank % 2}.")])


@distributed(2)
def test_views_that_overlap_or_left_their_buffer_are_named():
    net = trained_here(nets.shard(nets.make(), strategy="optim"))
    weft.check_views(net)
    here = {name: p for name, p in net.blocks[1].named_parameters() if p.to_local().numel() > 1}
    (one, first), (other, second) = list(here.items())[:2]

    kept = second._local_tensor
    second._local_tensor = first._local_tensor.view(-1)[1:2]
    with pytest.raises(RuntimeError, match=rf"weight of blocks\.1\.{one} and .* blocks\.1\.{other} overlap by 4 bytes"):
        weft.check_views(net)
    second._local_tensor = kept.clone()
    with pytest.raises(RuntimeError, match=rf"weight of blocks\.1\.{other} no longer lies in the flat buffer"):
        weft.check_views(net)
    second._local_tensor = kept
    weft.check_views(net)

    second.grad = second.like(first.grad.to_local().view(-1)[:1])
    with pytest.raises(RuntimeError, match=rf"gradient of blocks\.1\.({one}|{other}) and .* overlap"):
        weft.check_views(net)


@pytest.mark.slow
@distributed(2)
def test_a_profile_shows_when_each_unit_is_gathered_computes_and_is_reduced():
    net = trained_here(nets.shard(nets.make()))
    with torch.profiler.profile() as profile:
        trained_here(net)
    events = profile.events()
    units = ["root", *(f"blocks.{number}" for number in range(len(net.blocks)))]
    ranges = {name: [e.time_range for e in events if e.name == name] for name in {e.name for e in events}}
    for unit in units:
        for what in ("gather", "forward", "backward", "reduce"):
            assert len(ranges.get(f"weft/{unit}/{what}", ())) >= 1, f"{unit}/{what}"

    def inside(operator: str, name: str) -> int:
        (whole,) = ranges[name]
        return sum(whole.start <= each.start and each.end <= whole.end for each in ranges[operator])

    for unit in units[1:]:
        assert inside("aten::gelu", f"weft/{unit}/forward") == 1
        assert inside("aten::gelu_backward", f"weft/{unit}/backward") == 1
        assert inside("aten::_foreach_copy_", f"weft/{unit}/reduce") == 1
    assert inside("aten::gelu", "weft/root/forward") == len(net.blocks)
    with torch.profiler.profile() as profile:
        pass
    trained_here(net)
    assert not [event for event in profile.events() if event.name.startswith("weft/")]


@pytest.mark.slow
@distributed(2)
def test_values_that_are_not_finite_are_named_by_parameter_unit_and_rank():
    two_axes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    for options in ({"strategy": "optim_grads_params"}, {"strategy": "optim"}, {"mesh": two_axes}):
        net = trained_here(nets.shard(with_spare(nets.make()), **options))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_gather_object", None)
            assert weft.find_nonfinite(net) == []  # without an exchange

        expected = []
        for name, what, values in (
            ("blocks.1.up.weight", "gradient", [math.nan, math.inf, -math.inf]),
            ("blocks.0.up.weight", "weight", [math.nan]),  # frozen
            ("spare", "weight", [math.inf]),
        ):
            parameter = net.get_parameter(name)
            tensor = parameter if what == "weight" else parameter.grad
            part = tensor.to_local().detach().view(-1)
            here = part.numel() >= len(values)
            if here:
                part[: len(values)] = torch.tensor(values)
            for rank, holds in enumerate(gathered(here)):
                if holds:
                    nan = sum(map(math.isnan, values))
                    unit = name.rpartition(".up")[0]
                    expected.append((name, unit, what, rank, nan, len(values) - nan, None))
        found = weft.find_nonfinite(net)
        assert sorted(found) == sorted(expected) and len(found) >= 3
        assert gathered(found) == [found, found]
        assert [record.rank for record in found] == sorted(record.rank for record in found)


def gathered(value):
    """`value` of every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@distributed(2)
def test_values_that_are_not_finite_are_found_outside_of_units_too():
    net = nets.make()
    outside = nn.Parameter(torch.tensor([1.0, math.nan]))
    net.outside = outside
    nets.shard(net, ignored_params={outside})
    assert weft.find_nonfinite(net) == [("outside", None, "weight", rank, 1, 0, None) for rank in (0, 1)]
    assert str(weft.find_nonfinite(net)[0]) == "weight of outside on rank 0: 1 NaN"
