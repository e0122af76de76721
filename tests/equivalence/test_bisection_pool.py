"""Finding numbers: slices of whatever kind are found, everything else is not."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from emu.equivalence.bisection.pool import Pool


@st.composite
def wholes(draw, seed=0):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@st.composite
def slices(draw, whole):
    """Some indices along every dim, in order: contiguous, strided or zigzag cuts alike."""
    part = whole
    for dim, n in enumerate(whole.shape):
        kept = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True).map(sorted))
        part = part.index_select(dim, torch.tensor(kept))
    return part


@given(st.data())
def test_a_slice_is_found_in_what_it_is_of(data):
    several = [data.draw(wholes(seed)) for seed in range(data.draw(st.integers(1, 4)))]
    pool = Pool(zip(several, "abcd"))
    i = data.draw(st.integers(0, len(several) - 1))
    part = data.draw(slices(several[i]))
    noise = 1 + 1e-14 * torch.randn(part.shape, dtype=torch.float64)  # sums in another order
    assert pool.find(part * noise) == "abcd"[i]
    if part.dim() > 1:
        assert pool.find(part.mT.contiguous()) == "abcd"[i]


@given(st.data())
def test_pieces_of_several_are_found_as_one_vector(data):
    several = [data.draw(wholes(seed)) for seed in range(3)]
    flat = torch.cat([t.reshape(-1) for t in several] + [torch.zeros(data.draw(st.integers(0, 3)))])
    assert Pool(zip(several, "abc")).find(flat) is not None


@given(st.data(), st.sampled_from(["scaled", "moved", "one number", "exchanged", "one zero"]))
def test_other_numbers_and_another_order_are_not_found(data, fault):
    whole = data.draw(wholes().filter(lambda t: t.numel() > 2))
    whole = (
        whole.reshape(1, -1) if whole.dim() == 1 else whole
    )  # a vector's pieces come in any order, with zeros between
    other = whole.clone().reshape(-1)
    if fault == "scaled":
        other *= 1 + 2.0**-20
    elif fault == "moved":
        other += 1e-6
    elif fault == "one number":
        other[1] *= 1 + 1e-7
    elif fault == "one zero":
        other[other.abs().argmin()] = 0.0
    else:
        a, b = int(other.argmax()), int(other.argmin())
        other[[a, b]] = other[[b, a]]
    assert Pool([(whole, "whole")]).find(other.reshape(whole.shape)) is None


def test_zeros_are_nobodys():
    assert Pool([(torch.zeros(3, dtype=torch.float64), "zeros")]).find(torch.zeros(2, dtype=torch.float64)) is None
    assert Pool([]).find(torch.ones(2, dtype=torch.float64)) is None


def test_of_a_whole_and_a_slice_that_are_alike_it_is_the_whole():
    whole = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(2, 4)
    pool = Pool([(whole[:1].clone(), "row"), (whole, "matrix")])
    assert pool.find(whole[:1]) == "row" and pool.find(whole[1:]) == "matrix"


@given(st.integers(0, 4), st.integers(0, 4))
def test_numbers_that_are_alike_are_found_only_where_they_stand(at, there):
    """A row of zeros, say, is no row of zeros elsewhere."""
    rows = torch.arange(1.0, 26.0, dtype=torch.float64).reshape(5, 5)
    rows[there] = 0.0
    part = torch.arange(1.0, 26.0, dtype=torch.float64).reshape(5, 5)
    part[at] = 0.0
    assert (Pool([(rows, "rows")]).find(part) == "rows") == (at == there)


def test_a_slice_has_no_number_more_often_than_the_whole():
    whole = torch.tensor([[1.0, 5.0, 5.0, 2.0, 9.0, 8.0]], dtype=torch.float64)
    pool = Pool([(whole, "whole")])
    assert pool.find(torch.tensor([[1.0, 5.0, 5.0, 2.0]], dtype=torch.float64)) == "whole"
    assert pool.find(torch.tensor([[1.0, 5.0, 5.0, 5.0, 2.0]], dtype=torch.float64)) is None
