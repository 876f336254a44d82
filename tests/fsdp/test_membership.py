"""What comes into a sharded model after its first pass, and what was never in a unit: refused by name, or right."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.test_behaviour import assert_at_rest, assert_same_state, everything, mine
from tests.pool import distributed
from weft.fsdp.runtime import inventory


class Adapter(nn.Module):
    """A frozen linear layer and a trainable correction of low rank, in modules of its own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def evaluated(**options) -> nets.Net:
    """A sharded net after an evaluation and a step."""
    net = nets.shard(nets.make(), **options)
    tokens = nets.data(1, 4)[0]
    with torch.no_grad():
        net(tokens)
    nets.loss_of(net, tokens).backward()
    net.zero_grad()
    return net


@pytest.mark.slow
@distributed(2)
def test_what_comes_after_the_first_pass_is_refused_by_name_until_a_unit_has_it():
    tokens = nets.data(1, 4)[0]

    net = evaluated()
    net.blocks[1].up = Adapter(net.blocks[1].up)  # by attribute, as libraries of adapters do
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.down\.weight' was added to the root \(Net\) after"):
            net(tokens)
    with torch.no_grad(), pytest.raises(RuntimeError, match="in no unit"):
        net(tokens)

    net = evaluated()
    net.blocks.insert(1, nets.Block(13, 29))  # past all of torch's hooks
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.norm\.weight' was added .* call fully_shard on its module"):
        net(tokens)
    weft.fully_shard(net.blocks[1])
    nets.loss_of(net, tokens).backward()

    net = evaluated()
    net.blocks[2].register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"'blocks\.2\.scale' .* into a separate module"):
        net(tokens)
    del net.blocks[2].scale
    nets.loss_of(net, tokens).backward()

    net = evaluated()
    net.temperature = nn.Parameter(torch.ones(1), requires_grad=False)
    nets.loss_of(net, tokens).backward()
    net.temperature.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'temperature' was added"):
        net(tokens)
    net.temperature.requires_grad_(False)
    nets.loss_of(net, tokens).backward()


@pytest.mark.slow
@distributed(2)
def test_a_module_that_takes_the_place_and_the_address_of_another_is_noticed():
    net = evaluated()
    for _ in range(5):
        net.extra = nn.Linear(3, 3).requires_grad_(False)
        net(nets.data(1, 4)[0])
        del net.extra
        gc.collect()
        net.extra = nn.Linear(3, 3)
        with pytest.raises(RuntimeError, match=r"'extra\.weight' was added"):
            net(nets.data(1, 4)[0])


@distributed(2)
def test_a_module_that_was_removed_goes_at_once():
    net = evaluated()
    net.extra = nn.Linear(3, 3).requires_grad_(False)
    net(nets.data(1, 4)[0])
    gone = weakref.ref(net.extra), weakref.ref(net.extra.weight)
    del net.extra
    assert gone[0]() is None and gone[1]() is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_adapters_that_are_sharded_after_an_evaluation_train_as_in_one_process(strategy):
    plain, net = nets.make().double(), nets.shard(nets.make().double(), strategy=strategy)
    batches = nets.data(4, 8)
    with torch.no_grad():
        net(batches[0])
    optimizers = {}
    for model in (plain, net):
        model.requires_grad_(False)
        torch.manual_seed(1)
        for block in (model.blocks[0], model.blocks[2]):
            block.up, block.down = Adapter(block.up), Adapter(block.down)
            if model is net:
                adapters = [each for low in (block.up, block.down) for each in (low.down, low.up)]
                weft.fully_shard(adapters, strategy=strategy)
        model.gain.requires_grad_(True)
        optimizers[model] = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for batch in batches:
        for model, part in ((plain, everything), (net, mine)):
            optimizers[model].zero_grad()
            nets.loss_of(model, part(batch)).backward()
        assert_same_state(net, plain)
        assert_at_rest(net)
        for optimizer in optimizers.values():
            optimizer.step()


@pytest.mark.slow
@distributed(2)
def test_adapters_on_one_rank_alone_are_refused_there_and_the_pass_can_be_run_without_them():
    plain, net = nets.make(), nets.shard(nets.make())
    batches = nets.data(2, 8)
    nets.loss_of(net, mine(batches[0])).backward()
    net.zero_grad()
    if dist.get_rank() == 0:
        kept, net.blocks[0].up = net.blocks[0].up, Adapter(net.blocks[0].up)
        with pytest.raises(RuntimeError, match=r"'blocks\.0\.up\.down\.weight' was added"):
            net(mine(batches[1])[:, :-1])
        net.blocks[0].up = kept.requires_grad_(True)
    nets.loss_of(net, mine(batches[1])).backward()
    nets.loss_of(plain, everything(batches[1])).backward()
    assert_same_state(net, plain)


def rootless(**options) -> nets.Net:
    """A net whose blocks are sharded, and nothing around them."""
    net = nets.make()
    for block in net.blocks:
        weft.fully_shard(block, **options)
    return net


@distributed(2)
def test_a_root_that_was_forgotten_is_named_at_the_first_backward_and_can_be_sharded_then():
    plain, net = nets.make(), rootless()
    batch = nets.data(1, 8)[0]
    loss = nets.loss_of(net, mine(batch))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"'gain' of Net is in no unit, although 'blocks\.0' inside it is .* last"
        ):
            loss.backward()
    assert all(parameter.grad is None for parameter in net.parameters())
    for block in net.blocks:
        block.reshard()
    del loss
    weft.fully_shard(net)
    nets.loss_of(net, mine(batch)).backward()
    nets.loss_of(plain, everything(batch)).backward()
    assert_same_state(net, plain)


@pytest.mark.slow
@distributed(2)
def test_parameters_around_sharded_children_that_the_user_takes_care_of_are_left_alone():
    batch = nets.data(1, 8)[0]
    ignoring = nets.make()
    for block in ignoring.blocks:
        weft.fully_shard(block, ignored_params=list(ignoring.parameters())[:2] + list(ignoring.norm.parameters()))
    hooked = rootless()
    for parameter in (hooked.gain, hooked.embedding.weight, *hooked.norm.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
    frozen = rootless()
    for parameter in (frozen.gain, frozen.embedding.weight, *frozen.norm.parameters()):
        parameter.requires_grad_(False)
    scale = nn.Parameter(torch.ones(1))  # of no module
    for net in (ignoring, hooked, frozen):
        (nets.loss_of(net, mine(batch)) * scale).backward()


@pytest.mark.slow
@distributed(2)
def test_a_forgotten_root_is_named_though_another_model_s_backward_comes_first():
    batch = nets.data(1, 8)[0]
    net, other = rootless(), nets.shard(nets.make())
    losses = [nets.loss_of(each, mine(batch)) for each in (net, other)]
    losses[1].backward()
    with pytest.raises(RuntimeError, match=r"'gain' of Net is in no unit"):
        losses[0].backward()


class Margin(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return nets.loss_of(net, batch) * self.scale


@pytest.mark.parametrize("care", ["none", "hook", "ddp", "replicate", "fsdp2", "no model"])
@distributed(2)
def test_parameters_of_a_loss_beside_the_model_get_a_warning_unless_something_reduces_their_gradients(care):
    batch = nets.data(1, 8)[0]
    net, loss = weft.fully_shard(nn.Sequential(nets.shard(nets.make()))), Margin()  # the root has no parameters
    if care == "hook":
        loss.scale.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
    if care == "fsdp2":
        torch.distributed.fsdp.fully_shard(loss, mesh=init_device_mesh("cpu", (2,)))
    if care == "replicate":
        replicate(loss)
    wrapped = nn.parallel.DistributedDataParallel(loss) if care == "ddp" else loss
    said = []
    with patch.object(inventory.log, "warning", lambda text, *args: said.append(text % args)):
        for number in range(3):
            value = wrapped(net, mine(batch))
            if care == "no model" or number == 0:  # the first backward does not reach the model
                value = loss.scale * value.detach()
            value.sum().backward()
    if care == "none" and dist.get_rank() == 0:
        assert len(said) == 1 and "in no unit (Margin.scale)" in said[0]
    else:
        assert not said
