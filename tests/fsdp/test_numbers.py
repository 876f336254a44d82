"""A sharded run has the numbers of the plain single-process run on the same global batch."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.pool import distributed

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
BOTH_AXES = [(strategy, "no_shard") for strategy in STRATEGIES] + [(strategy, "optim") for strategy in STRATEGIES[1:]]
RECOMPUTE = [None, "reentrant", "non-reentrant"]


@contextmanager
def naming(*case):
    """Add the case to the report of a failure: many run in one job, which costs more than their steps."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case}")
        raise


def train(net, batches, microbatches, flagged=True, **options):
    flag = net.set_is_last_backward if flagged else lambda last: None
    return nets.train_here(net, batches, microbatches=microbatches, on_microbatch=flag, **options)


def assert_close(run, plain, **tolerance):
    """The losses of one process are the mean over ranks."""
    mean = torch.stack(run["losses"])
    dist.all_reduce(mean)
    torch.testing.assert_close({**run, "losses": list(mean / dist.get_world_size())}, plain, **tolerance)


def check_steps(cases, recompute, again=True):
    """Clipped AdamW steps (traced, planned, steady) equal one process; `again`: two more begin as they did, exactly."""
    plain = {}
    for microbatches, flagged, options in cases:
        with naming(microbatches, flagged, options):
            batches = nets.data(3, 4 * microbatches)
            if microbatches not in plain:
                plain[microbatches] = nets.train(nets.make(), batches, microbatches=microbatches)
            run = train(nets.shard(nets.make(recompute), **options), batches, microbatches, flagged)
            assert_close(run, plain[microbatches])
            if again:
                other = train(nets.shard(nets.make(recompute), **options), batches[:2], microbatches, flagged)
                for what in ("losses", "norms"):
                    torch.testing.assert_close(other[what], run[what][: len(other[what])], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE)
@distributed(2)
def test_one_axis_equals_one_process(recompute):
    """Over all kinds of recomputation, each strategy meets one microbatch and three."""
    odd = RECOMPUTE.index(recompute)
    counts = [(1, 3)[(number + odd) % 2] for number in range(len(STRATEGIES))]
    check_steps(
        [(count, True, {"strategy": each}) for count, each in zip(counts, STRATEGIES)], recompute, again=not recompute
    )


@pytest.mark.long
@distributed(4)
def test_one_axis_of_four_ranks_equals_one_process():
    check_steps([(3, True, {"strategy": strategy}) for strategy in STRATEGIES], None, again=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "microbatches, flagged, recompute, some",
    [
        (3, True, None, slice(None)),
        (1, True, None, slice(0, None, 2)),
        (3, False, None, slice(1, None, 2)),
        (3, True, "reentrant", slice(1, None, 3)),
        (3, True, "non-reentrant", slice(2, None, 3)),
    ],
    ids=["three microbatches", "one microbatch", "no flag", "reentrant", "non-reentrant"],
)
@distributed(4)
def test_two_axes_equal_one_process(microbatches, flagged, recompute, some):
    """Every pair of strategies in the usual step; what differs from it meets `some` of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    options = [{"mesh": mesh, "strategy": strategy, "outer_strategy": outer} for strategy, outer in BOTH_AXES[some]]
    check_steps([(microbatches, flagged, each) for each in options], recompute, again=some == slice(None))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.long
@pytest.mark.parametrize("recompute", RECOMPUTE)
@distributed(4)
def test_bf16_with_fp32_main_weights_equals_one_process_that_casts_at_the_same_places(recompute):
    """SGD: AdamW would make a whole step of the sign of a gradient that is nothing but rounding.

    All strategies without recomputation, a third of them with either kind; one microbatch and three in turn.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    loss_of = partial(nets.loss_as_cast, ranks=dist.get_world_size())
    batches = {count: nets.data(3, 4 * count) for count in (1, 3)}
    plain = {
        count: nets.train(nets.make(), batches[count], microbatches=count, loss_of=loss_of, optimizer=sgd)
        for count in batches
    }
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    axes = [{"strategy": strategy} for strategy in STRATEGIES]
    axes += [{"mesh": mesh, "strategy": strategy, "outer_strategy": outer} for strategy, outer in BOTH_AXES]
    some = {None: slice(None), "reentrant": slice(0, None, 3), "non-reentrant": slice(1, None, 3)}[recompute]
    for number, options in enumerate(axes[some]):
        count = (3, 1)[number % 2]
        with naming(options, count):
            net = nets.make(recompute)
            for block in net.blocks:
                weft.fully_shard(block, mp_policy=policy, **options)
            weft.fully_shard(net, mp_policy=replace(policy, output_dtype=torch.float32), **options)
            run = train(net, batches[count], count, optimizer=sgd)
            # Weights that differ in fp32's last bit may round to neighbours in bf16, 2 ** -8 of their value apart.
            assert_close(run, plain[count], rtol=3e-3, atol=3e-3)
