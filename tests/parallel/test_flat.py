"""The layout of a flat vector: every element lies in one place, whatever its size and the number of ranks."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import emu
from emu.parallel.flat import Flat, Span

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6)


@st.composite
def flats(draw):
    some = tuple(draw(shapes))
    parts = draw(st.integers(1, 12))
    owner = draw(st.none() | st.integers(0, parts - 1))
    return Flat(tuple(f"p{i}" for i in range(len(some))), some, parts, draw(st.integers(1, 16)), owner)


def assert_tiled(flat, spans_of):
    """Every element of every parameter is in one span of one rank; within a rank spans lie end to end."""
    covered = [torch.zeros(math.prod(shape), dtype=torch.int) for shape in flat.shapes]
    for part in range(flat.parts):
        end = 0
        for index, start, at, length in spans_of(flat, part):
            assert length > 0 and at == end
            end += length
            covered[index][start : start + length] += 1
            assert start + length <= len(covered[index])
        assert end == flat.cuts[part] <= flat.slots(part)
    assert all((count == 1).all() for count in covered)


@given(flats())
@example(Flat(("a",), ((0,),), 3))
@example(Flat(("a",), ((),), 5))
def test_the_spans_of_all_ranks_tile_every_parameter_once(flat):
    assert_tiled(flat, Flat.spans)
    assert sum(flat.cuts) == flat.numel == flat.offsets[-1]


@given(flats())
def test_spans_say_where_elements_lie(flat):
    vector = torch.arange(flat.numel)
    whole = [vector[a:b] for a, b in zip(flat.offsets, flat.offsets[1:])]
    for part in range(flat.parts):
        shard = vector[flat.first(part) : flat.first(part) + flat.cuts[part]]
        for index, start, at, length in flat.spans(part):
            assert torch.equal(shard[at : at + length], whole[index][start : start + length])


@given(flats())
def test_room_is_equal_aligned_and_no_larger_than_it_must_be(flat):
    slots = [flat.slots(part) for part in range(flat.parts)]
    if flat.owner is not None:
        assert [n for n in slots if n] == ([flat.numel] if flat.numel else [])
        assert slots[flat.owner] == flat.numel
        return
    assert len(set(slots)) == 1
    padded, step = sum(slots), math.lcm(flat.parts, flat.align)
    assert padded % flat.align == 0 and flat.numel <= padded < flat.numel + step
    cuts = list(flat.cuts)
    assert cuts == sorted(cuts, reverse=True)  # padding comes last,
    assert len({n for n in cuts if 0 < n < slots[0]}) <= 1  # and all but one rank has all or nothing


@pytest.mark.parametrize(
    ("numel", "align", "cuts", "slots"),
    [
        (10, 8, (4, 4, 2, 0), 4),  # scenario 13: padding on two ranks
        (10, 1, (3, 3, 3, 1), 3),
        (2, 1, (1, 1, 0, 0), 1),
        (2, 8, (2, 0, 0, 0), 2),
        (0, 1, (0, 0, 0, 0), 0),
        (9, 6, (3, 3, 3, 0), 3),  # 12 slots are a multiple of 6 and of 4
    ],
)
def test_padding_lies_on_as_many_ranks_as_it_takes(numel, align, cuts, slots):
    flat = Flat(("a",), ((numel,),), 4, align)
    assert flat.cuts == cuts and flat.slots(0) == slots


def pads_only_the_last(flat, part):
    """What scenario 13 is about: every rank but the last is taken to be full."""
    slots = flat.slots(part)
    length = slots if part < flat.parts - 1 else max(flat.numel - part * slots, 0)
    return [Span(0, part * slots, 0, length)] if length else []


def starts_in_the_vector(flat, part):
    return [span._replace(start=span.start + flat.offsets[span.index]) for span in flat.spans(part)]


@pytest.mark.parametrize("wrong", [pads_only_the_last, starts_in_the_vector])
def test_a_layout_that_is_nearly_right_is_seen(wrong):
    for flat in (Flat(("a",), ((10,),), 4, 8), Flat(("a", "b"), ((3,), (7,)), 2)):
        assert_tiled(flat, Flat.spans)
    with pytest.raises((AssertionError, IndexError)):
        assert_tiled(Flat(("a",), ((10,),), 4, 8) if wrong is pads_only_the_last else flat, wrong)


class Vector(torch.nn.Module):
    """n parameters in one tensor; its gradient is x."""

    def __init__(self, n):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, n, dtype=torch.float64))

    def loss_sum(self, x, y):
        return (x * self.w).sum()


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(("n", "real"), [(10, [3, 3, 3, 1]), (2, [1, 1, 0, 0]), (5, [2, 2, 1, 0])])
def test_a_step_and_its_norm_know_nothing_of_padding(zero, n, real):
    """Scenario 13 through the strategy: Adam and the norm are those of the vector without padding."""
    g = torch.Generator().manual_seed(13)
    x = torch.randn(4, n, generator=g, dtype=torch.float64)
    data = emu.Batch(x, torch.zeros(4, dtype=torch.long))

    def program(rank):
        dist = emu.DataParallel(Vector(n), rank, "dp", zero=zero)
        optimizer = dist.optimizer(torch.optim.Adam, lr=0.1, clip=1e9)
        dist.backward(data)
        norm = optimizer.step().norm
        held = sum(piece.tensor.numel() for piece in dist.pieces())
        return held, norm, dist.gather_parameters()["w"]

    whole = Vector(n)
    adam = torch.optim.Adam(whole.parameters(), lr=0.1)
    whole.w.grad = x.sum(0) / 4
    adam.step()
    results = emu.launch(program, emu.Mesh(dp=4)).results
    assert [held for held, _, _ in results] == real
    for _, norm, w in results:
        assert torch.allclose(norm, whole.w.grad.norm(), rtol=1e-12)  # sums of squares, in another order
        assert torch.allclose(w, whole.w, rtol=1e-12)  # gradients summed in another order
