"""The kernels of emu's own stack: what a shape run of emu.models.Decoder records, without running it.

Each is the Kernel that a trace holds, with its name, bytes and dims; only where in the model it ran is left out. So they
are priced by emu.cost.kernel_s as those of a trace are. Models with an ordinary MLP, biases and layer norms (GPT).
"""

from __future__ import annotations

from collections.abc import Iterator

from emu.trace.events import Kernel

from .workload import Workload

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
E = 2  # bytes of bfloat16, which everything but the loss and the optimizer computes in
# Kernels over tokens alone, of a loss over a cut vocabulary. Counted in shape runs.
LOSS_SMALL_FORWARD, LOSS_SMALL_BACKWARD = 14, 9


def kernel(
    name: str, phase: str, bytes_: float, flops: float = 0, dims: tuple[int, ...] = (), dtype: str = "bfloat16"
) -> Kernel:
    return Kernel(name, "", phase, int(flops), int(bytes_), dtype, dims, "default")


def product(name: str, phase: str, m: int, n: int, k: int, more_bytes: int = 0, batch: int = 1) -> Kernel:
    """[m, k] @ [k, n]."""
    bytes_ = E * batch * (m * k + k * n + m * n) + more_bytes
    return kernel(name, phase, bytes_, 2 * batch * m * n * k, (batch, m, n, k))


def copied(n: int, accumulated: bool) -> Kernel:
    """A gradient of n elements into its buffer; added there after the first micro-batch."""
    return kernel("add_" if accumulated else "copy_", BACKWARD, (6 if accumulated else 4) * n, n if accumulated else 0)


def forward_layer(w: Workload, micro_batch: int) -> list[Kernel]:
    """A block, forward, on one tensor-parallel rank."""
    h, f, tokens = w.hidden, w.ffn // w.tp, w.seq * micro_batch
    own = tokens // w.tp if w.sp else tokens
    return [
        _norm(own, h),
        *(product("addmm", FORWARD, tokens, n, h, E * n) for n in _heads(w)),
        _attention(w, micro_batch, FORWARD),
        *_row_parallel(w, tokens, own, _heads(w)[0]),
        _add(FORWARD, own * h),
        _norm(own, h),
        product("addmm", FORWARD, tokens, f, h, E * f),
        kernel("gelu", FORWARD, 2 * E * tokens * f, tokens * f),
        *_row_parallel(w, tokens, own, f),
        _add(FORWARD, own * h),
    ]


def backward_layer(w: Workload, micro_batch: int, accumulated: bool = False) -> list[Kernel]:
    """A block, backward; a linear map has two products, a sum for its bias, and two gradients to put away."""
    h, f, tokens = w.hidden, w.ffn // w.tp, w.seq * micro_batch
    own = tokens // w.tp if w.sp else tokens
    found = [*_linear_backward(tokens, h, f, own, accumulated)]
    found.append(kernel("gelu_backward", BACKWARD, 3 * E * tokens * f, tokens * f))
    found += _linear_backward(tokens, f, h, tokens, accumulated)
    found += _norm_backward(own, h, accumulated)
    found += _linear_backward(tokens, h, _heads(w)[0], own, accumulated)
    found.append(_attention(w, micro_batch, BACKWARD))
    for i, n in enumerate(_heads(w)):
        found += _linear_backward(tokens, n, h, tokens, accumulated, added=w.tp > 1 and i > 0)
        if w.tp == 1 and i:
            found.append(_add(BACKWARD, tokens * h))
    found += _norm_backward(own, h, accumulated)
    return found


def first_stage(w: Workload, micro_batch: int, accumulated: bool = False) -> list[Kernel]:
    """Embedding of tokens and positions, forward and backward."""
    h, v, tokens = w.hidden, w.vocab // w.tp, w.seq * micro_batch
    own = tokens // w.tp if w.sp else tokens
    found = [
        kernel("arange", FORWARD, 8 * w.seq, dtype="int64"),
        kernel("embedding", FORWARD, 2 * E * tokens * h + 8 * tokens),
        kernel("embedding", FORWARD, 2 * E * w.seq * h + 8 * w.seq),
        kernel("add", FORWARD, E * (2 * own * h + w.seq * h), own * h),
        kernel("sum", BACKWARD, E * (own * h + w.seq * h), own * h),
        kernel("embedding_dense_backward", BACKWARD, 2 * E * w.seq * h + 8 * w.seq, w.seq * h),
        copied(w.seq * h, accumulated),
        kernel("embedding_dense_backward", BACKWARD, E * (v * h + tokens * h) + 8 * tokens, v * h),
        copied(v * h, accumulated),
    ]
    if w.tp > 1:  # tokens of other ranks' parts of the vocabulary are masked
        found += [kernel("masked_fill_", FORWARD, 2 * E * tokens * h, tokens * h)]
        found += [kernel("lt", FORWARD, 9 * tokens, dtype="bool") for _ in range(5)]
    return found


def last_stage(w: Workload, micro_batch: int, accumulated: bool = False) -> list[Kernel]:
    """The last norm, the head, and cross entropy, which passes over float32 logits."""
    h, v, tokens = w.hidden, w.vocab // w.tp, w.seq * micro_batch
    own = tokens // w.tp if w.sp else tokens
    logits = tokens * v
    forward = (8, 8, 4) if w.tp > 1 else (8, 4)  # bytes a logit of each kernel over all logits
    backward = (8, 8, 8, 8) if w.tp > 1 else (8, 12)
    found = [
        _norm(own, h),
        product("mm", FORWARD, tokens, v, h),
        *([kernel("amax", FORWARD, E * logits, logits)] if w.tp > 1 else []),
        kernel("_to_copy", FORWARD, 6 * logits, dtype="float32"),
        *(kernel("loss", FORWARD, n * logits, logits, dtype="float32") for n in forward),
        *([kernel("_to_copy", BACKWARD, 6 * logits, dtype="float32")] if w.tp > 1 else []),
        *(kernel("loss", BACKWARD, n * logits, logits, dtype="float32") for n in backward),
        kernel("_to_copy", BACKWARD, 6 * logits),
        product("mm", BACKWARD, v, h, tokens),
        product("mm", BACKWARD, tokens, h, v),
        copied(v * h, accumulated),
        *_norm_backward(own, h, accumulated)[:1],
        *(copied(h, accumulated) for _ in range(2)),
    ]
    if w.tp > 1:
        found += [kernel("loss", FORWARD, 9 * tokens) for _ in range(LOSS_SMALL_FORWARD)]
        found += [kernel("loss", BACKWARD, 9 * tokens) for _ in range(LOSS_SMALL_BACKWARD)]
    return found


def _heads(w: Workload) -> tuple[int, int, int]:
    """Widths of queries, keys and values on a rank."""
    return w.heads * w.head_dim // w.tp, w.kv_heads * w.head_dim // w.tp, w.kv_heads * w.head_dim // w.tp


def _norm(tokens: int, h: int) -> Kernel:
    return kernel("native_layer_norm", FORWARD, 2 * E * tokens * h + 4 * h + 4 * tokens, tokens * h)


def _norm_backward(tokens: int, h: int, accumulated: bool) -> list[Kernel]:
    """The norm's backward, the residual's gradient added, and gradients of its weight and bias."""
    backward = kernel("native_layer_norm_backward", BACKWARD, 3 * E * tokens * h + 8 * h + 4 * tokens, tokens * h)
    return [backward, _add(BACKWARD, tokens * h), copied(h, accumulated), copied(h, accumulated)]


def _add(phase: str, n: int) -> Kernel:
    return kernel("add", phase, 3 * E * n, n)


def _attention(w: Workload, micro_batch: int, phase: str) -> Kernel:
    """Fused attention; emu counts twice the forward's operations for backward, as formulas do."""
    heads, kv_heads = micro_batch * w.heads // w.tp, micro_batch * w.kv_heads // w.tp
    each, statistics = E * w.seq * w.head_dim, 4 * heads * w.seq
    flops = 4 * heads * w.head_dim * w.seq * (w.seq + 1) // 2
    name = "_scaled_dot_product_flash_attention_for_cpu" + ("_backward" if phase == BACKWARD else "")
    times = 2 if phase == BACKWARD else 1
    return kernel(
        name,
        phase,
        times * 2 * (heads + kv_heads) * each + statistics,
        times * flops,
        (heads, w.seq, w.seq, w.head_dim),
    )


def _row_parallel(w: Workload, tokens: int, own: int, k: int) -> Iterator[Kernel]:
    """A map whose input is cut: its bias is added after the sum over ranks."""
    if w.tp == 1:
        yield product("addmm", FORWARD, tokens, w.hidden, k, E * w.hidden)
        return
    yield product("mm", FORWARD, tokens, w.hidden, k)
    yield kernel("add", FORWARD, 2 * E * own * w.hidden + E * w.hidden, own * w.hidden)


def _linear_backward(
    tokens: int, out: int, into: int, own: int, accumulated: bool, added: bool = False
) -> list[Kernel]:
    """From the gradient of `out` features to that of `into`; `own`: tokens that the bias's gradient is summed over."""
    inputs = product("mm", BACKWARD, tokens, into, out)
    if added:  # to the gradient that another map has left there
        inputs = product("addmm_", BACKWARD, tokens, into, out, E * tokens * into)
    return [
        inputs,
        product("mm", BACKWARD, out, into, tokens),
        kernel("sum", BACKWARD, E * (own * out + out), own * out),
        copied(out, accumulated),
        copied(out * into, accumulated),
    ]
