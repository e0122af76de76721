"""Problems for tiled attention, what may be seen in them, and the bytes that all steps count."""

import torch
from hypothesis import strategies as st

from emu.parallel.attention.flash import FlashBackward, FlashForward
from emu.parallel.attention.tiles import Tiles


@st.composite
def problems(draw, dtypes=(torch.float64,)):
    """q, k, v, and causal, documents, tiles: any sizes, any tiles, uneven ones too."""
    batch, kv_heads, group, head_dim = (draw(st.integers(1, n)) for n in (3, 2, 3, 9))
    queries = draw(st.integers(1, 30))
    documents = None
    if draw(st.booleans()):
        row = st.lists(st.integers(0, 3), min_size=queries, max_size=queries)
        documents = torch.tensor([draw(row) for _ in range(draw(st.sampled_from((1, batch))))])
    keys = queries if documents is not None else draw(st.one_of(st.just(queries), st.integers(1, 30)))
    draws = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    sizes = ((kv_heads * group, queries), (kv_heads, keys), (kv_heads, keys))
    dtype = draw(st.sampled_from(dtypes))
    q, k, v = (torch.randn(batch, h, n, head_dim, generator=draws, dtype=torch.float64).to(dtype) for h, n in sizes)
    tiles = Tiles(*(draw(st.integers(1, 12)) for _ in range(4)))
    return (q, k, v), {"causal": draw(st.booleans()), "documents": documents, "tiles": tiles}


def visible(q, k, causal, documents):
    """[batch or 1, 1, queries, keys] bool, pair by pair."""
    seen = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen = seen.tril()
    return seen if documents is None else seen & (documents[:, None, :, None] == documents[:, None, None, :])


def counted(problem):
    """Bytes read and written, forward and backward, as the steps count them."""
    (q, k, v), options = problem
    forward = FlashForward(q, k, v, **options)
    steps = list(forward)
    back = FlashBackward(torch.ones_like(q), q, k, v, forward.out, forward.lse, **options)
    back_steps = list(back)
    for walk, taken in ((forward, steps), (back, back_steps)):
        assert walk.read_bytes == sum(s.read_bytes for s in taken)
        assert walk.written_bytes == sum(s.written_bytes for s in taken)
        assert [s.index for s in taken] == list(range(len(taken)))
    return (forward.read_bytes, forward.written_bytes), (back.read_bytes, back.written_bytes), forward.shape
