"""In float32 a pipeline has the bits of plain gradient accumulation, in the order in which its rows go backward."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.models import Config
from emu.parallel.pipeline import Action
from emu.parallel.pipeline.division.units import divided
from emu.parallel.pipeline.running.executor import Execution
from emu.parallel.pipeline.schedules import make

from .programs import NAMES, Case, schedules, shapes

STEPS = 2
ADAMW = {"lr": 0.01, "weight_decay": 0.1}


def untied(model):
    """The same model, in which each use of a shared weight has a parameter of its own."""
    if isinstance(getattr(model, "head", None), nn.Module):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def accumulated(case, data):
    """Plain torch: microbatch after microbatch; what ranks add up apart is added up apart, in the order of their rows."""
    tied, schedule = case.model(), make(case.schedule, case.axes["pp"], len(case.rows[0]), case.chunks)
    names = dict(tied.named_parameters())
    optimizer = torch.optim.AdamW(names.values(), **ADAMW)
    losses = []
    for step in range(STEPS):
        model = untied(case.model())
        model.load_state_dict({k: v.clone() for k, v in tied.state_dict().items()})
        gradients, each = [], []
        x, y = data[step].x.split(list(case.rows[0])), data[step].y.split(list(case.rows[0]))
        for a, b in zip(x, y, strict=True):
            model.zero_grad()
            loss = model.loss_sum(a, b)
            loss.backward()
            each.append(loss.detach())
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        of_stage = [
            [f"{u.path}.{name}" for u in units for name, _ in u.module.named_parameters()]
            for units in divided(model, schedule.stages, case.cut)
        ]
        sums, total = {}, torch.zeros((), dtype=torch.float64)
        for row in schedule.rows:
            mine, lost = {}, None
            for action in (part for pair in row for part in pair.each()):
                m = action.microbatch
                if action.kind == "F" and action.stage == schedule.stages - 1:
                    lost = each[m] if lost is None else lost + each[m]
                for name in of_stage[action.stage] if action.kind in "BW" else ():
                    known = name if name in names else "embedding.weight"
                    mine[known] = mine[known] + gradients[m][name] if known in mine else gradients[m][name]
            for name, value in mine.items():
                sums[name] = sums[name] + value if name in sums else value
            total += 0 if lost is None else lost.double()
        for name, p in names.items():
            p.grad = sums[name] / data[step].tokens
        losses.append(total / data[step].tokens)
        optimizer.step()
    return {"loss": losses, "gradients": {n: p.grad for n, p in names.items()}, "values": names}


def on_ranks(rank, case, data):
    pipe = case.pipeline(rank)
    optimizer = pipe.optimizer(torch.optim.AdamW, **ADAMW)
    losses, gradients = [], {}
    for some in data:
        losses.append(pipe.backward(some, microbatches=case.microbatches(rank)))
        gradients = {k: v.clone() for k, v in pipe.gather_gradients().items()}
        optimizer.step()
    return {"loss": losses, "gradients": gradients, "values": pipe.gather_parameters()}


def differs(case, right=None, order="program"):
    """What on some rank is not what plain torch has, to the bit; None if nothing is."""
    data = [case.batch(seed) for seed in range(STEPS)]
    right = accumulated(case, data) if right is None else right
    seen = set()
    for r, found in enumerate(emu.launch(on_ranks, case.mesh(), args=(case, data), track=False, order=order).results):
        for i, (a, b) in enumerate(zip(found["loss"], right["loss"], strict=True)):
            if not torch.equal(a, b):
                return f"rank {r}: loss {i} {a} {b}"
        for what in ("gradients", "values"):
            for name, value in found[what].items():
                seen.add(name)
                if not torch.equal(value, right[what][name]):
                    return f"rank {r}: {what} of {name}"
    return None if seen == set(right["values"]) else f"nobody has {set(right['values']) - seen}"


@st.composite
def cases(draw):
    name, pp, m, chunks, stages = draw(schedules(most_actions=80))
    rows = tuple(draw(st.lists(st.integers(0, 2), min_size=m, max_size=m)))
    rows = rows if any(rows) else (1, *rows[1:])
    layers = stages + draw(st.integers(0, 2))
    how = {"recompute": draw(st.booleans()), "zero": draw(st.sampled_from([0, 3]))}
    if 1 < stages <= 4 and draw(st.booleans()):  # on one stage, both uses of a tied weight are one sum
        of = replace(draw(shapes(layers)), balance=0.0)  # a balance loss is added up stage by stage
        return Case(of, {"pp": pp}, name, chunks, (rows,), how=how)
    widths = draw(st.lists(st.integers(1, 6), min_size=layers, max_size=layers))
    return Case((*widths, 3), {"pp": pp}, name, chunks, (rows,), how=how)


@settings(max_examples=max(settings().max_examples // 2, 1))
@given(cases(), st.sampled_from(["program", "time", 1, 2]))
def test_any_pipeline_has_the_bits_of_accumulation_in_its_order(case, order):
    assert differs(case, order=order) is None


SHAPE = {"width": 6, "heads": 2, "ffn": 7, "vocab": 9, "seq": 3}


def decoder_case(name, pp=4, m=6, **more):
    rows = tuple(i % 3 for i in range(m))
    stages = make(name, pp, m).stages
    return Case(Config(layers=stages, **{**SHAPE, **more}), {"pp": pp}, name, 1, (rows,))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", NAMES)
def test_a_decoder_under_every_schedule(name, tied):
    assert differs(decoder_case(name, tied=tied)) is None


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_without_ties_it_is_backward_after_backward_into_grad(name):
    """The plainest accumulation there is: microbatches in order, gradients left in .grad."""
    case = decoder_case(name)
    data = case.batch()
    model = case.model()
    total = 0
    for x, y in zip(data.x.split(case.rows[0]), data.y.split(case.rows[0])):
        loss = model.loss_sum(x, y)
        loss.backward()
        total = total + loss.detach()

    def program(rank):
        pipe = case.pipeline(rank)
        return pipe.backward(data, microbatches=case.microbatches(rank)), pipe.gather_gradients()

    for loss, gradients in emu.launch(program, case.mesh()).results:
        assert torch.equal(loss, total.double() / data.tokens)
        assert gradients
        for key, value in gradients.items():
            assert torch.equal(value, model.get_parameter(key).grad / data.tokens), key


def test_the_order_shows_in_float32():
    """Negative control: the same sums in another order have other bits."""
    case = decoder_case("1f1b", m=7)._replace(rows=((1,) * 7,))
    assert differs(case) is None
    other_way = accumulated(case, [emu.Batch(b.x.flip(0), b.y.flip(0)) for b in map(case.batch, range(STEPS))])
    assert differs(case, other_way) is not None


def test_one_bit_in_one_gradient_is_seen(monkeypatch):
    keep = Execution._keep_gradient

    def one_bit_off(self, stage, microbatch, incoming):
        if incoming is not None and incoming.grad is not None and (stage, microbatch) == (2, 3):
            incoming.grad.view(-1)[0] = torch.nextafter(incoming.grad.view(-1)[0], torch.tensor(torch.inf))
        keep(self, stage, microbatch, incoming)

    case = decoder_case("1f1b")._replace(rows=((1, 1, 1, 2, 1, 1),))
    assert differs(case) is None
    monkeypatch.setattr(Execution, "_keep_gradient", one_bit_off)
    assert differs(case) is not None


def test_losses_are_added_in_the_order_of_forwards():
    """A schedule that takes microbatches in another order has another loss, in its last bits, and so has accumulation."""

    def reversed_gpipe(rank, ranks, microbatches, chunks):
        for m in reversed(range(microbatches)):
            yield Action(rank, "F", m)
        for m in range(microbatches):
            yield Action(rank, "B", m)

    case = decoder_case("gpipe", pp=2, m=7)._replace(rows=((1, 2, 1, 1, 2, 1, 3),))
    data = case.batch()
    model = case.model()
    each = [model.loss_sum(x, y).detach() for x, y in zip(data.x.split(case.rows[0]), data.y.split(case.rows[0]))]

    def program(rank, schedule):
        return case._replace(schedule=schedule).pipeline(rank).backward(data, microbatches=case.microbatches(rank))

    for schedule, order in (("gpipe", each), (reversed_gpipe, each[::-1])):
        total = order[0]
        for loss in order[1:]:
            total = total + loss
        for found in emu.launch(program, case.mesh(), args=(schedule,)).results:
            assert torch.equal(found, total.double() / data.tokens)
