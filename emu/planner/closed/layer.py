"""The kernels of one layer for one micro-batch on one rank, in order, forward and backward: what, not how long."""

from __future__ import annotations

from collections.abc import Iterator

from .flops import attention_width
from .params import MLA_KV_RANK, MLA_NOPE, MLA_QUERY_RANK, MLA_ROPE, MLA_VALUE
from .stacks import Stack
from .work import Attention, Pass, Product, Work
from .workload import Workload

ELEMENT = 2  # bytes of an activation: bfloat16
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
WIDE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}  # of attention and the head, which fp8 leaves alone
# What an RMS norm written out in float32 moves beside reading and writing bf16 once, bytes an element: to float32 (2 + 4),
# squared (4 + 4), averaged (4), scaled (4 + 4), back (4 + 2), weighed (2 + 2), less 4. Counted in a shape run's trace.
SPELLED_NORM = 32
BACKWARD_FLOPS = 2.5  # of fused attention over its forward's, derived: five products, two of which forward has too


def layer_work(w: Workload, stack: Stack, micro_batch: int, expert: bool = False) -> tuple[Work, ...]:
    """All kernels of a layer, with experts or with an ordinary MLP.

    Args:
        micro_batch: sequences; a rank has its context-parallel share of their tokens.
    """
    tokens = w.seq * micro_batch / w.cp
    steps = w.microbatches(micro_batch)
    work = [*_attention(w, stack, micro_batch, tokens, steps)]
    if expert and w.moe is not None:
        work += _experts(w, tokens, steps)
    else:
        work += _mlp(w, "mlp", tokens, w.ffn, w.tp, steps)
    work += _between(w, stack, tokens)
    return tuple(work)


def linear(
    w: Workload, name: str, m: float, n: float, k: float, steps: int, count: float = 1, grouped: bool = False
) -> Iterator[Work]:
    """A linear map of m tokens from k to n features, and its two products in backward.

    In fp8 its input and its output's gradient are converted, and written transposed for the weight's gradient: 3 bytes
    an element; weights once a step.
    """
    fp8, dtype = w.precision == "fp8", DTYPES[w.precision]
    kernels = 2 * count if count > 1 else 0  # one conversion more or less hides among others
    if fp8:
        yield Pass(f"{name}.cast", "forward", "cast", count * (3 * m * k + k * n / steps), kernels)
    yield Product(name, "forward", m, n, k, 1, dtype, count, grouped)
    if fp8:
        yield Pass(f"{name}.cast", "input", "cast", count * 3 * m * n, kernels)
    yield Product(name, "input", m, k, n, 1, dtype, count, grouped)
    if not w.adapters:
        yield Product(name, "weight", n, k, m, 1, dtype, count, grouped)


def _attention(w: Workload, stack: Stack, micro_batch: int, tokens: float, steps: int) -> Iterator[Work]:
    h, heads = w.hidden, w.heads / w.tp
    if w.moe is not None and w.moe.mla:
        yield from linear(w, "attention.down", tokens, MLA_QUERY_RANK + MLA_KV_RANK + MLA_ROPE, h, steps)
        yield from linear(w, "attention.query", tokens, heads * (MLA_NOPE + MLA_ROPE), MLA_QUERY_RANK, steps)
        yield from linear(w, "attention.key_value", tokens, heads * (MLA_NOPE + MLA_VALUE), MLA_KV_RANK, steps)
        yield from linear(w, "attention.out", tokens, h, heads * MLA_VALUE, steps)
    else:
        # Fewer key and value heads than ranks are copied, one to a rank.
        kv_heads = max(w.kv_heads / w.tp, 1)
        yield from linear(w, "attention.qkv", tokens, (heads + 2 * kv_heads) * w.head_dim, h, steps)
        yield from linear(w, "attention.out", tokens, h, heads * w.head_dim, steps)
    width = heads * attention_width(w)
    if stack.attention == "unfused":
        yield from _spelled_out(w, stack, heads * micro_batch)
        arranged = 8 * tokens * width * ELEMENT  # heads are brought to the front and back, in four kernels
        yield Pass("attention.arrange", "forward", "elementwise", arranged, 4)
        yield Pass("attention.arrange", "input", "elementwise", arranged, 4)
        return
    flops, wide = 4 * tokens * w.seq * width / 2, WIDE[w.precision]  # causal
    yield Attention("attention", "forward", stack.attention, flops, w.seq, w.head_dim, wide)
    yield Attention("attention", "input", stack.attention, BACKWARD_FLOPS * flops, w.seq, w.head_dim, wide)
    arranged = (2 if stack.fused else 6) * tokens * width * ELEMENT  # rotary positions, heads to the front
    yield Pass("attention.arrange", "forward", "elementwise", arranged, 2)
    yield Pass("attention.arrange", "input", "elementwise", arranged, 2)


def _spelled_out(w: Workload, stack: Stack, heads: float) -> Iterator[Work]:
    """Attention whose scores are written to memory: 4 products in backward, and passes of softmax and dropout."""
    rows, columns, size = w.seq / w.cp, w.seq, w.head_dim
    scores, dtype = heads * rows * columns, WIDE[w.precision]
    dropped = 5 if stack.dropout else 0  # reads and writes the probabilities, and writes or reads a mask of a byte
    yield Product("attention.scores", "forward", rows, columns, size, heads, dtype)
    yield Pass("attention.softmax", "forward", "scores", scores * (4 + dropped), 2)
    yield Product("attention.values", "forward", rows, size, columns, heads, dtype)
    yield Product("attention.values", "input", rows, columns, size, heads, dtype)
    yield Product("attention.values", "input", columns, size, rows, heads, dtype)
    yield Pass("attention.softmax", "input", "scores", scores * (6 + dropped), 2)
    yield Product("attention.scores", "input", rows, size, columns, heads, dtype)
    yield Product("attention.scores", "input", columns, size, rows, heads, dtype)


def _mlp(w: Workload, name: str, tokens: float, ffn: float, cut: int, steps: int) -> Iterator[Work]:
    gates = 2 if w.gated else 1
    yield from linear(w, f"{name}.up", tokens, gates * ffn / cut, w.hidden, steps)
    yield from linear(w, f"{name}.down", tokens, w.hidden, ffn / cut, steps)
    yield from _activation(name, tokens * ffn / cut, gates)


def _activation(name: str, elements: float, gates: int) -> Iterator[Work]:
    yield Pass(f"{name}.activation", "forward", "elementwise", elements * ELEMENT * (gates + 1), 1)
    yield Pass(f"{name}.activation", "input", "elementwise", elements * ELEMENT * (2 * gates + 1), 1)


def _experts(w: Workload, tokens: float, steps: int) -> Iterator[Work]:
    """Router, sorting by expert, and the products of this rank's experts, each with its mean number of tokens."""
    moe, gates = w.moe, 2 if w.gated else 1
    assert moe is not None
    h, cut = w.hidden, w.expert_tp
    own = tokens / w.tp
    routed = own * h * ELEMENT * 2 + own * moe.experts * 12  # logits, softmax and top-k in float32
    yield Pass("router", "forward", "elementwise", routed, 6)
    yield Pass("router", "input", "elementwise", routed, 8)
    choices = (tokens if cut > 1 else own) * moe.topk
    yield Pass("experts.sort", "forward", "elementwise", 4 * choices * h * ELEMENT, 4)
    yield Pass("experts.sort", "input", "elementwise", 4 * choices * h * ELEMENT, 4)
    local = max(1.0, moe.experts / w.ep)
    each = choices / local
    uneven = moe.dropless
    yield from linear(w, "experts.up", each, gates * moe.ffn / cut, h, steps, local, uneven)
    yield from linear(w, "experts.down", each, h, moe.ffn / cut, steps, local, uneven)
    yield from _activation("experts", choices * moe.ffn / cut, gates)
    if moe.shared:
        yield from linear(w, "shared.up", tokens, gates * moe.ffn * moe.shared / w.tp, h, steps)
        yield from linear(w, "shared.down", tokens, h, moe.ffn * moe.shared / w.tp, steps)


def _between(w: Workload, stack: Stack, tokens: float) -> Iterator[Work]:
    """Norms and residuals, with dropout where there is any, on this rank's share of the tokens."""
    elements = (tokens / w.tp if w.sp else tokens) * w.hidden
    norms = 4 * elements * ELEMENT
    if stack.spelled_norms and w.gated:
        norms += 2 * SPELLED_NORM * elements
    if stack.dropout:
        residuals = 2 * elements * (4 * ELEMENT + 1)
    else:
        residuals = 2 * elements * 3 * ELEMENT * (0.5 if stack.fused else 1)
    yield Pass("norms", "forward", "elementwise", norms + residuals, 4)
    yield Pass("norms", "input", "elementwise", 1.25 * (norms + residuals), 5)
