"""The tables of torch.distributed.pipelining: its generators are plain Python and need no process group."""

import re
from types import SimpleNamespace

from torch.distributed.pipelining import schedules as torch_schedules

from weft.pipeline import Action, Table

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def torch_table(ours: Table):
    """For each rank the entries of torch's schedule of the same name and sizes."""
    generate = {
        "gpipe": _whole(torch_schedules.ScheduleGPipe),
        "1f1b": _whole(torch_schedules.Schedule1F1B),
        "interleaved": _each_rank(torch_schedules.ScheduleInterleaved1F1B),
        "dualpipev": _each_rank(torch_schedules.ScheduleDualPipeV),
        "zbv": _each_rank(torch_schedules.ScheduleZBVZeroBubble),
    }[ours.name]
    return tuple(tuple(_entries(row, ours)) for row in generate(ours))


def _whole(schedule):
    def generate(ours):
        fake = SimpleNamespace(_num_stages=len(ours.ranks), _n_microbatches=ours.microbatches)
        rows = schedule._get_pipeline_order(fake)
        return [_counted_from_0(rows[rank]) for rank in range(len(ours.ranks))]

    return generate


def _counted_from_0(row):
    """torch 2.13 counts the forwards of 1F1B's last rank from 1; its runtime does not use that column."""
    row = [action for action in row if action is not None]
    first = row[0].microbatch_index
    return [
        a._replace(microbatch_index=a.microbatch_index - first) if a.computation_type.value == "F" else a for a in row
    ]


def _each_rank(schedule):
    def generate(ours):
        ranks = len(ours.ranks)
        fake = SimpleNamespace(
            pp_group_size=ranks,
            num_stages=ours.stages,
            n_local_stages=ours.chunks,
            _n_microbatches=ours.microbatches,
            microbatches_per_round=ours.microbatches // max(1, ours.microbatches // ranks),
        )
        for rank in range(ranks):
            fake.rank = rank
            yield schedule._calculate_single_rank_operations(fake, rank)

    return generate


def _entries(row, ours):
    for entry in row:
        found = tuple(_action(*parts, ours) for parts in ACTION.findall("" if entry is None else str(entry)))
        if found:  # else a pause, or the reduction of gradients
            yield found


def _action(stage, kind, microbatch, ours):
    _, chunk = ours.place(int(stage))
    return Action(kind, int(microbatch), chunk)
