"""What the clinic's mended programs compute, beside closed forms in float64 that know nothing of emu or of autograd.

Inputs are drawn here once more, so a case whose inputs change is noticed, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import emu.clinic
from emu.equivalence.compare import whole_results
from emu.parallel.pipeline import Schedule, Times, timed

SAME = 1e-9

pytestmark = pytest.mark.usefixtures("float64")


def drawn(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=g) for shape in shapes]


def found(number):
    """What all ranks of the mended program return, whole. In float64 it takes twice the memory, which is not looked at."""
    case = emu.clinic.case(number)
    results = emu.launch(case.mended, case.mesh, backend="virtual", track=False).results
    return whole_results(results, case.mesh)


def softmax_gradient(x, w, y):
    """Loss and gradient of w of the summed cross-entropy of x w, labels of -100 left out."""
    counts = y != -100
    x, y = x[counts], y[counts]
    p = (x @ w).softmax(-1)
    return -p[torch.arange(len(y)), y].log().sum(), x.T @ (p - F.one_hot(y, w.shape[1]))


def adamw(p, gradients, lr, decay):
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for t, gradient in enumerate(gradients, 1):
        g = gradient(p) if callable(gradient) else gradient
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return p


def uneven_batches():
    x, y, w = drawn(1, (7, 4), (7, 2), (4, 2))
    return {"loss": ((x @ w - y) ** 2).sum() / 14, "w": 2 * x.T @ (x @ w - y) / 14}


def token_means():
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(2, 3, 5, 4, generator=g), torch.randn(4, 7, generator=g)
    y = torch.randint(0, 7, (2, 3, 5), generator=g)
    for rank, row in enumerate(((5, 0, 3), (1, 4, 2))):
        for m, n in enumerate(row):
            y[rank, m, n:] = -100
    return {"w": softmax_gradient(x, w, y)[1] / 15}


def late_no_sync():
    x, y, w = drawn(4, (16, 4), (16, 2), (4, 2))
    return {"w": 2 * x.T @ (x @ w - y) / 16}


def overwritten_shard():
    x, y, layers = drawn(9, (12, 4), (12, 4), (3, 4, 4))
    first, second = x @ layers[0], x @ layers[0] @ layers[1]
    d = 2 * (second @ layers[2] - y) / 12
    return {"layers": torch.stack([x.T @ (d @ layers[2].T @ layers[1].T), first.T @ (d @ layers[2].T), second.T @ d])}


def frozen_decay():
    frozen, trained, gradients = drawn(12, (100,), (20,), (2, 20))
    return {"frozen": frozen, "trained": adamw(trained, list(gradients), 0.1, 0.1)}


def padding():
    p, g = drawn(13, (10,), (10,))
    return {"squares": (g**2).sum(), "p": p - 0.5 * g}


def local_norm():
    whole = torch.cat(drawn(15, (5,), (4,), (3,))) * 2
    norm = whole.norm()
    assert float(norm) == pytest.approx(7.81165, abs=1e-5)
    return {"norm": norm, "clipped": whole / (norm + 1e-6)}


def norm_under_sp():
    x, _, _, w, c = drawn(19, (6, 4), (4,), (4,), (4, 6), (6, 6))
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    return {"gamma": (normed * (c @ w.T)).sum(0), "beta": (c @ w.T).sum(0)}


def divided_bias():
    x, w, b, c = drawn(20, (5, 8), (8, 3), (3,), (5, 3))
    return {"y": x @ w + b, "b": c.sum(0)}


def few_microbatches():
    module = importlib.import_module("emu.clinic.cases.c25_few_microbatches")
    model, data = module.Stack(), module.batch()
    inputs, gradients = [data.x], {}
    for layer in model.layers:
        inputs.append((inputs[-1] @ layer.weight.T + layer.bias).clamp(min=0))
    d = 2 * (inputs[-1] - data.y) / 18
    for i in (3, 2, 1, 0):
        d = d * (inputs[i + 1] > 0)
        gradients[f"layers.{i}.weight"], gradients[f"layers.{i}.bias"] = d.T @ inputs[i], d.sum(0)
        d = d @ model.layers[i].weight
    return gradients


def divided_every_step():
    x, y, w1, w2 = drawn(28, (12, 4), (12, 1), (4, 3), (3, 1))
    h = torch.tanh(x @ w1)
    r = 2 * (h @ w2 - y) / 12
    return {"layers.0.weight": (x.T @ ((r @ w2.T) * (1 - h * h))).T, "layers.1.weight": (h.T @ r).T}


def tied_copies():
    table, a = drawn(31, (6, 3), (3, 3))
    ids, labels = torch.tensor([0, 1, 5, 3]), torch.tensor([1, 5, 3, 2])

    def gradient(e):
        h = torch.tanh(e[ids] @ a)
        d = ((h @ e.T).softmax(-1) - F.one_hot(labels, 6)) / 4
        return torch.zeros_like(e).index_add(0, ids, ((d @ e) * (1 - h * h)) @ a.T) + d.T @ h  # the sum of both uses

    return {"table": adamw(table, [gradient] * 3, 0.05, 0.1)}


def tokens_of_wrong_group():
    g = torch.Generator().manual_seed(34)
    x, w = torch.randn(2, 8, 4, generator=g), torch.randn(4, 6, generator=g)
    y = torch.randint(0, 6, (2, 8), generator=g)
    counts = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 1]]).bool()
    loss, gradient = softmax_gradient(x, w, y.masked_fill(~counts, -100))
    assert float(loss / 10) == pytest.approx(2.589311, abs=1e-6)
    return {"loss": loss / 10, "w": gradient / 10}


def causal(q, k, v, scale):
    scores = (q @ k.T * scale).masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return scores.softmax(-1), scores.softmax(-1) @ v


def local_positions():
    q, k, v = drawn(35, (16, 6), (16, 6), (16, 6))
    angles = torch.arange(16.0)[:, None] * 100 ** (-torch.arange(3.0) / 3)

    def turn(x):
        z = torch.complex(x[:, :3], x[:, 3:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], 1)

    return {"out": causal(turn(q), turn(k), v, 6**-0.5)[1]}


def odd_length():
    q, k, v = drawn(37, (13, 2, 5), (13, 2, 5), (13, 2, 5))
    scale, parts = 5**-0.5, {"out": [], "q": [], "k": [], "v": []}
    for h in range(2):
        p, out = causal(q[:, h], k[:, h], v[:, h], scale)
        dp = 2 * out @ v[:, h].T  # of the sum of squares
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
        for name, part in zip(parts, (out, ds @ k[:, h], ds.T @ q[:, h], p.T @ (2 * out))):
            parts[name].append(part)
    return {name: torch.stack(heads, 1) for name, heads in parts.items()}


def unbalanced_cut():
    q, k, v = drawn(40, (16, 4), (16, 4), (16, 4))
    return {"out": torch.cat([causal(q[s], k[s], v[s], 1.0)[1] for s in (slice(0, 4), slice(4, 16))])}


def expert_gradients():
    x, w, c = drawn(41, (6, 4), (2, 4, 4), (6, 4))
    d = torch.zeros_like(w)
    for t, e in enumerate((0, 1, 1, 0, 0, 1)):
        d[e] += torch.outer(x[t], c[t] / 6 * (1 - torch.tanh(x[t] @ w[e]) ** 2))
    return {"experts": d}


def balance_loss():
    x, w = drawn(43, (12, 3), (3, 4))
    p = (x @ w).softmax(-1)
    share = F.one_hot(p.argmax(-1), 4).double().mean(0)
    of_p = 0.01 * 4 * share / 12
    return {"router": x.T @ (p * (of_p - (p * of_p).sum(-1, keepdim=True)))}


def receive_sizes():
    got = [[0, 1, 2, 100, 101, 200], [3, 4, 102, 103, 201, 202], [5, 104, 105, 203, 204, 205]]
    return {"received": torch.tensor(got, dtype=torch.float64).flatten()}


def overflow_flag():
    return {"p": drawn(54, (6,))[0], "scale": torch.tensor(512.0)}


def other_dropout():
    x, w1, w2 = drawn(58, (6, 4), (4, 8), (8, 1))
    torch.manual_seed(5)
    mask = torch.dropout(torch.ones(6, 8), 0.5, True)  # 0 or 2
    following = torch.rand(2)
    h = torch.tanh(x @ w1)
    y = (h * mask) @ w2
    return {
        "loss": (y**2).sum(),
        "w1": x.T @ ((2 * y @ w2.T) * mask * (1 - h * h)),
        "w2": (h * mask).T @ (2 * y),
        "next": following,
    }


def gathered_ahead():
    torch.manual_seed(62)
    x = torch.ones(1, 64)
    for _ in range(8):
        x = torch.tanh(x @ (torch.randn(64, 64) / 8))
    return {"x": x}


RIGHT: dict[int, Callable[[], dict[str, torch.Tensor]]] = {
    1: uneven_batches,
    3: token_means,
    4: late_no_sync,
    6: lambda: {"w": torch.full((4,), -77.0)},
    9: overwritten_shard,
    12: frozen_decay,
    13: padding,
    15: local_norm,
    19: norm_under_sp,
    20: divided_bias,
    22: lambda: {"qkv": torch.arange(120.0).view(24, 5)},
    25: few_microbatches,
    27: lambda: {"sum": torch.full((3,), 3.0)},
    28: divided_every_step,
    31: tied_copies,
    34: tokens_of_wrong_group,
    35: local_positions,
    37: odd_length,
    40: unbalanced_cut,
    41: expert_gradients,
    43: balance_loss,
    45: receive_sizes,
    48: lambda: {"sum": torch.tensor([2.0, 2, 2, 2, 2, 1])},
    50: lambda: {"mean": torch.full((2,), 0.1)},
    51: lambda: {"total": torch.full((4,), 63.0)},
    54: overflow_flag,
    57: lambda: {"rows": torch.tensor(2.0)},
    58: other_dropout,
    62: gathered_ahead,
}
BY_NUMBER = {60, 63}  # a number by hand, beside what emu measures: below


def near(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=SAME)


def test_every_case_is_here():
    assert sorted({*RIGHT, *BY_NUMBER}) == emu.clinic.numbers()


@pytest.mark.parametrize("number", RIGHT)
def test_a_mended_program_computes_the_closed_form(number):
    results, right = found(number), RIGHT[number]()
    assert set(results) == set(right)
    for name, value in right.items():
        assert near(results[name].detach(), value), name


@pytest.mark.parametrize("number", [1, 3, 9, 13, 20, 22, 28, 34, 35, 41, 43, 58])
def test_a_broken_program_computes_something_else(number):
    """Negative control, of those that compute anything to the end, alike on all ranks."""
    case = emu.clinic.case(number)
    results = whole_results(emu.launch(case.broken, case.mesh, backend="virtual").results, case.mesh)
    assert any(not near(results[name].detach(), value) for name, value in RIGHT[number]().items())


def test_the_mended_schedule_of_case_25_has_the_bubble_that_its_cure_names():
    module = importlib.import_module("emu.clinic.cases.c25_few_microbatches")

    def mended(rank, ranks, microbatches, chunks):
        return module.one_f_one_b(rank, microbatches, min(ranks - 1 - rank, microbatches))

    for m in (1, 2, 3, 4, 5):
        done = timed(Schedule.of(mended, 4, m), Times())
        assert (done.makespan, done.bubble_fraction) == (3 * (m + 3), pytest.approx(3 / (m + 3)))


def test_numbers_by_hand_are_those_of_the_closed_forms():
    said = {number: emu.clinic.case(number).run() for number in BY_NUMBER}
    p, n = 10, 4
    shard = -(-p // n)
    assert f"{2 * p + 14 * shard} bytes measured" in said[60].mended.says  # 62
    head = 3 * 2 * 6 * 8 * 5
    assert f"{18144 + head:,} FLOP measured" in said[63].mended.says
    assert f"{4 * 6528 + head:,} FLOP by hand" in said[63].broken.says


def test_the_errors_of_wrong_programs_have_the_size_that_was_reported():
    """By the reports' inputs: 0.30 of a mean of means, 0.98 of local positions."""
    for number, name, size in ((1, "w", 0.30), (35, "out", 0.98)):
        case = emu.clinic.case(number)
        wrong = whole_results(emu.launch(case.broken, case.mesh, backend="virtual").results, case.mesh)[name].detach()
        assert float((wrong - RIGHT[number]()[name]).abs().max()) == pytest.approx(size, abs=0.005)
