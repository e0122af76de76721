"""What the exact tier rounds, what it refuses, what its tensors carry, and that it leaves no trace behind."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from emu.equivalence.exact import ExactMode, NotFloat64, round_to_grid
from emu.equivalence.exact_rules import GRADIENT, INSIDE, RAW, NoExactRule, rule_of, tag_of


@pytest.fixture(autouse=True)
def float64_by_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def born(shape=(3, 4)):
    """A gradient, as a backward makes it."""
    x = torch.randn(shape, requires_grad=True)
    (x * 2).backward(torch.randn(shape))
    return x.grad


# ---------------------------------------------------------------------------------------------------------- the grid
@pytest.mark.parametrize("bits", [8, 16, 28])
def test_rounding_gives_multiples_of_the_step_moves_by_at_most_a_step_and_is_idempotent(bits):
    x = torch.randn(1000) * 100
    y = round_to_grid(x, bits)
    assert torch.equal(y * 2.0**bits, (y * 2.0**bits).round())
    assert (y - x).abs().max() <= 0.52 * 2.0**-bits  # 0.5137: the boundary lies off the tie
    assert torch.equal(round_to_grid(y, bits), y)


def test_float_noise_around_grid_numbers_and_their_midpoints_collapses():
    n = torch.randn(1000).mul(2**16).round() / 2**16
    for exact in (n, n + 2.0**-17):
        for noise in (1e-15, -1e-15):
            assert torch.equal(round_to_grid(exact + noise, 16), round_to_grid(exact, 16))


def test_infinities_and_nan_pass():
    x = torch.tensor([float("inf"), -float("inf"), float("nan")])
    assert torch.equal(round_to_grid(x, 16)[:2], x[:2]) and round_to_grid(x, 16)[2].isnan()


# --------------------------------------------------------------------------------------------------- what is rounded
def test_products_round_their_operands_and_nothing_else_and_a_bias_is_added_as_it_is():
    a, b, bias = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5)
    with ExactMode(values=8) as mode:
        rounded = mode.on_grid(a, "value") @ mode.on_grid(b, "value")
        assert torch.equal(a @ b, rounded)
        assert torch.equal(torch.addmm(bias, a, b), rounded + bias)
        assert torch.equal(torch.addmm(bias, a, b, beta=2, alpha=4), 4 * rounded + 2 * bias)
        assert torch.equal(F.linear(a[0], b.T), rounded[0])
    assert not torch.equal(a @ b, rounded)


def test_sums_over_tokens_round_what_they_add_and_sums_within_a_row_do_not():
    x = torch.randn(6, 5)
    with ExactMode(values=8) as mode:
        grid = mode.on_grid(x, "value")
        assert torch.equal(x.sum(), grid.sum()) and torch.equal(x.sum(0), grid.sum(0))
        assert torch.equal(x.mean(0, keepdim=True), grid.sum(0, keepdim=True) / 6)
        assert torch.equal(x.mean(), grid.sum() / 30)
        rows = x.sum(-1)
        scalar = x[0, 0].sum()
    assert torch.equal(rows, x.sum(-1)) and torch.equal(scalar, x[0, 0])


def test_scatter_adds_and_embedding_gradients_round_what_they_add():
    index, source = torch.tensor([0, 2, 0]), torch.randn(3, 4)
    with ExactMode(values=8, gradients=9) as mode:
        grid = mode.on_grid(source, "value")
        zeros = torch.zeros(3, 4)
        for out in (
            zeros.index_add(0, index, source),
            torch.zeros(3, 4).scatter_add_(0, index[:, None].expand(3, 4), source),
            zeros.index_put((index,), source, accumulate=True),
            zeros.scatter_reduce(0, index[:, None].expand(3, 4), source, "sum"),
        ):
            assert torch.equal(out[0], grid[0] + grid[2])
        assert torch.equal(zeros.index_put((index[:2],), source[:2])[0], source[0])  # overwrites: nothing is added
        row = zeros.scatter_add(1, torch.zeros(3, 4, dtype=torch.long), source)  # within a row: gather's backward
        assert torch.equal(
            row[:, 0], torch.zeros(3, 4).scatter_add(1, torch.zeros(3, 4, dtype=torch.long), source)[:, 0]
        )
        table, g = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
        F.embedding(index, table).backward(g)
        assert torch.equal(table.grad[0], mode.on_grid(g)[0] + mode.on_grid(g)[2])


LOSSES = {
    "mse": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "huber": lambda x, y, r: F.huber_loss(x, y, reduction=r),
    "smooth l1": lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r),
    "l1": lambda x, y, r: F.l1_loss(x, y, reduction=r),
    "bce": lambda x, y, r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=r),
    "bce logits": lambda x, y, r: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction=r),
    "kl": lambda x, y, r: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction=r),
    "nll": lambda x, y, r: F.cross_entropy(x, y.argmax(-1), reduction=r),
    "nll ignored": lambda x, y, r: F.cross_entropy(x, y.argmax(-1), ignore_index=2, reduction=r),
    "nll weights": lambda x, y, r: F.cross_entropy(x, y.argmax(-1), weight=torch.arange(1.0, 6), reduction=r),
    "nll images": lambda x, y, r: F.cross_entropy(x.view(2, 3, 5).mT, y.argmax(-1).view(2, 3), reduction=r),
    "nll one": lambda x, y, r: F.cross_entropy(x[0], y[0].argmax(), reduction=r),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_torchs_values_and_gradients_up_to_the_grid(name):
    x, y = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    for reduction in ("sum", "mean", "none"):
        plain = LOSSES[name](x, y, reduction)
        (expected,) = torch.autograd.grad(plain.sum(), x)
        with ExactMode(24, 24):
            exact = LOSSES[name](x, y, reduction)
            (got,) = torch.autograd.grad(exact.sum(), x)
        assert torch.allclose(exact, plain, rtol=0, atol=30 * 2**-24)  # at most 30 terms, each rounded by half a step
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(5), torch.nn.LayerNorm(5, bias=False), torch.nn.RMSNorm(5)])
@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5), (5,), (0, 5)])
def test_norms_have_torchs_gradients_up_to_the_grid(norm, shape):
    norm = norm.double()
    x, g = torch.randn(shape, requires_grad=True), torch.randn(shape)
    expected = torch.autograd.grad(norm(x), [x, *norm.parameters()], g)
    with ExactMode(24, 24):
        got = torch.autograd.grad(norm(x), [x, *norm.parameters()], g)
    for a, b in zip(got, expected):
        assert a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=6 * 2**-24)


# --------------------------------------------------------------------------------------------------- what is refused
REFUSED = {
    "convolution": lambda x: F.conv1d(x[None], torch.randn(2, 4, 3)),
    "cumsum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.prod(),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "norm over tokens": lambda x: x.norm(),
    "clip_grad_norm_": lambda x: torch._foreach_norm([x, x]),
    "variance over tokens": lambda x: x.var(0),
    "softmax over tokens": lambda x: x.softmax(0),
    "scatter with mean": lambda x: x.scatter_reduce(0, torch.zeros(4, 6, dtype=torch.long), x, "mean"),
    "scatter with reduce": lambda x: x.scatter(0, torch.zeros(4, 6, dtype=torch.long), x, reduce="add"),
    "complex product": lambda x: x.to(torch.complex128) @ x.T.to(torch.complex128),
    "fft": lambda x: torch.fft.fft(x),
    "out=": lambda x: torch.mm(x, x.T, out=torch.empty(4, 4)),
    "reading bits": lambda x: x.view(torch.int64),
    "bincount": lambda x: torch.bincount(torch.arange(6), weights=x[0]),
    "trace": lambda x: x.trace(),
    "average pooling": lambda x: F.avg_pool1d(x, 2),
    "cdist": lambda x: torch.cdist(x, x),
    "inverse": lambda x: torch.linalg.inv(x[:, :4]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sums_inside_and_has_no_rule_is_refused_and_runs_outside(name):
    x = torch.randn(4, 6)
    REFUSED[name](x)
    with pytest.raises(NoExactRule) as error, ExactMode():
        REFUSED[name](x)
    assert error.value.op in str(error.value) and "float64" in error.value.hint and error.value.hint in str(error.value)


def test_no_operation_that_torch_calls_a_sum_or_a_product_is_free_by_its_name():
    """A second look at the list: free operations whose names say that they sum."""
    suspicious = "conv norm cumsum prod sum mean var std mm mv dot pool fft dist".split()  # noqa: SIM905
    known = {"native_layer_norm", "_fused_rms_norm", "cummax", "cummin"}  # within a row; and selections
    free = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, name, None) if full.startswith("aten::") else None
        if packet is None or not hasattr(packet, overload or "default"):
            continue
        if rule_of(getattr(packet, overload or "default")).kind == "free":
            free.add(name)
    assert "gelu" in free and "cat" in free  # the loop sees operations
    named = {n for n in free if any(s in n for s in suspicious)}
    harmless = {n for n in named if "normal" in n or "command" in n or "digamma" in n or "gamma" in n}
    assert named - harmless - known == set()


def test_rows_and_integers_are_not_refused():
    x, n = torch.randn(4, 6), torch.arange(24).view(4, 6)
    with ExactMode():
        x.clone().unsqueeze_(0).squeeze_(0).t_()
        torch._foreach_add_([x.clone(), x.clone()], [x, x])
        for f in (lambda: x.softmax(-1), lambda: x.var(-1), lambda: F.normalize(x), lambda: x[0].softmax(0)):
            f()
        n.cumsum(0), n.prod(), torch.bincount(n.flatten()), n.float().dtype
        assert torch.equal(F.one_hot(n % 3).sum(0).to(torch.float32), F.one_hot(n % 3).sum(0).double())
        x.view_as(x).chunk(2, -1), x.topk(2), torch.view_as_complex(x.view(4, 3, 2)) * torch.polar(x, x)[:, :3]


# --------------------------------------------------------------------------------------------------------- float64
def test_every_request_for_fewer_bits_gives_float64():
    outside = torch.randn(3, 4, dtype=torch.float32)
    with ExactMode():
        made = [
            torch.zeros(3, dtype=torch.float32), torch.randn(3, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.float16),
            torch.ones(3).float(), torch.ones(3).to(torch.bfloat16), torch.ones(3).half(), torch.zeros_like(outside),
            torch.ones(3).new_empty(2, dtype=torch.float32), outside + 1, outside @ outside.T, outside.mean(),
            torch.arange(3) / 2, torch.arange(3, dtype=torch.float32), torch.ones(3).softmax(0, dtype=torch.float32),
            torch.ones(3).sum(0, dtype=torch.float32), outside[0] * 2, torch.cat([outside, torch.ones(3, 4)]),
        ]  # fmt: skip
        assert torch.ones(2, dtype=torch.complex64).dtype == torch.complex128
    assert [t.dtype for t in made] == [torch.float64] * len(made)
    assert torch.equal(made[8], outside.double() + 1)


def test_factories_give_float64_whatever_the_default_is():
    torch.set_default_dtype(torch.float32)
    with ExactMode():
        assert torch.ones(3).dtype == torch.float64 == torch.nn.Linear(2, 2).weight.dtype


def test_writing_into_a_narrower_tensor_from_outside_is_an_error_that_says_what_to_do():
    outside = torch.zeros(3, dtype=torch.float32)
    with pytest.raises(NotFloat64, match=r"float32.*\.double\(\)"), ExactMode():
        outside.add_(torch.ones(3))
    with pytest.raises(NotFloat64), ExactMode():
        outside[1:].copy_(torch.ones(2))
    assert outside.sum() == 0


def test_training_a_narrower_model_from_outside_is_an_error_and_evaluating_it_is_not():
    model = torch.nn.Linear(4, 2, dtype=torch.float32)
    with ExactMode():
        with pytest.raises(NotFloat64, match=r"trains a torch.float32 .*module\.double\(\)"):
            model(torch.randn(3, 4))
        with torch.no_grad():
            assert model(torch.randn(3, 4)).dtype == torch.float64
        model.double()(torch.randn(3, 4)).sum().backward()
    assert model.weight.grad.dtype == torch.float64


# ------------------------------------------------------------------------------------------------------------- tags
def test_buffers_made_like_a_gradient_are_gradients_so_collectives_keep_the_grid():
    with ExactMode():
        g = born()
        assert tag_of(g) == GRADIENT
        buffers = [
            g.new_empty(7), torch.empty_like(g), g.clone(), g.new_zeros(2), g.T, g.view(-1)[2:], torch.cat([g, g]),
            torch.stack([g, g]), g.detach(), g.contiguous(), g * 2, g / 3, g.split(1)[0], torch.zeros(3, 4).copy_(g),
        ]  # fmt: skip
        assert [tag_of(b) for b in buffers] == [GRADIENT] * len(buffers)
        assert tag_of(torch.empty(3)) == 0  # control
        flat = torch.zeros(24)
        flat[12:].view(3, 4).copy_(g)
        assert tag_of(flat) == GRADIENT  # written through a view


def test_a_parameter_stays_a_value_whatever_an_optimizer_writes_into_it():
    with ExactMode():
        w = torch.nn.Parameter(torch.randn(3, 4))
        w.square().sum().backward()
        with torch.no_grad():
            w.add_(w.grad, alpha=-0.1)
        torch.optim.AdamW([w], foreach=True).step()
        assert tag_of(w.grad) == GRADIENT and tag_of(w) == 0 and tag_of(w.T) == 0


def test_gradients_are_found_in_checkpoints_functional_transforms_and_grad():
    seen = []

    class See(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            seen.append(tag_of(g))
            return g

    f = lambda x: See.apply(x * 3).sin()  # noqa: E731
    x = torch.randn(4, requires_grad=True)
    with ExactMode():
        f(x).sum().backward()
        torch.autograd.grad(f(x).sum(), x)
        for reentrant in (True, False):
            checkpoint(f, x, use_reentrant=reentrant).sum().backward()
        f(x).backward(torch.ones(4))
    assert seen == [GRADIENT] * 5


def test_what_softmax_and_exp_make_is_read_as_it_is_by_bmm_but_not_by_mm_nor_after_an_addition():
    p, v = torch.randn(2, 3, 4).softmax(-1), torch.randn(2, 4, 5)
    with ExactMode(values=8) as mode:
        made = torch.randn(2, 3, 4).softmax(-1)
        assert [tag_of(t) for t in (made, made.mT, made * 2, made.view(6, 4), made.exp())] == [RAW] * 5
        assert tag_of(made + 1) == 0 and tag_of(made @ v) == 0
        assert torch.equal(made @ v, torch.bmm(made, mode.on_grid(v, "value")))
        assert torch.equal(made[0] @ v[0], torch.mm(mode.on_grid(made[0], "value"), v[0]))
        assert torch.equal(p @ v, torch.bmm(mode.on_grid(p, "value"), v))  # made outside: nothing known


def test_a_kernel_reads_what_kernels_made_as_it_is_and_rounds_the_rest_once_on_entry():
    x = torch.randn(2, 3)
    with ExactMode(values=8) as mode:
        grid = mode.on_grid(x, "value")
        with mode.kernel():
            a = x * 0.3
            assert tag_of(a) == INSIDE and torch.equal(a, grid * 0.3)
        with mode.kernel():
            assert torch.equal(a + 0, a)
        with mode.kernel():
            buffer = torch.zeros(2, 3)  # of the kernel's own, which it fills part by part
            buffer[0].add_(a[0])
            assert torch.equal(buffer + 0, torch.stack([a[0], 0 * a[0]]))
        assert tag_of(a.clone()) == INSIDE and tag_of(a + 1) == 0  # copies travel between kernels, results leave them
        with mode.kernel(entry=False):
            assert torch.equal(x * 0.3, x * 0.3) and tag_of(x) == 0
            buffer = torch.zeros(2, 3)
            assert torch.equal(buffer.add_(x), x)
        with pytest.raises(KeyError), mode.kernel():
            raise KeyError
        assert mode.inside == 0 and torch.equal(x.sum(0), grid.sum(0))


# ---------------------------------------------------------------------------------------------------- leaving no trace
ENGINE = torch.autograd._engine_run_backward


def test_torchs_engine_is_back_after_exit_after_errors_and_after_nesting():
    assert torch.autograd._engine_run_backward is ENGINE
    with ExactMode() as mode:
        assert torch.autograd._engine_run_backward is not ENGINE
        with mode, ExactMode():
            pass
        assert torch.autograd._engine_run_backward is not ENGINE
    assert torch.autograd._engine_run_backward is ENGINE
    with pytest.raises(NoExactRule), ExactMode():
        torch.randn(3, requires_grad=True).cumsum(0).sum().backward()
    assert torch.autograd._engine_run_backward is ENGINE


def test_threads_come_and_go_in_any_order_and_threads_outside_are_untouched():
    ready, done, failures = threading.Barrier(5), threading.Barrier(5), []

    def rank(i):
        try:
            with ExactMode():
                ready.wait(10)
                g = born()
                assert tag_of(g) == GRADIENT
                if i:
                    done.wait(10)
            if not i:
                assert torch.autograd._engine_run_backward is not ENGINE
                done.wait(10)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    ready.wait(10)
    assert tag_of(born()) == 0  # this thread has no mode
    done.wait(10)
    for t in threads:
        t.join(10)
    assert failures == [] and torch.autograd._engine_run_backward is ENGINE


def test_the_random_state_is_what_it_is_without_the_mode():
    def draw():
        torch.manual_seed(3)
        x = F.dropout(torch.randn(4, 4, requires_grad=True), 0.5)
        x.matmul(x.T).sum().backward()
        return torch.randn(3), torch.get_rng_state()

    plain = draw()
    with ExactMode(certify=True):
        exact = draw()
    assert all(torch.equal(a, b) for a, b in zip(plain, exact))


def test_no_tensor_outlives_its_last_use():
    with ExactMode(certify=True) as mode:
        x = torch.randn(4, 4, requires_grad=True)
        with mode.kernel():
            y = x * 2
        z = (y @ y).softmax(-1)
        z.sum().backward()
        refs = [weakref.ref(t) for t in (x, y, z, x.grad)]
        del x, y, z
        gc.collect()
        assert [r() for r in refs] == [None] * 4
