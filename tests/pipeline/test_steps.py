"""Steps of several batches, scales, clipping, precision; orders of ranks; shapes alone; and what a pipeline keeps in memory."""

import pytest
import torch

import emu
from emu.equivalence.compare import whole_results
from emu.models import GPT, Config
from emu.parallel import LossScale, Pipeline, norms
from emu.parallel.pipeline import peak_activations
from emu.parallel.pipeline.running import executor
from emu.parallel.pipeline.schedules import make
from emu.trace.compare import first_difference
from emu.trace.events import Mark

CLOSE = 1e-12  # float64, in another order of sums
CONFIG = Config(layers=4, width=4, heads=2, ffn=5, vocab=7, seq=3, tied=True, positions="rotary")
MESH = {"pp": 2, "dp": 2}


def batches(n=3, rows=5):
    """Labels that count are few in some, and unevenly spread over rows and batches."""
    g = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        x, y = (torch.randint(0, CONFIG.vocab, (rows, CONFIG.seq), generator=g) for _ in "xy")
        y[: i + 1] = -100
        y[-1, : i + 1] = -100
        out.append(emu.Batch(x, y))
    return out


def model():
    made = GPT(CONFIG, seed=0)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(5)  # large enough for gradients to be clipped, and to matter
    return made


def right(some):
    """Loss and gradients over all tokens of all batches, on one device."""
    made = model()
    total = sum(made.loss_sum(b.x, b.y) for b in some)
    (total / sum(b.tokens for b in some)).backward()
    return total.detach() / sum(b.tokens for b in some), {n: p.grad for n, p in made.named_parameters()}


def off(results, mesh, gradients):
    whole = whole_results(results, mesh)
    assert whole.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in gradients.values())  # beside it some gradients are truly zero
    return max(
        float((whole[n] - g).abs().max()) / max(float(g.abs().max()), 1e-3 * largest) for n, g in gradients.items()
    )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("schedule", "zero"), [("gpipe", 0), ("1f1b", 3), ("zb-h1", 3), ("zb-v", 0), ("dualpipe", 3)])
def test_accumulation_over_batches_weighs_every_token_alike(schedule, zero):
    some = batches()
    tokens = sum(b.tokens for b in some)

    def program(rank, count):
        pipe = Pipeline(model(), rank, "dp", schedule=schedule, microbatches=3, zero=zero)
        losses = [pipe.add_gradients(b, microbatches=m) for b, m in zip(some, (3, 2, 4))]
        pipe.finish(count)
        return sum(losses), pipe.gather_gradients()

    loss, gradients = right(some)
    run = emu.launch(program, emu.Mesh(**MESH), args=(tokens,))
    assert float(sum(total for total, _ in run.results) / tokens - loss) == pytest.approx(0, abs=1e-12)
    assert off([found for _, found in run.results], run.mesh, gradients) < CLOSE
    # Negative control: a mean of the batches' means weighs tokens of batches with few labels more.
    means = [right([b])[1] for b in some]
    assert (
        max(float((sum(m[n] for m in means) / 3 - g).abs().max() / g.abs().max()) for n, g in gradients.items()) > 1e-2
    )


def one_batch(rank, pp, before):
    """Gradients of a batch that comes after another one, whose gradients were added and not finished."""
    first, second, _ = batches()
    if pp > 1:
        dist = Pipeline(model(), rank, "dp", microbatches=2, zero=ZERO[rank.mesh.axes["dp"]])
        dist.add_gradients(first)
    else:
        dist = emu.DataParallel(model(), rank, "dp", zero=ZERO[rank.mesh.axes["dp"]])
        dist.loss_sum(*first.part(dist.group)).backward()
    before(dist, first)
    return dist.backward(second), dist.gather_gradients()


ZERO = {1: 0, 2: 2}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_batch_that_is_all_of_a_step_does_not_join_what_is_not_finished(pp, dp):
    """Both would be divided by the tokens of the second."""
    mesh = emu.Mesh(pp=pp, dp=dp)

    def refused(dist, first):
        with pytest.raises(emu.EmuError, match=r"not finished.*\n.*finish.*zero_grad"):
            dist.backward(first)
        dist.zero_grad()

    loss, gradients = right(batches()[1:2])
    for before in (
        refused,
        lambda dist, first: dist.zero_grad(),
        lambda dist, first: dist.finish(first.tokens),
        lambda dist, first: (
            torch.optim.SGD(dist.model.parameters(), lr=0.1).zero_grad() if not dist.zero else dist.zero_grad()
        ),
    ):
        run = emu.launch(one_batch, mesh, args=(pp, before))
        assert float(run.results[0][0] - loss) == pytest.approx(0, abs=1e-12)
        assert off([found for _, found in run.results], run.mesh, gradients) < CLOSE


def stepped(rank, schedule, how, clip, scale, steps=2):
    pipe = Pipeline(model(), rank, "dp", schedule=schedule, microbatches=3, **how)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, clip=clip, scale=scale() if scale else None)
    out = []
    for b in batches(steps):
        pipe.backward(b, scale=optimizer.scale) if scale else pipe.backward(b)
        out.append(optimizer.step().norm)
    return out, pipe.gather_parameters()


def clipped(clip, steps=2):
    """torch's own clipping, on one device."""
    made = model()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    out = []
    for b in batches(steps):
        optimizer.zero_grad()
        (made.loss_sum(b.x, b.y) / b.tokens).backward()
        out.append(torch.nn.utils.clip_grad_norm_(made.parameters(), clip))
        optimizer.step()
    return out, {n: p.detach() for n, p in made.named_parameters()}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("scale", [None, lambda: LossScale(1024.0)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize(("schedule", "zero"), [("gpipe", 0), ("1f1b", 1), ("zb-h1", 3), ("zb-v", 3), ("dualpipe", 0)])
def test_clipping_is_by_the_norm_of_all_stages_with_tied_weights_once(schedule, zero, scale):
    run = emu.launch(stepped, emu.Mesh(**MESH), args=(schedule, {"zero": zero}, 0.1, scale))
    norms_right, values = clipped(0.1)
    for found, _ in run.results:
        assert all(torch.allclose(a, b, rtol=1e-10, atol=0) for a, b in zip(found, norms_right, strict=True))
    assert off([found for _, found in run.results], run.mesh, values) < 1e-10


@pytest.mark.usefixtures("float64")
def test_a_norm_of_one_stage_is_seen(monkeypatch):
    monkeypatch.setattr(norms, "along", lambda chain, own, join, name: own.double())
    run = emu.launch(stepped, emu.Mesh(**MESH), args=("1f1b", {}, 0.1, None))
    assert abs(float(run.results[0][0][0] / clipped(0.1)[0][0]) - 1) > 1e-3


def mixed(rank, schedule):
    """In bfloat16, on stages or (no schedule) on one device."""
    data = batches(1)[0]
    if schedule is None:
        dist = emu.DataParallel(model(), rank, precision="bf16-mixed")
        loss = dist.backward(data)
    else:
        dist = Pipeline(model(), rank, "dp", schedule=schedule, microbatches=3, precision="bf16-mixed")
        loss = dist.backward(data)
        assert {p.dtype for p in dist.model.parameters()} == {torch.bfloat16}
    return loss, dist.gather_gradients()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_mixed_precision_is_as_near_to_float64_as_on_one_device(schedule):
    """Stages add no error of their own: what they send is bfloat16 anyway. Twice one device's leaves room for luck."""
    torch.set_default_dtype(torch.float64)
    try:
        loss, gradients = right(batches(1))
    finally:
        torch.set_default_dtype(torch.float32)

    def far(run):
        whole = whole_results([g for _, g in run.results], run.mesh)
        assert whole.keys() == gradients.keys()
        assert abs(float(run.results[0][0] / loss) - 1) < 2**-6
        squares = sum(float((whole[n].double() - g).square().sum()) for n, g in gradients.items())
        return (squares / sum(float(g.square().sum()) for g in gradients.values())) ** 0.5

    alone = far(emu.launch(mixed, emu.Mesh(dp=1), args=(None,)))
    assert alone > 1e-5  # it is another precision
    assert far(emu.launch(mixed, emu.Mesh(**MESH), args=(schedule,))) < 2 * alone < 0.2


# Orders, and shapes.

ORDERS = ("program", "time", 1, 2)


def step(rank, schedule, how):
    pipe = Pipeline(GPT(CONFIG, seed=0), rank, "dp", schedule=schedule, microbatches=3, **how)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01, clip=1.0)
    x = torch.zeros((6, CONFIG.seq), dtype=torch.long)
    out = []
    for _ in range(2):
        out.append(pipe.backward(emu.Batch(x, x, tokens=18)))
        optimizer.step()
    return out, pipe.gather_parameters()


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe"])
def test_every_order_of_ranks_gives_the_same_bits(schedule):
    runs = [
        emu.launch(step, emu.Mesh(**MESH), args=(schedule, {"zero": 1}), order=o) for o in ("program", "time", 1, 2)
    ]
    assert all(other.trace == runs[0].trace for other in runs[1:])
    for other in runs[1:]:
        for (a, values), (b, others) in zip(runs[0].results, other.results, strict=True):
            assert all(map(torch.equal, a, b))
            assert all(torch.equal(values[name], others[name]) for name in values)


@pytest.mark.parametrize(
    ("schedule", "how"),
    [("1f1b", {}), ("interleaved", {"zero": 3, "recompute": True}), ("zb-v", {"zero": 3}), ("dualpipe", {"zero": 1})],
)
def test_shapes_leave_the_trace_of_values(schedule, how):
    real, shapes = (emu.launch(step, emu.Mesh(**MESH), args=(schedule, how), backend=b) for b in ("virtual", "shape"))
    assert first_difference(shapes.trace, real.trace) is None
    assert any(type(event) is Mark and event.name == "0F0" for event in shapes.trace[0])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_some_ranks_stand_for_the_others(schedule):
    """Replicas do the same: one pipeline of two leaves the trace that it leaves beside the other."""
    mesh = emu.Mesh(**MESH)
    every = emu.launch(step, mesh, args=(schedule, {}), backend="shape")
    some = emu.launch(step, mesh, args=(schedule, {}), backend="shape", ranks=[0, 2])
    for rank in (0, 2):
        assert some.trace[rank] == every.trace[rank]


# Memory.

WIDE = 64
ROWS = 4


class Equal(torch.nn.Module):
    """Layers that are all alike, with activations that outweigh all else."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers))

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = x + layer(x)  # what a layer keeps is its input; nothing keeps the sum but the next layer
        return (x - y).sum()


def one_step(rank, schedule, m, layers, recompute=False):
    pipe = Pipeline(Equal(layers), rank, schedule=schedule, microbatches=m, recompute=recompute)
    data = emu.Batch(torch.ones(m * ROWS, WIDE), torch.ones(m * ROWS, WIDE), tokens=1)
    pipe.backward(data)
    rank.mark("second")
    pipe.backward(data)


def activations(run, rank):
    series, lines = run.memory.series(rank)
    at = dict(zip(series, lines["activations"]))
    now, out, second, name = 0, [], False, None
    for i, event in enumerate(run.trace[rank]):
        if type(event) is Mark:
            if second and name not in (None, "second"):
                out.append((name, now))
            second = second or event.name == "second"
            name = event.name
        now = at.get(i, now)
    return [*out, (name, now)]


TENSOR = ROWS * WIDE * 4  # bytes of a microbatch's activations between layers


@pytest.mark.parametrize("m", [1, 2, 5, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_peak_activations_are_what_the_schedule_says(schedule, m):
    """Eight layers a stage keep eight tensors a microbatch: their inputs, the first of which was received. Beside those
    and the batch there are at most an input and a gradient that come in advance, an output and two on their way."""
    pp, each = 4, 8
    run = emu.launch(one_step, emu.Mesh(pp=pp), args=(schedule, m, pp * each))
    expected = peak_activations(make(schedule, pp, m), weight_share=1.0)  # inputs of products serve for the weights
    for rank in range(1, pp - 1):
        after = activations(run, rank)
        most = max(held for name, held in after if "F" in name) / TENSOR - 2 * m
        assert 0 <= most - each * expected[rank] <= 5, (rank, most, expected[rank])


def test_recomputation_keeps_inputs_alone():
    pp, m, layers = 2, 6, 8
    kept, again = (emu.launch(one_step, emu.Mesh(pp=pp), args=("gpipe", m, layers, r)) for r in (False, True))

    def grows(run):
        after = [held for name, held in activations(run, 1) if "F" in name]
        return (after[-1] - after[0]) / (m - 1) / TENSOR

    assert 0 < grows(again) <= 1  # the input of the stage; the first of them came before the first forward
    assert grows(kept) > 3  # and of each of its layers


def test_outputs_that_were_sent_go_before_their_backward(monkeypatch):
    """GPipe's middle stage: each microbatch keeps its layers' inputs, and no output once that has arrived."""
    each = 4
    args = ("gpipe", 8, 3 * each)

    def grows(run):
        after = [held for name, held in activations(run, 1) if "F" in name]
        return (after[-2] - after[2]) / (len(after) - 4) / TENSOR

    assert grows(emu.launch(one_step, emu.Mesh(pp=3), args=args)) == each
    forward = executor._DO["F"]

    def keeps(self, stage, microbatch):
        forward(self, stage, microbatch)
        if (stage, microbatch) in self._outputs:
            self.__dict__.setdefault("hoard", []).append(self._outputs[stage, microbatch])

    monkeypatch.setitem(executor._DO, "F", keeps)
    assert grows(emu.launch(one_step, emu.Mesh(pp=3), args=args)) == each + 1
