"""Two towers, one frozen; a rank that has no images in a microbatch does not run their tower."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients, assert_weights, naming, sgd, step
from tests.pool import distributed


class Tower(nn.Module):
    """Patches `[patches, 7]` to embeddings `[patches, 13]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 23) for _ in range(2))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        x = self.first(patches)
        for block in self.blocks:
            x = block(x)
        return x


class Multimodal(nn.Module):
    """Text, with the projected embeddings of images before it where there are images."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Tower()
        self.projector = nn.Sequential(nn.Linear(13, 17), nn.GELU(), nn.Linear(17, 13))
        self.text = nets.Net()

    def forward(self, tokens: torch.Tensor, images: torch.Tensor | None) -> torch.Tensor:
        x = self.text.embedding(tokens)
        if images is not None:
            x = torch.cat([self.projector(self.vision(images)), x], 1)
        for block in self.text.blocks:
            x = block(x + x.mean(1, keepdim=True))  # so that text sees images
        return self.text.head(self.text.norm(x))[:, -tokens.shape[1] :]


FROZEN = {
    "the vision tower": lambda net: net.vision,
    "the text tower": lambda net: net.text,
    "nothing": lambda net: nn.Module(),
}


def make(frozen: str) -> Multimodal:
    torch.manual_seed(0)
    net = Multimodal().double()
    FROZEN[frozen](net).requires_grad_(False)
    return net


def shard(net: Multimodal, **options) -> Multimodal:
    for block in (*net.vision.blocks, *net.text.blocks):
        weft.fully_shard(block, **options)
    weft.fully_shard(net.vision, **options)
    weft.fully_shard(net.projector, **options)
    return weft.fully_shard(net, **options)


WHO = {
    "all ranks": lambda number, rank: True,
    "the first rank": lambda number, rank: rank == 0,
    "the last rank": lambda number, rank: rank == dist.get_world_size() - 1,
    "ranks in turn": lambda number, rank: number % dist.get_world_size() == rank,
    "now and then none": lambda number, rank: number % 2 == 1,
}


def assert_trains(frozen: str, who: str, microbatches: int = 1, **options) -> None:
    plain, sharded = make(frozen), shard(make(frozen), **options)
    optimizers = sgd(plain, sharded)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    images = torch.randn(8, 2 * ranks, 3, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    count = 0

    def loss(net: Multimodal, rows: torch.Tensor, pictures: torch.Tensor, each: int) -> torch.Tensor:
        output = net(rows[:, :-1], pictures if WHO[who](count, each) else None)
        return F.cross_entropy(output.flatten(0, 1), rows[:, 1:].flatten())

    for number, batch in enumerate(nets.data(2, 2 * ranks * microbatches)):
        with naming("step", number):
            for micro, rows in enumerate(batch.chunk(microbatches)):
                sharded.set_is_last_backward(micro == microbatches - 1)
                parts = list(zip(rows.chunk(ranks), images[count].chunk(ranks)))
                for each, (some, pictures) in enumerate(parts):
                    value = loss(plain, some, pictures, each) / ranks
                    if value.requires_grad:
                        value.backward()
                mine = loss(sharded, *parts[rank], rank)
                mine.backward()
                count += 1
            assert_gradients(sharded, plain)
            step(optimizers)
    assert_weights(sharded, plain)
    assert all(role["live"] == 0 for role in weft.memory_report(sharded)["transient"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "who", "frozen", "microbatches"),
    [
        ("optim", "all ranks", "the vision tower", 1),
        ("optim", "ranks in turn", "the vision tower", 2),
        ("optim", "now and then none", "nothing", 1),
        ("optim_grads", "the first rank", "nothing", 1),
        ("optim_grads", "the last rank", "the vision tower", 2),
    ],
)
@distributed(2)
def test_images_on_some_ranks_only(strategy, who, frozen, microbatches):
    assert_trains(frozen, who, microbatches, strategy=strategy)


@pytest.mark.long
@pytest.mark.parametrize(
    ("frozen", "who"),
    [
        ("nothing", "ranks in turn"),
        pytest.param("nothing", "the last rank", marks=pytest.mark.long),
        pytest.param("the vision tower", "ranks in turn", marks=pytest.mark.long),
        pytest.param("the vision tower", "now and then none", marks=pytest.mark.long),
    ],
)
@distributed(2)
def test_images_on_some_ranks_only_where_weights_are_sharded(frozen, who):
    """The ranks without images take part in the tower's gathers when others wait for them."""
    assert_trains(frozen, who, 2, strategy="optim_grads_params")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2, timeout=40)
def test_a_projector_into_a_frozen_text_tower_trains_from_the_ranks_that_have_images(strategy):
    """Every rank has images here, since a loss that nothing trainable is in has no backward."""
    assert_trains("the text tower", "all ranks", strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "outer", "microbatches"), [("optim_grads", "no_shard", 2), ("optim_grads_params", "optim", 1)]
)
@distributed(4, timeout=60)
def test_images_on_some_ranks_only_on_two_axes(strategy, outer, microbatches):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    options = {"strategy": strategy, "outer_strategy": outer, "mesh": mesh}
    assert_trains("the vision tower", "the last rank", microbatches, **options)
