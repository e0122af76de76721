"""Decoders with mixtures of experts, trained by plans: gradients, losses and a step as on one device, bit for bit."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import emu
from emu.models import Config, Decoder
from emu.parallel.expert import experts as sharing


def decoder(**options):
    kind = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
    shape = {
        "layers": 1,
        "width": 8,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 5,
        "vocab": 11,
        "seq": 7,
        "experts": 4,
        "top_k": 2,
    }
    return Config(**{**kind, **shape, **options})


@st.composite
def plans(draw):
    """Meshes of 2 to 8 ranks, experts on any of them: (axes, config, options of the plan)."""
    dp, tp = draw(st.sampled_from([(2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (2, 3), (4, 2)]))
    ranks = dp * tp
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    etp = draw(st.sampled_from([n for n in (1, 2, 3) if ranks // ep % n == 0]))
    experts = draw(st.integers(max(ep, 2), 9))
    top_k = draw(st.integers(1, min(3, experts)))
    config = decoder(
        heads=6 if tp == 3 else 4,
        width=12 if tp == 3 else 8,
        experts=experts,
        top_k=top_k,
        router=draw(st.sampled_from(["softmax-topk", "topk-softmax"])) if top_k > 1 else "softmax-topk",
        shared_ffn=draw(st.sampled_from([0, 4])),
        balance=draw(st.sampled_from([0.0, 0.1])),
        activation=draw(st.sampled_from(["swiglu", "gelu"])),
    )
    options = {
        "sp": tp > 1 and draw(st.booleans()),
        "zero": draw(st.integers(0, 3)),
        "microbatches": draw(st.integers(1, 2)),
        "capacity": draw(st.sampled_from([None, 0.75, 1.0])),
        "global_batch": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 99)),
    }
    return {"dp": dp, "tp": tp, "ep": ep, "etp": etp}, config, options


def verified(axes, config, options, mutants="none"):
    plan = emu.Plan(emu.Mesh(**axes), seq=config.seq, **options)
    return emu.verify(lambda: Decoder(config), plan, mutants=mutants)


@given(plans())
@settings(max_examples=8)
@example(
    ({"dp": 8, "tp": 1, "ep": 8, "etp": 1}, decoder(experts=9, top_k=1), {"global_batch": 3})
)  # ranks without rows
@example(({"dp": 1, "tp": 4, "ep": 2, "etp": 2}, decoder(balance=0.1), {"sp": True, "capacity": 0.5, "zero": 1}))
def test_any_plan_trains_a_mixture_as_one_device_does(drawn):
    verdict = verified(*drawn)
    assert verdict, verdict.why


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_every_sampled_mutant_is_noticed(over):
    axes = {"dp": 2, "tp": 2, "ep": 2, "etp": 1}
    verdict = verified(axes, decoder(balance=0.1, balance_over=over), {"sp": True, "global_batch": 3}, mutants=12)
    assert verdict and not verdict.survivors, verdict.why
    assert verdict.mutants_killed + verdict.mutants_equivalent == verdict.mutants


@pytest.mark.parametrize("axes", [{"dp": 4, "tp": 1, "ep": 2, "etp": 1}, {"dp": 2, "tp": 2, "ep": 1, "etp": 2}])
def test_outputs_that_come_back_to_other_tokens_are_told(axes, monkeypatch):
    monkeypatch.setattr(sharing, "inverse_of", lambda order: order)
    assert not verified(axes, decoder(), {"global_batch": 4})
