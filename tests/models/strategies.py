"""Random small decoders."""

from hypothesis import strategies as st

from emu.models.config import Config


@st.composite
def configs(draw, dropout: bool = False) -> Config:
    """Configs small enough to run, over every variant there is."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    positions = draw(st.sampled_from(["learned", "rotary"]))
    head_dim = draw(st.integers(1, 4)) * (2 if positions == "rotary" else 1)
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
    )
