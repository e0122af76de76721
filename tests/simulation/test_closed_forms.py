"""What a simulation counts is what closed forms say: parameters, operations, memory and volumes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from emu.models import Config
from emu.simulation import Simulated

from .small import GPT, LLAMA, simulated

B, S = 4, 32  # sequences, tokens in each


def held(run: Simulated, category: str, rank: int = 0) -> int:
    """Bytes of a category when the step begins."""
    return run.memory.held[rank][category]


def most(run: Simulated, category: str, rank: int = 0) -> int:
    """The most bytes of a category during the step."""
    return max(run.memory.series(rank)[1][category])


# Parameters and model states.


@pytest.mark.parametrize(("zero", "parameters", "optimizer"), [(0, 2, 12), (1, 2, 3), (2, 2, 3), (3, 0.5, 3)])
def test_model_states_are_those_of_zero(zero: int, parameters: float, optimizer: float) -> None:
    """2 bytes of parameters and 12 of optimizer states for each of P parameters, and what of it 4 ranks share (arXiv
    1910.02054, figure 1, with K = 12); gradients of 2 bytes come and go within the step."""
    run = simulated(LLAMA, "dp=4", zero=zero, global_batch=B)
    assert held(run, "parameters") == parameters * LLAMA.n_params()
    assert held(run, "optimizer") == optimizer * LLAMA.n_params()


def test_stages_and_cuts_hold_their_parameters_alone() -> None:
    run = simulated(GPT, "pp=2,tp=2", microbatches=2, global_batch=B)
    whole, norms = 2 * GPT.n_params(), 2 * (8 + 1) * GPT.width * 2  # norms and some biases are on both ranks of tp
    both = [held(run, "parameters", rank) for rank in run.trace.ranks]
    assert len(both) == 2
    twice = 2 * sum(both) - whole  # of what is whole on each
    positions, biases = 2 * GPT.seq * GPT.width, 2 * 4 * 2 * GPT.width
    assert twice == norms + positions + biases


# Operations.


def flops(run: Simulated) -> float:
    """Of the step, on all devices, as MFU counts them."""
    return run.metrics.tflops_per_device * 1e12 * run.metrics.step_time_s * run.mesh.size


def brute_force(c: Config, seq: int, causal: bool) -> int:
    """Forward operations of one block for one sequence, token by token and head by head."""
    matrices = 3 if c.activation == "swiglu" else 2
    n = 0
    for token in range(seq):
        n += 2 * c.width * c.heads * c.head_dim + 2 * 2 * c.width * c.kv_heads * c.head_dim
        n += 2 * c.heads * c.head_dim * c.width + matrices * 2 * c.width * c.ffn
        for _ in range(c.heads):
            n += (2 * c.head_dim + 2 * c.head_dim) * (token + 1 if causal else seq)
    return n


SHAPES = [
    Config(layers=2, width=8, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=10, seq=6),
    replace(LLAMA, kv_heads=2, seq=S),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["gpt", "llama"])
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "pp=2", "cp=2"])
def test_operations_are_counted_once_on_whatever_mesh(shape: Config, mesh: str) -> None:
    """Three times the forward; causal attention counts the pairs it attends, and a table that is looked up nothing."""
    run = simulated(shape, mesh, seq=shape.seq, global_batch=B, microbatches=2)
    head = 2 * shape.seq * shape.width * shape.vocab
    forward = B * (shape.layers * brute_force(shape, shape.seq, causal=True) + head)
    if mesh != "cp=2":  # zigzag cuts sequences into pieces, and computes whole squares of them
        assert flops(run) == pytest.approx(3 * forward, rel=1e-12)
    full = B * (shape.layers * brute_force(shape, shape.seq, causal=False) + head)
    assert run.full_attention_mfu == pytest.approx(run.metrics.mfu * full / forward)
    assert "causal attention counts the pairs it attends" in run.metrics.flops_convention
    assert "recomputation out" in run.metrics.flops_convention


def test_ranks_with_more_rows_count_for_no_more_ranks_than_they_are() -> None:
    """7 sequences on 4 ranks, in microbatches of 1: one of the ranks has 1, and those with 2 are run by one of them."""
    run = simulated(LLAMA, "dp=4", global_batch=7, microbatches=2)
    assert len(run.trace.ranks) == 2
    assert flops(run) == pytest.approx(3 * LLAMA.flops(7, S), rel=1e-12)


def test_recomputation_counts_in_hfu_alone() -> None:
    run = simulated(LLAMA, "dp=2", global_batch=B, checkpoint="full")
    block, whole = LLAMA.block_flops(B, S), LLAMA.flops(B, S)
    again = run.metrics.hfu / run.metrics.mfu * 3 * whole - 3 * whole
    # Of the last product of a layer the result is of no use to its backward, so it is not computed again.
    down = 2 * B * S * LLAMA.width * LLAMA.ffn
    assert again == pytest.approx(LLAMA.layers * block) or again == pytest.approx(LLAMA.layers * (block - down))
    assert run.metrics.kernel_hfu > run.metrics.hfu


def test_korthikantis_formula_is_full_attention() -> None:
    """72 B L s h^2 (1 + s / 6h + v / 12hL) a step (arXiv 2205.05198, appendix A)."""
    n = GPT
    run = simulated(n, "dp=2", global_batch=B)
    theirs = 72 * B * n.layers * S * n.width**2 * (1 + S / (6 * n.width) + n.vocab / (12 * n.width * n.layers))
    full = run.full_attention_mfu
    assert full is not None
    assert flops(run) * full / run.metrics.mfu == pytest.approx(theirs)


# Activations.

DROPPING = Config(
    layers=4, width=1024, heads=16, vocab=1024, seq=1024, dropout=0.1, attention_dropout=0.1, fused=False
)  # fmt: skip


@pytest.mark.parametrize(("mesh", "sp"), [("tp=2", False), ("tp=2", True), ("pp=2,tp=2", True)], ids=str)
def test_activations_are_korthikantis(mesh: str, sp: bool) -> None:
    """s b h L (10 + 24 / t + 5 a s / (h t)), with sequence parallelism all of it over t; the first stage of 1F1B holds as
    many microbatches as there are stages. Within 3 %: what comes before, after and between the layers comes to as much."""
    n, t = DROPPING, 2
    run = simulated(n, mesh, seq=1024, global_batch=4, microbatches=4, sp=sp)
    layer = 1024 * n.width * ((34 / t if sp else 10 + 24 / t) + 5 * n.heads * 1024 / (n.width * t))
    found = most(run, "activations") / (n.layers * layer)
    assert 1 <= found < 1.03


# Volumes, in bytes that a rank sends.


@pytest.mark.parametrize(("zero", "volume"), [(0, 2 * 4), (1, 4 + 2), (2, 4 + 2), (3, 4 + 2 * 2)])
def test_data_parallel_volumes_are_zeros(zero: int, volume: float) -> None:
    """2 P, 2 P, 2 P and 3 P elements times (N - 1) / N: gradients travel in 4 bytes, parameters in 2."""
    run = simulated(LLAMA, "dp=4", zero=zero, global_batch=B)
    losses = 64  # some bytes of counts and losses
    assert run.metrics.comm_bytes["dp"] == pytest.approx(volume * LLAMA.n_params() * 3 / 4, abs=4 * losses)


WIDE = Config(layers=2, width=256, heads=4, vocab=64, seq=512)


def of_a_layer(mesh: str, axis: str, layers: tuple[int, int] = (2, 4), **more: Any) -> float:
    """What a layer adds to the bytes sent along an axis."""
    few, many = (
        simulated(replace(WIDE, layers=n), mesh, **{"global_batch": 2, "seq": 128, **more}).metrics.comm_bytes[axis]
        for n in layers
    )
    return (many - few) / (layers[1] - layers[0])


def test_tensor_parallel_volumes_are_four_all_reduces() -> None:
    """8 b s h (t - 1) / t elements a layer (SC21). Sequence parallelism sends as many, and gathers the inputs of both of a
    layer's regions once more in backward, since it keeps them cut (arXiv 2205.05198); within 2 %: norms' gradients."""
    bsh = 2 * 128 * WIDE.width
    plain = 8 * bsh * 3 / 4 * 2
    assert of_a_layer("tp=4", "tp") == pytest.approx(plain, rel=1e-3)
    assert of_a_layer("tp=4", "tp", sp=True) == pytest.approx(plain + 2 * bsh * 3 / 4 * 2, rel=0.02)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_pipelines_send_an_activation_a_boundary_and_direction(schedule: str, chunks: int) -> None:
    """b s h elements a microbatch, both ways from a stage in the middle; v times as many with v chunks (SC21)."""
    run = simulated(
        replace(WIDE, layers=4), "pp=2", seq=128, global_batch=4, microbatches=4, schedule=schedule, chunks=chunks
    )
    boundaries = 2 * chunks - 1  # that the two ranks share; of the four ends one sends on every one of them
    sent = run.metrics.comm_bytes["pp"]
    losses = 400  # bytes, which all ranks of the pipeline sum besides
    expected = 4 * 128 * WIDE.width * 2 * (1 if chunks == 1 else (boundaries + 1) / 2 + 1)
    assert sent == pytest.approx(expected, rel=1e-3, abs=losses)


@pytest.mark.parametrize("context", ["ring", "zigzag", "all-gather"])
def test_keys_and_values_travel_once_forward_and_thrice_backward(context: str) -> None:
    """(c - 1) / c x 2 s b h elements forward; again in backward, and their gradients, which travel in 4 bytes, not 2."""
    one = 3 / 4 * 2 * 2 * 128 * WIDE.width * 2
    assert of_tokens("cp=4", context=context) == pytest.approx(one * (1 + 1 + 2))


def test_ulysses_exchanges_four_tensors_each_way() -> None:
    """4 N h / P elements, all but the rank's own part of them, forward and backward."""
    assert of_tokens("cp=4", context="ulysses") == pytest.approx(2 * 4 * 2 * 128 / 4 * WIDE.width * 3 / 4 * 2)


def of_tokens(mesh: str, **more: Any) -> float:
    """What 128 tokens more of two sequences add to what a layer sends along cp: gradients of weights do not grow with them."""
    many, few = (of_a_layer(mesh, "cp", seq=seq, **more) for seq in (256, 128))
    return many - few
