"""Faults that context parallelism really had elsewhere: the right numbers here, and each fault seen.

Right values come from plain torch in float64, or from counting. Numbers and inputs are ours; the reports are linked.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import emu
from emu.models.rotary import rotate, rotation
from emu.parallel.context import attention, cut, holding, make_cut, place

SAME = 1e-9  # float64 against float64, in another order of sums: far above rounding, far below the faults (1e-2)
KINDS = ("ring", "zigzag", "striped", "all-gather", "ulysses", "usp")

pytestmark = pytest.mark.usefixtures("float64")


def near(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=SAME, atol=SAME)


def normal(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g) for shape in shapes]


def plain(q, k, v):
    """Causal attention in three lines of torch."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


# 35. Rotary tables cut otherwise than the tokens. https://github.com/NVIDIA/Megatron-LM/issues/560


def turned(x, positions):
    """Rotary positions, base 100, of [batch, heads, tokens, 6]."""
    return rotate(x.transpose(1, 2), rotation(positions, 6, 100.0, x.dtype)).transpose(1, 2)


def in_order(program, kind, ranks, args=()):
    """What all ranks return, as the whole sequence."""
    results = emu.launch(program, emu.Mesh(cp=ranks), args=(kind, *args), backend="virtual").results
    return make_cut(kind, 16, ranks).joined([results[i] for i in range(ranks)], 2)


def with_rotary(rank, kind, fault=""):
    group, here = rank.group("cp"), make_cut(kind, 16, rank.world_size)
    q, k, v = (here.own(x[None, None], rank, 2) for x in normal(35, (16, 6), (16, 6), (16, 6)))
    positions = here.tokens(rank).positions
    n = len(positions)
    if fault == "local positions":
        positions = torch.arange(n)
    elif fault == "positions of a contiguous cut":
        positions = torch.arange(n) + n * rank
    elif fault == "back to front":
        positions = positions.flip(0)
    of_keys = torch.arange(n) + n * rank if fault == "of keys only" else positions
    return attention(turned(q, positions), turned(k, of_keys), v, here, group, rank)


def right_with_rotary():
    """By complex numbers: pairs (i, i + 3) turn by position * 100 ** (-i / 3)."""
    q, k, v = normal(35, (16, 6), (16, 6), (16, 6))
    angles = torch.arange(16.0)[:, None] * 100 ** (-torch.arange(3.0) / 3)

    def turn(x):
        z = torch.complex(x[:, :3], x[:, 3:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], 1)

    return plain(turn(q), turn(k), v)[None, None]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ulysses"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_rotary_positions_are_those_of_the_tokens(kind, ranks):
    if kind != "usp" or ranks == 2:  # one head
        assert near(in_order(with_rotary, kind, ranks), right_with_rotary())


@pytest.mark.parametrize("fault", ["local positions", "positions of a contiguous cut", "back to front", "of keys only"])
def test_other_rotary_positions_are_seen(fault):
    wrong = in_order(with_rotary, "zigzag", 2, (fault,))
    assert (wrong - right_with_rotary()).abs().max() > 0.1


def test_local_positions_are_off_as_reported():
    wrong = in_order(with_rotary, "zigzag", 2, ("local positions",))
    assert float((wrong - right_with_rotary()).abs().max()) == pytest.approx(0.98, abs=0.005)


def test_output_that_is_put_together_in_rank_order_is_seen():
    results = emu.launch(with_rotary, emu.Mesh(cp=2), args=("zigzag",), backend="virtual").results
    assert not near(torch.cat([results[0], results[1]], 2), right_with_rotary())


# 37. Zigzag fails on lengths that twice the ranks do not divide. https://github.com/jzhang38/EasyContext/issues/47


def thirteen():
    return normal(37, *((1, 2, 13, 5),) * 4)


def with_gradients(rank, kind, tensors, length):
    group, here = rank.group("cp"), make_cut(kind, length, rank.world_size)
    *inputs, weights = (here.own(x, rank, 2).clone() for x in tensors)
    q, k, v = (x.requires_grad_() for x in inputs)
    out = attention(q, k, v, here, group, rank)
    (out * weights).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def across(kind, tensors, ranks=4):
    length = tensors[0].shape[2]
    results = emu.launch(with_gradients, emu.Mesh(cp=ranks), args=(kind, tensors, length), backend="virtual").results
    here = make_cut(kind, length, ranks)
    return [here.joined([results[i][n] for i in range(ranks)], 2) for n in range(4)]


def on_one_device(tensors):
    *inputs, weights = tensors
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    out = plain(q, k, v)
    (out * weights).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ulysses"])
def test_thirteen_tokens_on_four_ranks(kind):
    assert all(map(near, across(kind, thirteen()), on_one_device(thirteen())))


@pytest.mark.parametrize("kind", ["zigzag", "all-gather"])
def test_the_length_of_the_report(kind):
    tensors = normal(2999, *((1, 1, 2999, 2),) * 4)
    assert all(map(near, across(kind, tensors), on_one_device(tensors)))


@pytest.mark.parametrize("kind", ["zigzag", "ring"])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 9])
def test_hardly_any_tokens_on_four_ranks(kind, length):
    tensors = normal(length, *((1, 2, length, 5),) * 4)
    assert all(map(near, across(kind, tensors), on_one_device(tensors)))


def wrong_pieces(monkeypatch, change):
    around = cut.around
    monkeypatch.setattr(cut, "around", lambda found, *rest: around([change(piece) for piece in found], *rest))
    cut._plain.cache_clear()  # of what was worked out rightly


def without_diagonal(piece):
    mask = torch.ones(1, piece.queries, piece.keys).tril(-1).bool()
    return replace(piece, causal=False, mask=mask)


@pytest.fixture
def anew():
    yield
    cut._plain.cache_clear()


@pytest.mark.parametrize("kind", ["ring", "zigzag"])
@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("not causal", lambda piece: replace(piece, causal=False)),
        ("causal everywhere", lambda piece: replace(piece, causal=True)),
        ("without the last key", lambda piece: replace(piece, k=slice(piece.k.start, max(piece.k.stop - 1, 1)))),
        ("without a query's own key", lambda piece: without_diagonal(piece) if piece.causal else piece),
    ],
)
def test_wrong_masks_are_seen(monkeypatch, anew, kind, fault, change):
    right = on_one_device(thirteen())
    wrong_pieces(monkeypatch, change)
    found = across(kind, thirteen())
    assert max(float((a - b).abs().max()) for a, b in zip(found, right)) > 1e-2


def test_padding_that_is_not_masked_is_seen():
    """Ranks filled up to four tokens each with zeros, which later ranks' queries see: 4, 3, 3, 3 of 16."""
    tensors = thirteen()
    places = [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 13, 14]
    padded = [torch.zeros(1, 2, 16, 5).index_copy(2, torch.tensor(places), x) for x in tensors]
    found = [x[:, :, places] for x in across("ring", padded)]
    assert all(not near(a, b) for a, b in zip(found, on_one_device(tensors)))


def test_padding_at_the_end_is_behind_everyone():
    """So it does no harm, as long as it is at the end: and so it is with any cut."""
    tensors = thirteen()
    padded = [torch.cat([x, torch.zeros(1, 2, 3, 5)], 2) for x in tensors]
    for kind in ("ring", "zigzag"):
        found = [x[:, :, :13] for x in across(kind, padded)]
        assert all(map(near, found, on_one_device(tensors)))


def test_a_tail_that_is_left_out_is_seen():
    tensors = thirteen()
    found = across("zigzag", [x[:, :, :8] for x in tensors])
    right = on_one_device(tensors)
    assert near(found[0], right[0][:, :, :8])  # outputs of the rest are right: gradients of keys tell
    assert not near(found[2], right[2][:, :, :8])


def test_messages_of_equal_size_are_an_error_where_ranks_hold_unequal_parts(monkeypatch):
    """Never a silently wrong number: the ranks disagree, and are told so."""
    from emu.spmd import CollectiveMismatch, Group

    shift = Group.ring_shift

    def even(self, tensors, by=1, *, sizes=None, **rest):
        return shift(self, tensors, by, **rest)

    monkeypatch.setattr(Group, "ring_shift", even)
    with pytest.raises(CollectiveMismatch, match="shape"):
        across("ring", thirteen())


# 40. Cut by tokens, not by attended work: right outputs, one rank with most of the work.
# https://github.com/pytorch/pytorch/pull/189902

FOUR_AND_TWELVE = [4, 12]


def packed(lengths):
    return torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]


def works(kind, ranks, lengths):
    numbers = packed(lengths) if len(lengths) > 1 else None
    here = make_cut(kind, sum(lengths), ranks, numbers)
    return [here.work(i) for i in range(ranks)]


def test_work_is_balanced_where_tokens_alone_are_not():
    assert works("zigzag", 4, [16]) == works("all-gather", 4, [16]) == [34, 34, 34, 34]
    assert works("ring", 4, [16]) == [10, 26, 42, 58]  # each rank has four tokens
    assert works("zigzag", 2, FOUR_AND_TWELVE) == works("all-gather", 2, FOUR_AND_TWELVE) == [44, 44]
    assert works("ring", 2, FOUR_AND_TWELVE) == [10 + 1 + 2 + 3 + 4, 5 + 6 + 7 + 8 + 9 + 10 + 11 + 12]
    here = make_cut("zigzag", 16, 2, packed(FOUR_AND_TWELVE))
    assert here.sizes == [8, 8]
    assert here.tokens(0).positions.tolist() == [[0, 3, 4, 5, 6, 13, 14, 15]]
    assert here.tokens(1).positions.tolist() == [[1, 2, 7, 8, 9, 10, 11, 12]]


def document_major(documents, ranks):
    """The fault: heads and tails of one document after the other, and then a contiguous cut."""
    place, length = cut.within(documents[0])
    start, order = 0, []
    while start < len(place):
        n = length[start]
        chunk = n // (2 * ranks)
        for i in range(ranks):
            order += [*range(start + i * chunk, start + (i + 1) * chunk)]
            order += [*range(start + n - (i + 1) * chunk, start + n - i * chunk)]
        start += n
    size = len(order) // ranks
    return [sorted(order[i * size : (i + 1) * size]) for i in range(ranks)]


def whole_zigzag(documents, ranks):
    """Another of the kind: a zigzag of the pack, as if it were one document."""
    found = []
    n = documents.shape[1] // (2 * ranks)
    for i in range(ranks):
        found.append([*range(i * n, (i + 1) * n), *range(documents.shape[1] - (i + 1) * n, documents.shape[1] - i * n)])
    return found


def equal_tokens_of_each(documents, ranks):
    """And one more: each rank a contiguous part of every document."""
    place, length = cut.within(documents[0])
    return [[t for t in range(len(place)) if place[t] * ranks // length[t] == i] for i in range(ranks)]


FAULTS = {document_major: [26, 62], whole_zigzag: [52, 36], equal_tokens_of_each: [24, 64]}


def faulty(monkeypatch, fault):
    import numpy as np

    def positions(documents, ranks):
        return [np.array([some], np.int64) for some in fault(documents, ranks)]

    monkeypatch.setattr(holding, "zigzag_of_documents", positions)


def test_the_report_s_order():
    """Positions 0 and 3, 1 and 2; then 4 to 6 and 13 to 15, 7 to 9 and 10 to 12; cut after eight."""
    first, last = document_major(packed(FOUR_AND_TWELVE).numpy(), 2)
    assert first == [0, 1, 2, 3, 4, 5, 6, 13] and last == [7, 8, 9, 10, 11, 12, 14, 15]


@pytest.mark.parametrize("fault", FAULTS)
def test_outputs_of_an_unbalanced_cut_are_right_but_its_work_tells(monkeypatch, fault):
    faulty(monkeypatch, fault)
    here = make_cut("zigzag", 16, 2, packed(FOUR_AND_TWELVE))
    assert [here.work(i) for i in range(2)] == FAULTS[fault] != [44, 44]
    assert here.sizes == [8, 8]
    q, k, v = normal(40, *((1, 1, 16, 4),) * 3)

    def program(rank):
        mine = (here.own(x, rank, 2) for x in (q, k, v))
        return attention(*mine, here, rank.group("cp"), rank)

    results = emu.launch(program, emu.Mesh(cp=2), backend="virtual").results
    parts = [plain(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 4), (4, 16))]
    assert near(here.joined([results[0], results[1]], 2), torch.cat(parts, 2))


def slowest_s(lengths, ranks=2):
    """Virtual time of the slowest rank's attention, and of all together, forward."""
    numbers = packed(lengths)

    def program(rank):
        here = make_cut("all-gather", sum(lengths), ranks, numbers)
        n = here.sizes[rank]
        q, k, v = (torch.zeros(1, heads, n, 128, dtype=torch.bfloat16) for heads in (32, 8, 8))
        attention(q, k, v, here, rank.group("cp"), rank)

    run = emu.launch(program, emu.Mesh(cp=ranks), backend="shape")
    spans = run.timeline().spans
    return max(s.end_s - s.start_s for rank in range(ranks) for s in spans[rank] if "attention" in s.name)


@pytest.mark.parametrize("fault", FAULTS)
def test_virtual_time_follows_the_largest_share(monkeypatch, fault):
    """The report's documents, 256 times as long."""
    lengths = [256 * n for n in FOUR_AND_TWELVE]
    right = slowest_s(lengths)
    faulty(monkeypatch, fault)
    share = max(make_cut("zigzag", sum(lengths), 2, packed(lengths)).work(i) for i in range(2))
    monkeypatch.undo()
    balanced = max(works("zigzag", 2, lengths))
    faulty(monkeypatch, fault)
    assert slowest_s(lengths) / right == pytest.approx(share / balanced, rel=0.02)
    assert share / balanced > 1.15


def test_flops_of_a_kernel_follow_its_pairs():
    """Control for the above: time is counted from the pairs that are seen, and not from the size of the rectangle."""
    assert place.FORWARD_FLOPS == 4
    once, twice = slowest_s([4096, 4096]), slowest_s([8192])
    assert twice / once == pytest.approx(2, rel=0.05)


# 34. Loss scaled by the size of the group, or by tokens counted over the wrong one.
# https://github.com/NVIDIA/Megatron-LM/issues/906


class Scored(nn.Module):
    """A linear map of each token to logits. It attends, to no effect, so that its sequences may be cut."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def loss_sum(self, x, y, positions=None, mask=None):
        heads = x.unsqueeze(1)
        x = x if mask is None else x + 0 * mask.attend(heads, heads, heads).squeeze(1)
        return nn.functional.cross_entropy(
            (x @ self.weight).flatten(0, 1), y.flatten(), reduction="sum", ignore_index=-100
        )


def test_ranks_with_unequal_numbers_of_labels_weigh_what_their_labels_weigh():
    g = torch.Generator().manual_seed(34)
    x, weight = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((2, 8, 4), (4, 6)))
    y = torch.randint(0, 6, (2, 8), generator=g)
    counts = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1, 1, 1]]).bool()
    y = y.masked_fill(~counts, -100)  # labels of (dp, cp): 4 and 1, 2 and 3

    def program(rank):
        dist = emu.DataParallel(Scored(weight), rank, "dp", "cp", context="ring")
        return dist.backward(emu.Batch(x, y)), dist.gather_gradients()["weight"]

    alone = Scored(weight)
    (alone.loss_sum(x, y) / 10).backward()
    per_rank = [
        Scored(weight).loss_sum(x[d : d + 1, c : c + 4], y[d : d + 1, c : c + 4]) for d in (0, 1) for c in (0, 4)
    ]
    for loss, gradient in emu.launch(program, emu.Mesh(dp=2, cp=2)).results:
        assert float(loss) == pytest.approx(2.589311, abs=1e-6)
        assert (gradient - alone.weight.grad).abs().max() <= 1e-12
        for wrong in (sum(part / n for part, n in zip(per_rank, (4, 1, 2, 3))) / 4, 2 * loss, loss / 2):
            assert abs(float(wrong - loss)) > 1e-3
