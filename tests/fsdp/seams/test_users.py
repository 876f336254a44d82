"""Programs that users write around a model, which must be right or refused with the true reason."""

import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import STRATEGIES, assert_gradients, assert_weights, naming, right_or_refused
from tests.pairs import all_pairs
from tests.pool import distributed


class Net(nn.Module):
    """Blocks between two linear layers; its input has gradients, too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(9, 7)
        self.blocks = nn.ModuleList(nets.Block(7, 13) for _ in range(3))
        self.leave = nn.Linear(7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def pair(strategy: str, kind: Callable[[], nn.Module] = Net, **options) -> tuple[nn.Module, nn.Module]:
    """A plain net and a sharded one with the same weights."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(kind())
    plain, sharded = made
    return plain, nets.shard(sharded, strategy=strategy, **options)


def batch(number: int = 0) -> torch.Tensor:
    """All rows of a step."""
    return torch.randn(8, 9, generator=torch.Generator().manual_seed(number))


def whole(rows: torch.Tensor) -> torch.Tensor:
    """What the plain net gets."""
    return rows


def mine(rows: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (net(rows) - rows[:, :5]).square().mean()


def train(net: nn.Module, rows_of: Callable, *, first: int = 0, steps: int = 3, loss: Callable = loss_of) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(first, first + steps):
        loss(net, rows_of(batch(number))).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def unsharded(net: nn.Module) -> Iterator[None]:
    """With the weights of the net's own unit, if it is one."""
    if isinstance(net, weft.FSDPModule):
        net.unshard()
    yield
    if isinstance(net, weft.FSDPModule):
        net.reshard()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "used"), list(zip(STRATEGIES, [True, True, False, True])))
@distributed(2)
def test_a_model_that_is_gone_leaves_no_parameters(strategy, used):
    _, sharded = pair(strategy)
    parameters = [weakref.ref(parameter) for parameter in sharded.parameters()]
    if used:
        train(sharded, mine)
    del sharded
    gc.collect()
    assert not any(parameter() is not None for parameter in parameters)


# --- weights that are not here ----------------------------------------------------------------------------------------


class Keeping(nets.Block):
    """Leaves its weight where others find it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vars(self)["kept"] = self.up.weight
        return super().forward(x)


def of_blocks(kind: type[nn.Module]) -> Callable[[], Net]:
    """How to make a net with other blocks."""

    def make() -> Net:
        net = Net()
        net.blocks = nn.ModuleList(kind(7, 13) for _ in range(3))
        return net

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "known"), list(zip(STRATEGIES, [0, 0, 3, 3])))
@distributed(2)
def test_a_penalty_on_weights_that_forward_kept(strategy, known):
    """`known`: steps before, from which the pool has a plan. Freed memory that is read ends the interpreter."""
    plain, sharded = pair(strategy, of_blocks(Keeping))

    def penalised(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return loss_of(net, rows) + 0.1 * sum(block.kept.square().sum() for block in net.blocks)

    def program() -> None:
        for net, rows_of in ((plain, whole), (sharded, mine)):
            train(net, rows_of, steps=known)
            train(net, rows_of, first=known, loss=penalised)
        assert_weights(sharded, plain)

    right_or_refused(program, r"blocks\.\d|Keeping")


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_parameter_that_was_taken_under_unshard_is_read_after_reshard(strategy):
    plain, sharded = pair(strategy)
    sharded.unshard()
    weight = sharded.leave.weight
    sharded.reshard()
    right_or_refused(
        lambda: torch.testing.assert_close(weight.detach().clone(), plain.leave.weight.detach()), "root|Net"
    )


# --- writes -----------------------------------------------------------------------------------------------------------


class Clamping(Net):
    """Writes to its weights in forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.leave.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Codebook(nn.Module):
    """Frozen vectors that follow what they see."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 7), requires_grad=False)
        self.mix = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = self.codes[(x.detach() @ self.codes.t()).argmax(1)]
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(0.01)
        return x + self.mix(near)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*zip(STRATEGIES, ["codebook", "codebook", "clamp", "clamp"]), ("optim_grads_params", "codebook")],
)
@distributed(2)
def test_weights_that_forward_itself_writes(strategy, kind):
    plain, sharded = pair(strategy, Clamping if kind == "clamp" else of_blocks(Codebook))

    def program() -> None:
        train(plain, whole)
        train(sharded, mine)
        assert_weights(sharded, plain)

    right_or_refused(program, r"leave\.weight|codes")


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_weights_that_forward_writes_where_computation_has_another_dtype(strategy):
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, sharded = pair(strategy, Clamping, mp_policy=policy)

    def program() -> None:
        with torch.no_grad():
            plain(batch()), sharded(mine(batch()))
        assert_weights(sharded, plain, rtol=1e-2, atol=1e-3)

    right_or_refused(program, r"leave\.weight")


@all_pairs(strategy=["optim", "optim_grads_params"], then=["nothing", "a pass", "a step and a pass"])
@distributed(2)
def test_weights_that_are_written_under_the_users_unshard(strategy, then):
    plain, sharded = pair(strategy)

    def program() -> None:
        for net, rows_of in ((plain, whole), (sharded, mine)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            loss_of(net, rows_of(batch(1))).backward()
            with unsharded(net):
                with torch.no_grad():
                    net.leave.weight.mul_(0.5)
                if "step" in then:
                    optimizer.step()
                if "pass" in then:
                    loss_of(net, rows_of(batch())).backward()
        assert_weights(sharded, plain)

    right_or_refused(program, r"leave\.weight")


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_a_backward_through_weights_that_a_step_has_changed_raises_as_in_one_process(strategy):
    for net, rows_of in zip(pair(strategy), (whole, mine)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss_of(net, rows_of(batch())).backward()
        loss = loss_of(net, rows_of(batch(1)))
        optimizer.step()
        with naming(type(net).__name__), pytest.raises(RuntimeError, match=r"modified|written|changed"):
            loss.backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_weights_that_stay_until_backward_and_are_written_before_it_are_refused_as_in_one_process(strategy):
    for net, rows_of in zip(pair(strategy), (whole, mine)):
        loss = loss_of(net, rows_of(batch()))
        with torch.no_grad():
            net.leave.weight.clamp_(-0.1, 0.1)
        with naming(type(net).__name__), pytest.raises(RuntimeError, match=r"modified|written"):
            loss.backward()


# --- gradients --------------------------------------------------------------------------------------------------------


def _double(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


@all_pairs(strategy=STRATEGIES, hook=["on the gradient", "on the accumulated gradient"], when=["before", "after"])
@distributed(2)
def test_hooks_on_parameters_registered_before_or_after_sharding(strategy, hook, when):
    def hooked(net: nn.Module) -> nn.Module:
        for parameter in net.parameters():
            if hook == "on the gradient":
                parameter.register_hook(lambda gradient: gradient * 2)
            else:
                parameter.register_post_accumulate_grad_hook(_double)
        return net

    def program() -> None:
        plain, sharded = pair(strategy, (lambda: hooked(Net())) if when == "before" else Net)
        for net, rows_of in ((plain, whole), (sharded, mine)):
            if when == "after":
                hooked(net)
            loss_of(net, rows_of(batch())).backward()
        assert_gradients(sharded, plain)

    right_or_refused(program, "hook")


@distributed(2)
def test_a_hook_that_a_forward_registers_on_a_sharded_parameter_is_refused_in_that_step():
    net = nets.shard(nets.make())
    net.blocks[0].register_forward_hook(lambda block, given, output: block.up.weight.register_hook(torch.neg) and None)
    net.register_forward_pre_hook(lambda net, given: net.blocks[1].up.weight.register_hook(torch.neg) and None)
    with pytest.raises(RuntimeError, match=r"'up.weight' of blocks.1.*a hook on its gradient.*would never run"):
        nets.loss_of(net, nets.data(1, 4)[0]).backward()
    assert net.gain.grad is None


@pytest.mark.parametrize(("strategy", "way"), list(zip(STRATEGIES, ["backward", "grad", "backward", "grad"])))
@distributed(2)
def test_gradients_that_are_asked_for_by_parameter(strategy, way):
    plain, sharded = pair(strategy)

    def program() -> None:
        for net, rows_of in ((plain, whole), (sharded, mine)):
            loss, parameters = loss_of(net, rows_of(batch())), list(net.parameters())
            if way == "backward":
                loss.backward(inputs=parameters)
            else:
                for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True)):
                    parameter.grad = gradient
        assert_gradients(sharded, plain)

    right_or_refused(program, "shard.*parameter|parameter.*shard")


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_parameters_that_are_frozen_between_forward_and_backward(strategy):
    plain, sharded = pair(strategy)
    losses = [loss_of(plain, batch()), loss_of(sharded, mine(batch()))]
    for net, loss in zip((plain, sharded), losses):
        for parameter in net.blocks[1].parameters():
            parameter.requires_grad_(False)
        loss.backward()
    assert_gradients(sharded, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_clipping_counts_the_gradients_of_blocks_that_the_user_holds(strategy):
    plain, sharded = pair(strategy)
    sharded.blocks[1].unshard()

    def program() -> None:
        norms = []
        for net, rows_of in ((plain, whole), (sharded, mine)):
            loss_of(net, rows_of(batch())).backward()
            norms.append(nets.full(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)))
        torch.testing.assert_close(norms[1], norms[0])

    right_or_refused(program, r"blocks\.1")


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_an_asynchronous_checkpoint_holds_the_weights_of_when_it_was_taken(strategy):
    plain, sharded = pair(strategy)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for net, rows_of in ((plain, whole), (sharded, mine)):
        train(net, rows_of)
    saving = dcp.async_save({"model": sharded.state_dict()}, checkpoint_id=folder[0])
    train(sharded, mine, first=3)
    saving.result()
    loaded = {"model": sharded.state_dict()}
    dcp.load(loaded, checkpoint_id=folder[0])
    assert_weights(sharded, plain)


@pytest.mark.long
@pytest.mark.parametrize("what", ["the model", "the loss"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_torch_compile_around_the_root(strategy, what):
    plain, sharded = pair(strategy)
    train(plain, whole)

    def program() -> None:
        if what == "the model":
            compiled = torch.compile(sharded, backend="eager")
            train(sharded, mine, loss=lambda net, rows: loss_of(compiled, rows))
        else:
            train(sharded, mine, loss=torch.compile(loss_of, backend="eager"))
        assert_weights(sharded, plain)

    right_or_refused(program, "fully_shard|shard.*compile|compile.*shard")


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["jacrev", "vmap", "jvp"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_function_transforms_of_a_sharded_model(strategy, transform):
    plain, sharded = pair(strategy)

    def found(net: nn.Module) -> torch.Tensor:
        x = mine(batch())
        if transform == "jvp":
            return torch.func.jvp(net, (x,), (torch.ones_like(x),))[1].detach()
        return (torch.func.jacrev(net)(x) if transform == "jacrev" else torch.func.vmap(net)(x)).detach()

    right_or_refused(lambda: torch.testing.assert_close(found(sharded), found(plain)), "called under torch.func")


@distributed(2)
def test_pickling_a_sharded_model_says_what_to_do():
    _, sharded = pair("optim_grads_params")
    with naming("pickle"), tempfile.TemporaryFile() as file, pytest.raises(TypeError, match="state_dict"):
        torch.save(sharded, file)
