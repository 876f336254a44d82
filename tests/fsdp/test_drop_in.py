"""A script written for torch's FSDP2 runs with only the import changed.

Each script takes the namespace that the names come from, `torch.distributed.fsdp` or `weft`, and runs once with each.
What it returns must be equal: numbers, and what kind of tensor is registered when.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import weft
from tests.fsdp import nets
from tests.pool import distributed

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """`nets.Net` without its 0-D parameter, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(3))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def mesh_of(*shape: int) -> DeviceMesh:
    """Over the ranks, on CPU; the default mesh would be the accelerator's, where there is one."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "shard")[-len(shape) :])


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def bottom_up(fsdp: ModuleType, net: nn.Module, **options: Any) -> Any:
    options.setdefault("mesh", mesh_of())
    for block in net.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(net, **options)


def batches(steps: int = 3, rows: int = 8) -> list[torch.Tensor]:
    """This rank's rows of each step."""
    return [mine(batch) for batch in nets.data(steps, rows)]


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def kinds(net: nn.Module) -> dict[str, tuple]:
    """What is registered under each name: DTensor or plain, its dtype and shape, and whether it trains."""
    return {
        name: ("DTensor" if isinstance(p, DTensor) else "plain", p.dtype, tuple(p.shape), p.requires_grad)
        for name, p in net.named_parameters()
    }


def with_gradients(net: nn.Module) -> list[str]:
    """The sharded parameters that have a gradient. A plain one tells too much: between backwards that do not reduce,
    torch keeps what it accumulates in `.grad` of the full parameter, weft in a buffer."""
    return sorted(name for name, p in net.named_parameters() if isinstance(p, DTensor) and p.grad is not None)


def whole(net: nn.Module) -> dict[str, dict]:
    """Full weights and gradients, by name; a parameter without gradient is left out."""
    weights = {name: nets.full(value) for name, value in net.state_dict().items()}
    gradients = {name: nets.full(p.grad) for name, p in net.named_parameters() if p.grad is not None}
    return {"weights": weights, "gradients": gradients}


def both(script: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What the script returns with weft, and with FSDP2."""
    return script(weft, *args), script(torch_fsdp, *args)


def differences(actual: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where two trees of plain values differ."""
    if isinstance(expected, dict) and isinstance(actual, dict) and actual.keys() == expected.keys():
        for key, value in expected.items():
            yield from differences(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list) and isinstance(actual, list) and len(actual) == len(expected):
        for number, value in enumerate(expected):
            yield from differences(actual[number], value, f"{where}[{number}]")
    elif actual != expected:
        yield f"{where}: {actual}, with FSDP2 {expected}"


def assert_same(script: Callable[..., tuple[Any, Any]], *args: Any, **tolerance: float) -> None:
    """The script returns numbers, which must be close, and anything else, which must be equal."""
    (numbers, facts), (expected, expected_facts) = both(script, *args)
    assert not (found := list(differences(facts, expected_facts))), "\n".join(found[:8])
    torch.testing.assert_close(numbers, expected, **tolerance)


# --- training -------------------------------------------------------------------------------------------------------


def trained(fsdp, optimizer, options):
    net = bottom_up(fsdp, make(), **options)
    optimizer = optimizer(net.parameters())
    numbers, seen = [], {"constructed": kinds(net)}
    net.blocks[1].up.register_forward_pre_hook(lambda *_: seen.update({"in a block's forward": kinds(net)}))
    for batch in batches():
        loss = net.loss(batch)
        seen["after forward"] = kinds(net)
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@distributed(2)
def test_three_steps_and_what_is_registered_at_each_moment(optimizer):
    for reshard in (None, True, False):
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
    "bf16, reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
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
    for batch in batches():
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


def steps(net, *, before=lambda number, last: None, micro=3, clip=None, seen=None, parameters=None):
    """Three steps of three microbatches; returns the numbers on the way."""
    optimizer = torch.optim.AdamW(parameters or net.parameters(), lr=1e-2)
    numbers = []
    for batch in batches(3, 4 * micro):
        for number, part in enumerate(batch.chunk(micro)):
            before(number, number == micro - 1)
            (net.loss(part) / micro).backward()
            if seen is not None:
                seen.append([kinds(net), with_gradients(net)])
        if clip is not None:
            numbers.append(clip(net))
        for child in net.modules():
            if hasattr(child, "reshard"):
                child.reshard()
        numbers.append(whole(net))
        optimizer.step()
        optimizer.zero_grad()
    return [*numbers, whole(net)]


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


def told_of_the_last_backward(fsdp):
    net, seen = bottom_up(fsdp, make()), []
    return steps(net, before=lambda number, last: net.set_is_last_backward(last), seen=seen), seen


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


def torchtitan_s_accumulation(fsdp):
    """The three calls that torchtitan makes per microbatch."""
    net, seen = bottom_up(fsdp, make()), []

    def before(number, last):
        net.set_is_last_backward(last)
        net.set_requires_gradient_sync(last)
        net.set_reshard_after_backward(last)

    return steps(net, before=before, seen=seen), seen


def kept_after_forward(fsdp):
    net, seen = bottom_up(fsdp, make(), reshard_after_forward=False), []
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
    seen = [kinds(net)]
    output.square().mean().backward()
    seen.append(kinds(net))
    return [output.detach(), whole(net)], seen


SCRIPTS = [
    explicit_prefetch,
    accumulated_without_sync,
    accumulated_without_sync_of_one_block,
    told_of_the_last_backward,
    resharded_after_the_last_only,
    never_resharded_after_backward,
    torchtitan_s_accumulation,
    kept_after_forward,
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
]


@pytest.mark.parametrize("script", [script.__name__ for script in SCRIPTS])
@distributed(2)
def test_the_methods_mean_the_same(script):
    assert_same(globals()[script])


# --- state dicts and checkpoints -------------------------------------------------------------------------------------


def trained_pair(fsdp, seed=0, count=2, mesh=None):
    """A sharded net and its optimizer after some steps."""
    net = make(seed)
    bottom_up(fsdp, net, mesh=mesh or mesh_of())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in batches()[:count]:
        a_step(net, optimizer, batch)
    return net, optimizer


def a_step(net, optimizer, batch):
    net.loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(tree: Any) -> dict[str, torch.Tensor]:
    """The whole tensors of a tree, by path."""
    leaves = tree_flatten_with_path(tree)[0]
    return {keystr(path): nets.full(leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def facts_of(tree: Any) -> dict[str, Any]:
    """What is at each path of a tree: for a tensor, which kind it is of."""
    found = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            kind = "DTensor" if isinstance(leaf, DTensor) else "plain"
            leaf = (kind, leaf.dtype, tuple(leaf.shape), leaf.device.type)
        found[keystr(path)] = leaf
    return found


WAYS = {
    "sharded": (StateDictOptions(), StateDictOptions()),
    "sharded, on CPU": (StateDictOptions(cpu_offload=True), StateDictOptions()),
}


def got_and_set(fsdp, way):
    getting, setting = WAYS[way]
    net, optimizer = trained_pair(fsdp)
    states = (
        get_model_state_dict(net, options=getting),
        get_optimizer_state_dict(net, optimizer, options=getting),
    )
    seen = [facts_of(state) for state in states]
    numbers = [tensors(state) for state in states]
    other, its_optimizer = trained_pair(fsdp, seed=1, count=1)
    set_model_state_dict(other, copy.deepcopy(states[0]), options=setting)
    set_optimizer_state_dict(other, its_optimizer, copy.deepcopy(states[1]), options=setting)
    numbers.append(tensors(its_optimizer.state_dict()["state"]))
    for batch in batches()[1:]:
        a_step(other, its_optimizer, batch)
        numbers.append(whole(other))
    return numbers, [*seen, kinds(other)]


@pytest.mark.parametrize("way", WAYS)
@distributed(2)
def test_state_dicts_are_got_and_set(way):
    assert_same(got_and_set, way)


def whole_on_rank_0(fsdp):
    """What is saved for others to read: everything, in the memory of one rank."""
    net, optimizer = trained_pair(fsdp)
    getting = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = [get_model_state_dict(net, options=getting), get_optimizer_state_dict(net, optimizer, options=getting)]
    return [tensors(state) for state in states], [facts_of(state) for state in states]


def a_model_set_from_whole_tensors(fsdp):
    options = StateDictOptions(full_state_dict=True)
    net, _ = trained_pair(fsdp)
    state = get_model_state_dict(net, options=options)
    other, optimizer = trained_pair(fsdp, seed=1, count=1)
    report = set_model_state_dict(other, copy.deepcopy(state), options=options)
    numbers = [tensors(state), whole(other)]
    a_step(other, optimizer, batches()[2])
    return [*numbers, whole(other)], [facts_of(state), kinds(other), list(report.missing_keys)]


@distributed(2)
def test_whole_state_dicts_are_got_and_a_model_is_set_from_one():
    assert_same(whole_on_rank_0)
    assert_same(a_model_set_from_whole_tensors)


def as_checkpoint(net, optimizer):
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


@distributed(2)
def test_a_checkpoint_of_one_loads_with_the_other_and_on_one_process(tmp_path):
    for saves, loads in ((weft, torch_fsdp), (torch_fsdp, weft), (weft, weft)):
        folder = f"{tmp_path}/{saves.__name__}-{loads.__name__}"
        net, optimizer = trained_pair(saves)
        dcp.save(as_checkpoint(net, optimizer), checkpoint_id=folder)
        other, its_optimizer = trained_pair(loads, seed=1, count=1)
        state = as_checkpoint(other, its_optimizer)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        alone = make(1)
        its_own = torch.optim.AdamW(alone.parameters(), lr=1e-2)
        state = as_checkpoint(alone, its_own)
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(alone, its_own, model_state_dict=state["model"], optim_state_dict=state["optim"])
        expected = tensors(as_checkpoint(net, optimizer))
        torch.testing.assert_close(tensors(as_checkpoint(other, its_optimizer)), expected, rtol=0, atol=0)
        torch.testing.assert_close(tensors(as_checkpoint(alone, its_own)), expected, rtol=0, atol=0)
        batch = nets.data(4, 8)[3]
        a_step(net, optimizer, mine(batch))
        a_step(other, its_optimizer, mine(batch))
        a_step(alone, its_own, batch)
        torch.testing.assert_close(whole(other)["weights"], whole(net)["weights"])
        torch.testing.assert_close(whole(alone)["weights"], whole(net)["weights"])


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


def test_functions_and_methods_take_the_same_arguments():
    def arguments(of: Callable) -> list[tuple]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(of).parameters.values()]

    shared = {name for name in dir(torch_fsdp.FSDPModule) if not name.startswith("_")} & set(dir(weft.FSDPModule))
    assert {"unshard", "reshard", "set_requires_gradient_sync", "set_modules_to_backward_prefetch"} <= shared
    for name in shared:
        assert arguments(getattr(weft.FSDPModule, name)) == arguments(getattr(torch_fsdp.FSDPModule, name)), name
    theirs, ours = (inspect.signature(fsdp.fully_shard).parameters for fsdp in (torch_fsdp, weft))
    assert set(theirs) - set(ours) <= {"dp_mesh_dims"}  # weft takes the mesh of the data-parallel axes itself


# --- HSDP -----------------------------------------------------------------------------------------------------------


def replicated_and_sharded(fsdp, accumulate):
    net, seen = bottom_up(fsdp, make(), mesh=mesh_of(2, 2)), []
    before = {
        "at once": lambda number, last: None,
        "outer axis last": lambda number, last: net.set_requires_all_reduce(last),
        "both axes last": lambda number, last: net.set_requires_gradient_sync(last),
        "told of the last": lambda number, last: net.set_is_last_backward(last),
    }[accumulate]
    numbers = steps(net, before=before, seen=seen)
    if accumulate == "told of the last":
        # torch all-reduces all the same. weft does so once, at the last, and has no gradient until then.
        early = [present for number, (_, present) in enumerate(seen) if number % 3 < 2]
        assert (early == [[]] * len(early)) == (fsdp is weft)
        seen = seen[2::3]
    return numbers, seen


@pytest.mark.slow
@distributed(4)
def test_a_mesh_of_two_axes_replicates_over_the_first():
    for accumulate in ("at once", "outer axis last", "both axes last", "told of the last"):
        assert_same(replicated_and_sharded, accumulate)
