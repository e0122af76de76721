"""What a device sees of a backward in two parts: memory, kernels, work; and the exact tier.

Table 1 of Zero Bubble, https://arxiv.org/abs/2401.10241, says what a layer's parts take.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import emu
from emu.equivalence.exact import ExactMode
from emu.models import GPT, Config
from emu.parallel import shard_model
from emu.parallel.pipeline.running.split import Split
from emu.trace.events import Kernel, Mark


def program(rank, config, batch, sp, split):
    """Forward and both parts, or one backward, of a model in 16 bits, cut over tp."""
    model = GPT(config).bfloat16()
    if rank.world_size > 1:
        shard_model(model, rank, sp=sp)
    rank.watch(model)
    tokens = torch.zeros(batch, config.seq, dtype=torch.int64, device=rank.device)
    rank.mark("F")
    parts = Split()
    with parts if split else nullcontext():
        loss = model.loss_sum(tokens, tokens)
    rank.mark("I")
    if split:
        parts.input_gradients([loss], None, [])
        del loss
        rank.mark("W")
        parts.weights()
    else:
        loss.backward()
        del loss
    rank.mark("end")
    return {name: p.grad for name, p in model.named_parameters()}


def launched(layers, split=True, tp=1, sp=False, batch=2, backend="virtual"):
    config = Config(layers=layers, width=24, heads=4, vocab=16, seq=8, fused=False, dropout=0.1, attention_dropout=0.1)
    return emu.launch(program, emu.Mesh(tp=tp), backend=backend, args=(config, batch, sp, split))


def held(run, mark):
    """Bytes on rank 0 at a mark, apart from parameters and their gradients."""
    at = next(i for i, event in enumerate(run.trace[0]) if isinstance(event, Mark) and event.name == mark)
    indices, lines = run.memory.series(0)
    now = max(i for i, index in enumerate(indices) if index < at)
    return sum(line[now] for category, line in lines.items() if category not in ("parameters", "gradients"))


@pytest.mark.parametrize("backend", ["virtual", "shape"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (4, False), (2, True)])
def test_what_a_layer_holds_between_i_and_w_is_m_w_of_the_zero_bubble_paper(backend, tp, sp):
    """arXiv 2401.10241, table 1, in bytes of 16-bit numbers: M_B = s b (34 h + 5 a s) before I, M_W = 32 s b h before W.

    Of M_W, inputs are 14, and gradients 18 s b h. Under tp, heads and the MLP's columns are cut. What enters their pairs,
    4 s b h, is cut under sp only; what comes back to their ends, 4 s b h, is gathered under sp.
    """
    one, two = (launched(layers, tp=tp, sp=sp, backend=backend) for layers in (1, 2))
    s, b, h, a = 8, 2, 24, 4
    sbh, around = s * b * h, tp if sp else 1
    numbers = 8 * s * b // around  # means and deviations of norms, which the paper leaves out
    assert held(two, "I") - held(one, "I") == 10 * sbh // around + (24 * sbh + 5 * a * s * s * b) // tp + numbers
    assert held(two, "W") - held(one, "W") == 4 * sbh // around + 4 * sbh + 24 * sbh // tp
    assert held(two, "end") == held(one, "end")


def test_a_forward_whose_backward_will_be_in_parts_holds_no_more_than_any():
    assert held(launched(2), "I") == held(launched(2, split=False), "I")


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_a_device_sees_the_same_kernels_in_the_same_modules(tp, sp):
    parts, whole = launched(2, True, tp, sp), launched(2, False, tp, sp)
    for rank in range(tp):
        kernels = [Counter(e for e in run.trace[rank] if isinstance(e, Kernel)) for run in (parts, whole)]
        assert kernels[0] == kernels[1]
        grads = [run.results[rank] for run in (parts, whole)]
        assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[1])
    late = [e for e in parts.trace.window("W", "end")[0] if isinstance(e, Kernel)]
    assert {e.phase for e in late} == {"backward"}
    assert {"blocks.0.attention.q", "blocks.1.mlp.down", "embedding"} <= {e.scope for e in late} or tp > 1


def test_a_layers_work_is_cut_as_in_the_zero_bubble_paper():
    """Table 1: F s b h (24 h + 4 s), I s b h (24 h + 8 s), W 24 s b h^2, in products alone."""
    one, two = launched(1), launched(2)
    s, b, h = 8, 2, 24
    expected = {"F": 24 * h + 4 * s, "I": 24 * h + 8 * s, "W": 24 * h}
    for mark, end in (("F", "I"), ("I", "W"), ("W", "end")):
        flops = [
            sum(
                e.flops
                for e in run.trace.window(mark, end)[0]
                if isinstance(e, Kernel) and e.name in ("mm", "addmm", "bmm")
            )
            for run in (one, two)
        ]
        assert flops[1] - flops[0] == s * b * h * expected[mark]


def decoder():
    return GPT(Config(layers=2, width=8, heads=2, vocab=10, seq=6, fused=False, tied=True))


@settings(max_examples=5)
@given(st.integers(1, 3), st.integers(0, 9))
def test_in_the_exact_tier_microbatches_in_parts_give_the_whole_batchs_gradients(cut, seed):
    with ExactMode():
        torch.manual_seed(seed)
        tokens = torch.randint(0, 10, (4, 6))
        whole, parts = decoder(), decoder()
        whole.loss_sum(tokens, tokens).backward()
        waiting = []
        for some in (tokens[:cut], tokens[cut:]):
            waiting.append(split := Split())
            with split:
                loss = parts.loss_sum(some, some)
            split.input_gradients([loss], None, [])
        for split in waiting:
            split.weights()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(whole.parameters(), parts.parameters()))
