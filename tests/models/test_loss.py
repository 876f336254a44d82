import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from weft.models import loss
from weft.models.loss import cross_entropy


def example(shape=(3, 7), vocabulary=19, dtype=torch.float32, spread=4.0):
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(*shape, vocabulary, generator=generator) * spread).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = loss.IGNORED_LABEL
    return logits, labels


def reference(logits, labels):
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2),
        labels.flatten(),
        ignore_index=loss.IGNORED_LABEL,
    )


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 500.0])
def test_loss_and_gradient_are_those_of_torch_however_the_rows_are_cut(monkeypatch, rows, dtype, spread):
    logits, labels = example(dtype=dtype, spread=spread)
    monkeypatch.setitem(loss.CHUNK, "cpu", rows * logits.shape[-1])
    expected = reference(logits, labels)
    (expected_gradient,) = torch.autograd.grad(3 * expected, logits)

    result = cross_entropy(logits, labels)
    assert_close(result, expected)
    (gradient,) = torch.autograd.grad(3 * result, logits)
    assert_close(gradient, expected_gradient)


def test_without_labels_to_learn_the_loss_is_nan_and_the_gradient_zero_as_in_torch():
    logits, labels = example()
    labels.fill_(loss.IGNORED_LABEL)
    result = cross_entropy(logits, labels)
    assert_close(result, reference(logits, labels), equal_nan=True)
    result.backward()
    assert not logits.grad.any()


def test_the_loss_leaves_logits_and_labels_as_they_were():
    logits, labels = example()
    logits_before, labels_before = logits.detach().clone(), labels.clone()
    cross_entropy(logits, labels).backward()
    assert torch.equal(logits, logits_before)
    assert torch.equal(labels, labels_before)


def test_evaluation_gives_the_loss_of_training():
    logits, labels = example()
    with torch.no_grad():
        evaluated = cross_entropy(logits, labels)
    assert torch.equal(evaluated, cross_entropy(logits, labels))
    assert not evaluated.requires_grad


def test_a_second_backward_through_one_loss_is_an_error_and_not_a_wrong_gradient():
    logits, labels = example()
    result = cross_entropy(logits, labels)
    result.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        result.backward()


def test_training_holds_one_tensor_of_the_logits_size_beside_the_logits():
    logits, labels = example(shape=(16, 64), vocabulary=1024)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: held.append(saved.numel()) or saved, lambda saved: saved
    ):
        cross_entropy(logits, labels)
    assert [size for size in held if size >= logits.numel()] == [logits.numel()]


def test_labels_of_another_shape_are_refused():
    logits, labels = example()
    with pytest.raises(ValueError, match=r"\(3, 6\).*\(3, 7, 19\).*-100"):
        cross_entropy(logits, labels[:, 1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_scaled_loss_in_half_precision_has_gradients_without_a_common_error(dtype):
    logits, labels = example(shape=(64, 16), dtype=dtype)
    eps = torch.finfo(dtype).eps
    scale = (labels != loss.IGNORED_LABEL).sum() * (1 + 0.4 * eps)  # over the count: rounded, it would be 1
    (expected,) = torch.autograd.grad(scale * reference(logits.float(), labels), logits)
    (gradient,) = torch.autograd.grad(scale * cross_entropy(logits, labels), logits)
    ratio = (gradient.double() * expected.double()).sum() / expected.double().square().sum()
    assert abs(ratio - 1) < eps / 10
