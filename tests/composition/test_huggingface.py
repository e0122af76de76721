"""transformers' stock Llama under plans of several axes trains as it does on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emu
from emu.equivalence import check
from emu.models.huggingface import llama
from emu.parallel import Plan, mesh_of

pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 8,
    "initializer_range": 0.3,  # large enough that attention, activations and norms matter
}
PLANS = {
    "dp 2 x tp 2 x pp 2, ZeRO-1": Plan("dp=2,tp=2,pp=2", zero=1, microbatches=2),
    "the same, innermost out, with sp": Plan("pp=2,tp=2,dp=2", zero=1, microbatches=2, sp=True),
    "FSDP x cp 2": Plan("dp=2,cp=2", zero=3),
    "FSDP x cp 2, in rings, layers computed again": Plan("cp=2,dp=2", zero=3, context="ring", checkpoint="full"),
}
STEPS, ROWS, SEQ, RATE = 4, 4, 6, 0.03
NOTICED = dict.fromkeys(PLANS, 0) | {"FSDP x cp 2": 2}  # mutants, as a negative control


def batches(steps: int = STEPS) -> list[emu.Batch]:
    """Some labels do not count, elsewhere on each step."""
    g = torch.Generator().manual_seed(0)
    out = []
    for _ in range(steps):
        x, y = (torch.randint(13, (ROWS, SEQ), generator=g) for _ in "xy")
        ignored = torch.rand(y.shape, generator=g) < 0.25
        out.append(emu.Batch(x, y.masked_fill(ignored, -100)))
    return out


def model() -> Any:
    """In torch's default dtype, which is that of the tier."""
    torch.manual_seed(0)
    return llama(**TINY, tie_word_embeddings=True).to(torch.get_default_dtype())


def trained(rank: emu.Rank, plan: Plan) -> dict[str, Any]:
    """Losses of some steps of AdamW with clipping, and the one after them."""
    dist = emu.parallelize(model(), plan, rank)
    optimizer = dist.optimizer(torch.optim.AdamW, lr=RATE, clip=1.0)
    losses = []
    for batch in batches():
        losses.append(dist.backward(batch, microbatches=plan.accumulated()))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack([*losses, dist.evaluate(batches()[0])])}


def alone(plan: Plan) -> dict[str, Any]:
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE)
    losses = []
    for batch in batches():
        loss = plain.loss_sum(batch.x, batch.y)
        loss.backward()
        for p in plain.parameters():
            p.grad.div_(batch.tokens)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double() / batch.tokens)
    with torch.no_grad():
        losses.append(plain.loss_sum(batches()[0].x, batches()[0].y).double() / batches()[0].tokens)
    return {"losses": torch.stack(losses)}


@pytest.mark.parametrize("name", PLANS)
def test_gradients_and_a_step_are_those_of_one_device_bit_for_bit(name: str) -> None:
    plan = PLANS[name]
    verdict = emu.verify(lambda: llama(**TINY, tie_word_embeddings=True), plan, batches(1)[0], mutants="none")
    assert verdict and verdict.max_rel_err == 0, str(verdict)
    assert verdict.n_parameters >= 20 and not verdict.without_gradient


@pytest.mark.parametrize("name", PLANS)
def test_several_steps_of_it_are_those_of_one_device(name: str) -> None:
    """AdamW with clipping, in float64; and it learns."""
    plan = PLANS[name]
    verdict = check(trained, mesh_of(plan), alone, args=(plan,), tier="float64", mutants=NOTICED[name])
    assert verdict, str(verdict)
    losses = alone(plan)["losses"]
    assert losses[-1] < 0.9 * losses[0]
