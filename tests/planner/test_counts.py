"""Parameters and FLOPs in closed form, against the models themselves, formulas of papers and published counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workloads import llama, mixtral, workload

from emu.models import Config, Decoder
from emu.planner.closed import Moe
from emu.planner.closed.flops import forward_flops, step_flops
from emu.planner.closed.params import n_params
from emu.planner.closed.step import predict


def config_of(w) -> Config:
    """The same model for emu.models: GPT where the MLP has no gate, Llama where it has one."""
    like = {"activation": "swiglu", "norm": "rms", "positions": "rotary", "bias": False} if w.gated else {}
    if w.moe:
        like |= {"experts": w.moe.experts, "top_k": w.moe.topk, "shared_ffn": w.moe.shared * w.moe.ffn}
    ffn = w.moe.ffn if w.moe else w.ffn
    return Config(w.layers, w.hidden, w.heads, w.kv_heads, w.head_dim, ffn, w.vocab, w.seq, tied=w.tied, **like)


@st.composite
def models(draw):
    heads = draw(st.integers(1, 8))
    kv_heads = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    moe = draw(st.none() | st.builds(Moe, st.integers(2, 6), st.integers(1, 2), st.integers(1, 40), st.integers(0, 1)))
    gated = draw(st.booleans()) if moe is None else True
    return workload(
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 40)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 8])),
        ffn=draw(st.integers(1, 50)),
        gated=gated,
        vocab=draw(st.integers(2, 60)),
        seq=draw(st.integers(1, 30)),
        tied=draw(st.booleans()),
        moe=moe,
        stack="nemo-2024",
    )


@given(models())
def test_parameters_are_those_of_the_model(w):
    assert n_params(w) == config_of(w).n_params()


def test_parameters_are_those_that_a_model_has():
    w = workload(layers=2, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=24, vocab=11, seq=6)
    assert n_params(w) == sum(p.numel() for p in Decoder(config_of(w), seed=0).parameters())


@pytest.mark.parametrize(
    ("w", "billions"),
    [
        (llama(), 8.03),
        (llama(layers=80, hidden=8192, heads=64, ffn=28672), 70.55),
        (llama(layers=126, hidden=16384, heads=128, ffn=53248), 405.85),
        (mixtral(), 140.6),
        (workload(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152), 174.6),
    ],
)
def test_parameters_are_those_that_are_published(w, billions):
    """Of Llama 3, Mixtral 8x22B and GPT-3 (https://arxiv.org/abs/2407.21783, mistral.ai, https://arxiv.org/abs/2104.04473)."""
    assert n_params(w) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_mla_has_the_parameters_of_deepseek_v3():
    """671 billion (https://arxiv.org/abs/2412.19437), which count no second prediction."""
    w = mixtral(
        layers=61, hidden=7168, heads=128, kv_heads=128, ffn=18432, vocab=129280, moe=Moe(256, 8, 2048, 1, 3, mla=True)
    )
    assert n_params(w) / 1e9 == pytest.approx(671, rel=2e-3)


@given(models(), st.sampled_from(["full", "causal"]))
def test_flops_are_those_of_the_model(w, pairs):
    assert forward_flops(w, pairs) == pytest.approx(config_of(w).flops(1, w.seq, pairs))


def test_flops_of_scenario_63_by_hand():
    """One block of grouped heads: 6048 forward of pairs that are attended to, 6528 of all; 18144 a step, 24192 recomputed."""
    w = workload(
        layers=1, hidden=8, heads=4, kv_heads=2, head_dim=2, ffn=16, vocab=1, seq=6, global_batch=1, recompute="full"
    )
    head = 2 * 8 * 6
    assert forward_flops(w, "causal") - head == 6048
    assert forward_flops(w, "full") - head == 6528
    assert step_flops(w, "causal") - 3 * head == 18144
    assert step_flops(w, "causal", recomputed=True) - 3 * head == 24192


@pytest.mark.parametrize("layers, h, batch", [(48, 6144, 4), (96, 12288, 64), (105, 20480, 280), (128, 25600, 512)])
def test_flops_are_korthikantis(layers, h, batch):
    """72 B L s h^2 (1 + s/6h + v/12hL); recomputing attention alone adds s/6h (https://arxiv.org/abs/2205.05198, 7 and 8)."""
    s, v = 2048, 51200
    w = workload(
        layers=layers,
        hidden=h,
        heads=64,
        kv_heads=64,
        head_dim=h // 64,
        ffn=4 * h,
        seq=s,
        global_batch=batch,
        recompute="selective",
    )
    model = 72 * batch * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert step_flops(w) == pytest.approx(model)
    hardware = 72 * batch * layers * s * h**2 * (1 + s / (3 * h) + v / (12 * h * layers))
    assert step_flops(w, recomputed=True) == pytest.approx(hardware)


@pytest.mark.parametrize(
    ("layers", "h", "heads", "mfu", "hfu"), [(48, 6144, 64, 0.415, 0.437), (96, 12288, 96, 0.514, 0.528)]
)
def test_hardware_flops_over_the_models_are_as_korthikanti_prints_them(layers, h, heads, mfu, hfu):
    """Table 5 of https://arxiv.org/abs/2205.05198, of three digits each."""
    dims = {"hidden": h, "heads": heads, "kv_heads": heads, "head_dim": h // heads, "ffn": 4 * h}
    w = workload(layers=layers, **dims, recompute="selective")
    assert step_flops(w, recomputed=True) / step_flops(w) == pytest.approx(hfu / mfu, abs=3e-3)  # as rounded


def test_flops_with_everything_recomputed_are_narayanans():
    """96 B s L h^2 (1 + s/6h + V/16Lh) (https://arxiv.org/abs/2104.04473, 3)."""
    s, v, layers, h, batch = 2048, 51200, 96, 12288, 1536
    w = workload(layers=layers, hidden=h, heads=96, kv_heads=96, ffn=4 * h, global_batch=batch, recompute="full")
    theirs = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    assert step_flops(w, recomputed=True) == pytest.approx(theirs)


def test_a_prediction_says_the_models_flops_whatever_is_recomputed():
    assert predict(workload(recompute="full")).flops == predict(workload()).flops == step_flops(workload())
