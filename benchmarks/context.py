"""Context parallelism: how long the transfers between context ranks take, and what fraction computation hides.

    weft bench context --ranks 2 -- --link 800mbit     # as root: a network of limited bandwidth between the ranks
    weft bench context --ranks 2                       # loopback: transfers cost little, so hiding them gains little

Each model has four layers of one mixer, such as attention (`*`) or Mamba-2 (`M`). Attention is measured twice: with
gathered keys and values, and with exchanged heads. Each row is divided over all ranks. A step is forward and backward
of one batch.

A transfer counts as hidden while this rank computes and does not wait for any communication.
"""

import statistics
from functools import partial

import _link
import _report
import torch
import torch.distributed as dist

import weft
from weft.comm.ranges import span
from weft.debug.timeline import Timeline
from weft.models import HybridConfig, HybridModel, context_part
from weft.models.gathering import CONTEXT
from weft.overlap import hidden_fraction
from weft.overlap.hidden import busy
from weft.overlap.order import COMPUTE

MIXERS = "*+MGKP"
BATCH = 2


def config(mixer: str, how: str = "gather") -> HybridConfig:
    """Return a model of four layers, with two query heads for each key and value head."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "context_attention": how}
    return HybridConfig(pattern=mixer * 4, hidden_size=256, **heads)


def configs(mixers: str) -> dict[str, HybridConfig]:
    """Return the configurations for `mixers`, by the name that is printed."""
    found = {mixer: config(mixer) for mixer in mixers}
    return found | ({"* heads": config("*", "heads")} if "*" in mixers else {})


def step(net: HybridModel, part: dict) -> None:
    """Run forward and backward of this rank's slices."""
    with span(COMPUTE):
        net(**part).backward()


def main() -> None:
    """Measure each mixer; print on rank 0 the seconds per step, the seconds of transfers, and the hidden fraction."""
    parser = _report.parser(__doc__, rounds=5, link="800mbit")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a row, over all ranks")
    parser.add_argument("--mixers", default=MIXERS, help=f"which of {MIXERS}")
    options = parser.parse_args()
    if unknown := set(options.mixers) - set(MIXERS):
        parser.error(f"--mixers {options.mixers}: {sorted(unknown)} are none; choose from {MIXERS}")
    torch.set_num_threads(1)
    with _link.process_group(options.link):
        meshes = weft.init_meshes("cpu", cp=dist.get_world_size())
        rows = torch.randint(256, (2, BATCH, options.sequence), generator=torch.Generator().manual_seed(0))
        tokens, labels = rows.unbind()
        part = context_part({"tokens": tokens, "labels": labels}, meshes)
        steps = {}
        for name, cfg in configs(options.mixers).items():
            torch.manual_seed(0)
            steps[name] = partial(step, HybridModel(cfg, meshes), part)
        taken = _report.in_turn(steps, options.rounds, 1)
        lines = []
        for mixer, run in steps.items():
            shares, moving = [], []
            for _ in range(options.rounds):
                dist.barrier()
                with Timeline() as timeline:
                    run()
                intervals = timeline.intervals()
                moving.append(busy(intervals, CONTEXT))
                shares.append(hidden_fraction(intervals, CONTEXT))
            median = statistics.median(taken[mixer])
            lines.append(f"{mixer:8}{median:10.3f}{statistics.median(moving):12.3f}{statistics.median(shares):10.0%}")
        if dist.get_rank() == 0:
            print(f"{_report.machine()}, on {options.link or 'loopback'}, medians of {options.rounds}")
            print(f"{BATCH} rows of {options.sequence} tokens over {dist.get_world_size()} ranks")
            print(f"{'mixer':8}{'s/step':>10}{'moving, s':>12}{'hidden':>10}")
            print("\n".join(lines))


if __name__ == "__main__":
    main()
