"""What a layer with unfused attention and dropout stores for its backward is the table of Korthikanti et al., 2022.

https://arxiv.org/abs/2205.05198, section 4.1 and table 2, for 16-bit numbers and one-byte masks: each term is looked up
in the record of the device's memory, and equal to the byte. activations.py has the terms, and says how they are found.
"""

import sys

import pytest
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emu.models.attention import Attention
from emu.parallel.tensor.region import Region

from .activations import (
    NUMBERS,
    Sizes,
    by_term,
    end_of,
    held,
    launched,
    left_out,
    saved_by_torch,
    stored,
    table,
)


@st.composite
def sizes(draw, ranks=(1, 2, 3, 4)):
    t = draw(st.sampled_from(ranks))
    a = t * draw(st.integers(1, 2))
    return Sizes(
        s=t * draw(st.integers(1, 4)),
        b=draw(st.integers(1, 3)),
        h=a * draw(st.integers(1, 4)),
        a=a,
        t=t,
        v=t * draw(st.integers(1, 5)),
    )


def in_short(n: Sizes, sp: bool) -> int:
    """Table 2: a layer's activations in bytes."""
    sbh, scores = n.s * n.b * n.h, n.a * n.s * n.s * n.b  # a s / h * sbh
    if sp:
        return (34 * sbh + 5 * scores) // n.t
    return 10 * sbh + (24 * sbh + 5 * scores) // n.t if n.t > 1 else 34 * sbh + 5 * scores


@given(sizes(), st.booleans())
def test_the_terms_add_up_to_table_2(n, sp):
    assert sum(table(n, sp).values()) == in_short(n, sp)


@pytest.mark.parametrize("backend", ["virtual", "shape"])
@settings(max_examples=15)
@given(sizes(), st.booleans())
@example(Sizes(s=8, b=2, h=16, a=4, t=1), False)
@example(Sizes(s=8, b=2, h=16, a=4, t=4), False)
@example(Sizes(s=8, b=2, h=16, a=4, t=4), True)
@example(Sizes(s=1, b=1, h=1, a=1, t=1), False)  # where nothing has to be copied to lie side by side
def test_every_layer_stores_the_papers_terms_and_two_numbers_a_norm(backend, n, sp):
    sp = sp and n.t > 1
    run = launched(n, sp, backend=backend, ranks=[0] if backend == "shape" else None)
    for rank in run.trace.ranks:
        for layer in range(2):
            assert by_term(run, layer, rank) == table(n, sp) | left_out(n, sp)


@settings(max_examples=6)
@given(sizes(), st.booleans(), st.integers(1, 3))
def test_one_layer_more_takes_as_much_more_of_the_device(n, sp, layers):
    """Whatever a block of memory is called or blamed on."""
    sp = sp and n.t > 1
    more = held(launched(n, sp, layers + 1)) - held(launched(n, sp, layers))
    assert more == in_short(n, sp) + left_out(n, sp)[NUMBERS]


@settings(max_examples=10)
@given(sizes(ranks=(1,)))
def test_torchs_own_autograd_says_that_it_keeps_as_much(n):
    of_a_layer = saved_by_torch(n.config(2), n.b) - saved_by_torch(n.config(1), n.b)
    assert of_a_layer == in_short(n, False) + left_out(n, False)[NUMBERS]


@settings(max_examples=10)
@given(sizes(ranks=(2, 3, 4)), st.integers(1, 3))
def test_a_sequence_that_does_not_divide_leaves_a_rank_what_its_own_tokens_take(n, more):
    n = n._replace(s=n.s + more % n.t)
    run = launched(n, sp=True)
    for rank in range(n.t):
        expected = table(n, True, rank) | left_out(n, True, rank)
        assert by_term(run, 0, rank) == {term: size for term, size in expected.items() if size}


@settings(max_examples=6)
@given(sizes(), st.booleans())
def test_shapes_alone_have_the_same_memory_event_by_event(n, sp):
    sp = sp and n.t > 1
    virtual, shape = (launched(n, sp, backend=backend) for backend in ("virtual", "shape"))
    for rank in range(n.t):
        assert list(virtual.trace[rank]) == list(shape.trace[rank])


@settings(max_examples=5)
@given(sizes(), st.booleans())
def test_backward_frees_all_of_it_and_it_was_activations(n, sp):
    run = launched(n, sp and n.t > 1)
    of_layers = [one.block for one in stored(run) if one.scope.startswith("blocks.")]
    assert {end_of(run)[block] for block in of_layers} == {"activations"}


@pytest.mark.parametrize(("t", "sp"), [(1, False), (4, False), (4, True)])
def test_modules_that_the_device_blames_are_those_whose_kernels_allocated(t, sp):
    run = launched(Sizes(s=8, b=2, h=16, a=4, t=t), sp)
    by_scope: dict[str, int] = {}
    for one in stored(run):
        by_scope[one.scope] = by_scope.get(one.scope, 0) + one.bytes
    blamed: dict[str, int] = {}
    for (category, scope), size in run.results[0].items():
        if category in ("activations", "temporary", "communication"):
            blamed[scope] = blamed.get(scope, 0) + size
    for scope, size in by_scope.items():
        if scope.startswith("blocks."):
            assert blamed[scope] == size


# Beside the layers.


@settings(max_examples=12)
@given(sizes(), st.booleans())
def test_what_is_stored_outside_of_layers(n, sp):
    """Of the paper's section 4.3: the embedding's dropout 1, the last norm's input 2 (the last layer's result: the first
    layer's input stands for it here), the head's input 2, and logits: 4 bytes on one device, as the paper has it. A loss
    that is cut over the vocabulary keeps them in 2 bytes, with three numbers of 4 bytes a token.
    """
    sp = sp and n.t > 1
    run = launched(n, sp)
    found: dict[str, int] = {}
    for one in stored(run):
        if not one.scope.startswith("blocks."):
            found[one.scope] = found.get(one.scope, 0) + one.bytes
    s, b, h, _, t, v = n
    around, tokens = left_out(n, sp)[NUMBERS] // 8, s * b
    expected = {
        "": 8 * s + s * s,  # positions, and the causal mask that all layers share
        "dropout": (2 + 1) * around * h,
        "norm": 2 * around * h + 2 * 2 * around,
    }
    if t == 1:
        expected["loss"] = 4 * tokens * v + 2 * 4  # log-probabilities; the sum, and how many labels count
    else:
        expected["embedding"] = 8 * tokens + tokens  # which row of this rank's, and whether it has one
        expected["head"] = 2 * tokens * v // t
        expected["loss"] = 4 * tokens + 2 * 4 * tokens + 4  # largest logit; sum of exponentials, label's logit; the sum
    assert found == expected


# The paper's models.

PAPER = {  # table 3, with a microbatch and t = 8
    "22B": Sizes(s=2048, b=4, h=6144, a=64, t=8, v=51200),
    "175B": Sizes(s=2048, b=1, h=12288, a=96, t=8, v=51200),
    "530B": Sizes(s=2048, b=1, h=20480, a=128, t=8, v=51200),
    "1T": Sizes(s=2048, b=1, h=25600, a=160, t=8, v=51200),
}


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("model", PAPER)
def test_the_papers_models_by_shapes(model, sp):
    n = PAPER[model]
    run = launched(n, sp, layers=1, backend="shape", ranks=[0])
    found = by_term(run, 0)
    assert sum(found.values()) - found.pop(NUMBERS) == in_short(n, sp)
    assert found == table(n, sp)


@pytest.mark.parametrize(("model", "times", "share"), [("175B", 80, 0.70), ("530B", 64, 0.65)])
def test_what_could_be_recomputed_cheaply_is_as_large_a_share_as_section_5_says(model, times, share):
    n = PAPER[model]
    found = by_term(launched(n, True, layers=1, backend="shape", ranks=[0]), 0)
    cheap = sum(found[term] for term in ("softmax", "attention dropout's mask", "dropped weights"))
    assert cheap == times * n.s * n.b * n.h // n.t
    assert round(cheap / sum(found.values()), 2) == share


# What would be seen.


@settings(max_examples=5)
@given(sizes(ranks=(2, 3, 4)))
def test_either_figure_is_wrong_for_the_other_setting(n):
    for sp in (False, True):
        found = by_term(launched(n, sp), 1)
        wrong = table(n, not sp)
        around = {term for term in wrong if found[term] != wrong[term]}
        assert around == {
            "input of q, k, v",
            "input of the first linear",
            "masks of two dropouts",
            "inputs of two layer norms",
        }


@pytest.mark.parametrize(("t", "sp"), [(1, False), (4, True)])
def test_masks_of_torchs_plain_dropout_take_two_bytes(t, sp):
    n = Sizes(s=8, b=2, h=16, a=4, t=t)
    found = by_term(launched(n, sp, plain_dropout=True), 1)
    expected = table(n, sp) | left_out(n, sp)
    of_weights, of_branches = (expected.pop(term) for term in ("attention dropout's mask", "masks of two dropouts"))
    assert found.pop("attention.core.dropout bernoulli_") == 2 * of_weights
    assert found.pop("dropout bernoulli_") == 2 * of_branches
    expected["attention.core.dropout mul"] = expected.pop("dropped weights")
    assert found == expected


def test_a_gathered_input_that_is_kept_is_seen(monkeypatch):
    def by_itself(self, m, x):
        return F.linear(x, m.weight, m.bias)  # torch's autograd keeps what it reads

    monkeypatch.setattr(Region, "product", by_itself)
    n = Sizes(s=8, b=2, h=16, a=4, t=4)
    found, expected = by_term(launched(n, True), 1), table(n, True) | left_out(n, True)
    for module in ("attention", "mlp"):
        assert found.pop(f"{module} all_gather") == 2 * n.s * n.b * n.h
    assert found == expected


def test_scores_that_are_kept_are_seen(monkeypatch):
    module = sys.modules[Attention.__module__]
    right = module.spelled_out

    def keeps_scores(q, k, v, mask, dropout):
        scores = q @ k.mT
        return right(q, k, v, mask, dropout) + 0 * (scores * scores).sum()

    monkeypatch.setattr(module, "spelled_out", keeps_scores)
    n = Sizes(s=8, b=2, h=16, a=4, t=4)
    found, expected = by_term(launched(n, True), 1), table(n, True) | left_out(n, True)
    assert found != expected
    assert found.pop("attention bmm") == expected["softmax"]
