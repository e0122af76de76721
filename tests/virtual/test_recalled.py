"""Shapes that are remembered are those that torch would work out again: no event of a shape run changes by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import emu
from emu.models import Decoder, config
from emu.parallel import Plan, mesh_of, parallelize
from emu.virtual import recalled, tracker


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    recalled._known.clear()


def asked_again(op: Any, args: Any, kwargs: Any) -> Any:
    return op.call(*args, **kwargs) if kwargs else op.call(*args)


def trained(rank: emu.Rank, model: str, plan: Plan) -> None:
    dist = parallelize(Decoder(config(model)), plan, rank)
    optimizer = dist.optimizer(torch.optim.AdamW)
    x = torch.zeros(plan.global_batch, plan.seq, dtype=torch.int64)
    for _ in range(2):  # the second time all is known
        dist.backward(emu.Batch(x, x, x.numel()), microbatches=plan.accumulated())
        optimizer.step()
        optimizer.zero_grad()


def record(program: Any, mesh: emu.Mesh, *args: Any) -> Any:
    return emu.launch(program, mesh, backend="shape", args=args).trace.events


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt-tiny", Plan("dp=2", checkpoint="full")),
        ("llama-tiny", Plan("dp=2", zero=3, microbatches=2)),
        ("llama-tiny", Plan("pp=2,tp=2", sp=True, microbatches=2, schedule="zb-h1")),
        ("moe-tiny", Plan("dp=2,cp=2", context="ring")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.mesh,
)
def test_a_step_leaves_the_same_record(model: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = record(trained, mesh_of(plan), model, plan)
    assert recalled._known
    monkeypatch.setattr(tracker, "recalled", asked_again)
    assert ours == record(trained, mesh_of(plan), model, plan)


CALLS: dict[str, Any] = {
    "a sum": lambda x, n: x + n,
    "a sum with itself turned": lambda x, n: x + x.transpose(0, 1) if x.shape[0] == x.shape[1] else x,
    "in place": lambda x, n: x.clone().add_(n),
    "a view": lambda x, n: x.reshape(-1) * 2,
    "of a column": lambda x, n: x[:, :1].exp(),
    "a wider dtype": lambda x, n: x.to(torch.float64) + 1,
    "a product": lambda x, n: x @ x.transpose(0, 1),
    "a softmax": lambda x, n: functional.softmax(x, dim=n % 2),
    "a mean": lambda x, n: x.mean(n % 2, keepdim=bool(n)),
    "both": lambda x, n: torch.cat([x, x], n % 2),
    "the largest": lambda x, n: x.max(n % 2).values,
    "a number of another kind": lambda x, n: x.round().to(torch.int64) * (1.0 if n else 1),
}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(CALLS)), st.integers(0, 2)), min_size=1, max_size=6),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.booleans(),
)
def test_any_calls_return_the_same_forms(calls: list[tuple[str, int]], shape: tuple[int, int], turned: bool) -> None:
    def program(rank: emu.Rank) -> list[Any]:
        def called() -> list[Any]:
            x = torch.ones(shape)
            x = x.transpose(0, 1) if turned else x
            forms = []
            for name, n in calls:
                out: Tensor = CALLS[name](x, n)
                forms.append((tuple(out.shape), out.stride(), out.dtype, out.storage_offset()))
            return forms

        return [called(), called()]

    recalled._known.clear()
    first, second = emu.launch(program, emu.Mesh(dp=1), backend="shape").results[0]
    assert first == second


def test_a_call_with_another_dtype_or_number_is_another_call() -> None:
    def program(rank: emu.Rank) -> list[torch.dtype]:
        one, half = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)
        return [(one * 1).dtype, (one * 1.0).dtype, (one * True).dtype, (half * 1.0).dtype, (one * half).dtype]

    assert emu.launch(program, emu.Mesh(dp=1), backend="shape").results[0] == [
        torch.int64,
        torch.float32,
        torch.int64,
        torch.bfloat16,
        torch.bfloat16,
    ]


def test_what_has_no_dtype_of_its_own_takes_the_default_of_now() -> None:
    def program(rank: emu.Rank) -> list[torch.dtype]:
        return [
            torch.ones(3, device=rank.device).dtype,
            (torch.ones(3, dtype=torch.int64, device=rank.device) / 2).dtype,
        ]

    for precision, dtype in (("fp32", torch.float32), ("bf16-mixed", torch.bfloat16), ("fp32", torch.float32)):
        found = emu.launch(program, emu.Mesh(dp=1), backend="shape", precision=precision).results[0]
        assert found == [dtype, dtype]
