"""`torch.compile` of what computes with sharded parameters themselves: a compiled graphs do not support uneven cuts."""

import pytest
import torch
from torch import nn

import weft
from tests.pool import distributed


def update(parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor) -> None:
    """A step of an optimizer."""
    mean.lerp_(gradient, 0.1)
    parameter.add_(mean, alpha=-0.1)


def trained(step) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model and its weights after two steps."""
    torch.manual_seed(0)
    model = weft.fully_shard(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3)))
    means = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(2):
        model(torch.ones(2, 3)).square().mean().backward()
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), means):
                step(parameter.detach(), parameter.grad, mean)
        model.zero_grad()
    return model, [parameter.full_tensor().detach() for parameter in model.parameters()]


@pytest.mark.slow
@distributed(2)
def test_a_compiled_update_of_sharded_parameters_is_right_or_refused():
    model, expected = trained(update)
    _, actual = trained(torch.compile(update, backend="eager"))
    torch.testing.assert_close(actual, expected)
    torch._dynamo.reset()  # it remembers what it left as it is
    whole = torch.compile(update, backend="eager", fullgraph=True)
    parameter = model[0].weight
    before = parameter.full_tensor().detach().clone()
    with pytest.raises(RuntimeError, match=r"such as an optimizer's step.*set_stance"):
        whole(parameter.detach(), torch.ones_like(parameter), torch.zeros_like(parameter))
    assert torch.equal(parameter.full_tensor(), before)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(trained(whole)[1], expected)
