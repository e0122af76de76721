"""Routers, balance and capacity against their definitions, written out one token at a time."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.models import Balance, Capacity, Config, Router, UnknownRouting, declared

CHOICES = [("softmax-topk", False), ("softmax-topk", True), ("topk-softmax", False)]


def router(width, n, k, order="softmax-topk", renormalize=False, seed=0, whole=False):
    """A router of float64; with whole weights and whole tokens, many of its scores are equal."""
    k = min(k, n)
    if k == 1 < n:
        order, renormalize = "softmax-topk", False
    made = Router(Config(1, width, 1, experts=n, top_k=k, router=order, renormalize=renormalize)).double()
    made.weight.data = numbers((n, width), seed, whole)
    return made


def numbers(shape, seed, whole=False):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.round() if whole else drawn


def by_hand(scores: list[float], k: int, order: str, renormalize: bool):
    """Weights and experts of one token."""
    chosen = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]  # ties: the lower number first
    among = scores if order == "softmax-topk" else [scores[i] for i in chosen]
    total = sum(math.exp(s - max(scores)) for s in among)
    weights = [math.exp(scores[i] - max(scores)) / total for i in chosen]
    if renormalize:
        weights = [w / sum(weights) for w in weights]
    return weights, chosen


@given(
    batch=st.integers(0, 3), seq=st.integers(0, 5), n=st.integers(1, 7), k=st.integers(1, 7),
    kind=st.sampled_from(CHOICES), whole=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_each_token_goes_to_its_best_experts_with_their_weights(batch, seq, n, k, kind, whole, seed):
    routes = router(2, n, k, *kind, seed=seed, whole=whole)
    x = numbers((batch, seq, 2), seed + 1, whole)
    weights, experts, probabilities = routes(x)
    assert weights.shape == experts.shape == (batch, seq, routes.top_k) and experts.dtype == torch.int64
    assert torch.allclose(probabilities, (x @ routes.weight.T).softmax(-1), rtol=0, atol=1e-15)
    for b in range(batch):
        for t in range(seq):
            scores = (x[b, t] @ routes.weight.T).tolist()
            right, chosen = by_hand(scores, routes.top_k, routes.order, routes.renormalize)
            assert experts[b, t].tolist() == chosen
            assert weights[b, t].tolist() == pytest.approx(right, abs=1e-14)  # a dozen roundings of numbers below 1


def test_equal_scores_are_won_by_the_lower_number():
    routes = router(3, 6, 2)
    routes.weight.data = routes.weight.data[:1].expand(6, 3).clone()  # all experts alike
    assert routes(numbers((1, 4, 3), 0)).experts.tolist() == [[[0, 1]] * 4]
    routes.weight.data[4] *= 1 + 1e-12  # control: the least difference decides, up or down
    x = numbers((1, 4, 3), 0)
    wins = (x @ routes.weight[0] > 0)[0].tolist()
    assert routes(x).experts[0].tolist() == [[4, 0] if w else [0, 1] for w in wins] and len(set(wins)) == 2


@given(kind=st.sampled_from(CHOICES), n=st.integers(2, 6), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_weights_have_the_gradient_of_their_formula(kind, n, seed):
    routes = router(3, n, 2, *kind, seed=seed)
    x = numbers((2, 3, 3), seed + 1)
    cotangent = numbers((2, 3, 2), seed + 2)
    weights, experts, _ = routes(x)
    (grad,) = torch.autograd.grad(weights, routes.weight, cotangent)
    one = torch.nn.functional.one_hot(experts, n).to(torch.float64)  # [batch, seq, k, experts]
    exps = (x @ routes.weight.T).exp()
    picked = (one * exps.unsqueeze(-2)).sum(-1)
    below = exps if (routes.order, routes.renormalize) == ("softmax-topk", False) else picked
    (right,) = torch.autograd.grad(picked / below.sum(-1, keepdim=True), routes.weight, cotangent)
    assert torch.allclose(grad, right, rtol=0, atol=1e-12)


def test_in_half_precision_probabilities_are_worked_out_in_float32():
    routes = Router(Config(1, 4, 1, experts=3, top_k=2)).bfloat16()
    torch.nn.init.normal_(routes.weight, generator=torch.Generator().manual_seed(0))
    weights, _, probabilities = routes(numbers((1, 5, 4), 0).bfloat16())
    assert probabilities.dtype == torch.float32 and weights.dtype == torch.bfloat16
    assert torch.allclose(probabilities.sum(-1), torch.ones(1, 5), atol=1e-6)


@given(
    batch=st.integers(0, 3), seq=st.integers(0, 6), n=st.integers(1, 5), k=st.integers(1, 5), seed=st.integers(0, 99)
)
@settings(deadline=None, max_examples=80)
def test_balance_is_the_product_of_use_and_probability(batch, seq, n, k, seed):
    routing = router(3, n, k, seed=seed)(numbers((batch, seq, 3), seed + 1))
    probabilities, experts = routing.probabilities, routing.experts
    k = experts.shape[-1]
    chosen = torch.nn.functional.one_hot(experts, n).sum(2).to(torch.float64)  # [batch, seq, experts]
    each = Balance("sequence")(probabilities, experts)
    all_rows = Balance("batch")(probabilities, experts)
    assert each.shape == (batch,) and all_rows.shape == (1,)
    if seq:
        right = (n / (k * seq) * chosen.sum(1) * probabilities.mean(1)).sum(-1)  # arXiv 2412.19437, eq. 17-20
        assert torch.allclose(each, right, rtol=0, atol=1e-13)
    if batch * seq:
        right = n * (chosen.mean((0, 1)) / k * probabilities.mean((0, 1))).sum()  # arXiv 2101.03961, eq. 4-6
        assert torch.allclose(all_rows, right.expand(1), rtol=0, atol=1e-13)
    if batch and seq and k == 1:
        right_gradient = torch.autograd.grad(all_rows[0], probabilities)[0]
        used = chosen.mean((0, 1)) * n / (batch * seq)  # use has no gradient: it counts
        assert torch.allclose(right_gradient, used.expand(batch, seq, n), rtol=0, atol=1e-13)


def test_balance_is_one_when_even_and_the_number_of_experts_over_k_when_not():
    even = torch.full((1, 8, 4), 0.25), torch.arange(16).view(1, 8, 2) % 4
    assert Balance()(*even).tolist() == [1.0]
    one = torch.tensor([0.5, 0.5, 0, 0]).expand(1, 8, 4), torch.arange(16).view(1, 8, 2) % 2
    assert Balance()(*one).tolist() == [2.0]


def test_over_a_batch_sequences_may_be_uneven_if_together_they_are_not():
    probabilities = torch.eye(2).unsqueeze(1).expand(2, 3, 2)  # one sequence uses one expert, one the other
    experts = probabilities.argmax(-1, keepdim=True)
    assert Balance("sequence")(probabilities, experts).tolist() == [2.0, 2.0]
    assert Balance("batch")(probabilities, experts).tolist() == [1.0]


@given(
    batch=st.integers(0, 3), seq=st.integers(0, 8), n=st.integers(1, 5), k=st.integers(1, 5),
    factor=st.sampled_from([0.1, 0.5, 1.0, 1.1, 1.25, 3.0]), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_experts_take_earlier_tokens_first_until_they_are_full(batch, seq, n, k, factor, seed):
    k = min(k, n)
    experts = numbers((batch, seq, n), seed).argsort(-1)[..., :k]
    kept = Capacity(factor, n)(experts)
    assert kept is not None and kept.dtype == torch.bool and kept.shape == experts.shape
    room = math.ceil(round(factor * 100) * seq * k / (100 * n))
    for b in range(batch):
        taken = [0] * n
        for t in range(seq):
            for j in range(k):
                e = int(experts[b, t, j])
                assert bool(kept[b, t, j]) == (taken[e] < room)
                taken[e] += 1


@given(st.integers(0, 8), st.integers(1, 4), st.floats(0.1, 2), st.data())
@settings(deadline=None, max_examples=60)
def test_a_sequence_in_parts_is_kept_as_it_is_whole_given_what_earlier_parts_took(seq, n, factor, data):
    experts = numbers((2, seq, n), seq).argsort(-1)[..., : data.draw(st.integers(1, n))]
    cut, room = data.draw(st.integers(0, seq)), Capacity(factor, n)
    limit = room.limit(seq, experts.shape[-1])
    assert limit is not None
    before = torch.nn.functional.one_hot(experts[:, :cut], n).sum((1, 2))
    parts = [room.keep(experts[:, :cut], limit), room.keep(experts[:, cut:], limit, before)]
    assert torch.equal(torch.cat(parts, 1), room(experts))


def test_without_a_factor_nothing_is_dropped():
    experts = torch.zeros(1, 9, 1, dtype=torch.int64)
    assert Capacity(None, 3)(experts) is None
    assert int(Capacity(1.0, 3)(experts).sum()) == 3


@given(
    how=st.one_of(st.just("uniform"), st.floats(0, 5).map("zipf:{}".format)),
    tokens=st.integers(0, 300), experts=st.integers(1, 40), k=st.integers(1, 8),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_declared_routings_add_up_and_give_no_expert_a_token_twice(how, tokens, experts, k):
    k = min(k, experts)
    counts = declared(how, tokens * k, experts, tokens)
    assert sum(counts) == tokens * k and len(counts) == experts
    assert all(0 <= c <= tokens for c in counts)
    if how == "uniform":
        assert max(counts) - min(counts) <= 1
    free = [c for c in counts if c < tokens]  # those that are not full keep their order
    assert all(a >= b - 1 for a, b in itertools.pairwise(free))


def test_declared_zipf_follows_its_law():
    counts = declared("zipf:1", 110_000, 3)
    assert counts == (60_000, 30_000, 20_000)  # as 1 : 1/2 : 1/3
    assert declared("zipf:1", 100, 4, 40) == (40, 28, 18, 14)  # the first is full; the rest is 1/2 : 1/3 : 1/4 of 60
    assert declared("zipf:0", 12, 3) == declared("uniform", 12, 3) == (4, 4, 4)


@pytest.mark.parametrize("how", ["zipf", "zipf:-1", "even", 3, "zipf:nan"])
def test_a_routing_that_says_nothing_is_refused(how):
    with pytest.raises(UnknownRouting, match=r'Use "uniform", or "zipf:1.2"'):
        declared(how, 4, 2)
    with pytest.raises(ValueError, match="do not fit"):
        declared("uniform", 9, 2, 4)
