"""Who holds which tokens: every one once, equally many, and as much work as others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.context import KINDS, make_cut
from emu.parallel.context.dealing import dealt
from emu.spmd import EmuError, PlanError, split_sizes

RANKS = st.integers(1, 8)
LENGTHS = st.integers(0, 70)


@st.composite
def documents(draw, longest=40):
    """[rows, length]: ends of documents drawn for every row; numbers may come again in other rows, and within a row."""
    n, length = draw(st.integers(1, 3)), draw(st.integers(1, longest))
    ends = draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=n, max_size=n))
    numbers = torch.tensor(ends).long().cumsum(1)
    return numbers % draw(st.sampled_from([1000, 2]))


def pairs_seen(numbers):
    """Of every token how many see each: counted one by one."""
    rows = []
    for row in numbers.tolist():
        rows.append([sum(other == number for other in row[: at + 1]) for at, number in enumerate(row)])
    return torch.tensor(rows)


@given(st.sampled_from(KINDS), LENGTHS, RANKS)
def test_every_token_is_held_once_by_ranks_that_hold_equally_many(kind, length, ranks):
    cut = make_cut(kind, length, ranks)
    held = torch.cat([cut.tokens(i).positions for i in range(ranks)])
    assert held.sort().values.tolist() == list(range(length))
    assert sorted(cut.sizes) == sorted(split_sizes(length, ranks))
    for i in range(ranks):
        positions = cut.tokens(i).positions
        assert (positions.diff() > 0).all()
        assert positions.tolist() == [p for run in cut.tokens(i).runs for p in range(run.start, run.stop, run.step)]


@given(st.sampled_from(KINDS), documents(), RANKS)
def test_so_it_is_in_every_row_of_documents(kind, numbers, ranks):
    cut = make_cut(kind, numbers.shape[1], ranks, numbers)
    plain = make_cut(kind, numbers.shape[1], ranks)
    assert cut.sizes == plain.sizes or sorted(cut.sizes) == sorted(plain.sizes)
    held = torch.cat([cut.tokens(i).positions.expand(len(numbers), -1) for i in range(ranks)], 1)
    assert (held.sort(1).values == torch.arange(numbers.shape[1])).all()
    for i in range(ranks):
        some = cut.tokens(i)
        assert torch.equal(some.documents, numbers.gather(1, some.positions.expand(len(numbers), -1)))


@given(st.sampled_from(KINDS), documents(), RANKS, st.booleans())
def test_what_is_cut_comes_back_in_order(kind, numbers, ranks, packed):
    cut = make_cut(kind, numbers.shape[1], ranks, numbers if packed else None)
    x = torch.randn(*numbers.shape, 2)
    parts = [cut.own(x, i) for i in range(ranks)]
    assert [part.shape[1] for part in parts] == cut.sizes
    assert torch.equal(cut.joined(parts), x)
    across = x.transpose(1, 2)  # tokens in another dim
    assert torch.equal(cut.joined([cut.own(across, i, -1) for i in range(ranks)], -1), across)
    for i in range(ranks):
        positions = cut.tokens(i).positions.expand(len(x), -1)
        assert torch.equal(parts[i], torch.stack([row[at] for row, at in zip(x, positions)]))


@given(st.sampled_from(KINDS), documents(), RANKS, st.booleans())
def test_work_is_what_a_count_of_pairs_says(kind, numbers, ranks, packed):
    cut = make_cut(kind, numbers.shape[1], ranks, numbers if packed else None)
    seen = pairs_seen(numbers if packed else torch.zeros_like(numbers[:1]))
    works = [cut.work(i) for i in range(ranks)]
    assert sum(works) == pytest.approx(int(seen.sum()))
    if cut.ring is cut:
        for i, work in enumerate(works):
            positions = cut.tokens(i).positions.expand(len(seen), -1)
            assert work == int(seen.gather(1, positions).sum())
            assert work == sum(piece.pairs for j in range(ranks) for piece in cut.block(i, j).pieces)


@given(st.integers(0, 3000), RANKS)
def test_work_of_a_zigzag_differs_by_fewer_pairs_than_there_are_ranks(length, ranks):
    cut = make_cut("zigzag", length, ranks)
    works = [cut.work(i) for i in range(ranks)]
    spread = max(works) - min(works)
    if length % (2 * ranks) == 0:
        assert spread == 0
    elif length >= 2 * ranks:
        assert spread < ranks
        assert spread <= max(cut.sizes) ** 2  # one block: a rank's queries and a rank's keys
    else:
        assert spread <= length  # less than two tokens a rank


@given(st.integers(16, 300), st.integers(2, 8))
def test_a_contiguous_cut_does_not_balance(length, ranks):
    """Negative control: the last rank attends far more."""
    if length % (2 * ranks) == 0:
        cut = make_cut("ring", length, ranks)
        assert cut.work(ranks - 1) - cut.work(0) == (ranks - 1) * (length // ranks) ** 2


@given(documents(200), st.integers(2, 8))
def test_documents_are_balanced_within_the_cost_of_their_rests(numbers, ranks):
    """Chunks are equal exactly; rests cost at most 2 * ranks a token, and a round of them at most that much in difference."""
    cut = make_cut("zigzag", numbers.shape[1], ranks, numbers)
    works = [cut.work(i) for i in range(ranks)]
    assert max(works) - min(works) <= 2 * ranks * len(numbers)


@given(st.lists(st.integers(1, 16), max_size=60), RANKS)
def test_rounds_deal_equal_numbers_and_loads_that_differ_by_no_more_than_the_dearest(costs, ranks):
    owners = dealt(costs, ranks)
    counts = [int((owners == i).sum()) for i in range(ranks)]
    assert counts == split_sizes(len(costs), ranks)
    loads = [sum(cost for cost, owner in zip(costs, owners) if owner == i) for i in range(ranks)]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_one_document_is_the_plain_zigzag():
    for length in range(1, 40):
        numbers = torch.zeros(2, length, dtype=torch.long)
        packed, plain = make_cut("zigzag", length, 3, numbers), make_cut("zigzag", length, 3)
        for i in range(3):
            assert (packed.tokens(i).positions == plain.tokens(i).positions).all()


def test_usp_lies_contiguous_within_neighbours():
    cut = make_cut("usp", 32, 8, ulysses=2)
    zigzag = make_cut("zigzag", 32, 4)
    for i in range(4):
        pair = torch.cat([cut.tokens(2 * i).positions, cut.tokens(2 * i + 1).positions])
        assert torch.equal(pair, zigzag.tokens(i).positions)
    assert make_cut("usp", 32, 8).ulysses == 2 and make_cut("usp", 32, 16).ulysses == 4
    assert make_cut("usp", 32, 7).ulysses == 1


@pytest.mark.parametrize(
    ("kind", "ranks", "ulysses", "nearest"),
    [("usp", 6, 4, 3), ("usp", 4, 0, 1), ("zigzag", 4, 2, 1), ("ulysses", 4, 2, 4)],
)
def test_what_does_not_fit_is_told(kind, ranks, ulysses, nearest):
    with pytest.raises(PlanError, match=f"ulysses={nearest}") as told:
        make_cut(kind, 16, ranks, ulysses=ulysses)
    assert told.value.field == "context" and told.value.nearest == nearest


def test_wrong_arguments_are_told():
    with pytest.raises(PlanError, match="zigzag, striped"):
        make_cut("spiral", 16, 2)
    with pytest.raises(EmuError, match="16 tokens"):
        make_cut("ring", 16, 2, torch.zeros(2, 15, dtype=torch.long))
    with pytest.raises(EmuError, match="without values"):
        make_cut("ring", 16, 2, torch.zeros(2, 16, dtype=torch.long, device="meta"))
    cut = make_cut("zigzag", 16, 2, torch.zeros(2, 16, dtype=torch.long))
    with pytest.raises(EmuError, match="2 rows"):
        cut.own(torch.zeros(3, 16), 0)
    with pytest.raises(EmuError, match="16 tokens long"):
        cut.own(torch.zeros(2, 15), 0)
    with pytest.raises(EmuError, match="parts"):
        cut.joined([torch.zeros(2, 16)])
