"""Steps that are taken in advance end as those that wait, to the bit; and they do not wait."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import emu
import emu.parallel.norms as norms
import emu.parallel.optimistic as optimistic
from emu.parallel import LossScale
from emu.parallel.optimistic import OptimisticStep
from emu.parallel.rollback import Options, Snapshot
from emu.trace.events import Collective, Kernel, Transfer

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first step may be skipped
INF, NAN = float("inf"), float("nan")


class Dictated(nn.Module):
    """Its gradients are what it is given. x: [elements of all its parameters, or of the first alone]."""

    def __init__(self, stage):
        super().__init__()
        torch.manual_seed(stage)
        shapes = [(3 + stage,), (2, 1 + stage), ()][: 3 - stage % 2]
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def loss_sum(self, x, y):
        cut = x.split([w.numel() for w in self.weights][: 1 if len(x) == self.weights[0].numel() else None])
        return sum((w.flatten() * piece).sum().float() for w, piece in zip(self.weights, cut))


class Counting(torch.optim.SGD):
    """An optimizer of one's own: counts in its groups, keeps lists and numbers in its states, and puts new tensors there."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["decay"] = group.get("decay", torch.ones(())).mul_(0.5)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = [*state.get("seen", []), p.grad.detach().clone()][-2:]
                    state["n"] = state.get("n", 0) + 1
                    if state["n"] == 2:
                        state["second"] = p.grad.detach().clone()
                    state["mean"] = sum(state["seen"]) * group["decay"] / state["n"]
                    p.data.sub_(state["mean"] * group["lr"] / group["steps"])


class Case(NamedTuple):
    """What is trained, how; and for every step the size of every stage's gradients."""

    kind: Any = torch.optim.AdamW
    options: dict = {"lr": 0.1}
    steps: tuple = ((0.1, 0.1, 0.1),)
    dp: int = 1
    zero: int = 0
    precision: str | None = None
    clip: float | None = 1.0
    norm: float = 2.0
    scale: float | None = None
    schedule: bool = False  # whether the learning rate changes, before a step is validated
    kept: bool = False  # whether parameters stay whole after a forward at zero=3
    made: bool = True  # whether states are there before the first step, to be loaded into
    early: bool = False  # whether forwards run before a step is validated
    partly: bool = False  # whether some steps use some parameters only
    order: Any = "program"


def gradients(case, rank, model, step):
    """This rank's gradients, before they are summed over dp: of the sizes that the case says, and inf or nan in one place."""
    g = torch.Generator().manual_seed(1000 * step + int(rank))
    size = case.steps[step][rank.coords["pp"]]
    used = list(model.weights)[: 1 if case.partly and step % 2 else None]
    x = torch.randn(sum(w.numel() for w in used), generator=g)
    odd = size != size or size == INF
    x = x / x.norm() * (0.1 if odd else size)
    if odd and rank.coords["dp"] == case.dp - 1:
        x[-1] = size
    return x


def trains(rank, case, in_advance):
    """Returns everything that steps decide, and what was seen of being in advance."""
    how = {"zero": case.zero, "precision": case.precision, "find_unused": True}
    if case.zero == 3:
        how["reshard_after_forward"] = not case.kept
    dist = emu.DataParallel(Dictated(rank.coords["pp"]), rank, "dp", **how)
    scale = None if case.scale is None else LossScale(case.scale, interval=2)
    how = {"clip": case.clip, "norm": case.norm, "scale": scale}
    optimizer = dist.optimizer(case.kind, **how, **case.options)
    if case.made:
        optimizer.pieces()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.torch, 0.5)
    optimist = OptimisticStep(optimizer, rank.group("pp"))  # whose chain is the optimizer's from now on
    seen, out = [], []

    def forward(step):
        if step == len(case.steps):
            return None
        return dist.loss_sum(gradients(case, rank, dist.model, step), torch.zeros(1))

    loss = forward(0)
    for step in range(len(case.steps)):
        dist.zero_grad()
        out.append(loss.detach().clone())
        (loss if scale is None else loss * scale.value).backward()
        dist.finish(1)
        if in_advance:
            optimist.step()
        else:
            stepped = optimizer.step()
        if case.schedule:
            schedule.step()
        if in_advance:
            stale_loss = forward(step + 1) if case.early else None
            stepped = optimist.validate()
            seen.append((optimist.stale, optimist.taken_back, optimist.snapshot_bytes))
            loss = stale_loss if case.early and not optimist.stale else forward(step + 1)
        else:
            loss = forward(step + 1)
        out += [torch.tensor(NAN) if stepped.norm is None else stepped.norm, torch.tensor(stepped.skipped)]
        out += [piece.tensor.clone() for piece in dist.pieces()]
        out += [p.detach().clone() for p in dist.model.parameters()] if case.zero < 3 else []  # there they come and go
        for key, pieces in sorted(optimizer.pieces().items()):
            out += [torch.tensor(list(key.encode())), *(piece.tensor.clone() for piece in pieces)]
        out.append(torch.tensor([group["lr"] for group in optimizer.torch.param_groups]))
        if scale is not None:
            out.append(torch.tensor([scale.value, scale.since]))
    with dist.gathered() as model:
        out += [p.detach().clone() for p in model.parameters()]
    return out, seen


def run(case, in_advance):
    mesh = emu.Mesh(pp=len(case.steps[0]), dp=case.dp)
    return emu.launch(trains, mesh, order=case.order, args=(case, in_advance)).results


def bits(x):
    return x.dtype, tuple(x.shape), x.reshape(-1).contiguous().view(torch.uint8).tolist()


def differs(case):
    """Whether anything that steps decide is not what it is where every step waits."""
    waits, hopes = run(case, False), run(case, True)
    return any(
        len(a) != len(b) or any(bits(x) != bits(y) for x, y in zip(a, b)) for (a, _), (b, _) in zip(waits, hopes)
    )


# Equality.

KINDS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "foreach": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.Adadelta, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (Counting, {"lr": 0.1}),
]
sizes = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.5, 0.7, 1.0, 2.0, 1e4, INF, NAN])


@st.composite
def cases(draw):
    stages = draw(st.integers(1, 4))
    step = st.tuples(*[sizes] * stages) | st.just((0.1,) * stages)
    kind, options = draw(st.sampled_from(KINDS))
    precision, scale = draw(
        st.sampled_from(
            [(None, None), (None, 1000.0), ("bf16-mixed", None), ("bf16-mixed", 3.0), ("fp16-scaled", 1024.0)]
        )
    )
    return Case(
        kind,
        options,
        tuple(draw(st.lists(step, min_size=1, max_size=4))),
        dp=draw(st.integers(1, 2)),
        zero=draw(st.integers(0, 3)),
        precision=precision,
        clip=draw(st.sampled_from([None, 1.0, 1.0])),
        norm=draw(st.sampled_from([2.0, 2.0, INF])),
        scale=scale,
        schedule=draw(st.booleans()),
        kept=draw(st.booleans()),
        made=draw(st.booleans()),
        early=draw(st.booleans()),
        partly=draw(st.booleans()),
        order=draw(st.sampled_from(["program", "time", 1, 2])),
    )


FINE, LATE, EARLY = (0.1, 0.1, 0.1, 0.1), (0.1, 0.5, 0.1, 5.0), (5.0, 0.1, 0.1, 0.1)
LAST, FIRST = (0.1, 0.1, 0.1, INF), (INF, 0.1, 0.1, 0.1)


@given(cases())
@example(Case(steps=(FINE, LATE, FINE, EARLY, FINE)))
@example(Case(steps=(LATE, LATE), early=True, schedule=True))
@example(Case(steps=(LAST, FINE, LAST, FIRST, FINE), scale=1000.0, precision="fp16-scaled", early=True))
@example(Case(steps=((0.1, NAN), (0.1, 0.1)), scale=2.0))
@example(Case(steps=((0.1, NAN), (0.1, 0.1))))  # without a scale nobody looks, and all parameters become nan
@example(Case(steps=((0.6, 0.8 - 1e-6), (0.6, 0.8), (0.6, 0.8 + 1e-6)), clip=1.0))  # about the limit
@example(Case(steps=(LATE, FINE), zero=3, dp=2, precision="bf16-mixed", early=True))
@example(Case(steps=(LATE, FINE), zero=3, dp=2, kept=True, early=True))  # whole parameters of before are left
@example(Case(Counting, {"lr": 0.1}, steps=(FINE, LAST, FINE), scale=2.0))
@example(Case(steps=(LAST, FINE), scale=2.0, made=False))
@example(Case(Counting, {"lr": 0.1}, steps=(FINE, LATE, LAST, LATE, FINE), scale=2.0, schedule=True))
@example(Case(*KINDS[2], steps=(LAST, LATE, FINE), scale=2.0, zero=1, dp=2))
@example(Case(steps=(LATE, LATE), clip=None))
def test_a_step_in_advance_ends_as_one_that_waits_to_the_bit(case):
    assert not differs(case)


@pytest.mark.exhaustive
@settings(max_examples=1500)
@given(cases())
def test_a_step_in_advance_ends_as_one_that_waits_to_the_bit_at_length(case):
    assert not differs(case)


def test_the_norm_is_that_of_all_stages_gradients():
    for case in (Case(steps=((0.6, 0.8, 1.2),), dp=2), Case(steps=((0.6, 0.8, 1.2),), norm=INF)):
        model = [Dictated(stage) for stage in range(3)]

        def whole(rank, case=case, model=model):
            return gradients(case, rank, model[rank.coords["pp"]], 0)

        every = emu.launch(whole, emu.Mesh(pp=3, dp=case.dp)).results
        summed = torch.cat([sum(every[case.dp * stage : case.dp * (stage + 1)]) for stage in range(3)])
        for in_advance in (False, True):
            for out, _ in run(case, in_advance):
                assert float(out[1]) == pytest.approx(float(summed.norm(p=case.norm)), rel=1e-6)  # float32


def uneven(rank, in_advance):
    """Stage 1 has nothing to train; the last has a parameter that stage 0 has too, which counts it."""
    case, stage = Case(steps=((0.6, 0.1, 0.8), (0.6, 0.1, 0.1))), rank.coords["pp"]
    model = Dictated(stage).requires_grad_(stage != 1)
    dist = emu.DataParallel(model, rank, "dp")
    for vector in dist.vectors if stage == 2 else ():
        vector.counted = [(0, vector.flat.offsets[-2])]  # of all parameters, last to first, but the first
    optimizer = dist.optimizer(torch.optim.AdamW, lr=0.1, clip=0.7, scale=LossScale(4.0))
    optimist, out = OptimisticStep(optimizer, rank.group("pp")), []
    for step in range(2):
        dist.zero_grad()
        x = gradients(case, rank, model, step)
        if stage != 1:
            (dist.loss_sum(x, torch.zeros(1)) * 4.0).backward()
        dist.finish(1)
        optimist.step() if in_advance else None
        stepped = optimist.validate() if in_advance else optimizer.step()
        counted = x[model.weights[0].numel() :] if stage == 2 else x if stage == 0 else x[:0]
        out.append((float(stepped.norm), float(counted.double().norm()), [w.tolist() for w in model.weights]))
    return out


def test_stages_without_trainable_parameters_and_with_those_of_others_are_counted_once():
    waits, hopes = (emu.launch(uneven, emu.Mesh(pp=3, dp=1), args=(how,)).results for how in (False, True))
    assert waits == hopes
    for step in range(2):
        right = sum(result[step][1] ** 2 for result in waits) ** 0.5
        assert all(result[step][0] == pytest.approx(right, rel=1e-6) for result in waits)  # float32


# Where it hopes, where it waits, and what is taken back.


@pytest.mark.parametrize(
    ("step", "scale", "stale", "taken_back"),
    [
        (FINE, None, False, [0, 0, 0, 0]),
        (LATE, None, True, [1, 1, 1, 0]),  # the last stage knows all when it steps
        ((0.1, 5.0, 0.1, 0.1), None, True, [1, 0, 0, 0]),  # the second and all after it know enough to wait
        (EARLY, None, True, [0, 0, 0, 0]),
        (LAST, 2.0, True, [1, 1, 1, 0]),
        (FIRST, 2.0, True, [0, 0, 0, 0]),
        ((0.7, 0.7, 0.7, 0.1), None, True, [1, 1, 0, 0]),  # no stage is above the limit by itself
    ],
)
def test_a_stage_hopes_until_what_it_knows_speaks_against_it(step, scale, stale, taken_back):
    found = [seen[-1] for _, seen in run(Case(steps=(step,), scale=scale), True)]
    assert [s for s, *_ in found] == [stale] * 4
    assert [n for _, n, _ in found] == taken_back


def test_a_chain_of_one_stage_knows_all():
    for step in ((5.0,), (INF,)):
        ((_, seen),) = run(Case(steps=(step,), scale=2.0), True)
        assert seen == [(False, 0, 0)]


def test_copies_of_gradients_do_not_wait_for_the_validation():
    def program(rank):
        dist = emu.DataParallel(Dictated(0), rank, "dp", precision="bf16-mixed")
        optimist = OptimisticStep(dist.optimizer(torch.optim.SGD, lr=0.1, clip=1.0), rank.group("pp"))
        dist.loss_sum(torch.full((6,), 0.1), torch.zeros(1)).backward()
        dist.finish(1)
        optimist.step()
        held = [p.grad for group in optimist.optimizer.torch.param_groups for p in group["params"]]
        optimist.validate()
        return held

    for held in emu.launch(program, emu.Mesh(pp=2, dp=1)).results:
        assert held == [None] * 3


def test_a_forward_of_parameters_that_are_no_more_refuses_its_backward():
    def program(rank, step, refused):
        case = Case(steps=(step, step))
        dist = emu.DataParallel(Dictated(rank.coords["pp"]), rank, "dp")
        optimist = OptimisticStep(dist.optimizer(torch.optim.SGD, lr=0.1, clip=1.0), rank.group("pp"))
        dist.loss_sum(gradients(case, rank, dist.model, 0), torch.zeros(1)).backward()
        dist.finish(1)
        optimist.step()
        loss = dist.loss_sum(gradients(case, rank, dist.model, 1), torch.zeros(1))
        optimist.validate()
        dist.zero_grad()
        if not refused:
            return loss.backward()
        with pytest.raises((emu.EmuError, RuntimeError), match=r"computed before the last step|modified by an inplace"):
            loss.backward()

    for step, refused in ((FINE, False), (LATE, True), (EARLY, True)):
        emu.launch(program, emu.Mesh(pp=4, dp=1), args=(step, refused))


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [
        (torch.optim.SGD, {"lr": 0.1}, 1),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 2),
        (torch.optim.AdamW, {"lr": 0.1}, 3),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, 4),
    ],
)
@pytest.mark.parametrize(("zero", "precision"), [(0, None), (0, "bf16-mixed"), (2, "bf16-mixed"), (3, None)])
def test_a_snapshot_costs_the_optimizers_part_of_parameters_and_states_and_nothing_else(
    kind, options, copies, zero, precision
):
    case = Case(kind, options, ((0.1, 0.1),) * 2, dp=2, zero=zero, precision=precision)
    for rank, (_, seen) in enumerate(run(case, True)):
        n = sum(w.numel() for w in Dictated(rank // 2).weights)
        own = -(-n // 2) if zero else n
        counters = 4 * 3 * (copies > 2)  # Adam counts the steps of every parameter
        assert seen[-1][0] is False
        if rank // 2 == 1:
            assert seen[-1][2] == 0  # the last stage is certain
        else:
            assert 4 * own * copies <= seen[-1][2] <= 4 * own * copies + counters


# Negative controls: a rollback that forgets something, sums in another order, and hopes that stay.

_restore, _options = Snapshot.restore, Options.restore


def forgets(keep):  # the keep-th of its tensors
    def restore(self):
        left = self._tensors[keep].clone() if keep < len(self._tensors) else None
        _restore(self)
        if left is not None:
            self._tensors[keep].detach().copy_(left)

    return restore


def forgets_the_schedule(self, besides=None):
    if besides is not None:
        _options(self, besides)


def forgets_made_states(self):
    _restore(self)
    self._optimizer.made = []


def last_first(chain, own, join, name):
    parts = chain.all_gather(own.double().view(1), name=name).unbind()
    total = parts[-1]
    for part in reversed(parts[:-1]):
        total = join(total, part)
    return total


MOMENTUM = Case(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})


@pytest.mark.parametrize(
    ("owner", "attribute", "wrong", "case"),
    [
        (Snapshot, "restore", lambda self: None, Case(steps=(FINE, LATE))),
        *(
            (Snapshot, "restore", forgets(i), Case(steps=(FINE, LATE)))
            for i in range(6)  # each parameter; of the first also its counter and its two moments
        ),
        (Snapshot, "restore", forgets_made_states, MOMENTUM._replace(steps=(LATE, FINE))),
        (Options, "restore", forgets_the_schedule, Case(steps=(LATE,), schedule=True)),
        (optimistic.OptimisticStep, "_holds", lambda self, known: True, Case(steps=(LATE,))),
        (
            optimistic,
            "_read",
            lambda state, rank: optimistic.Known(False, float(state[1])),
            Case(steps=(LAST,), scale=2.0),
        ),
        (optimistic, "joining", lambda norm: torch.maximum, Case(steps=((0.7, 0.7, 0.7, 0.7),))),
    ],
)
def test_what_is_nearly_right_is_seen(monkeypatch, owner, attribute, wrong, case):
    assert not differs(case)
    monkeypatch.setattr(owner, attribute, wrong)
    assert differs(case)


@pytest.mark.usefixtures("float64")
def test_another_order_of_stages_is_seen(monkeypatch):
    case = Case(steps=tuple((1.1 + i, 0.7, 0.9, 0.8) for i in range(8)))
    assert not differs(case)
    monkeypatch.setattr(norms, "along", last_first)
    assert differs(case)


# Time.

STAGES, STEPS, FORWARD_S, REST_S = 4, 4, 2e-3, 30e-3


def in_turn(rank, how):
    """Stages that begin and end one after the other, as with ZB-H2: the first forwards of a step pass through all of them."""
    dist = emu.DataParallel(Dictated(0), rank, "dp", find_unused=True)
    pp = rank.group("pp")
    chain = rank.group(members=pp.members, label="steps")
    optimizer = dist.optimizer(torch.optim.AdamW, lr=0.1, clip=1.0)
    optimist, passed, sent = OptimisticStep(optimizer, chain), torch.ones(4), []

    def computes(seconds):
        with rank.kernel("work", flops=int(seconds * rank.mesh.on.chip.peak_flops["float32"])):
            passed.mul_(1.0)

    def forwards(n):
        for _ in range(n):
            if pp.rank:
                pp.recv(passed, pp.rank - 1)
            computes(FORWARD_S)
            if pp.rank < STAGES - 1:
                sent.append(pp.send(passed.clone(), pp.rank + 1, async_op=True))

    warm_up = STAGES - pp.rank  # as many forwards as reach the last stage before it could send anything back
    forwards(warm_up)
    for step in range(STEPS):
        forwards(STAGES - warm_up)
        computes(REST_S)
        for work in sent:
            work.wait()
        sent.clear()
        dist.zero_grad()
        dist.loss_sum(torch.full((3,), 1e-3), torch.zeros(1)).backward()
        dist.finish(1)
        if how == "waits":
            optimizer.step()
        else:
            optimist.step()
        if how == "validates at once":
            optimist.validate()
        if step < STEPS - 1:
            forwards(warm_up)
        if how == "validates later":
            optimist.validate()


def seconds(how):
    mesh = emu.Mesh(pp=STAGES, dp=1, on=emu.cluster("h100", nodes=1))
    return emu.launch(in_turn, mesh, args=(how,)).timeline().step_time_s


def test_stages_that_end_one_after_the_other_do_not_wait_for_each_other():
    one, skew = STAGES * FORWARD_S + REST_S, (STAGES - 1) * FORWARD_S
    launches = 0.04  # of kernels, and messages: all that is not in the closed forms
    assert seconds("waits") == pytest.approx(STEPS * (one + skew), rel=launches)  # all end together, and begin in turn
    assert seconds("validates later") == pytest.approx(STEPS * one + skew, rel=launches)  # a parallelogram
    assert seconds("validates at once") == pytest.approx(
        STEPS * (one + skew), rel=launches
    )  # the wait comes afterwards


def steps_only(rank, in_advance, zero):
    dist = emu.DataParallel(Dictated(0), rank, "dp", zero=zero, precision="bf16-mixed")
    optimizer = dist.optimizer(torch.optim.AdamW, lr=0.1, clip=1e9, scale=LossScale(2.0))
    optimist, x = OptimisticStep(optimizer, rank.group("pp")), torch.ones(6)
    for _ in range(3):
        dist.zero_grad()
        dist.loss_sum(x, x).backward()
        dist.finish(1)
        optimist.step() if in_advance else optimizer.step()
        optimist.validate() if in_advance else None


def work_of(program, backend, *args):
    """What every rank gives to its device, in order."""
    trace = emu.launch(program, emu.Mesh(pp=3, dp=2), backend=backend, args=args).trace
    return {r: [e for e in trace.events[r] if isinstance(e, (Kernel, Collective, Transfer))] for r in trace.ranks}


@pytest.mark.parametrize("zero", [0, 2])
def test_a_shape_run_takes_the_steps_of_one_in_which_they_hold(zero):
    assert work_of(steps_only, "shape", True, zero) == work_of(steps_only, "virtual", True, zero)


def test_a_shape_run_takes_the_time_of_one_in_which_steps_hold():
    mesh = emu.Mesh(pp=STAGES, dp=1, on=emu.cluster("h100", nodes=1))
    shapes = emu.launch(in_turn, mesh, backend="shape", args=("validates later",)).timeline().step_time_s
    assert shapes == pytest.approx(seconds("validates later"), rel=0.01)  # other waits of the host are left out there


# What it refuses.


def misuse(rank, what, **how):
    case = Case(steps=((0.1, 0.1), (0.1, 0.1)))
    dist = emu.DataParallel(Dictated(rank.coords["pp"]), rank, "dp", **how)
    optimizer = dist.optimizer(torch.optim.SGD, lr=0.1, clip=1.0)
    optimist = OptimisticStep(optimizer, rank.group("pp"))

    def backward():
        dist.loss_sum(gradients(case, rank, dist.model, 0), torch.zeros(1)).backward()
        dist.finish(1)

    backward()
    optimist.step()
    what(dist, optimizer, optimist, backward)


MISUSES = {
    "a second step": (lambda d, o, s, b: s.step(), "taken in advance.*\n.*validate"),
    "a step that waits": (lambda d, o, s, b: o.step(), "taken in advance.*\n.*validate"),
    "saving": (lambda d, o, s, b: o.pieces(), "taken in advance.*\n.*validate"),
    "two validations": (lambda d, o, s, b: (s.validate(), s.validate()), "no step to validate.*\n.*step"),
    "forgotten": (lambda d, o, s, b: o.zero_grad(), "taken in advance.*\n.*validate"),
    "forgotten by the model's": (lambda d, o, s, b: (d.zero_grad(), s.validate()), "forgotten before.*\n.*zero_grad"),
    "forgotten by torch": (lambda d, o, s, b: (o.torch.zero_grad(), s.validate()), "forgotten before.*\n.*zero_grad"),
    "set to zero": (
        lambda d, o, s, b: (d.model.zero_grad(set_to_none=False), s.validate()),
        "written into before.*\n.*zero_grad",
    ),
    "a backward": (
        lambda d, o, s, b: (d.zero_grad(), b(), s.validate()),
        "(forgotten|written into) before.*\n.*zero_grad",
    ),
    "another chain": (
        lambda d, o, s, b: OptimisticStep(o, d.rank.group(members=[d.rank.id])),
        "stages \\[0, 1\\].*\n.*same group",
    ),
    "no chain": (lambda d, o, s, b: OptimisticStep(d.optimizer(torch.optim.SGD, lr=0.1)), "no chain.*\n.*pp"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_what_would_go_wrong_says_so(name):
    what, says = MISUSES[name]
    with pytest.raises(emu.EmuError, match=says):
        emu.launch(misuse, emu.Mesh(pp=2, dp=1), args=(what,))


@pytest.mark.parametrize("zero", [0, 2])
def test_gradients_that_parameters_do_not_hold_are_missed_too(zero):
    def forgets(rank):
        misuse(rank, lambda d, o, s, b: (d.zero_grad(), s.validate()), zero=zero, precision="bf16-mixed")

    with pytest.raises(emu.EmuError, match="forgotten before"):
        emu.launch(forgets, emu.Mesh(pp=2, dp=1))
