"""What the detector of hangs knows of a model goes with the model; what else looks uses its thread."""

import gc

import torch.distributed as dist

from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.watch.hang_detector import start_hang_detector


@distributed(2)
def test_nothing_is_known_of_how_to_take_part_in_the_gathers_of_a_model_that_has_gone():
    watch, rank = start_hang_detector(), dist.get_rank()
    counts = []
    for _ in range(2):
        net = nets.shard(nets.make(), strategy="optim_grads_params")
        nets.loss_of(net, nets.data(1, 4)[0][rank::2]).backward()
        counts.append(sum(map(len, watch._joinable.values())))
        del net
        gc.collect()
        assert not sum(map(len, watch._joinable.values()))
    assert counts[0] == counts[1] > 0
