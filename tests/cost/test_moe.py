"""Closed forms of expert beside tensor parallelism are what the cost of the single collectives adds up to."""

from math import inf, isinf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.cost import collective_s, sent_bytes
from emu.cost.moe import (
    MIXTRAL_8X7B,
    MoeLayer,
    break_even_imbalance,
    break_even_tokens,
    expert_parallel_bytes,
    expert_tensor_bytes,
    moves_less,
    tensor_parallel_bytes,
)
from emu.hardware import cluster
from emu.trace.events import Collective

NODE = cluster("h100-8")
layers = st.builds(
    MoeLayer,
    width=st.integers(1, 64).map(lambda n: 128 * n),
    ffn=st.integers(1, 64).map(lambda n: 128 * n),
    experts=st.just(64),
    top_k=st.integers(1, 12),
    matrices=st.sampled_from([2, 3]),
    element_bytes=st.sampled_from([1, 2, 4]),
)
ranks = st.integers(2, 8)


def message(kind, size, n):
    return Collective(kind, "g", tuple(range(n)), 0, size, (), "bfloat16", "", "", -1, "s", "s", 0, "")


def expert_parallel(layer, tokens, n):
    """The exchanges of a step: counts, dispatch and combine, and both again in backward."""
    copies = message("all_to_all", tokens * layer.top_k * layer.width * layer.element_bytes, n)
    return [message("all_to_all", 8 * layer.experts, n), *[copies] * 4]


def tensor_parallel(layer, tokens, n, copies=1):
    size = copies * n * tokens * layer.width * layer.element_bytes
    return [message(kind, size, n) for kind in ("all_gather", "reduce_scatter") * 2]


@given(layers, ranks, st.integers(0, 4096))
def test_bytes_are_those_of_the_collectives_of_a_step(layer, n, tokens):
    assert sum(sent_bytes(e, 0) for e in expert_parallel(layer, tokens, n)[1:]) == expert_parallel_bytes(
        layer, tokens, n
    )
    assert sum(sent_bytes(e, 0) for e in tensor_parallel(layer, tokens, n)) == tensor_parallel_bytes(layer, tokens, n)
    etp = tensor_parallel(layer, tokens, n, copies=layer.top_k)
    assert sum(sent_bytes(e, 0) for e in etp) == expert_tensor_bytes(layer, tokens, n)
    if tokens:
        less = expert_parallel_bytes(layer, tokens, n) < tensor_parallel_bytes(layer, tokens, n)
        assert less == moves_less(layer, n)


def test_the_busiest_ranks_bytes_grow_by_its_imbalance():
    even = expert_parallel_bytes(MIXTRAL_8X7B, 100, 8)
    assert expert_parallel_bytes(MIXTRAL_8X7B, 100, 8, imbalance=1.5) == even * 3 / 2


@given(layers, ranks)
def test_inside_a_node_skew_is_paid_for_only_where_bytes_are_saved(layer, n):
    p = break_even_imbalance(layer, n, NODE)
    assert (p > 1 + 1e-12) == moves_less(layer, n)
    wider = MoeLayer(layer.width, 2 * layer.ffn, layer.experts, layer.top_k, layer.matrices, layer.element_bytes)
    assert abs(break_even_imbalance(wider, n, NODE) - 1) <= abs(p - 1)  # products weigh more, and skew costs products


@given(layers, ranks)
def test_at_the_break_even_imbalance_both_take_as_long_with_many_tokens(layer, n):
    tokens = 10**9  # latency is nothing
    products = layer.step_flops(tokens) / NODE.chip.flops_per_s("bfloat16")
    ep, tp = (sum(collective_s(e, NODE) for e in f(layer, tokens, n)) for f in (expert_parallel, tensor_parallel))
    p = break_even_imbalance(layer, n, NODE)
    assert p * (products + ep) == pytest.approx(products + tp, rel=1e-3)


@given(layers, ranks)
def test_few_tokens_are_those_below_which_the_exchanges_take_longer(layer, n):
    few = break_even_tokens(layer, n, NODE)
    assert isinf(few) == (not moves_less(layer, n))

    def longer(tokens):
        ep, tp = (sum(collective_s(e, NODE) for e in f(layer, tokens, n)) for f in (expert_parallel, tensor_parallel))
        return ep > tp

    if few < inf:
        assert longer(int(few * 0.9)) and not longer(int(few * 1.1) + 2)
    else:
        assert longer(1)
        assert longer(10**9) or layer.top_k == n  # equal bytes: only steps and counts differ


def test_mixtral_on_a_node_of_h100():
    assert moves_less(MIXTRAL_8X7B, 8) and not moves_less(MIXTRAL_8X7B, 2)
    assert break_even_imbalance(MIXTRAL_8X7B, 8, NODE) == pytest.approx(1.136, abs=0.005)
    assert break_even_tokens(MIXTRAL_8X7B, 8, NODE) == pytest.approx(33, abs=1)
