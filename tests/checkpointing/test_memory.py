"""Peak activation memory and recomputed flops, from the record of a device, are each policy's closed form, to the byte.

Layers are alike: GPT blocks with unfused attention and dropout, in 16 bits. With s, b, h, a as in arXiv 2205.05198, a layer keeps

    layer   34 s b h + 5 a s^2 b (table 2 there), and 8 s b: two numbers of 2 bytes for each token of two norms
    input   2 s b h

Beside what the policy says there are, whatever the policy:

    after forward   what lies outside of layers: the mask of the embedding's dropout, positions, the causal mask, the last
                    norm, the loss
    at the peak     of these the first three and the loss; and what the last layer's recomputation has at hand when it has
                    computed everything: the result of its second linear map, and that after dropout, 2 s b h each

Forwards of one layer are computed again as often as the policy says, with the flops of a forward.
"""

from functools import cache
from itertools import pairwise
from math import ceil, log2, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.models import Config, Decoder
from emu.parallel.checkpointing import Policy, checkpointed, frames, pieces

from .models import policies
from .record import activations, layer_flops

S, B, H, A = 4, 2, 8, 2
INPUT = 2 * S * B * H
LAYER = 34 * S * B * H + 5 * A * S * S * B + 8 * S * B
MASK = S * B * H  # of the embedding's dropout
SHARED = 8 * S + S * S  # positions, and the causal mask
NORM = (
    INPUT + 2 * 2 * S * B
)  # the last layer's result, and the norm's numbers; the first layer's input stands in a layer
LOSS = 4 * S * B * 16 + 4 + 4  # log-probabilities of 16 tokens; the sum, and how many labels count


def program(rank: emu.Rank, layers: int, policy) -> None:
    config = Config(
        layers=layers, width=H, heads=A, ffn=4 * H, vocab=16, seq=S, dropout=0.1, attention_dropout=0.1, fused=False
    )
    model = Decoder(config, seed=0)
    checkpointed(model, policy)
    dist = emu.DataParallel(model, rank, precision="bf16-mixed")
    tokens = torch.zeros(B, S, dtype=torch.int64)
    rank.mark("forward")
    loss = dist.loss_sum(tokens, tokens)
    rank.mark("backward")
    loss.backward()


def launched(layers: int, policy, backend: str = "virtual") -> emu.Run:
    return emu.launch(program, emu.Mesh(), args=(layers, policy), backend=backend)


@cache
def measured(layers: int, policy, backend: str = "virtual") -> tuple[int, int, int]:
    """Bytes after forward, at the peak; forwards of one layer that backward added."""
    run = launched(layers, policy, backend)
    found = activations(run)
    forward, again = (sum(layer_flops(run, phase, "blocks.").values()) for phase in ("forward", "recompute"))
    assert again * layers % forward == 0
    return found.after_forward_bytes, found.peak_bytes, again * layers // forward


OUTSIDE = MASK + SHARED + NORM + LOSS + INPUT  # after forward; the head reads an input of its own
AT_PEAK = MASK + SHARED + 4 + 4 + 2 * INPUT


# By hand, for C that divides n: inputs kept after forward; inputs beside, and layers, at the peak; layer forwards.
FORMS = {
    "full": lambda n, c: (n, (n - 1, 1), n),
    "every": lambda n, c: (n // c, (n // c - 1, c), n),
    "sqrt": lambda n, c: (ceil(n / ceil(sqrt(n))), (ceil(n / ceil(sqrt(n))) - 1, ceil(sqrt(n))), n),
    "repeated": lambda n, c: (1, (int(n > c), c), n * (n // c + 1) // 2),
    "naive": lambda n, c: (1, (1, 1), n * (n + 1) // 2),
    "halving": lambda n, c: (1, (int(log2(n)), 1), n * int(log2(n)) // 2 + n),
}


NAMED = [("full", 0, 4), ("every", 2, 4), ("every", 4, 8), ("sqrt", 0, 4), ("sqrt", 0, 9), ("halving", 0, 8)]
NAMED += [("repeated", 2, 8), ("repeated", 3, 9), ("naive", 0, 4), ("naive", 0, 8)]


@pytest.mark.parametrize(("kind", "c", "n"), NAMED)
def test_named_policies_take_what_their_closed_forms_say(kind, c, n):
    after, peak, forwards = measured(n, f"{kind}:{c}" if c else kind)
    kept, (inputs, layers), again = FORMS[kind](n, c)
    assert after == kept * INPUT + OUTSIDE
    assert peak == inputs * INPUT + layers * LAYER + AT_PEAK
    assert forwards == again


@pytest.mark.parametrize("policy", ["full", "repeated:2", "halving"])
def test_shapes_alone_take_the_same(policy):
    assert measured(4, policy, "shape") == measured(4, policy)


@pytest.mark.parametrize("n", [1, 5])
def test_without_checkpointing_all_layers_are_kept_and_nothing_is_computed_again(n):
    after, _, forwards = measured(n, "none")
    assert after == n * LAYER + OUTSIDE
    assert forwards == 0


@settings(max_examples=10)
@given(st.integers(2, 6).flatmap(policies).filter(lambda p: p.segments and p.segments[-1].stop == p.layers))
def test_any_policy_takes_what_it_says(policy):
    """That ends in a segment, so that the peak lies in a recomputation, unless layers before it keep more."""
    run = launched(policy.layers, policy)
    found = activations(run)
    assert found.after_forward_bytes == len(policy.kept) * INPUT + policy.plain * LAYER + OUTSIDE
    in_backward = 0
    covered = sum(s.stop - s.start for s in policy.segments)
    for one in policy.again():
        covered -= one.segment.stop - one.segment.start
        in_backward = max(in_backward, (one.segment.stop - covered) * LAYER + one.held * INPUT)
    assert found.peak_bytes >= in_backward + AT_PEAK - 2 * INPUT
    if in_backward - 2 * INPUT > len(policy.kept) * INPUT + policy.plain * LAYER + OUTSIDE:
        assert found.peak_bytes == in_backward + AT_PEAK
        assert in_backward == policy.peak_bytes(INPUT, LAYER)


def test_every_layer_is_computed_again_as_often_as_its_policy_says():
    """Of the lecture's form: layer i lies on the way to every later segment."""
    n, c = 8, 2
    run = launched(n, f"repeated:{c}")
    forward, again = (layer_flops(run, phase, "blocks.") for phase in ("forward", "recompute"))
    for i in range(n):
        assert again[f"blocks.{i}"] == (n - i // c * c) // c * forward[f"blocks.{i}"]


# Growth: differences, which are free of what is the same for all n.

SIZES = (4, 8, 16)


def grown(policy: str) -> tuple[list[int], list[int]]:
    """Peak bytes, and layer forwards, over n."""
    found = [measured(n, policy) for n in SIZES]
    return [peak for _, peak, _ in found], [forwards for *_, forwards in found]


@pytest.mark.parametrize("policy", ["full", "every:4"])
def test_memory_grows_by_an_input_a_segment_and_compute_by_a_forward_a_layer(policy):
    c = Policy.named(policy, 4).segments[0].stop
    peaks, forwards = grown(policy)
    assert [b - a for a, b in pairwise(peaks)] == [(n - m) // c * INPUT for m, n in pairwise(SIZES)]
    assert forwards == list(SIZES)


@pytest.mark.parametrize("policy", ["naive", "repeated:2"])
def test_memory_stays_and_compute_grows_as_the_square(policy):
    c = 1 if policy == "naive" else 2
    peaks, forwards = grown(policy)
    assert len(set(peaks)) == 1
    assert forwards == [n * (n // c + 1) // 2 for n in SIZES]
    second = [b - 2 * a for a, b in pairwise(forwards)]  # n^2 / 4 C is left of a square
    assert second == [(2 * n) ** 2 // (4 * c) for n in SIZES[:-1]]


def test_the_square_root_grows_by_a_segment_and_an_input_where_its_root_does():
    peaks = [measured(n * n, "sqrt")[1] for n in (2, 3, 4)]
    assert [b - a for a, b in pairwise(peaks)] == [LAYER + INPUT] * 2


def test_without_checkpointing_memory_grows_by_a_layer():
    after = [measured(n, "none")[0] for n in SIZES]
    assert [b - a for a, b in pairwise(after)] == [(n - m) * LAYER for m, n in pairwise(SIZES)]


# What would be seen.


def test_a_recomputation_that_keeps_too_much_is_seen(monkeypatch):
    monkeypatch.setattr(frames.Frame, "filled", lambda self: frames.saved_tensors_hooks(lambda x: x, lambda x: x))
    with pytest.raises(Exception, match="saves 0 tensors"):
        launched(4, "full")


def test_kept_inputs_that_stay_are_seen(monkeypatch):
    """As if what backward keeps on its way stayed until it is over."""
    peak = measured(8, "halving")[1]
    monkeypatch.setattr(pieces, "in_backward", lambda x: STAY.append(x) or (lambda: x))
    try:
        assert activations(launched(8, "halving")).peak_bytes > peak
    finally:
        STAY.clear()


STAY = []
