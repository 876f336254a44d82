"""A wrong configuration fails at construction, in one line with the value, the rule and the fix."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.fsdp import plan_of
from weft.fsdp.module import runtime_of, unit_of


@contextmanager
def refused(kind: type[Exception], *said: str):
    """Expect an error of one line that contains each of `said`, in this order."""
    with pytest.raises(kind, match=".*".join(re.escape(part) for part in said)) as caught:
        yield
    assert "\n" not in str(caught.value)


@distributed(2)
def test_modules_that_cannot_be_a_unit_are_refused():
    with refused(ValueError, "Block is already sharded", "once per module"):
        weft.fully_shard(weft.fully_shard(nets.Block(4, 4)))
    with refused(ValueError, "'norm.weight' of Block", "is already sharded", "children first"):
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


def test_modules_of_torch_jit_are_refused_by_name(world):
    world(0, 2)
    scripted = torch.jit.ScriptModule()
    for module, name in ((scripted, "the module itself"), (nn.Sequential(scripted), "0")):
        with refused(ValueError, f"{name} is a ScriptModule of torch.jit", "the original module"):
            weft.fully_shard(module)


@distributed(2)
def test_parameters_on_another_device_are_refused():
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    linear.reset_parameters = None
    weft.fully_shard(linear, mesh=mesh)
    with refused(ValueError, "Linear", "'weight'", "meta device", "reset_parameters"):
        linear(torch.ones(1, 2))


@distributed(4)
def test_meshes_that_do_not_fit_are_refused():
    block = nets.Block(4, 4)
    with refused(ValueError, "3 axes ('dp', 'cp', 'tp'): pass a 1-D"):
        weft.fully_shard(block, mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp")))
    half = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() < 2:
        weft.fully_shard(block, mesh=half)
    else:
        with refused(ValueError, "mesh [0, 1]", f"this rank ({dist.get_rank()})", "only on the ranks of its mesh"):
            weft.fully_shard(block, mesh=half)


def test_a_mesh_of_another_type_is_refused():
    with refused(TypeError, "mesh='cpu'", "pass a DeviceMesh"):
        weft.fully_shard(nets.Block(4, 4), mesh="cpu")


@distributed(2)
def test_unknown_strategies_and_placements_are_refused():
    block = nets.Block(4, 4)
    for strategy in ("zero3", "full_shard", "", None, ["optim"]):
        with refused(ValueError, f"strategy={strategy!r}", "'no_shard'", "'optim_grads_params'", "Placements"):
            weft.fully_shard(block, strategy=strategy)
    with refused(ValueError, "S(0), P(sum), R", "on the shard axis: choose one of", "optim_grads_params"):
        weft.Placements(Shard(0), Partial(), Replicate())
    with refused(ValueError, "S(1), S(1), S(1)", "choose one of"):
        weft.Placements(parameter=Shard(1), gradient=Shard(1), optimizer=Shard(1))
    assert not isinstance(block, weft.FSDPModule)


def test_strategies_of_two_axes_that_do_not_fit_are_refused(world):
    world(0, 4)
    mesh, block = init_device_mesh("cpu", (2, 2)), nets.Block(4, 4)
    for outer in ("optim_grads", "hsdp"):
        with refused(ValueError, f"outer_strategy={outer!r}: choose one of 'no_shard', 'optim'"):
            weft.fully_shard(block, mesh=mesh, outer_strategy=outer)
    with refused(ValueError, "outer_strategy='optim' with strategy='no_shard'", "a stronger strategy"):
        weft.fully_shard(block, mesh=mesh, strategy="no_shard", outer_strategy="optim")
    with refused(ValueError, "is for 1 mesh axes, but the mesh has 2", "one placement per axis"):
        weft.fully_shard(block, mesh=mesh, strategy=weft.Placements(Shard(0), Shard(0), Shard(0)))
    with refused(ValueError, "on the outer axis: choose one of no_shard", "optim"):
        weft.Placements(*[[Shard(0), Shard(0)]] * 3)
    for gradient in ([Shard(0)], [Shard(0)] * 3):
        with refused(ValueError, "one placement per mesh axis each, for one or two axes"):
            weft.Placements([Replicate(), Shard(0)], gradient, [Replicate(), Shard(0)])
    with refused(ValueError, "for one or two axes"):
        weft.Placements(*[[Replicate(), Replicate(), Shard(0)]] * 3)


def test_a_parameter_s_own_mesh_is_one_of_the_module_s_device_and_needs_no_number_of_ranks(world):
    world(0, 4)
    whole, half, equal = (DeviceMesh("cpu", ranks) for ranks in ([0, 1, 2, 3], [0, 1], [0, 1, 2, 3]))

    def sharded(own, reshard=None) -> nn.Linear:
        chosen = SimpleNamespace(placement=Shard(0), mesh_info=SimpleNamespace(mesh=own, dp_mesh_dims=None))
        return weft.fully_shard(
            nn.Linear(4, 4), mesh=whole, reshard_after_forward=reshard, shard_placement_fn=lambda parameter: chosen
        )

    with refused(ValueError, "returned a mesh on cuda, but the module's mesh is on cpu"):
        sharded(SimpleNamespace(device_type="cuda"))
    with refused(ValueError, "reshard_after_forward=2 where shard_placement_fn gives parameters their own mesh"):
        sharded(half, 2)
    for reshard in (None, True, False):
        assert sharded(half, reshard).weight.device_mesh == half
    assert unit_of(sharded(equal, 2)).reshard_after_forward is True


@distributed(2)
def test_options_that_cannot_be_honoured_are_refused_and_not_ignored():
    block = nets.Block(4, 4)
    with refused(ValueError, "outer_strategy='optim'", "1-D"):
        weft.fully_shard(block, outer_strategy="optim")
    with refused(ValueError, "gradient_divide_factor=0", "positive"):
        weft.fully_shard(block, gradient_divide_factor=0)
    for factor in (-1, float("nan"), float("inf")):
        with refused(ValueError, f"gradient_divide_factor={factor}", "positive", "finite"):
            weft.fully_shard(block, gradient_divide_factor=factor)
    with refused(TypeError, "gradient_divide_factor='2'", "positive number"):
        weft.fully_shard(block, gradient_divide_factor="2")
    with refused(TypeError, "mesh='cpu'", "DeviceMesh", "None"):
        weft.fully_shard(block, mesh="cpu")
    for dims in ("shard", SimpleNamespace(shard="dp"), SimpleNamespace(replicate="dp")):
        with refused(TypeError, f"dp_mesh_dims={dims!r}", "weft.DataParallelMeshDims"):
            weft.fully_shard(block, dp_mesh_dims=dims)
    with refused(TypeError, "runtime={}", "weft.RuntimeOptions"):
        weft.fully_shard(block, runtime={})
    with refused(TypeError, "shard_placement_fn=Shard(dim=0)", "function"):
        weft.fully_shard(block, shard_placement_fn=Shard(0))
    with refused(TypeError, "mp_policy='bf16'", "MixedPrecisionPolicy"):
        weft.fully_shard(block, mp_policy="bf16")
    with refused(TypeError, "offload_policy=True", "OffloadPolicy"):
        weft.fully_shard(block, offload_policy=True)
    sharded = weft.fully_shard(block)
    with refused(ValueError, "set_requires_all_reduce(False)", "set_requires_gradient_sync"):
        sharded.set_requires_all_reduce(False)
    for set_factor in (sharded.set_gradient_divide_factor, sharded.set_reduce_scatter_divide_factor):
        for factor in (-1, 0, float("nan"), float("inf")):
            with refused(ValueError, f"gradient divide factor {factor}", "positive", "finite"):
                set_factor(factor)
        for factor in ("2", True, [2]):
            with refused(TypeError, f"gradient divide factor {factor!r}", "positive number"):
                set_factor(factor)
    with refused(TypeError, "set_all_reduce_hook('sum')", "function"):
        sharded.set_all_reduce_hook("sum")


@distributed(2)
def test_runtime_options_of_a_unit_that_are_not_the_root_s_are_refused():
    caching, tokens = weft.RuntimeOptions(allocator="caching"), nets.data(1, 2)[0]
    for root in (None, weft.RuntimeOptions(prefetch_bytes=0)):
        net = nets.make()
        weft.fully_shard(net.blocks[1], runtime=caching)
        weft.fully_shard(net, runtime=root)
        for _ in range(2):
            with refused(ValueError, "allocator='caching'", "blocks.1 (Block)", "the root's options", "last call"):
                net(tokens)
    net = nets.shard(nets.make(), runtime=caching)  # the same everywhere
    net(tokens)
    assert runtime_of(net).options == caching
    inner = nn.Sequential(weft.fully_shard(nn.Linear(2, 2), runtime=caching))
    weft.fully_shard(inner)  # no root: it is only for the last call to say
    weft.fully_shard(outer := nn.Sequential(inner), runtime=caching)
    outer(torch.ones(1, 2))
    assert runtime_of(outer).options == caching


@distributed(2)
def test_ignored_parameters_are_parameters():
    block = nets.Block(4, 4)
    names = [name for name, _ in block.named_parameters()]
    with refused(TypeError, "ignored_params contains 'norm.weight'", "the parameters themselves"):
        weft.fully_shard(block, ignored_params=names)
    with refused(TypeError, "ignored_params contains a tuple", "set(module.parameters())"):
        weft.fully_shard(block, ignored_params=block.named_parameters())
    for single in (block.norm.weight, block, "norm.weight", 1):
        with refused(TypeError, f"ignored_params is a {type(single).__name__}", "the parameters themselves"):
            weft.fully_shard(block, ignored_params=single)
    elsewhere = nn.Parameter(torch.ones(1))  # torch takes one set for every call
    weft.fully_shard(block, ignored_params=iter([block.norm.weight, elsewhere]))
    ignored = [name for name, parameter in block.named_parameters() if not isinstance(parameter, DTensor)]
    assert ignored == ["norm.weight"]


@distributed(2)
def test_a_call_that_is_refused_ignores_no_parameters():
    block, extra = nets.Block(4, 4), nn.Parameter(torch.ones(1))
    with refused(TypeError, "mp_policy='bf16'"):
        weft.fully_shard(block, ignored_params=[extra], mp_policy="bf16")
    with refused(ValueError, "shard_placement_fn returned 'rows'"):
        weft.fully_shard(block, ignored_params=[extra], shard_placement_fn=lambda parameter: "rows")
    weft.fully_shard(block)
    block.extra = extra
    with refused(RuntimeError, "parameter 'extra' was added to", "ignored_params"):
        block(torch.ones(1, 4))


class OnCuda(nn.Parameter):
    device = torch.device("cuda")


@distributed(2)
def test_the_default_mesh_is_on_the_device_of_what_is_sharded():
    linear = nn.Linear(2, 2)
    linear._parameters = {"scale": OnCuda(torch.ones(1)), **linear._parameters}
    weft.fully_shard(linear, ignored_params=[linear.scale])
    assert linear.weight.device_mesh.device_type == "cpu"
    linear = nn.Linear(2, 2)
    linear.weight = OnCuda(linear.weight.detach())
    with refused(ValueError, "'weight' of Linear is on cuda, the mesh is for cpu", "move the module to cpu"):
        weft.fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))


@distributed(2)
def test_switches_are_bools():
    sharded = weft.fully_shard(nets.Block(4, 4))
    for method in (
        *("set_is_last_backward", "set_requires_gradient_sync", "set_requires_all_reduce"),
        *("set_reshard_after_backward", "set_unshard_in_backward", "set_force_sum_reduction_for_comms"),
        *("set_reduce_scatter_unused_params", "set_separate_reduce_scatter_group"),
        "set_allocate_memory_from_process_group_for_comm",
    ):
        for wrong in ("no", None, [False]):
            with refused(TypeError, f"{method}({wrong!r})", "True or False"):
                getattr(sharded, method)(wrong)
    sharded.set_requires_gradient_sync(0)
    sharded.set_is_last_backward(torch.tensor(False))
    assert sharded._weft_unit.requires_gradient_sync is False and runtime_of(sharded).reductions.last_backward is False


@distributed(2)
def test_only_sharded_modules_of_the_same_model_are_prefetched():
    def two_units():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in net:
            weft.fully_shard(layer)
        net[0].set_modules_to_forward_prefetch([net[1]])  # before the root is sharded, too
        around = weft.fully_shard(nn.Sequential(weft.fully_shard(nn.Linear(2, 2))))
        net[0].set_modules_to_forward_prefetch([around[0]])
        return weft.fully_shard(net)

    net, other = two_units(), two_units()
    for method in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with refused(TypeError, f"{method} got a Linear", "a list of sharded modules"):
            getattr(net[0], method)(net[1])
        with refused(ValueError, "Linear is not sharded", "fully_shard"):
            getattr(net[0], method)([nn.Linear(2, 2)])
        with refused(ValueError, f"{method} of '0' got '1'", "another root", "same model"):
            getattr(net[0], method)([other[1]])
        getattr(net[0], method)((net[1],))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@distributed(2)
def test_embeddings_with_sparse_gradients_are_refused(kind):
    with refused(ValueError, f"{kind.__name__}(sparse=True), 0", "sparse=False", "ignored_params"):
        weft.fully_shard(nn.Sequential(kind(8, 4, sparse=True), nn.Linear(4, 4)))
    with refused(ValueError, f"{kind.__name__}(sparse=True), the module itself"):
        weft.fully_shard(kind(8, 4, sparse=True))
    ignored = kind(8, 4, sparse=True)
    weft.fully_shard(nn.Sequential(ignored, nn.Linear(4, 4)), ignored_params=[ignored.weight])
    frozen = kind(8, 4, sparse=True).requires_grad_(False)
    net = weft.fully_shard(nn.Sequential(frozen, nn.Linear(4, 4)))
    net(torch.arange(8).view(4, 2)).sum().backward()


def test_a_trained_parameter_whose_memory_another_tensor_has_is_refused_by_name(world):
    world(0, 2)

    def net(share) -> nn.Module:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        share(*net)
        return net

    def tie_by_data(one: nn.Linear, other: nn.Linear) -> None:
        other.weight.data = one.weight.data.t()

    def view(one: nn.Linear, other: nn.Linear) -> None:
        other.bias = nn.Parameter(one.weight.data[3])

    def buffer(one: nn.Linear, other: nn.Linear) -> None:
        other.register_buffer("copy", one.weight.detach()[:2])

    def behind_another(one: nn.Linear, other: nn.Linear) -> None:
        memory = torch.randn(12, 4)
        one.weight, one.bias = (nn.Parameter(each, requires_grad=False) for each in (memory, memory[1]))
        other.weight = nn.Parameter(memory[4:8])  # the bias begins between the two weights, and ends before this one

    def halves(one: nn.Linear, other: nn.Linear) -> None:
        both = torch.randn(8, 4)
        one.weight, other.weight = map(nn.Parameter, both.chunk(2))
        one.bias, other.bias = map(nn.Parameter, torch.randn(4, 2).t())

    for share, first, second in (
        (tie_by_data, "parameter '0.weight'", "parameter '1.weight'"),
        (view, "parameter '0.weight'", "parameter '1.bias'"),
        (buffer, "buffer '1.copy'", "parameter '0.weight'"),
        (behind_another, "parameter '0.weight'", "parameter '1.weight'"),
    ):
        with refused(ValueError, first, "shares memory with", second, "clone()"):
            weft.fully_shard(net(share))
        weft.fully_shard(net(share).requires_grad_(False))  # whose values stay equal
    weft.fully_shard(net(halves))


@distributed(2)
def test_parameters_that_are_replaced_after_sharding_are_named_and_the_model_continues():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = net(x)
    for layer in net:
        weft.fully_shard(layer)
    weft.fully_shard(net)
    own = net[0].weight

    def refuses(call):
        with refused(RuntimeError, "parameter 'weight'", "replaced or removed", "copy_", "before fully_shard"):
            call()
        assert net[0].weight is own
        torch.testing.assert_close(net(x), expected)

    given = {name: torch.zeros(parameter.shape) for name, parameter in net.named_parameters()}
    refuses(lambda: torch.func.functional_call(net, given, (x,)))
    for replacement in (nn.Parameter(torch.zeros(4, 4)), None):
        net[0].weight = replacement
        refuses(lambda: net(x))
    del net[0].weight
    refuses(lambda: net(x))
    net[0].weight = nn.Parameter(torch.zeros(4, 4))
    refuses(lambda: net.to(torch.float32))
    net[0].weight = net[0].weight
    torch.testing.assert_close(net(x), expected)


@pytest.mark.parametrize(
    "option, said",
    [
        ({"allocator": "arena"}, ["allocator='arena'", "'trace'", "'caching'"]),
        ({"max_live_reduce_buffers": 0}, ["max_live_reduce_buffers=0", "at least 1"]),
        ({"prefetch_bytes": -1}, ["prefetch_bytes=-1", "None"]),
        ({"bucket_bytes": -1}, ["bucket_bytes=-1", "0 or more"]),
    ],
)
def test_runtime_options_are_checked(option, said):
    with refused(ValueError, *said):
        weft.RuntimeOptions(**option)


@pytest.mark.parametrize(
    "option, said",
    [
        ({"separate_all_gather_group": "yes"}, ["separate_all_gather_group='yes'", "True or False"]),
        ({"check_collectives": "no"}, ["check_collectives='no'", "True or False"]),
        ({"max_live_reduce_buffers": 1.5}, ["max_live_reduce_buffers=1.5", "an int"]),
        ({"max_live_reduce_buffers": True}, ["max_live_reduce_buffers=True", "an int"]),
        ({"prefetch_bytes": "1"}, ["prefetch_bytes='1'", "an int", "None"]),
        ({"bucket_bytes": "1"}, ["bucket_bytes='1'", "an int", "0"]),
    ],
)
def test_types_of_runtime_options_are_checked(option, said):
    with refused(TypeError, *said):
        weft.RuntimeOptions(**option)


def test_without_a_process_group_the_message_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)  # of a launcher, from whose variables a group would be created
    with refused(ValueError, "needs a process group", "torchrun"):
        weft.fully_shard(nets.Block(4, 4))


def test_a_model_without_sharded_modules_has_no_report():
    for report in (weft.describe, weft.memory_report):
        with refused(ValueError, "Block has no sharded module", "fully_shard"):
            report(nets.Block(4, 4))


def test_only_a_sharded_module_has_a_plan(world):
    world(0, 2)
    with refused(TypeError, "got generator, not a module"):
        plan_of(nets.Block(4, 4).parameters())
    with refused(ValueError, "Block has no sharded module", "fully_shard"):
        plan_of(nets.Block(4, 4))
    with refused(ValueError, "Sequential is not sharded itself", "last called"):
        plan_of(nn.Sequential(weft.fully_shard(nets.Block(4, 4))))


def test_reports_and_marks_name_what_they_got():
    block = nets.Block(4, 4)
    first = weft.find_nonfinite, weft.check_views, weft.parameter_norms, weft.moe.load_statistics
    for report in (*first, weft.describe, weft.memory_report):
        with refused(TypeError, "got generator, not a module", "pass the"):
            report(block.parameters())
    with refused(ValueError, "Block is not sharded", "fully_shard"):
        weft.graph_report(block)
    with refused(TypeError, "keep_dtype got a Block", "each parameter"):
        weft.keep_dtype(block)
    with refused(TypeError, "models.shard got a Block", "HybridModel", "fully_shard"):
        weft.models.shard(block, None)
    for rows in (0, 2.5, "2"):
        with refused(ValueError, f"BlockAtomic({rows!r})", "at least one"):
            weft.BlockAtomic(rows)


@distributed(2)
def test_what_comes_too_late_for_a_sharded_module_is_refused_and_not_ignored():
    block = weft.fully_shard(nets.Block(4, 4))
    with refused(ValueError, "keep_dtype of a sharded parameter", "before"):
        weft.keep_dtype(next(block.parameters()))
    with refused(ValueError, "share_memory() of the sharded Block", "plain copy"):
        block.share_memory()
