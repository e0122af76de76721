"""What a layer stores under no, selective and full checkpointing is table 2 of Korthikanti et al., 2022, term by term.

https://arxiv.org/abs/2205.05198, for 16-bit numbers and one-byte masks, with tensor parallelism over t ranks and with sequence
parallelism besides; bytes for each layer and rank:

                    t = 1                  tp                           tp and sp
    none            34 s b h + 5 a s^2 b   s b h (10 + 24/t) + 5 a s^2 b/t  (34 s b h + 5 a s^2 b) / t
    selective       34 s b h               s b h (10 + 24/t)            34 s b h / t
    full            2 s b h                2 s b h                      2 s b h / t, since the input is cut by tokens already
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import emu
from emu.models import Decoder
from emu.parallel import shard_model
from emu.parallel.checkpointing import CORES, checkpointed, checkpointed_modules

from ..memory.activations import NUMBERS, Sizes, left_out, stored, table
from .record import layer_flops

SCORES = ("softmax", "attention dropout's mask", "dropped weights")


def program(rank: emu.Rank, sizes: Sizes, sp: bool, policy: str, pattern: str = CORES):
    model = Decoder(sizes.config(3), seed=0)
    if pattern == CORES:
        checkpointed(model, policy)
    else:
        checkpointed_modules(model, pattern)
    dist = emu.DataParallel(model, rank, sharding=shard_model(model, rank, sp=sp), precision="bf16-mixed")
    tokens = torch.zeros(sizes.b, sizes.s, dtype=torch.int64)
    rank.mark("forward")
    loss = dist.loss_sum(tokens, tokens)
    rank.mark("forward is over")
    loss.backward()


def launched(sizes, sp, policy, *more, **how):
    return emu.launch(program, emu.Mesh(tp=sizes.t), args=(sizes, sp, policy, *more), **how)


def by_term(run, rank=0, layer=1):
    """What a layer stores, under the names of the paper's terms; anything else under its scope and operator."""
    block, found = f"blocks.{layer}", {}
    nth: dict[tuple[str, str], int] = {}
    for one in stored(run, rank):
        if one.scope == block or one.scope.startswith(f"{block}."):
            key = (one.scope.removeprefix(block).removeprefix("."), one.op)
            nth[key] = nth.get(key, -1) + 1
            name = NAMES.get((*key, nth[key])) or NAMES.get(key) or " ".join(key)
            found[name] = found.get(name, 0) + one.bytes
    return found


# Selective checkpointing stores queries, keys and values as the maps return them: the insides of attention make no copies.
NAMES = {
    ("norm1", "native_layer_norm"): NUMBERS,
    ("norm1", "native_layer_norm", 0): "input of q, k, v",
    ("norm2", "native_layer_norm"): NUMBERS,
    ("norm2", "native_layer_norm", 0): "input of the first linear",
    ("attention.q", "addmm"): "queries and keys",
    ("attention.k", "addmm"): "queries and keys",
    ("attention.v", "addmm"): "values",
    ("attention", "clone"): "input of the projection",
    ("attention.core", "bmm"): "input of the projection",
    ("attention.o", "clone"): "input of the projection",
    ("attention", "bmm"): "input of the projection",
    ("mlp.up", "addmm"): "input of the GELU",
    ("mlp", "gelu"): "input of the second linear",
    ("dropout", "native_dropout"): "masks of two dropouts",
    ("", "add"): "inputs of two layer norms",
}


def expected(sizes, sp, policy, rank=0):
    """Term by term: table() and left_out() are those of no checkpointing."""
    whole = table(sizes, sp, rank) | left_out(sizes, sp, rank)
    if policy == "selective":
        return {term: size for term, size in whole.items() if term not in SCORES}
    return {
        "inputs of two layer norms": whole["inputs of two layer norms"] // 2
    }  # the first of them: the layer's input


def in_short(n: Sizes, sp: bool, policy: str) -> int:
    """Table 2, by hand."""
    sbh = n.s * n.b * n.h
    if policy == "full":
        return 2 * sbh // (n.t if sp else 1)
    return 34 * sbh // n.t if sp else 10 * sbh + 24 * sbh // n.t


@st.composite
def sizes(draw):
    t = draw(st.sampled_from((1, 2, 4)))
    a = t * draw(st.integers(1, 2))
    return Sizes(
        s=t * draw(st.integers(1, 3)), b=draw(st.integers(1, 2)), h=a * draw(st.integers(1, 4)), a=a, t=t, v=4 * t
    )


@given(sizes(), st.booleans(), st.sampled_from(["selective", "full"]))
def test_the_terms_add_up_to_table_2(n, sp, policy):
    terms = expected(n, sp and n.t > 1, policy)
    assert sum(terms.values()) - terms.get(NUMBERS, 0) == in_short(n, sp and n.t > 1, policy)


@settings(max_examples=4)
@given(sizes(), st.booleans(), st.sampled_from(["selective", "full"]))
@example(Sizes(s=8, b=2, h=16, a=4, t=1), False, "selective")
@example(Sizes(s=8, b=2, h=16, a=4, t=4), False, "selective")
@example(Sizes(s=8, b=2, h=16, a=4, t=4), True, "selective")
@example(Sizes(s=8, b=2, h=16, a=4, t=4), False, "full")
@example(Sizes(s=8, b=2, h=16, a=4, t=4), True, "full")
@example(Sizes(s=1, b=1, h=1, a=1, t=1), False, "selective")
def test_every_layer_stores_the_papers_terms(n, sp, policy):
    sp = sp and n.t > 1
    run = launched(n, sp, policy)
    for rank in run.trace.ranks:
        assert by_term(run, rank) == expected(n, sp, policy, rank)


@pytest.mark.parametrize(("t", "sp"), [(1, False), (2, True)])
def test_selective_computes_two_products_of_attention_again(t, sp):
    """4 b s^2 h flops a layer, of which each rank has a share."""
    n = Sizes(s=8, b=2, h=16, a=4, t=t)
    again = layer_flops(launched(n, sp, "selective"), "recompute", "blocks.")
    products = 4 * n.b * n.s**2 * n.h // t
    around = {flops - products for flops in again.values()}
    assert len(again) == 3
    assert len(around) == 1
    scores = n.a * n.b * n.s**2 // t
    assert around.pop() <= 12 * scores + n.s * n.b * n.h // t  # scaling, mask, softmax, dropout: each once a number


PAPER = {  # table 3, with a microbatch and t = 8
    "22B": Sizes(s=2048, b=4, h=6144, a=64, t=8, v=51200),
    "175B": Sizes(s=2048, b=1, h=12288, a=96, t=8, v=51200),
}


@pytest.mark.parametrize("model", PAPER)
def test_the_papers_models_by_shapes(model):
    n = PAPER[model]
    run = launched(n, True, "selective", backend="shape", ranks=[0])
    found = by_term(run)
    assert sum(found.values()) - found.pop(NUMBERS) == 34 * n.s * n.b * n.h // n.t


def test_other_insides_are_other_figures():
    """Computing the MLP again in place of attention would be seen."""
    n = Sizes(s=8, b=2, h=16, a=4, t=1)
    found = by_term(launched(n, False, "none", "blocks.*.mlp"))
    assert "input of the GELU" not in found
    assert found != expected(n, False, "selective")
