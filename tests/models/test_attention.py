"""The one kernel against softmax attention written out, and rotary positions against complex numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.models import Config
from emu.models.attention import Attention, attention, causal_mask, document_mask, spelled_out
from emu.models.decoder import Block, Decoder
from emu.models.layers import Dropout
from emu.models.rotary import rotate, rotation


def plain(q, k, v):
    """Causal attention with nothing fused: [batch, heads, seq, head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    past = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~past, -math.inf).softmax(-1) @ v


def with_gradients(function, q, k, v, cotangent):
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]


def error(mine, right) -> float:
    """The largest difference relative to the largest value, over output and gradients; 0 where all is empty."""
    worst = 0.0
    for a, b in zip(mine, right, strict=True):
        assert a.shape == b.shape
        if b.numel():
            worst = max(worst, float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-3)))
    return worst


def inputs(batch, kv_heads, group, seq, head_dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seq, n, head_dim) for n in (kv_heads * group, kv_heads, kv_heads, kv_heads * group)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).transpose(1, 2) for s in shapes]


sizes = {
    "batch": st.integers(0, 2),
    "kv_heads": st.integers(1, 3),
    "group": st.integers(1, 3),
    "seq": st.integers(0, 40),
    "head_dim": st.integers(1, 9),
}


@given(**sizes, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=100)
def test_in_float64_the_kernel_is_softmax_attention(batch, kv_heads, group, seq, head_dim, seed):
    tensors = inputs(batch, kv_heads, group, seq, head_dim, torch.float64, seed)
    # A sum of at most 40 terms in another order: some 1e-15 for values of order one.
    assert error(with_gradients(attention, *tensors), with_gradients(plain, *tensors)) <= 1e-12


def unfused(q, k, v, dropout=0.0):
    return spelled_out(q, k, v, causal_mask(q.shape[-2]), Dropout(dropout))


@given(**sizes, seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=100)
def test_spelled_out_it_is_the_same_attention(batch, kv_heads, group, seq, head_dim, seed):
    tensors = inputs(batch, kv_heads, group, seq, head_dim, torch.float64, seed)
    assert error(with_gradients(unfused, *tensors), with_gradients(attention, *tensors)) <= 1e-12  # as above


@given(kv_heads=st.integers(1, 3), group=st.integers(1, 3), seq=st.integers(1, 9), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_dropped_weights_are_those_of_a_mask_over_batch_and_heads(kv_heads, group, seq, seed):
    q, k, v, _ = inputs(2, kv_heads, group, seq, 4, torch.float64, seed)
    torch.manual_seed(seed)
    out = unfused(q, k, v, 0.3)
    torch.manual_seed(seed)
    heads = kv_heads * group
    kept = torch.native_dropout(torch.ones(2, heads, seq, seq, dtype=torch.float64), 0.3, True)[0]
    scores = q @ k.repeat_interleave(group, 1).mT / 2
    weights = scores.masked_fill(causal_mask(seq), -math.inf).softmax(-1)
    assert torch.allclose(out, (weights * kept) @ v.repeat_interleave(group, 1), rtol=0, atol=1e-12)


def test_a_module_drops_weights_in_training_alone():
    module = Attention(Config(1, 8, 2, fused=False, attention_dropout=0.5))
    for p in module.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x)) and torch.equal(module(x), module(x, mask=causal_mask(6)))
    module.fused = True
    still = module(x)
    module.fused = False
    assert torch.allclose(module(x), still, rtol=0, atol=1e-5)  # float32, some hundred roundings


def saved_bytes(module, *args) -> int:
    """Bytes of all storages that autograd keeps, but the module's parameters and its arguments."""
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *args[1:]) if t is not None}
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), (t, t.untyped_storage().nbytes()))[0], lambda t: t
    ):
        out = module(*args)
    del out
    return sum(n for pointer, (_, n) in kept.items() if pointer not in own)


@pytest.mark.parametrize("batch, seq, width, heads", [(2, 32, 64, 4), (1, 64, 32, 8), (3, 48, 64, 2)])
def test_a_block_spelled_out_keeps_what_the_paper_counts(batch, seq, width, heads):
    """https://arxiv.org/abs/2205.05198, equation 1: s b h (34 + 5 a s / h) bytes in 16 bits."""
    shape = Config(1, width, heads, seq=seq, fused=False, dropout=0.1, attention_dropout=0.1)
    x = torch.zeros(batch, seq, width, dtype=torch.bfloat16)
    formula = seq * batch * width * 34 + 5 * heads * seq * seq * batch
    # A mean and a deviation for each token of two norms, which it leaves out; a CPU keeps them as narrow as the rest.
    statistics = 2 * 2 * 2 * batch * seq
    mask = causal_mask(seq)
    assert saved_bytes(Block(shape).bfloat16(), x, None, mask) == formula + statistics
    fused = Config(1, width, heads, seq=seq, dropout=0.1)  # control
    assert saved_bytes(Block(fused).bfloat16(), x, None, None) < formula - 4 * heads * seq * seq * batch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_keeps_one_byte_for_each_element(dtype):
    x = torch.ones(50, 40, dtype=dtype, requires_grad=True)
    dropout = Dropout(0.25)
    assert saved_bytes(dropout, x) == 50 * 40
    torch.manual_seed(0)
    out = dropout(x)
    assert set(out.unique().tolist()) == {0.0, torch.tensor(1 / 0.75, dtype=dtype).item()}
    assert float((out > 0).double().mean()) == pytest.approx(0.75, abs=0.05)  # 2,000 draws: five deviations
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, out)
    assert dropout.eval()(x) is x and Dropout(0.0)(x) is x


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("group", [1, 3])
def test_in_other_dtypes_it_is_softmax_attention_to_their_rounding(dtype, tolerance, group):
    tensors = inputs(2, 2, group, 33, 5, dtype)
    right = with_gradients(plain, *(t.double() for t in tensors))
    # 1e-5: 100 roundings of 2^-24; 0.03: 8 roundings of 2^-8.
    assert error(with_gradients(attention, *tensors), right) <= tolerance


def test_the_comparison_sees_heads_that_are_grouped_the_other_way_round():
    q, k, v, cotangent = inputs(2, 2, 2, 8, 4, torch.float64)
    interleaved = with_gradients(
        lambda q, k, v: plain(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), q, k, v, cotangent
    )
    assert error(with_gradients(attention, q, k, v, cotangent), interleaved) > 1e-3


@given(**sizes)
@settings(deadline=None, max_examples=30)
def test_meta_tensors_have_the_same_shapes_and_gradients(batch, kv_heads, group, seq, head_dim):
    tensors = inputs(batch, kv_heads, group, seq, head_dim, torch.float32)
    real = with_gradients(attention, *tensors)
    meta = with_gradients(attention, *(t.to("meta") for t in tensors))
    assert [t.shape for t in real] == [t.shape for t in meta]


@pytest.mark.parametrize("wrong", ["heads", "head_dim", "values", "seq"])
def test_shapes_that_do_not_fit_are_named(wrong):
    q, k, v, _ = inputs(2, 2, 2, 8, 4, torch.float32)
    if wrong == "heads":
        q = q[:, :3]
    elif wrong == "head_dim":
        q = q[..., :3]
    elif wrong == "values":
        v = v[:, :1]
    else:
        k, v = k[:, :, :5], v[:, :, :5]
    with pytest.raises(ValueError, match="do not fit") as caught:
        attention(q, k, v)
    assert str(tuple(q.shape)) in str(caught.value)


@given(batch=st.integers(0, 2), half=st.integers(1, 4), positions=st.lists(st.integers(0, 10_000), max_size=6))
@settings(deadline=None, max_examples=50)
def test_rotary_positions_multiply_by_a_complex_unit(batch, half, positions):
    x = torch.randn(batch, len(positions), 3, 2 * half, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    where = torch.tensor(positions, dtype=torch.int64)
    mine = rotate(x, rotation(where, 2 * half, 10_000.0, torch.float64))
    angles = [[p * 10_000.0 ** (-2 * i / (2 * half)) for i in range(half)] for p in positions]
    unit = torch.polar(
        torch.ones(len(positions), half, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64).view(-1, half)
    )
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * unit[:, None]
    # Angles reach 1e4, where float64 numbers lie 2e-12 apart.
    assert torch.allclose(mine, torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-10)


def test_rotary_scores_depend_on_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(at, to):
        tables = [rotation(torch.tensor([p]), 8, 100.0, torch.float64) for p in (at, to)]
        return float((rotate(q, tables[0]) * rotate(k, tables[1])).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


@st.composite
def packed(draw):
    """Documents of the given lengths, a row each: numbers that grow along the row."""
    seq = draw(st.integers(1, 20))
    rows = [
        sorted(draw(st.lists(st.integers(0, 3), min_size=seq, max_size=seq))) for _ in range(draw(st.integers(1, 2)))
    ]
    return torch.tensor(rows)


@given(packed(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_packed_documents_are_attended_to_as_if_each_came_alone(documents, kv_heads, group, head_dim, fused, seed):
    q, k, v, cotangent = inputs(
        *documents.shape[:1], kv_heads, group, documents.shape[1], head_dim, torch.float64, seed
    )

    def together(q, k, v):
        hidden = document_mask(documents)
        return attention(q, k, v, hidden) if fused else spelled_out(q, k, v, hidden, Dropout(0.0))

    def alone(q, k, v):
        rows = []
        for row, numbers in enumerate(documents):
            parts = [numbers == n for n in numbers.unique()]
            rows.append(torch.cat([plain(*(t[row : row + 1, :, part] for t in (q, k, v))) for part in parts], 2))
        return torch.cat(rows)

    found, right = (with_gradients(function, q, k, v, cotangent) for function in (together, alone))
    assert error(found, right) <= 1e-12  # as above
    if len(documents.unique()) > 1 and any(len(row.unique()) > 1 for row in documents):
        assert error(with_gradients(plain, q, k, v, cotangent), right) > 1e-6  # without the mask it is another function


def test_a_decoder_that_knows_where_documents_end_reads_each_by_itself():
    config = Config(2, 16, 4, vocab=11, seq=12, positions="rotary", document_end=0)
    tokens = torch.tensor([[3, 4, 0, 5, 6, 7, 0, 0, 8, 9, 1, 2]])
    with torch.no_grad():
        model = Decoder(config).double()
        assert model.documents(tokens).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3]]
        found = model(tokens)
        for a, b in ((0, 3), (3, 7), (7, 8), (8, 12)):
            alone = model(tokens[:, a:b], torch.arange(a, b))
            assert (found[:, a:b] - alone).abs().max() <= 1e-12 * alone.abs().max()
        config = Config(2, 16, 4, vocab=11, seq=12, positions="rotary")
        assert (Decoder(config).double()(tokens) - found).abs().max() > 1e-3
