"""All experts at once against one after another."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from tests.moe.reference import enlarge
from weft.moe import GroupedExperts
from weft.moe import experts as experts_module
from weft.moe.experts import leaves_zeros

COUNTS = {
    "all have rows": [3, 1, 4, 2],
    "some have none": [0, 5, 0, 2],
    "one has all": [0, 0, 7, 0],
    "nobody has any": [0, 0, 0, 0],
}


def run(backend, counts, dtype, hidden=16, inner=24):
    torch.manual_seed(1)
    module = GroupedExperts(len(counts), hidden, inner, backend=backend).to(dtype)
    enlarge(module, 10.0)
    rows = torch.randn(sum(counts), hidden).to(dtype).requires_grad_()
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    output = module(rows, offsets)
    output.sum().backward()  # the gradient is expanded from one element
    return output, [rows.grad, *(weight.grad for weight in module.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_the_grouped_product_equals_the_loop(counts, dtype):
    output, gradients = run("grouped_mm", counts, dtype)
    expected, expected_gradients = run("loop", counts, dtype)
    assert_close(output, expected)
    for gradient, other in zip(gradients, expected_gradients):
        assert gradient is not None, "an expert without rows has a gradient of zeros"
        assert_close(gradient, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_experts_compute_the_same_in_every_dtype(dtype):
    torch.manual_seed(1)
    module = GroupedExperts(4, 16, 24).to(dtype)
    rows, offsets = torch.randn(10, 16, dtype=dtype), torch.tensor([3, 4, 8, 10], dtype=torch.int32)
    expected = module(rows, offsets)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, backend="eager")(rows, offsets), expected)


ACTS = {"silu": lambda gate, up: F.silu(gate) * up, "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_each_row_gets_the_biases_of_its_expert(backend, act):
    counts = COUNTS["some have none"]
    torch.manual_seed(1)
    module = GroupedExperts(len(counts), 16, 24, act=act, bias=True, backend=backend)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    rows = torch.randn(sum(counts), 16)
    expected = []
    for expert, own in enumerate(rows.split(counts)):

        def project(name, x, expert=expert):
            return x @ module.get_parameter(name)[expert] + module.get_parameter(f"{name}_bias")[expert]

        expected.append(project("down_proj", ACTS[act](project("gate_proj", own), project("up_proj", own))))
    found = module(rows, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype, inner", [(torch.float32, 6), (torch.bfloat16, 12)], ids=str)
def test_sizes_that_the_grouped_product_refuses_take_the_loop_and_say_so(dtype, inner, caplog, monkeypatch):
    monkeypatch.setattr(experts_module, "_logged", set())
    with caplog.at_level(logging.WARNING):
        output, gradients = run("grouped_mm", [3, 0, 2], dtype, inner=inner)
        run("grouped_mm", [3, 0, 2], dtype, inner=inner)
    (record,) = caplog.records
    assert f"intermediate_size={inner}" in record.message and str(dtype) in record.message
    assert record.message.endswith(f"multiples of {16 // dtype.itemsize}")
    expected, expected_gradients = run("loop", [3, 0, 2], dtype, inner=inner)
    assert torch.equal(output, expected)
    assert all(torch.equal(gradient, other) for gradient, other in zip(gradients, expected_gradients))


def test_a_device_whose_product_leaves_gradients_of_experts_without_rows_as_they_were_is_found(monkeypatch):
    assert leaves_zeros(torch.device("cpu"), torch.bfloat16)
    right = torch._grouped_mm

    def wrong(x, y, offsets):
        product = right(x, y, offsets)
        product[torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0] = torch.nan
        return product

    monkeypatch.setattr(torch, "_grouped_mm", wrong)
    assert not leaves_zeros.__wrapped__(torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("backend", ["grouped_mm", "loop"])
def test_autocast_reaches_the_experts(backend):
    torch.manual_seed(1)
    module = GroupedExperts(3, 16, 24, backend=backend)
    enlarge(module, 10.0)
    rows, offsets = torch.randn(6, 16), torch.tensor([2, 2, 6], dtype=torch.int32)
    for given in (rows, rows.bfloat16()):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = module(given, offsets)
        output.sum().backward()
        assert module.gate_proj.grad.dtype == torch.float32
    assert torch.equal(output, module.bfloat16()(rows.bfloat16(), offsets))


def test_autocast_leaves_experts_in_fp64_as_it_leaves_a_linear_layer():
    torch.manual_seed(1)
    module = GroupedExperts(3, 16, 24).double()
    rows, offsets = torch.randn(6, 16, dtype=torch.float64), torch.tensor([2, 2, 6], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.Linear(16, 16).double()(rows).dtype == torch.float64
        output = module(rows, offsets)
    assert output.dtype == torch.float64 and torch.equal(output, module(rows, offsets))


def test_the_grouped_product_gets_the_parameters_themselves():
    module = GroupedExperts(2, 8, 8)
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch._grouped_mm, torch.nn.functional.grouped_mm):
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    with Watch():
        module(torch.randn(3, 8), torch.tensor([1, 3], dtype=torch.int32))
    assert {id(weight) for weight in seen} == {id(weight) for weight in module.parameters()}


def test_an_expert_starts_from_the_same_weights_wherever_it_is():
    torch.manual_seed(3)
    whole = GroupedExperts(6, 8, 4)
    for first in (0, 2, 4):
        torch.manual_seed(3)
        part = GroupedExperts(2, 8, 4, first_expert=first)
        for name, weight in part.named_parameters():
            assert torch.equal(weight, whole.get_parameter(name)[first : first + 2])
    assert not torch.equal(whole.gate_proj[0], whole.gate_proj[1])
    assert_close(whole.up_proj.std(), torch.tensor(0.02), rtol=0.2, atol=0)


@pytest.mark.parametrize(
    "message, options",
    [
        ("num_local_experts=0: num_local_experts must be a positive integer", {"num_local_experts": 0}),
        ("hidden_size=-4", {"hidden_size": -4}),
        ("intermediate_size=0", {"intermediate_size": 0}),
        ("backend='triton': backend must be 'grouped_mm' or 'loop'", {"backend": "triton"}),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it_and_the_rule(message, options):
    with pytest.raises(ValueError) as error:
        GroupedExperts(**{"num_local_experts": 2, "hidden_size": 8, "intermediate_size": 8, **options})
    assert str(error.value).startswith(message)
