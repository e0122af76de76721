"""A fault that utilisation figures really had: work counted by another convention than the one they are compared with.

The convention here: a multiply-add is two; matrix products and attention alone; causal attention counts the pairs that it
attends to; a training step is three times forward; recomputation counts in HFU, not in MFU. Numbers and inputs are ours.
https://github.com/NVIDIA/Megatron-LM/issues/831
"""

import pytest
import torch

import emu
from emu.cost.kernels import is_model_work
from emu.models import Config
from emu.models.decoder import Block
from emu.parallel.checkpointing import checkpointed
from emu.trace.events import Kernel

S, D, HEADS, KV, HEAD_DIM, FFN = 6, 8, 4, 2, 2, 16
FORWARD, FULL, TRAIN, WITH_RECOMPUTATION = 6048, 6528, 18144, 24192


def config(kv=KV, fused=True):
    return Config(1, D, HEADS, kv, HEAD_DIM, FFN, vocab=5, seq=S, bias=False, fused=fused)


def by_hand(kv=KV, kv_in_scores=HEADS, pairs=S * (S + 1) // 2):
    """One token after the other: its maps, and then a product with every key and every value that it sees."""
    maps = 2 * (D * HEADS * HEAD_DIM + 2 * D * kv * HEAD_DIM + HEADS * HEAD_DIM * D + 2 * D * FFN)
    return S * maps + kv_in_scores * pairs * 4 * HEAD_DIM


class One(torch.nn.Module):
    """A block, as the layers of a model."""

    def __init__(self, kv, fused):
        super().__init__()
        torch.manual_seed(63)
        self.layers = torch.nn.ModuleList([Block(config(kv, fused))])

    def loss_sum(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (x**2).sum()


def measured(kv=KV, backward=True, again=False, fused=True):
    """Of a step of one sequence, which needs a gradient of its input, too: what is done, and what MFU and HFU count."""

    def program(rank):
        model = One(kv, fused)
        if again:
            checkpointed(model, "full", rank)
        x = torch.randn(1, S, D).requires_grad_()
        loss = model.loss_sum(x, None)
        if backward:
            loss.backward()

    run = emu.launch(program, emu.Mesh(dp=1), backend="virtual", precision="fp32")
    kernels = [kernel for _, kernel in run.trace.of(Kernel, rank=0) if is_model_work(kernel)]
    metrics = run.metrics
    could = metrics.step_time_s * run.cluster.chip.peak("float32")
    counted = round(metrics.mfu * could), round(metrics.hfu * could)
    return sum(kernel.flops for kernel in kernels), *counted


def test_the_hand_counts_what_the_issue_says():
    assert by_hand() == FORWARD and by_hand(pairs=S * S) == FULL
    assert (TRAIN, WITH_RECOMPUTATION) == (3 * FORWARD, 4 * FORWARD)


def test_forward_is_counted_with_the_pairs_that_are_attended_to():
    assert measured(backward=False) == (FORWARD, FORWARD, FORWARD)
    assert config().block_flops(1, S, "causal") == FORWARD and config().block_flops(1, S, "full") == FULL


def test_attention_that_is_spelled_out_computes_and_counts_all_pairs():
    """As executed: masked scores are computed, too."""
    assert measured(backward=False, fused=False) == (FULL, FULL, FULL)


def test_a_training_step_is_three_times_forward():
    assert measured() == (TRAIN, TRAIN, TRAIN)


def test_recomputation_counts_in_hardware_flops_alone():
    assert measured(again=True) == (WITH_RECOMPUTATION, TRAIN, WITH_RECOMPUTATION)


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_fewer_key_and_value_heads_make_their_projections_cheaper_and_nothing_else(kv):
    assert measured(kv, backward=False)[0] == by_hand(kv) == FORWARD + (kv - KV) * S * 4 * D * HEAD_DIM
    assert measured(kv)[1] == 3 * by_hand(kv)


def test_other_conventions_are_other_numbers():
    """The faults: full pairs, scores of key and value heads alone, projections as if all heads had their own."""
    wrong = (by_hand(pairs=S * S), by_hand(kv_in_scores=KV), by_hand(kv=HEADS))
    assert len({FORWARD, *wrong}) == 4
    assert not {3 * w for w in wrong} & {measured()[1]}
