"""The tiled algorithm is attention, and each step of it is what it says."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

import emu
from emu.parallel.attention.block import attend, backward
from emu.parallel.attention.flash import FlashBackward, FlashForward, flash_attention
from emu.parallel.attention.pieces import pieces
from emu.parallel.attention.tiles import Tiles
from emu.parallel.attention.tokens import Run, tokens
from emu.parallel.attention.traffic import backward_traffic, forward_traffic

from .problems import counted, problems, visible

FLOAT64 = 1e-12  # float64 sums in another order


@given(problems())
def test_the_tiled_algorithm_is_attention_forward_and_backward(problem):
    inputs, options = problem
    seen = visible(inputs[0], inputs[1], options["causal"], options["documents"])
    leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    ours = flash_attention(*leaves[0], **options)
    theirs = F.scaled_dot_product_attention(*leaves[1], attn_mask=seen, enable_gqa=True)
    cotangent = torch.cos(torch.arange(ours.numel(), dtype=torch.float64)).view(ours.shape)
    grads = [torch.autograd.grad(out, inputs, cotangent) for out, inputs in ((ours, leaves[0]), (theirs, leaves[1]))]
    for a, b in zip((ours.detach(), *grads[0]), (theirs.detach(), *grads[1])):
        assert float((a - b).abs().max()) <= FLOAT64 * max(1.0, float(b.abs().max()))


@given(problems())
def test_running_values_are_right_after_every_tile(problem):
    """After each tile, m is the largest score so far, O / l attention over the keys so far; hidden tiles change nothing."""
    (q, k, v), options = problem
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    seen = visible(q, k, options["causal"], options["documents"])
    scores = (q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    values, total = v.repeat_interleave(group, 1), torch.zeros(())
    for step in FlashForward(q, k, v, **options):
        if step.kind == "softmax":
            total = step.values["l"]
            past = scores[step.row, :, step.queries, : step.keys.stop]
            assert torch.allclose(step.values["m"].flatten(0, 1), past.amax(-1), rtol=0, atol=1e-12)
            assert torch.allclose(
                (step.values["m"] + total.log()).flatten(0, 1), past.logsumexp(-1), rtol=0, atol=1e-12
            )
        if step.kind == "output":
            assert step.values["O"].shape[:2] == (kv_heads, group)
            so_far = past.softmax(-1).nan_to_num() @ values[step.row, :, : step.keys.stop]
            mean = (step.values["O"] / total.clamp(min=1e-300).unsqueeze(-1)).flatten(0, 1)
            assert torch.allclose(mean, so_far, rtol=0, atol=1e-12)


def test_a_sum_that_is_not_shrunk_when_the_maximum_grows_is_wrong():
    """The control: the rescaling above is needed, and seen."""
    q = torch.ones(1, 1, 4, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64).view(1, 1, 4, 1)
    shrinks = [
        s.values["shrink"] for s in FlashForward(q, k, k, causal=False, tiles=Tiles(4, 1, 1, 1)) if s.kind == "softmax"
    ]
    assert [round(float(s[0, 0, 0]), 6) for s in shrinks] == [0.0, *[round(math.exp(-1), 6)] * 3]
    out = flash_attention(q, k, k, causal=False, tiles=Tiles(4, 1, 1, 1))
    unshrunk = sum(float(x) for x in k.flatten()) / 4
    assert abs(float(out[0, 0, 0, 0]) - unshrunk) > 0.1


@pytest.mark.parametrize(
    "scores", [(1000.0, -1000.0, 1000.0, 999.0), (-math.inf, 0.0, -math.inf, 3.0), (-math.inf,) * 4]
)
def test_extreme_scores_are_those_of_whole_blocks(scores):
    """Infinite ones by overflow, as they come about: -1e30 times 1e30 in float32."""
    k = torch.tensor([-1e30 if score == -math.inf else score * 1e-30 for score in scores]).view(1, 1, 4, 1)
    q, v = torch.full_like(k, 1e30), torch.arange(1.0, 5.0).view(1, 1, 4, 1)
    whole = tokens([Run(0, 4)])
    row = attend(q, k, v, pieces(whole, whole), scale=1.0)
    blocks = backward(torch.ones_like(q), q, k, v, row.out, row.lse, pieces(whole, whole), scale=1.0)
    tiled = FlashForward(q, k, v, tiles=Tiles(2, 1, 1, 2), scale=1.0)
    tiled.run()
    back = FlashBackward(torch.ones_like(q), q, k, v, tiled.out, tiled.lse, tiles=Tiles(2, 1, 1, 2), scale=1.0)
    back.run()
    assert torch.equal(tiled.lse == -math.inf, row.lse == -math.inf)
    for a, b in zip(
        (tiled.out, back.dq * 1e30, back.dk / 1e30, back.dv), (row.out, blocks[0] * 1e30, blocks[1] / 1e30, blocks[2])
    ):
        assert bool(a.isfinite().all()) and torch.allclose(
            a, b, rtol=1e-3, atol=1e-3
        )  # a score of 1,000 is known to 6e-5


def test_a_walk_is_read_step_by_step_and_goes_on_where_it_was_left():
    draws = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 8, 4, generator=draws), torch.randn(1, 1, 8, 4, generator=draws)
    walk = FlashForward(q, k, k, tiles=Tiles(4, 4, 4, 4))
    first = [next(iter(walk)) for _ in range(5)]
    assert [step.kind for step in first] == ["load Q", "load K, V", "scores", "softmax", "output"]
    assert (walk.read_bytes, walk.written_bytes) == (384, 0) and not walk.out.any()
    lines = [str(step) for step in (*first, *walk)]
    assert [step.index for step in first] == list(range(5)) and lines[5].split()[0] == "5"
    assert "12 of 32 hidden" in lines[2] and "m -inf ->" in lines[3] and "writes 160 B" in lines[5]
    assert "keys 4-7" not in "".join(lines[:6]), "a tile in which nothing is seen was visited"
    assert not list(walk) and walk.out.any()
    back = list(FlashBackward(torch.ones_like(q), q, k, k, walk.out, walk.lse, tiles=Tiles(4, 4, 4, 4)))
    assert all(len(str(step)) < 160 for step in back)
    meta = FlashForward(q.to("meta"), k.to("meta"), k.to("meta"), tiles=Tiles(4, 4, 4, 4))
    assert all("shapes only" in str(step) for step in meta)


@pytest.mark.parametrize("sizes", [(0, 2, 1, 3, 3, 4), (1, 2, 1, 0, 0, 4), (1, 2, 1, 3, 0, 4), (1, 2, 1, 3, 3, 0)])
def test_empty_tensors(sizes):
    batch, heads, kv_heads, queries, keys, head_dim = sizes
    q = torch.randn(batch, heads, queries, head_dim, requires_grad=True)
    k = torch.randn(batch, kv_heads, keys, head_dim, requires_grad=True)
    out = flash_attention(q, k, k)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad is not None and not q.grad.any()
    forward, back, shape = counted(((q.detach(), k.detach(), k.detach()), {"tiles": Tiles(2, 2, 2, 2)}))
    assert forward == forward_traffic(shape, Tiles(2, 2, 2, 2)) and back == backward_traffic(shape, Tiles(2, 2, 2, 2))


def test_what_does_not_fit_together_is_refused():
    q, k = torch.zeros(1, 3, 4, 2), torch.zeros(1, 2, 4, 2)
    with pytest.raises(emu.EmuError, match="do not fit") as raised:
        flash_attention(q, k, k)
    assert "divides heads" in raised.value.hint
    with pytest.raises(emu.EmuError, match="documents"):
        flash_attention(q, q, q, documents=torch.zeros(1, 5))
    with pytest.raises(emu.EmuError, match="empty tiles"):
        Tiles(0, 1, 1, 1)
