"""A script written for torch's FSDP2 runs with only the import changed.

Each script takes the namespace that the names come from, `torch.distributed.fsdp` or `weft`, and runs once with each.
What it returns must be equal: numbers, and what kind of tensor is registered when.
"""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import weft
from tests.fsdp import nets
from tests.fsdp.side_by_side import (
    Net,
    assert_same,
    batches,
    both,
    bottom_up,
    kinds,
    kinds_between,
    make,
    mesh_of,
    steps,
    whole,
    with_gradients,
)
from tests.pool import distributed
from tests.programs import Imported
from tests.train.command import free_port

pytestmark = pytest.mark.slow


# --- training -------------------------------------------------------------------------------------------------------


def trained(fsdp, optimizer, options):
    net = bottom_up(fsdp, make(), **options)
    optimizer = optimizer(net.parameters())
    numbers, seen = [], {"constructed": kinds(net)}
    running = net if options["reshard_after_forward"] is not False else net.blocks[1]
    net.blocks[1].up.register_forward_pre_hook(lambda *_: seen.update({"in a block's forward": kinds(running)}))
    for batch in batches():
        loss = net.loss(batch)
        seen["after forward"] = kinds_between(net)
        loss.backward()
        seen["after backward"] = kinds(net)
        numbers.append((loss.detach(), whole(net)))
        optimizer.step()
        optimizer.zero_grad()
        seen["after the step"] = kinds(net)
        numbers.append(whole(net))
    return numbers, seen


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(("optimizer", "reshard"), [("AdamW", None), ("SGD", True), ("SGD", False)])
@distributed(2)
def test_three_steps_and_what_is_registered_at_each_moment(optimizer, reshard):
    assert_same(trained, OPTIMIZERS[optimizer], {"reshard_after_forward": reshard})


def unsharded_by_hand(fsdp):
    net = bottom_up(fsdp, make(), reshard_after_forward=True)
    net.loss(batches()[0]).backward()  # torch wants the root's forward to come first
    block = net.blocks[0]
    seen = {}
    block.unshard()
    seen["unshard"] = kinds(net)
    numbers = [{name: p.detach().clone() for name, p in block.named_parameters()}]
    block.reshard()
    seen["reshard"] = kinds(net)
    handle = block.unshard(async_op=True)
    handle.wait()
    handle.wait()
    seen["asynchronous unshard"] = kinds(net)
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(dist.get_rank()))
    numbers.append(block(x).detach())
    seen["a forward of its own"] = kinds(net)
    for child in (net, *net.blocks):
        child.reshard()
    seen["everything resharded"] = kinds(net)
    assert net.unshard() is None
    seen["the root alone"] = kinds(net)
    net.reshard()
    net.loss(batches()[0]).backward()
    seen["after a step"] = kinds(net)
    return [*numbers, whole(net)], seen


@distributed(2)
def test_unshard_and_reshard_by_hand():
    assert_same(unsharded_by_hand)


def evaluated(fsdp, reshard):
    net = bottom_up(fsdp, make(), reshard_after_forward=reshard)
    numbers, seen = [], {}
    for mode in ("first of all", "between steps"):
        net.eval()
        with torch.no_grad():
            numbers.append(net.loss(batches()[0]))
        seen[mode] = kinds(net)
        net.train()
        net.loss(batches()[1]).backward()
        seen[f"{mode}, then a step"] = kinds(net)
        numbers.append(whole(net))
    with torch.no_grad():
        net.loss(batches()[0])
    net.state_dict()
    seen["state dict"] = kinds(net)
    return numbers, seen


def own(seen: dict[str, tuple]) -> set[str]:
    """The names of plain parameters."""
    return {name for name, kind in seen.items() if kind[0] == "plain"}


@distributed(2)
def test_an_evaluation_leaves_everything_sharded_where_torch_leaves_the_root_whole():
    """torch keeps what it does not reshard after forward until the next forward. weft keeps it for a backward only: an
    evaluation has none, and outside of forward and backward nothing is whole."""
    for reshard in (None, True, False):
        (numbers, seen), (expected, torch_seen) = both(evaluated, reshard)
        torch.testing.assert_close(numbers, expected)
        stay = {None: lambda name: not name.startswith("blocks"), True: lambda name: False, False: lambda name: True}
        for mode in ("first of all", "between steps"):
            assert own(seen.pop(mode)) == set()
            names = torch_seen.pop(mode)
            assert own(names) == {name for name in names if stay[reshard](name)}
        assert seen == torch_seen


# --- mixed precision ------------------------------------------------------------------------------------------------


POLICIES = {
    "bf16 throughout": {"param_dtype": torch.bfloat16},
    "fp32, reduced in bf16": {"reduce_dtype": torch.bfloat16},
    "fp32 outputs": {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "output_dtype": torch.float32,
    },
}


def in_low_precision(fsdp, policy):
    policy = torch_fsdp.MixedPrecisionPolicy(**policy)
    net = make()
    for block in net.blocks:
        fsdp.fully_shard(block, mesh=mesh_of(), mp_policy=dataclasses.replace(policy, output_dtype=None))
    fsdp.fully_shard(net, mesh=mesh_of(), mp_policy=policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = {"constructed": kinds(net)}
    net.blocks[1].up.register_forward_pre_hook(lambda _, args: seen.update({"input": args[0].dtype}))
    net.blocks[1].up.register_forward_hook(lambda *_: seen.update({"in a block's forward": kinds(net)}))
    numbers = []
    for batch in batches(2):
        output = net(batch)
        seen["output"] = output.dtype
        F.cross_entropy(output.flatten(0, 1), batch.flatten()).backward()
        seen["after backward"] = kinds(net)
        seen["gradients"] = {name: p.grad.dtype for name, p in net.named_parameters()}
        numbers.append(whole(net))
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(whole(net))
    return numbers, seen


@pytest.mark.parametrize("policy", POLICIES)
@distributed(2)
def test_torch_s_own_precision_policy_means_the_same(policy):
    # A sum of two is rounded alike, but torch halves before it adds and weft may after.
    assert_same(in_low_precision, POLICIES[policy], rtol=3e-3, atol=3e-3)


class Feeds(nn.Module):
    """Tells what dtype reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(13))

    def forward(self, x: torch.Tensor, *, others: dict[str, Any]) -> Any:
        self.seen = (x.dtype, others["y"].dtype, others["ids"].dtype)
        return {"x": x * self.scale, "ids": others["ids"], "y": (others["y"],)}


def cast_or_not(fsdp, cast, output):
    policy = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=output, cast_forward_inputs=cast)
    net = fsdp.fully_shard(Feeds(), mesh=mesh_of(), mp_policy=policy)
    x = torch.randn(4, 13, requires_grad=True, generator=torch.Generator().manual_seed(dist.get_rank()))
    result = net(x, others={"y": torch.ones(3, dtype=torch.float64), "ids": torch.arange(3)})
    result["x"].float().sum().backward()
    seen = (net.seen, result["x"].dtype, result["y"][0].dtype, result["ids"].dtype, kinds(net))
    return [x.grad, nets.full(net.scale.grad)], seen


@distributed(2)
def test_inputs_and_outputs_have_the_same_dtypes():
    for cast in (True, False):
        for output in (None, torch.float32, torch.bfloat16):
            assert_same(cast_or_not, cast, output, rtol=3e-3, atol=3e-3)


# --- the methods of a sharded module --------------------------------------------------------------------------------


def explicit_prefetch(fsdp):
    net = bottom_up(fsdp, make())
    blocks = list(net.blocks)
    net.set_modules_to_forward_prefetch(blocks[:2])
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[1].set_modules_to_forward_prefetch([blocks[2]])
    blocks[2].set_modules_to_backward_prefetch(blocks[1::-1])
    blocks[1].set_modules_to_backward_prefetch([blocks[0]])
    seen = []
    return steps(net, seen=seen), seen


def accumulated_without_sync(fsdp):
    net, seen = bottom_up(fsdp, make()), []
    return steps(net, before=lambda number, last: net.set_requires_gradient_sync(last), seen=seen), seen


def accumulated_without_sync_of_one_block(fsdp):
    net, seen = bottom_up(fsdp, make()), []
    block = net.blocks[1]
    before = lambda number, last: block.set_requires_gradient_sync(last, recurse=False)  # noqa: E731
    return steps(net, before=before, seen=seen), seen


def resharded_after_the_last_only(fsdp):
    net, seen = bottom_up(fsdp, make()), []

    def before(number, last):
        net.set_is_last_backward(last)
        net.set_reshard_after_backward(last)

    return steps(net, before=before, seen=seen), seen


def never_resharded_after_backward(fsdp):
    net, seen = bottom_up(fsdp, make()), []
    net.set_reshard_after_backward(False)
    return steps(net, seen=seen), seen


def kept_after_forward_of_one_block(fsdp):
    net, seen = bottom_up(fsdp, make()), []
    net.blocks[0].set_reshard_after_forward(False)
    net.set_reshard_after_forward(True, recurse=False)
    return steps(net, seen=seen), seen


def kept_by_a_call_on_the_root(fsdp):
    net, seen = bottom_up(fsdp, make()), []
    net.set_reshard_after_forward(False, recurse=True)
    return steps(net, seen=seen), seen


def other_divisors(fsdp):
    net = bottom_up(fsdp, make())
    if hasattr(net, "set_force_sum_reduction_for_comms"):  # torch's default asks gloo for a product it does not have
        for child in (net, *net.blocks):
            child.set_force_sum_reduction_for_comms(True)
    net.set_gradient_divide_factor(3.0)
    net.blocks[1].set_gradient_divide_factor(16.0)
    return steps(net), None


def clipped(fsdp):
    net = bottom_up(fsdp, make())
    facts = []

    def clip(net):
        total = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        facts.append((isinstance(total, DTensor), total.dim(), total.dtype))
        return [total.full_tensor(), total.item()]

    return steps(net, clip=clip), facts


def clipped_without_foreach(fsdp):
    net = bottom_up(fsdp, make())

    def clip(net):
        norms = [torch.nn.utils.clip_grad_norm_(net.parameters(), m, p, foreach=False) for m, p in LIMITS]
        return [norm.full_tensor() for norm in norms]

    return steps(net, clip=clip), None


LIMITS = [(10.0, float("inf")), (1.0, 1.0), (0.1, 2.0)]


def weights_not_needed_in_backward(fsdp):
    net = make()
    net.head.weight = nn.Parameter(torch.randn(11, 13, generator=torch.Generator().manual_seed(2)))
    fsdp.fully_shard(net.embedding, mesh=mesh_of())
    net.embedding.set_unshard_in_backward(False)
    bottom_up(fsdp, net)
    seen = []
    return steps(net, seen=seen), seen


def frozen_parameters(fsdp):
    net, seen = make(), []
    for parameter in [*net.blocks[0].parameters(), net.blocks[1].up.weight]:
        parameter.requires_grad_(False)
    bottom_up(fsdp, net)
    return steps(net, seen=seen, parameters=[p for p in net.parameters() if p.requires_grad]), seen


def one_unit_of_several_modules(fsdp):
    net, seen = make(), []
    returned = fsdp.fully_shard(list(net.blocks[:2]), mesh=mesh_of())
    assert [isinstance(block, fsdp.FSDPModule) for block in returned] == [True, True]
    fsdp.fully_shard([net.blocks[2], net.norm], mesh=mesh_of())
    fsdp.fully_shard(net, mesh=mesh_of())
    return steps(net, seen=seen), seen


def left_alone(fsdp):
    net, seen = make(), []
    ignored = {net.norm.weight, net.blocks[1].down.weight}
    weights = (net.norm.weight, net.blocks[1].down.weight)
    bottom_up(fsdp, net, ignored_params=ignored)
    assert (net.norm.weight is weights[0], net.blocks[1].down.weight is weights[1]) == (True, True)
    trained = [p for p in net.parameters() if p not in ignored]
    return steps(net, seen=seen, parameters=trained), seen


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nets.Block(13, 29)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)

    def encode(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        x = self.blocks[0](x)
        return self.blocks[0](x) if twice else x


def another_forward_method(fsdp):
    torch.manual_seed(0)
    net = fsdp.fully_shard(Encoder(), mesh=mesh_of())
    fsdp.register_fsdp_forward_method(net, "encode")
    fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
    with pytest.raises(ValueError):
        fsdp.register_fsdp_forward_method(net, "decode")
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(dist.get_rank()))
    output = net.encode(x, twice=True)
    seen = [kinds_between(net)]
    output.square().mean().backward()
    seen.append(kinds(net))
    return [output.detach(), whole(net)], seen


def torchtitan_s_way(fsdp):
    """Its units, its precision, its microbatches: a module beside the blocks, norm and output as one unit that is not
    resharded, sums over tokens without division, and its own calls per microbatch."""
    net = make()
    net.head.weight = nn.Parameter(torch.randn(11, 13, generator=torch.Generator().manual_seed(2)))
    config = {
        "mesh": mesh_of(),
        "mp_policy": fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    fsdp.fully_shard(net.embedding, **config, reshard_after_forward=True)
    for block in net.blocks:
        fsdp.fully_shard(block, **config, reshard_after_forward=True)
    fsdp.fully_shard([net.norm, net.head], **config, reshard_after_forward=False)
    fsdp.fully_shard(net, **config)
    for module in net.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
            module.set_gradient_divide_factor(1.0)
    seen = [kinds(net)]

    def before(number, last):
        net.set_is_last_backward(last)
        net.set_requires_gradient_sync(last)
        net.set_reshard_after_backward(last)

    def clip(net):
        total = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()], foreach=True)
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, total, foreach=True)
        return total.full_tensor()

    return steps(net, before=before, seen=seen, clip=clip), seen


def hooked_reductions(fsdp):
    net, seen = bottom_up(fsdp, make()), []

    def doubled(reduced: torch.Tensor) -> None:
        seen.append((reduced.dim(), reduced.dtype))
        reduced.mul_(2)

    net.blocks[1].set_all_reduce_hook(doubled)
    return steps(net), seen


def separate_communicators_and_more_buffers(fsdp):
    net = bottom_up(fsdp, make())
    net.set_separate_reduce_scatter_group()
    net.set_reduce_scatter_max_input_buffers(3)
    backwards = iter(range(4))

    def before(number, last):
        if next(backwards) == 2:
            net.set_separate_reduce_scatter_group(False)

    return steps(net, before=before), None


class Choosy(nn.Module):
    """Rank r uses the r-th of two branches of the same shape, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.head = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.branches[dist.get_rank()](x))


def parameters_that_some_ranks_or_none_use(fsdp):
    torch.manual_seed(0)
    net = fsdp.fully_shard(Choosy(), mesh=mesh_of())
    net.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(dist.get_rank()))
    numbers = []
    for _ in range(3):
        net(x).square().mean().backward()
        numbers.append(whole(net))
        optimizer.step()
        optimizer.zero_grad()
    return numbers, [sorted(each["gradients"]) for each in numbers]


def two_models_that_share_their_communication(fsdp):
    torch.manual_seed(0)
    stages = [fsdp.fully_shard(nn.Linear(13, 13), mesh=mesh_of()) for _ in range(2)]
    fsdp.share_comm_ctx(stages)
    fsdp.share_comm_ctx([])
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(dist.get_rank()))
    numbers = []
    for _ in range(3):
        stages[1](stages[0](x).relu()).square().mean().backward()
        numbers.append([whole(stage) for stage in stages])
        for stage in stages:
            stage.zero_grad()
    return numbers, [kinds(stage) for stage in stages]


def a_slice_of_a_sharded_container(fsdp):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(13, 13) for _ in range(3)))
    for layer in net:
        fsdp.fully_shard(layer, mesh=mesh_of())
    fsdp.fully_shard(net, mesh=mesh_of())
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(dist.get_rank()))
    net(x).square().mean().backward()
    front = net[:2]
    assert isinstance(net, fsdp.FSDPModule) and not isinstance(front, fsdp.FSDPModule)
    return [front[0].weight.full_tensor().detach(), whole(net)], [type(front), len(front), kinds(front)]


SCRIPTS = [
    explicit_prefetch,
    accumulated_without_sync,
    accumulated_without_sync_of_one_block,
    resharded_after_the_last_only,
    never_resharded_after_backward,
    kept_after_forward_of_one_block,
    kept_by_a_call_on_the_root,
    other_divisors,
    clipped,
    clipped_without_foreach,
    weights_not_needed_in_backward,
    frozen_parameters,
    one_unit_of_several_modules,
    left_alone,
    another_forward_method,
    torchtitan_s_way,
    hooked_reductions,
    separate_communicators_and_more_buffers,
    parameters_that_some_ranks_or_none_use,
    two_models_that_share_their_communication,
    a_slice_of_a_sharded_container,
]


@pytest.mark.parametrize("script", [script.__name__ for script in SCRIPTS])
@distributed(2)
def test_the_methods_mean_the_same(script):
    assert_same(globals()[script])


class Event:
    """What a CUDA event does for the pass that waits for it."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


@distributed(2)
def test_the_next_pass_waits_once_for_an_event_behind_the_optimizer():
    net, event = bottom_up(weft, make()), Event()
    net.set_post_optim_event(event)
    for _ in range(2):
        net.loss(batches()[0]).backward()
        assert event.waits == 1


@pytest.mark.long
@distributed(4)
def test_data_parallel_axes_of_a_larger_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "context"))
    expected = steps(bottom_up(weft, make()))
    for dims in (
        torch_fsdp.DataParallelMeshDims(shard=("replicate", "context")),
        torch_fsdp.DataParallelMeshDims(shard="context", replicate="replicate"),
        weft.DataParallelMeshDims(replicate=("replicate", "context")),
    ):
        net = bottom_up(weft, make(), mesh=mesh, dp_mesh_dims=dims)
        torch.testing.assert_close(steps(net), expected)
        whole_here = all(p.to_local().numel() == p.numel() for p in net.parameters())
        assert whole_here == (dims.shard is None)


# --- what else scripts do -------------------------------------------------------------------------------------------


def arithmetic_on_parameters_and_gradients(fsdp):
    net = bottom_up(fsdp, make())
    net.loss(batches()[0]).backward()
    gradients = [p.grad for p in net.parameters()]
    torch._foreach_mul_(gradients, 0.5)
    for gradient in gradients:
        gradient.div_(3).add_(1.0)
    total = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(net.parameters(), 0.1, total)
    average = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.add_(p.grad, alpha=-0.1)
            p.data.mul_(1.5)
    torch._foreach_lerp_(average, [p.detach() for p in net.parameters()], 0.1)
    weight = net.blocks[1].up.weight
    figures = [total, weight.grad.norm(), weight.detach().abs().max(), weight.grad.pow(2).sum(), weight.detach().mean()]
    facts = [weight.placements, weight.device_mesh.shape, weight.numel(), sum(p.numel() for p in net.parameters())]
    return [whole(net), [nets.full(value) for value in [*figures, *average]]], facts


def gradients_set_to_zero(fsdp):
    net = bottom_up(fsdp, make())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    numbers, seen = [], []
    for batch in batches():
        net.loss(batch).backward()
        optimizer.step()
        net.zero_grad(set_to_none=False)
        numbers.append(whole(net))
        seen.append(with_gradients(net))
    return numbers, seen


def built_on_the_meta_device(fsdp):
    with torch.device("meta"):
        net = Net()
    bottom_up(fsdp, net)
    net.to_empty(device="cpu")
    values = torch.Generator().manual_seed(dist.get_world_size())
    with torch.no_grad():
        for p in net.parameters():
            nn.init.constant_(p, torch.rand((), generator=values).item())
        nn.init.zeros_(net.norm.bias)
        nn.init.ones_(net.norm.weight)
    return steps(net), kinds(net)


def loaded_from_distributed_tensors(fsdp):
    net, full = bottom_up(fsdp, make()), make(1).state_dict()
    sharded = {
        name: distribute_tensor(full[name], value.device_mesh, value.placements)
        for name, value in net.state_dict().items()
    }
    report = net.load_state_dict(sharded)
    return [whole(net), steps(net)], [list(report.missing_keys), kinds(net)]


def moved_to_where_it_is(fsdp):
    net = bottom_up(fsdp, make())
    before = list(net.parameters())
    net.to("cpu").float().cpu()
    assert all(p is q for p, q in zip(net.parameters(), before, strict=True))
    return steps(net), kinds(net)


@pytest.mark.parametrize(
    "script",
    [
        "arithmetic_on_parameters_and_gradients",
        "gradients_set_to_zero",
        "built_on_the_meta_device",
        "loaded_from_distributed_tensors",
        "moved_to_where_it_is",
    ],
)
@distributed(2)
def test_parameters_are_used_the_same(script):
    assert_same(globals()[script])


# --- HSDP -----------------------------------------------------------------------------------------------------------


def replicated_and_sharded(fsdp, accumulate):
    net, seen = bottom_up(fsdp, make(), mesh=mesh_of(2, 2)), []
    before = {
        "at once": lambda number, last: None,
        "outer axis last": lambda number, last: net.set_requires_all_reduce(last),
        "both axes last": lambda number, last: net.set_requires_gradient_sync(last),
        "told of the last": lambda number, last: net.set_is_last_backward(last),
        "outer axis last, hooked": lambda number, last: net.set_requires_all_reduce(last),
    }[accumulate]
    if "hooked" in accumulate:
        net.blocks[0].set_all_reduce_hook(lambda reduced: reduced.mul_(2))
    numbers = steps(net, before=before, seen=seen)
    if accumulate == "told of the last":
        # torch all-reduces all the same. weft does so once, at the last, and has no gradient until then.
        early = [present for number, (_, present) in enumerate(seen) if number % 2 == 0]
        assert (early == [[]] * len(early)) == (fsdp is weft)
        seen = seen[1::2]
    return numbers, seen


@pytest.mark.long
@distributed(4)
def test_a_mesh_of_two_axes_replicates_over_the_first():
    for accumulate in ("at once", "outer axis last", "both axes last", "told of the last", "outer axis last, hooked"):
        assert_same(replicated_and_sharded, accumulate)


# --- a program without a process group ------------------------------------------------------------------------------


def test_under_torchrun_a_program_needs_no_init_process_group():
    program = (
        "import torch, torch.distributed as dist, {0} as fsdp\n"
        "torch.manual_seed(0)\n"
        "model = fsdp.fully_shard(torch.nn.Linear(3, 4))\n"
        "model(torch.ones(2, 3) * (1 + dist.get_rank())).sum().backward()\n"
        "print(dist.get_world_size(), model.weight.grad.full_tensor().tolist())\n"
    )
    place = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    said = []
    with Imported("import torch.distributed.fsdp, weft.fsdp") as ready:
        for namespace in ("torch.distributed.fsdp", "weft"):
            port = str(free_port())
            places = [{**place, "MASTER_PORT": port, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
            ranks = ready.run([program.format(namespace)] * 2, places, together=True)
            assert [each.returncode for each in ranks] == [0, 0], [each.stderr for each in ranks]
            said += [each.stdout for each in ranks]
    assert said[0].startswith("2 [[3.0, 3.0, 3.0]") and set(said) == {said[0]}
