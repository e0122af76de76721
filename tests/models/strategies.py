"""Random small decoders."""

from hypothesis import strategies as st

from emu.models.config import Config


@st.composite
def configs(draw, dropout: bool = False, unfused: bool = False, experts: bool = False) -> Config:
    """Configs small enough to run, over every variant there is; those that are named only where they are asked for."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    positions = draw(st.sampled_from(["learned", "rotary"]))
    head_dim = draw(st.integers(1, 4)) * (2 if positions == "rotary" else 1)
    fused = not (unfused and draw(st.booleans()))
    mixture = draw(mixtures()) if experts and draw(st.booleans()) else {}
    return Config(
        layers=draw(st.integers(1, 2)),
        width=draw(st.integers(2, 12)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=draw(st.integers(1, 20)),
        vocab=draw(st.integers(2, 30)),
        seq=draw(st.integers(1, 9)),
        positions=positions,
        norm=draw(st.sampled_from(["layer", "rms"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        dropout=0.25 if dropout and draw(st.booleans()) else 0.0,
        tied=draw(st.booleans()),
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
        fused=fused,
        attention_dropout=0.25 if dropout and not fused and draw(st.booleans()) else 0.0,
        **mixture,
    )


@st.composite
def mixtures(draw) -> dict:
    """The fields of a Config that say how experts are chosen and used."""
    n = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, n))
    constant = top_k == 1 < n  # then the only weight must not be divided by itself
    return {
        "experts": n,
        "top_k": top_k,
        "shared_ffn": draw(st.sampled_from([0, 3])),
        "router": "softmax-topk" if constant else draw(st.sampled_from(["softmax-topk", "topk-softmax"])),
        "renormalize": not constant and draw(st.booleans()),
        "balance": draw(st.sampled_from([0.0, 0.5])),
        "capacity": draw(st.sampled_from([None, 0.3, 1.0])),
    }
