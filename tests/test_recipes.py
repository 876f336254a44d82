"""The loop of docs/recipes.md with two networks and two optimizers: what it computes, and where it resumes."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from tests.train.command import assert_same_contents, contents, metrics

PAGE = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
(LOOP,) = (block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "NOISE" in block)


def recipe():
    names = {}
    exec(LOOP.partition('losses = train_gan("')[0], names)
    return names


def trained(folder, *steps):
    train = recipe()["train_gan"]
    losses = [train(str(folder), each).tolist() for each in steps][-1]
    assert train(str(folder), steps[-1]) is None, "no step is left"
    return losses


def plain(steps):
    """The same in one process, without sharding."""
    names = recipe()

    def network(inputs, outputs, width=16):
        layers = (nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs))
        return nn.Sequential(layers[0], nn.GELU(), layers[1], nn.GELU(), layers[2])

    torch.manual_seed(0)
    generator, discriminator = network(names["NOISE"], 2), network(2, 1)
    optimizer_g = torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    optimizer_d = torch.optim.AdamW(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    for step in range(1, steps + 1):
        true = discriminator(names["real"](step, 0, 1))
        fake = discriminator(generator(names["noise"](step, 0, 0, 1)).detach())
        loss_d = cross_entropy(true, torch.ones_like(true)) + cross_entropy(fake, torch.zeros_like(fake))
        optimizer_d.zero_grad()
        loss_d.backward()
        optimizer_d.step()
        fake = discriminator(generator(names["noise"](step, 1, 0, 1)))
        loss_g = cross_entropy(fake, torch.ones_like(fake))
        optimizer_g.zero_grad()
        loss_g.backward()
        optimizer_g.step()
    return [loss_d.item(), loss_g.item()]


@pytest.mark.long
def test_the_gan_of_the_recipes_equals_one_process_and_resumes_bit_for_bit(pool, tmp_path):
    whole = pool.run(2, trained, tmp_path / "whole", 6)[0]
    torch.testing.assert_close(whole, plain(6))
    assert pool.run(2, trained, tmp_path / "cut", 3, 6)[0] == whole
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole") and len(metrics(tmp_path / "cut")) == 6
    last = "checkpoints/step-00000006"
    assert_same_contents(contents(tmp_path / "cut" / last), contents(tmp_path / "whole" / last))
