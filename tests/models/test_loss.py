"""The loss module against torch's own and against its definition."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.models import Config, CrossEntropy, Decoder


def inputs(shape, vocab, ignored, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, vocab, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(vocab, shape, generator=generator)
    return logits, labels.where(torch.rand(shape, generator=generator) >= ignored, -100)


sizes = {
    "shape": st.lists(st.integers(0, 4), min_size=1, max_size=3),
    "vocab": st.integers(1, 9),
    "ignored": st.sampled_from([0.0, 0.5, 1.0]),
    "smoothing": st.sampled_from([0.0, 0.1, 1.0]),
    "seed": st.integers(0, 1000),
}


@given(**sizes)
@settings(deadline=None, max_examples=100)
def test_it_is_the_sum_over_labels_that_count_of_smoothed_surprises(shape, vocab, ignored, smoothing, seed):
    logits, labels = inputs(shape, vocab, ignored, seed)
    loss = CrossEntropy(smoothing)(logits, labels)
    asked = (1 - smoothing) * F.one_hot(labels.clamp_min(0), vocab).double() + smoothing / vocab
    right = -(asked * logits.log_softmax(-1))[labels != -100].sum()
    assert loss.shape == () and abs(loss - right) <= 1e-12 * (1 + abs(right))  # at most 64 * 9 terms of order ten
    (grad,) = torch.autograd.grad(loss, logits)
    (grad_right,) = torch.autograd.grad(right, logits)
    assert torch.allclose(grad, grad_right, rtol=0, atol=1e-12)


def test_smoothing_and_ignoring_make_a_difference():
    logits, labels = inputs((2, 5), 7, 0.5, 0)
    plain = CrossEntropy()(logits, labels)
    assert abs(CrossEntropy(0.1)(logits, labels) - plain) > 1e-3
    assert abs(CrossEntropy(ignore_index=-1)(logits, labels.clamp_min(0)) - plain) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_widened_before_it_is_summed(dtype):
    logits, labels = inputs((400,), 50, 0.0, 0, dtype)
    loss = CrossEntropy(0.1)(logits, labels)
    right = F.cross_entropy(logits.double(), labels, reduction="sum", label_smoothing=0.1)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(right.item(), rel=1e-5)
    narrow = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    assert abs(narrow.item() - right.item()) > 1e-4 * right.item()


def test_a_decoder_smooths_as_its_config_says():
    x = torch.arange(6).view(2, 3)
    for smoothing in (0.0, 0.2):
        model = Decoder(Config(layers=1, width=8, heads=2, label_smoothing=smoothing))
        right = F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="sum", label_smoothing=smoothing)
        assert model.loss_sum(x, x).item() == pytest.approx(right.item(), rel=1e-6)
