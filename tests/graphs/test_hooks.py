"""Graphs under hooks, against eager calls, bit for bit. All memory of a capture is poisoned before each replay."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp.nets import Block, data, loss_of, make
from tests.pool import distributed
from weft.fsdp.module import runtime_of
from weft.graphs import captured
from weft.memory.pool import Pool
from weft.models.gathering import gathered


@contextlib.contextmanager
def poisoned():
    """Inside, what a capture computes is NaN before each replay, and what the pool of memory is given back at once."""

    def giving(pool, transient):
        if transient in pool._alive and transient.tensor.is_floating_point():
            transient.tensor.data.fill_(torch.nan)  # no version of it is another
        give(pool, transient)

    give, captured.POISON = Pool.give, True
    Pool.give = giving
    try:
        yield
    finally:
        Pool.give, captured.POISON = give, False


def blocks(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


def sharded(graphs, **options):
    net = make()
    for block in net.blocks:
        weft.fully_shard(block, **options)
    return weft.fully_shard(net, **options, runtime=weft.RuntimeOptions(graphs=graphs))


def run(net, steps: int = 6, microbatches: int = 1, seed: int = 1):
    """Losses of each microbatch, gradients of each step and the weights."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    seen = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in data(steps, 4 * microbatches, seed):
        for number, part in enumerate(batch.chunk(microbatches)):
            net.set_is_last_backward(number == microbatches - 1)
            loss = loss_of(net, part.chunk(ranks)[rank])
            (loss / microbatches).backward()
            seen.append(loss.detach())
        seen += [local(each.grad) for each in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(local(each) for each in net.parameters())]


def local(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected):
        assert torch.equal(one, other)


def compare(steps: int = 6, microbatches: int = 1, **options):
    """Both runs are bit-equal; returns the report."""
    plain = run(sharded(None, **options), steps, microbatches)
    net = sharded(weft.Graphs(modules=blocks, warmup=1, backend="tape"), **options)
    with poisoned():
        assert_equal(run(net, steps, microbatches), plain)
    return weft.graph_report(net)


@pytest.mark.long
@distributed(2)
def test_twenty_steps_with_graphs_are_those_without():
    report = compare(20)
    assert report["captures"] == 3 and report["replays"] > 40, report
    assert report["bytes"] > 0
    assert set(report["scopes"]) == {"blocks.0", "blocks.1", "blocks.2"}


BF16 = weft.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, main_params_dtype=torch.float32
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "microbatches"),
    [
        ({"strategy": "optim", "mp_policy": BF16}, 3),
        ({"strategy": "optim_grads"}, 1),
        ({"strategy": "optim_grads_params", "mp_policy": BF16}, 1),
        ({"strategy": "optim_grads_params", "reshard_after_forward": False}, 3),
    ],
)
@distributed(2)
def test_every_strategy_and_precision_has_the_numbers_of_eager_calls(options, microbatches):
    report = compare(6, microbatches, **options)
    assert report["captures"] == 3 and report["replays"] >= 9 * microbatches, report


@pytest.mark.long
@distributed(4)
def test_replicated_shards_have_the_numbers_of_eager_calls():
    report = compare(6, 2, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
    assert report["captures"] == 3 and report["replays"] >= 18, report


class Twice(nn.Module):
    """Calls its block twice before a backward."""

    def __init__(self):
        super().__init__()
        self.block = Block(8, 12)

    def forward(self, x):
        return self.block(self.block(x) * 2)


class Noisy(nn.Module):
    """Does what a graph cannot hold."""

    def __init__(self, what):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.what = what
        self.kept = None
        self.outside = torch.ones(8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        if self.what == "random":
            y = torch.nn.functional.dropout(y, 0.1)
        elif self.what == "item":
            y = y * (1 + 0 * x.sum().item())
        elif self.what == "tolist":
            y = y * (1 + 0 * x.detach().flatten().tolist()[0])
        elif self.what == "branch" and bool((x.sum() > -1e9).item()):
            y = y + 1
        elif self.what == "attribute":
            self.kept = y.detach()
        elif self.what == "outside":
            y = y * self.outside
        elif self.what == "host data":
            y = y + torch.tensor([1.0] * 8)
        elif self.what == "collective":
            dist.all_reduce(y.detach().clone())
        elif self.what == "gathered":
            y = y + 0 * gathered(dist.group.WORLD, y)[0][0]
        elif self.what == "hook":
            self.linear.weight.register_hook(lambda gradient: gradient * 2)
        elif self.what == "generator":
            return iter([y])
        elif self.what == "counts":
            self.count += 1
            y = y * self.count
        return y


def small(make_module, graphs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), make_module(), nn.Linear(8, 8))
    for each in net:
        weft.fully_shard(each)
    return weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))


def steps(net, number, *, rows=4, start=0):
    """Gradients and outputs of some steps."""
    seen = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(start, start + number):
        torch.manual_seed(step)
        y = net(torch.randn(rows, 8))
        y.square().mean().backward()
        seen += [y.detach(), *(local(each.grad) for each in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def tape(*modules, **options):
    return weft.Graphs(modules=modules, warmup=1, backend="tape", **options)


def eager_and_graphed():
    """A small net with a block, without graphs and with one of the block."""
    return [small(lambda: Block(8, 12), graphs) for graphs in (None, tape("1"))]


REASONS = {
    "random": "random numbers",
    "item": "host reads",
    "tolist": "host reads",
    "branch": "host reads",
    "attribute": "sets attributes",
    "outside": "not an argument, parameter or buffer",
    "host data": "numbers on the host",
    "collective": "collective",
    "gathered": "collective",
    "hook": "a hook on the gradient of a gathered weight",
}


@pytest.mark.long
@distributed(2)
def test_what_a_graph_cannot_hold_stays_eager_and_says_why():
    for what, reason in REASONS.items():
        plain = small(functools.partial(Noisy, what), None)
        net = small(functools.partial(Noisy, what), tape("1"))
        assert_equal(steps(net, 3), steps(plain, 3))
        report = weft.graph_report(net)
        assert report["captures"] == report["replays"] == 0
        assert any(reason in each for each in report["eager"]), (what, report)


@pytest.mark.slow
@distributed(2)
def test_a_hook_on_a_gathered_weight_ends_the_replays_of_its_module():
    def doubled(module, _):
        module.norm.weight.register_hook(lambda gradient: gradient * 2)

    plain, net = eager_and_graphed()
    assert_equal(steps(net, 5), steps(plain, 5))
    replays = weft.graph_report(net)["replays"]
    assert replays > 0
    for each in (plain, net):
        each[1].register_forward_pre_hook(doubled)
    assert_equal(steps(net, 3, start=5), steps(plain, 3, start=5))
    assert weft.graph_report(net)["replays"] == replays


@pytest.mark.slow
@distributed(2)
def test_buffers_that_a_forward_changes_are_counted_once_per_call():
    plain = small(lambda: Noisy("counts"), None)
    net = small(lambda: Noisy("counts"), tape("1"))
    with poisoned():
        assert_equal(steps(net, 8), steps(plain, 8))
    assert weft.graph_report(net)["replays"] > 3
    assert torch.equal(net[1].count, torch.tensor(8.0))


@pytest.mark.slow
@distributed(2)
def test_a_block_that_runs_twice_before_its_backward_is_eager_the_second_time():
    plain = small(Twice, None)
    net = small(Twice, tape("1.block"))
    with poisoned():
        assert_equal(steps(net, 8), steps(plain, 8))
    report = weft.graph_report(net)
    assert report["captures"] == 1 and report["replays"] > 3
    assert report["eager"]["its last forward waits for its backward"] == report["replays"]


@pytest.mark.slow
@distributed(2)
def test_new_shapes_evaluations_and_loaded_weights_are_right_and_counted():
    nets, seen = eager_and_graphed(), []
    for net in nets:
        with poisoned():
            found = steps(net, 5)
            found += steps(net, 4, rows=6, start=5)
            net.eval()
            with torch.no_grad():
                found.append(net(torch.ones(4, 8)))
            net.train()
            found += steps(net, 3, start=9)
            with torch.no_grad():
                for each in net.parameters():
                    each.mul_(0.5)
            found += steps(net, 2, start=12)
        seen.append(found)
    assert_equal(*seen)
    report = weft.graph_report(nets[1])
    assert report["captures"] == 2
    assert report["eager"]["no gradients are computed"] == 1
    assert report["eager"]["new inputs"] == 2
    assert report["replays"] >= 14 - 8


@pytest.mark.slow
@distributed(2)
def test_weights_that_move_and_freezing_lead_to_a_new_capture():
    nets, seen = eager_and_graphed(), []
    for net in nets:
        with poisoned():
            found = steps(net, 6)
            net[1].up.bias.requires_grad_(False)
            for step in range(5):
                torch.manual_seed(step)
                y = net(torch.randn(4, 8))
                y.square().mean().backward()
                found += [y.detach(), *(local(each.grad) for each in net.parameters() if each.grad is not None)]
                net.zero_grad()
        seen.append(found)
    assert_equal(*seen)
    assert weft.graph_report(nets[1])["captures"] == 2


@pytest.mark.slow
@distributed(2)
def test_a_capture_that_fails_on_one_rank_is_used_on_none():
    net = small(lambda: Noisy("item" if dist.get_rank() else "nothing"), tape("1"))
    plain = small(lambda: Noisy("nothing"), None)
    assert_equal(steps(net, 6), steps(plain, 6))
    report = weft.graph_report(net)
    assert report["replays"] == 0 and report["bytes"] == 0
    if not dist.get_rank():
        assert report["captures"] == 1 and report["eager"]["its capture failed on another rank"] > 1


@pytest.mark.slow
@distributed(2)
def test_dropped_graphs_leave_the_model_as_it_was():
    net, plain = small(lambda: Block(8, 12), tape("1")), small(lambda: Block(8, 12), None)
    found = steps(net, 5)
    assert weft.graph_report(net)["bytes"] > 0 and "forward" in vars(net[1])
    weft.drop_graphs(net)
    assert "forward" not in vars(net[1])
    found += steps(net, 3, start=5)
    assert_equal(found, steps(plain, 8))
    report = weft.graph_report(net)
    assert report["bytes"] == 0 and report["captures"] == 1


@pytest.mark.slow
@distributed(2)
def test_user_hooks_on_a_captured_module_run_around_its_replays():
    net = small(lambda: Block(8, 12), tape("1"))
    seen = []
    net[1].register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    steps(net, 6)
    assert len(seen) == 6 and weft.graph_report(net)["replays"] > 2


@pytest.mark.slow
@distributed(2)
def test_what_a_replay_and_the_pool_may_overwrite_is_poison():
    """The negative control: poison is seen where something reads it."""
    net = small(lambda: Block(8, 12), tape("1"))
    with poisoned():
        steps(net, 6)
        pool = runtime_of(net).channels.weights
        released = [place for transient, place in pool._places.items() if transient not in pool._alive]
        assert any(place.isnan().all() for place in released)
        (signature,) = vars(net[1])["forward"]._signatures.values()
        (found,) = signature.captured
        assert found._inputs[0].tensor.isnan().all()
        made = [each for each in found._forward.made.values() if each.is_floating_point()]
        assert made and all(each.isnan().all() for each in made)
        net(torch.ones(4, 8))
        assert not found._inputs[0].tensor.isnan().any()


@pytest.mark.slow
@distributed(2)
def test_checkpoints_around_and_inside_of_a_captured_module():
    seen = []
    for graphs in (None, tape("1"), tape("1.block")):
        net = small(Checkpointed, graphs)
        with poisoned():
            seen.append(steps(net, 6))
    assert_equal(seen[1], seen[0])
    assert_equal(seen[2], seen[0])
    report = weft.graph_report(net)
    assert report["replays"] == 0
    assert report["eager"]["it runs inside a checkpoint or other hooks on saved tensors"] == 6


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(8, 12)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
