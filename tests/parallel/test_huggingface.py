"""transformers' stock Llama, cut inside its layers: all its gradients are those of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import emu
from emu.models.huggingface import llama
from emu.parallel import Plan
from emu.parallel.tensor.maps_llama import llama_map
from emu.parallel.tensor.styles import Column, Region
from emu.spmd import PlanError
from emu.trace.compare import first_difference

transformers: Any = pytest.importorskip("transformers")

DEGREES = (2, 4, 8)
TINY: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 9,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 7,
    "attention_bias": True,
    "mlp_bias": True,
    "initializer_range": 0.3,  # large enough that attention, activations and norms matter
}


@st.composite
def cases(draw: Any) -> tuple[dict[str, Any], Plan]:
    """Shapes and plans; heads divide, nothing else needs to: key and value heads may be fewer than ranks."""
    tp = draw(st.sampled_from(DEGREES))
    heads = tp * draw(st.integers(1, 3))
    config = transformers.LlamaConfig(
        vocab_size=draw(st.integers(2, 30)),
        hidden_size=heads,
        intermediate_size=draw(st.integers(tp, 20)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        head_dim=2 * draw(st.integers(1, 2)),
        max_position_embeddings=9,
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        initializer_range=0.3,
        attn_implementation=draw(st.sampled_from(["sdpa", "eager"])),
        bos_token_id=None,
        eos_token_id=None,
    )
    dp = draw(st.sampled_from([1, 1, 2])) if tp < 8 else 1
    plan = Plan(
        f"dp={dp},tp={tp}",
        zero=draw(st.sampled_from([0, 3])) if dp > 1 else 0,
        sp=draw(st.booleans()),
        seq=draw(st.integers(1, 9)),
        global_batch=draw(st.integers(1, 3)),
    )
    return config, plan


def batch(vocab: int, plan: Plan) -> emu.Batch:
    """Some labels do not count, but not all."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(vocab, (plan.global_batch, plan.seq), generator=g) for _ in "xy")
    ignored = torch.rand(y.shape, generator=g) < 0.25
    ignored[-1, 0] = False
    return emu.Batch(x, y.masked_fill(ignored, -100))


@given(cases(), st.sampled_from(["float64", "exact"]))
def test_loss_and_all_gradients_are_those_of_one_device(case: Any, tier: str) -> None:
    config, plan = case
    model = llama(config)
    verdict = emu.verify(model, plan, batch(config.vocab_size, plan), tier=tier, mutants="none")
    assert verdict, f"{config} {plan}: {verdict}"
    assert not verdict.without_gradient
    assert verdict.n_parameters == len(list(model.parameters()))


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("tp", DEGREES)
def test_they_are_equal_bit_for_bit_where_sums_are_exact(tp: int, sp: bool) -> None:
    """Negative control: the same with communications left out, stale, scaled, ..."""
    plan = Plan(f"tp={tp}", sp=sp, seq=7, global_batch=2)
    verdict = emu.verify(llama(**TINY), plan, tier="exact", mutants="sampled" if tp < 8 else 3)
    assert verdict, str(verdict)
    assert verdict.max_rel_err == 0
    assert verdict.mutants_killed > 0


def test_every_fault_of_every_communication_is_noticed() -> None:
    plan = Plan("tp=2", sp=True, seq=7, global_batch=2)
    verdict = emu.verify(llama(**{**TINY, "num_hidden_layers": 1}), plan, tier="exact", mutants="all")
    assert verdict, str(verdict)
    assert verdict.mutants_killed > 15


@pytest.mark.parametrize("tp, groups", [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_attention_repeats_its_own_heads(tp: int, groups: int) -> None:
    """The stock attention repeats each key head `num_key_value_groups` times: for so many queries it has on this rank."""

    def program(rank: emu.Rank) -> tuple[int, int, int]:
        model = llama(**TINY)
        emu.parallel.parallelize(model, Plan(emu.Mesh(tp=tp)), rank)
        attention = model.model.layers[0].self_attn
        return attention.num_key_value_groups, len(attention.q_proj.weight), len(attention.k_proj.weight)

    assert emu.launch(program, emu.Mesh(tp=tp)).results == [(groups, 16 // tp, 4 // min(tp, 2))] * tp


def test_a_map_by_itself_changes_nothing() -> None:
    model = llama(**TINY)
    x = torch.zeros((1, 7), dtype=torch.int64)
    before = model(x).logits
    for _ in range(2):
        llama_map(model)
    attention = copy.deepcopy(model).model.layers[0].self_attn
    assert attention.num_key_value_groups == 4
    assert type(attention).__name__ == "LlamaAttention"
    assert torch.equal(model(x).logits, before)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_shapes_leave_the_trace_of_values(axes: dict[str, int]) -> None:
    plan = Plan(emu.Mesh(**axes), sp=True, zero=3 if "dp" in axes else 0, seq=7)

    def program(rank: emu.Rank) -> None:
        distributed = emu.parallel.parallelize(llama(**TINY), plan, rank)
        optimizer = distributed.optimizer(torch.optim.AdamW, lr=1e-2)
        x = torch.zeros((4, 7), dtype=torch.int64)
        for _ in range(2):
            distributed.backward(emu.Batch(x, x, tokens=28))
            optimizer.step()

    real, shapes = (emu.launch(program, emu.Mesh(**axes), backend=backend) for backend in ("virtual", "shape"))
    assert first_difference(shapes.trace, real.trace) is None
    assert any("self_attn" in getattr(event, "scope", "") for event in real.trace.events[0])


def test_a_stock_class_with_a_loss_of_its_own_gets_whole_logits() -> None:
    class Mine(transformers.LlamaForCausalLM):
        def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self(x).logits
            assert logits.shape[-1] == TINY["vocab_size"]
            return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")

    torch.manual_seed(0)
    model = Mine(transformers.LlamaConfig(**TINY, use_cache=False))
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(13, (2, 7), generator=g) for _ in "xy")
    verdict = emu.verify(model, Plan("tp=4", sp=True, seq=7), (x, y), tier="float64")
    assert verdict, str(verdict)
    assert llama_map(model)["lm_head"] == Column(llama_map(llama(**TINY))["lm_head"].cut, gather=True)  # type: ignore[union-attr]


def test_masks_of_attention_weights_are_drawn_within_the_region() -> None:
    for p in (0.0, 0.1):
        model = llama(**TINY, attention_dropout=p)
        assert llama_map(model)["model.layers.*.self_attn"] == Region(draws=p > 0)


def test_heads_that_do_not_divide_are_an_error_that_names_the_module_and_the_number() -> None:
    with pytest.raises(PlanError, match=r"model\.layers\.0\.self_attn\.q_proj: 8 heads .* 3 ranks") as caught:
        emu.verify(llama(**TINY), Plan("tp=3", seq=7))
    assert caught.value.nearest in ("tp=2", "tp=4")
    assert "\n" not in str(caught.value).partition("\n  hint: ")[0]
