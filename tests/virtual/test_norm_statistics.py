"""Mean and deviation that a norm keeps for its backward are as wide in a shape run as in a virtual one."""

import pytest
import torch
from torch import nn

import emu
from emu.trace.events import Alloc
from emu.virtual import tracker

NORMS = {
    "layer": lambda **how: nn.LayerNorm(6, elementwise_affine=how.pop("affine"), **how),
    "layer without bias": lambda **how: nn.LayerNorm(6, elementwise_affine=how.pop("affine"), bias=False, **how),
    "batch": lambda **how: nn.BatchNorm1d(4, **how),
    "rms": lambda **how: nn.RMSNorm(6, elementwise_affine=how.pop("affine"), **how),
}


def program(rank, norm, dtype, weights, affine):
    module = NORMS[norm](dtype=weights, affine=affine)
    x = torch.ones(3, 4, 6, dtype=dtype, requires_grad=True)
    module(x).float().sum().backward()


def both(*args):
    return [list(emu.launch(program, emu.Mesh(dp=1), backend=b, args=args).trace[0]) for b in ("virtual", "shape")]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float32),  # as under autocast
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # an RMS norm of two dtypes is several kernels
def test_shapes_alone_have_the_same_record(norm, affine, dtype, weights):
    virtual, shape = both(norm, dtype, weights, affine)
    assert virtual == shape
    assert any(isinstance(event, Alloc) for event in shape)


def test_statistics_as_torchs_shapes_have_them_are_seen(monkeypatch):
    monkeypatch.setattr(tracker, "NORMS", ())
    virtual, shape = both("layer", torch.bfloat16, torch.bfloat16, True)
    assert virtual != shape
