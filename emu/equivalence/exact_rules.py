"""Which rule of the exact tier governs which torch operation.

The list is an allowlist: an operation that reads floating-point tensors and that no rule names is refused, because if
it sums inside, the order of that sum would depend on how the work is cut, and equality would be luck.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

aten = torch.ops.aten

# What a tensor carries through the exact tier: bits of its `_exact` attribute.
GRADIENT = 1  # comes from where a backward starts: rounds to the gradient grid
RAW = 2  # comes from exp or softmax: attention may normalise early or late, so bmm reads it as it is
INSIDE = 4  # made inside a kernel: what a kernel made, the next kernel reads as it is
ALL = GRADIENT | RAW | INSIDE


def set_tag(x: Any, tag: int) -> None:
    """Marks a tensor: torch lets any attribute hang on one, which types do not know of."""
    x._exact = tag


def tag_of(x: torch.Tensor) -> int:
    """What a tensor carries (GRADIENT, RAW, INSIDE). A trainable leaf is a value, whatever was written into it."""
    tag = getattr(x, "_exact", 0)
    if tag & GRADIENT and x.requires_grad and x.is_leaf and x._base is None:
        return tag & ~GRADIENT
    return tag


class NoExactRule(RuntimeError):
    """An operation that may sum inside, and for which the exact tier has no rule.

    Fields: op (str, the operation's name), message (str, what is wrong) and hint (str, what to do).
    """

    def __init__(self, op: str, why: str = "it may sum inside, and no rule says how to make that sum exact"):
        self.op = op
        self.hint = (
            "use tier='float64' for this program (--tier float64 on the command line); or write the operation with "
            "matrix products and sums, which the exact tier knows; or run it inside rank.kernel(...) if it never sums over tokens"
        )
        self.message = f"{op} cannot run in the exact tier: {why}"
        super().__init__(f"{self.message}. What to do: {self.hint}.")


class Rule(NamedTuple):
    """How one operation is treated: a kind, the tags that its results inherit, and which arguments it writes to."""

    kind: str
    keeps: int
    writes: tuple[int | str, ...]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Kind "matmul": positions of the two operands, which are rounded as they are read.
MATMUL = {"mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1)}
# The same with something added: the product is exact, then one rounded addition.
ADD_MATMUL = {"addmm": "mm", "addmm_": "mm", "baddbmm": "bmm", "baddbmm_": "bmm", "addmv": "mv", "addmv_": "mv"}
# Kind "scatter": position of what is added up.
SCATTER = {
    "index_add": 3, "index_add_": 3, "scatter_add": 3, "scatter_add_": 3,
    "index_put": 2, "index_put_": 2, "_index_put_impl_": 2, "_unsafe_index_put": 2,
    "scatter_reduce": 3, "scatter_reduce_": 3, "embedding_dense_backward": 0,
}  # fmt: skip
# Kind "attention": how many leading operands a fused attention rounds as it reads them (then: query, key, value).
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": 3,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 4,
}
# Kind "rows": operations that sum along the dims at this position, which must not be the tokens' (dim 0).
ROWS = {
    "_softmax": 1, "_log_softmax": 1, "_safe_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2,
    "logsumexp": 1, "var": 1, "var_mean": 1, "std": 1, "std_mean": 1, "linalg_vector_norm": 2, "norm": 2,
}  # fmt: skip
# Of these, the ones that may run along dim 0 of a vector: it is one row.
ONE_ROW = _words("_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data logsumexp")
MAKES_RAW = {"_softmax", "_safe_softmax", "_softmax_backward_data", "exp", "exp_"}
# Kind "loss": element-wise losses, and the position of their reduction argument (0 none, 1 mean, 2 sum).
LOSS = {
    "mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4, "nll_loss_forward": 3, "nll_loss2d_forward": 3,
}  # fmt: skip
# Kind "norm_backward": the weight's and bias's gradients are sums over tokens.
NORM_BACKWARD = {"native_layer_norm_backward", "_fused_rms_norm_backward"}

# Results are copies or pieces of what is read: every tag stays.
COPIES = _words("""
    clone _to_copy copy copy_ cat stack contiguous _unsafe_view lift lift_fresh lift_fresh_copy detach_ new_empty
    new_empty_strided new_zeros new_ones new_full empty_like zeros_like ones_like full_like rand_like randn_like
    index index_select gather take masked_select repeat roll flip constant_pad_nd tril triu tril_ triu_ diag_embed
    rot90 slice_backward select_backward diagonal_backward slice_scatter select_scatter as_strided_scatter
    index_copy index_copy_ index_fill index_fill_ masked_scatter masked_scatter_ scatter scatter_ view_copy
    slice_copy select_copy expand_copy permute_copy transpose_copy squeeze_copy unsqueeze_copy split_with_sizes_copy
    _reshape_copy alias_copy complex _conj_physical resize_ set_ squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_
    as_strided_
""")
# Results are the operand scaled or masked: what comes from a softmax still does.
SCALES = _words("""
    mul mul_ div div_ masked_fill masked_fill_ where native_dropout native_dropout_backward neg neg_
""")
# Nothing is summed, or only within a row of the last dims: left alone.
FREE = _words("""
    fill fill_ zero_ bernoulli bernoulli_ uniform_ normal_ exponential_ random_ geometric_ cauchy_ log_normal_
    trunc_normal_ multinomial native_dropout native_dropout_backward normal poisson binomial _local_scalar_dense
    is_nonzero equal max min amax amin aminmax argmax argmin any all sort argsort topk kthvalue median nanmedian
    mode cummax cummin nonzero nonzero_static count_nonzero unique_dim _unique2 searchsorted bucketize isin polar
    glu glu_backward _prelu_kernel _prelu_kernel_backward log_sigmoid_forward log_sigmoid_backward softplus_backward
    elu_backward leaky_relu_backward hardtanh_backward hardswish hardswish_ hardswish_backward hardsigmoid_backward
    mish_backward rrelu_with_noise softshrink_backward hardshrink_backward logit_backward embedding
    native_layer_norm _fused_rms_norm nll_loss_backward nll_loss2d_backward mse_loss_backward
    smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward floor_divide
    floor_divide_ fmod remainder value_selecting_reduction_backward _fused_adam_ _fused_adamw_ _fused_sgd_
    _fused_adagrad_ _amp_update_scale_ _amp_foreach_non_finite_check_and_unscale_
""")

_rules: dict[torch._ops.OpOverload, Rule] = {}


def rule_of(func: torch._ops.OpOverload) -> Rule:
    """The rule of an operation, looked up once and kept.

    func: an overload such as torch.ops.aten.mm.default. Kind "refused" where no rule is known.
    """
    rule = _rules.get(func)
    if rule is None:
        rule = _rules[func] = _classify(func)
    return rule


def _classify(func: torch._ops.OpOverload) -> Rule:
    schema = func._schema
    name = schema.name.partition("::")[2]
    writes = tuple(
        a.name if a.kwarg_only else i
        for i, a in enumerate(schema.arguments)
        if a.alias_info is not None and a.alias_info.is_write
    )
    kind = _kind(func, schema)
    if any(a.is_out for a in schema.arguments) and kind not in ("free", "view"):
        kind = "refused"  # a decomposition would not fill the out= tensor
    if kind == "view" or name in COPIES:
        keeps = ALL
    elif name in SCALES:
        keeps = GRADIENT | RAW
    else:
        keeps = GRADIENT
    return Rule(kind, keeps, writes)


def _kind(func: torch._ops.OpOverload, schema: torch._C.FunctionSchema) -> str:
    name = schema.name.partition("::")[2]
    if func.namespace == "aten":
        for kind, names in (
            ("matmul", MATMUL),
            ("add_matmul", ADD_MATMUL),
            ("scatter", SCATTER),
            ("attention", ATTENTION),
            ("rows", ROWS),
            ("loss", LOSS),
            ("norm_backward", NORM_BACKWARD),
            ("sum", ("sum",)),
            ("mean", ("mean",)),
        ):
            if name in names:
                return kind
        if name == "view" and func._overloadname == "dtype":
            return "refused"  # reads the bits of a number that has more of them here
        if name in ("scatter", "scatter_") and "reduce" in func._overloadname:
            return "refused"
        if name == "_unsafe_view" or any(r.alias_info and not r.alias_info.is_write for r in schema.returns):
            return "view" if name != "lift_fresh" else "free"
        if name in COPIES or name in FREE or name in SCALES:
            return "free"
        if name.startswith("_foreach_"):  # one operation on a list of tensors: as free as on one
            single = getattr(aten, name.removeprefix("_foreach_"), None)
            return "free" if single and any(_kind(o, o._schema) == "free" for o in _overloads(single)) else "refused"
    pointwise = any(torch.Tag.pointwise in o.tags for o in _overloads(func.overloadpacket))
    return "free" if pointwise else "refused"


def _overloads(packet: torch._ops.OpOverloadPacket) -> list[torch._ops.OpOverload]:
    return [getattr(packet, o) for o in packet.overloads()]
