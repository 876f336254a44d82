"""Peak memory of training, weft compared with torch FSDP2: the bytes that torch's allocator hands out.

    weft bench memory --ranks 2
    weft bench memory --ranks 4        # HSDP as well

The model has eight MLP blocks in fp32, one unit each, and AdamW. It processes few rows, so that activations, which are
the same on both sides, are small. The unsharded model is included for comparison.

"peak total" is the maximum that is allocated at once since the construction of the model. "peak transient" is the
maximum in a later step, minus the weights and optimizer state that are always allocated. Both include gathered weights,
all gradients, activations and weft's slabs (the memory that it plans in advance), but not gloo's own allocations.

weft's bytes are the same in every run; FSDP2's depend on when gloo's threads release buffers.
"""

import argparse
import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from _report import machine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import weft

WIDTH, HIDDEN, BLOCKS, ROWS = 512, 2048, 8, 16
STEPS = 4


def model() -> nn.Sequential:
    """Return eight blocks of 2.1 M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(BLOCKS))
    )


def sharded(fully_shard: Callable[..., Any], **options: Any) -> nn.Module:
    """Shard each block as one unit, then the root."""
    net = model()
    for block in net:
        fully_shard(block, **options)
    fully_shard(net, **options)
    return net


def strategies() -> dict[str, dict[str, Any]]:
    """Return the strategies that both libraries have, as options of `fully_shard`."""
    common: dict[str, dict[str, Any]] = {
        "ZeRO-3": {},
        "weights kept until backward": {"reshard_after_forward": False},
    }
    if dist.get_world_size() % 2 == 0 and dist.get_world_size() > 2:
        names = ("outer", "shard")
        common["HSDP"] = {"mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)}
    return common


def measured(make: Callable[[], nn.Module]) -> dict[str, float]:
    """Return the MiB at rest, the additional MiB at the peak of a later step, and the total MiB at the highest peak."""
    gc.collect()
    kept: list[Any] = []

    def construct_and_train() -> None:
        net = make()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        kept.extend([net, optimizer, rows])
        for _ in range(STEPS):
            step()

    def step() -> None:
        net, optimizer, rows = kept
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()

    before = allocations(construct_and_train)
    later = allocations(step)
    net, optimizer, _ = kept
    states = [value for state in optimizer.state.values() for value in state.values()]
    rest = storage_bytes([*net.parameters(), *net.buffers(), *states])
    in_step = sum(before) + max(accumulate(later, initial=0))
    numbers = {
        "at rest": rest,
        "peak transient": in_step - rest,
        "peak total": max(*accumulate(before, initial=0), in_step),
    }
    return {name: value / 2**20 for name, value in numbers.items()}


def allocations(work: Callable[[], None]) -> list[int]:
    """Return the sizes in bytes that `work` allocates with torch's allocator, in order; freed bytes are negative."""
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    return [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]


def storage_bytes(tensors: list[Any]) -> int:
    """Return the bytes of the distinct storages of these tensors' local parts."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    storages = [each.untyped_storage() for each in local if isinstance(each, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main() -> None:
    """Measure all variants; print MiB and ratios on rank 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    unit = sum(parameter.numel() for parameter in model()[0].parameters()) * 4 / 2**20
    say(f"{BLOCKS} units of {unit:.1f} MiB, {machine()}")
    say(f"{'MiB on a rank':44}{'at rest':>10}{'peak transient':>16}{'peak total':>12}")
    print_side("unsharded", measured(model))
    for name, options in strategies().items():
        ours = measured(lambda options=options: sharded(weft.fully_shard, **options))
        theirs = measured(lambda options=options: sharded(torch_fully_shard, **options))
        print_side(f"{name}: weft", ours)
        print_side(f"{name}: FSDP2", theirs)
        ratios = {key: ours[key] / theirs[key] for key in ours}
        say(
            f"{'weft / FSDP2':>44}{ratios['at rest']:10.2f}{ratios['peak transient']:16.2f}{ratios['peak total']:12.2f}"
        )
    dist.destroy_process_group()


def print_side(name: str, numbers: dict[str, float]) -> None:
    """Print one line of the table."""
    say(f"{name:44}{numbers['at rest']:10.1f}{numbers['peak transient']:16.1f}{numbers['peak total']:12.1f}")


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
