"""Models of awkward sizes, every way to shard them, steps of training on ranks, and plain torch taking the same steps."""

from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

import emu
from emu.equivalence.exact import ExactMode, round_to_grid
from emu.models import GPT, Config
from emu.virtual.launch import run_virtual

from .programs import batch, configs


class Mlp(nn.Module):
    """Layers of any widths, 1 too. x: [rows, widths[0]]; y: [rows]."""

    def __init__(self, widths, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def loss_sum(self, x, y):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.layers[-1](x), y, reduction="sum", ignore_index=-100)


class Made(NamedTuple):
    """What model to make: of a decoder its config, of an Mlp its widths."""

    of: Any

    def model(self):
        return GPT(self.of, seed=0) if isinstance(self.of, Config) else Mlp(self.of)

    def names(self):
        return [name for name, _ in self.model().named_parameters()]

    def batch(self, rows, seed=0):
        if isinstance(self.of, Config):
            return batch(self.of, rows, seed)
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.of[0], generator=g, dtype=torch.float64)
        y = torch.randint(0, self.of[-1], (rows,), generator=g)
        y[torch.rand(rows, generator=g) < 0.2] = -100
        y[0] = 0  # at least one counts
        return emu.Batch(x.to(torch.get_default_dtype()), y)


widths = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(lambda some: (*some, 3))
mlps = st.builds(Made, widths)
decoders = st.builds(Made, configs)
models = mlps | decoders


@st.composite
def options(draw, size, names, precisions=(None,)):
    """Arguments of DataParallel over so many ranks, for a model with parameters of these names."""
    zero = draw(st.integers(0, 3))
    divisors = [n for n in range(1, size + 1) if not size % n]
    how = {"zero": zero, "find_unused": draw(st.booleans())}
    if zero:
        how["replicate"] = draw(st.sampled_from(divisors))
        how["by_owner"] = draw(st.booleans())
    if zero == 3:
        how["reshard_after_forward"] = draw(st.booleans())
        how["prefetch"] = draw(st.integers(0, 3))
    else:
        how["bucket_bytes"] = draw(st.sampled_from([1, 100, 600, 2**25]))
    if draw(st.booleans()):
        how["replicated"] = draw(st.sampled_from([names[:1], names[::3], ["*"]]))
    how["precision"] = draw(st.sampled_from(precisions))
    return how


class Rule(NamedTuple):
    """An optimizer: kind, options, options of each of two groups of parameters (None: one group), and clipping."""

    kind: Any
    options: dict
    groups: tuple | None = None
    clip: float | None = None
    norm: float = 2.0

    def cut(self, names):
        """The groups, by names: every other parameter in each."""
        if self.groups is None:
            return None
        return [{"params": names[i::2], **group} for i, group in enumerate(self.groups) if names[i::2]]


SGD = Rule(torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})
ADAMW = Rule(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})
rules = st.builds(
    Rule._replace,
    st.sampled_from([SGD, ADAMW]),
    groups=st.sampled_from([None, ({"lr": 0.02}, {"weight_decay": 0.3})]),
    clip=st.sampled_from([None, 0.01, 1.0]),
    norm=st.sampled_from([2.0, float("inf")]),
)


def fits(names, rule):
    """The rule, for models of so few parameters that one group stays empty too."""
    return rule if len(names) > 1 else rule._replace(groups=None)


def states_of(optimizer, parameters):
    """(state, parameter's name) -> its value now, of an optimizer of torch's own."""
    return {
        (key, name): value.detach().clone()
        for name, p in parameters.items()
        for key, value in optimizer.state[p].items()
        if isinstance(value, torch.Tensor)
    }


def on_one_device(made, data, rule, steps):
    """Plain torch: `steps` steps on the whole of each batch."""
    model = made.model()
    parameters = dict(model.named_parameters())
    groups = rule.cut(list(parameters))
    if groups is None:
        groups = [{"params": list(parameters)}]
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]
    optimizer = rule.kind(groups, **rule.options)
    losses, gradients = [], {}
    for step in range(steps):
        some = data[step % len(data)]
        optimizer.zero_grad()
        loss = model.loss_sum(some.x, some.y)
        loss.backward()
        for p in model.parameters():
            p.grad.div_(some.tokens)
        losses.append(loss.detach() / some.tokens)
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        if rule.clip is not None:
            if rule.norm == 2.0:
                norm = sum((p.grad * p.grad).sum() for p in model.parameters()).sqrt()
            else:
                norm = torch.stack([p.grad.abs().max() for p in model.parameters()]).max()
            for p in model.parameters():
                p.grad.mul_((rule.clip / (norm + 1e-6)).clamp(max=1.0))
        optimizer.step()
    states = states_of(optimizer, parameters)
    values = {name: p.detach().clone() for name, p in parameters.items()}
    return {"loss": losses, "gradients": gradients, "values": values, "states": states}


def on_ranks(rank, made, data, rule, steps, sizes, how, microbatches=1):
    """The same steps under data parallelism."""
    dist = emu.DataParallel(made.model(), rank, "dp", **how)
    optimizer = dist.optimizer(rule.kind, rule.cut(made.names()), clip=rule.clip, norm=rule.norm, **rule.options)
    losses, gradients = [], {}
    for step in range(steps):
        some = data[step % len(data)]
        optimizer.zero_grad()
        losses.append(dist.backward(some, sizes, microbatches))
        gradients = dict(dist.gather_gradients())
        optimizer.step()
    return outcome(dist, optimizer, losses, gradients)


def accumulates(rank, made, data, rule, steps, sizes, how, microbatches, syncs, form):
    """Accumulates over microbatches by hand; `syncs`: after which of them ranks reduce; `form`: what no_sync is put around.

    The forms of scenario 4: "both" forward and backward, "backward" alone, or "forward" alone, which has no effect.
    """
    dist = emu.DataParallel(made.model(), rank, "dp", **how)
    optimizer = dist.optimizer(rule.kind, rule.cut(made.names()), clip=rule.clip, norm=rule.norm, **rule.options)
    losses, gradients = [], {}
    for step in range(steps):
        some = data[step % len(data)]
        x, y = some.shard(rank, "dp", sizes=sizes)
        optimizer.zero_grad()
        total = 0
        for x_part, y_part, sync in zip(x.tensor_split(len(syncs)), y.tensor_split(len(syncs)), syncs):
            quiet = nullcontext if sync else dist.no_sync
            with quiet() if form != "backward" else nullcontext():
                loss = dist.loss_sum(x_part, y_part)
                if form == "both":
                    loss.backward()
            if form != "both":
                with quiet() if form == "backward" else nullcontext():
                    loss.backward()
            total = total + loss.detach()
        dist.finish(some.tokens)
        losses.append(dist.group.all_reduce(total).div_(some.tokens))
        gradients = dict(dist.gather_gradients())
        optimizer.step()
    return outcome(dist, optimizer, losses, gradients)


def outcome(dist, optimizer, losses, gradients):
    """What a rank has to show, and what it holds."""
    with dist.gathered() as model:
        used = {name: p.detach().clone() for name, p in model.named_parameters()}
    copied = {key: [copy_of(piece) for piece in pieces] for key, pieces in optimizer.pieces().items()}
    return {
        "loss": losses,
        "gradients": gradients,
        "values": dict(dist.gather_parameters()),
        "used": used,  # in the dtype that forward takes them in
        "pieces": [copy_of(piece) for piece in dist.pieces()],
        "states": copied,
    }


def copy_of(piece):
    return piece._replace(tensor=piece.tensor.detach().clone())


def exactly(program, ranks, *args, order="program"):
    """Every rank's result in the exact tier's arithmetic; without ranks, the result on one device, with its certificate."""
    certificates = []

    @contextmanager
    def within(rank):
        mode = ExactMode(certify=not ranks)
        rank._device.inside_kernel = mode.kernel
        with mode:
            yield
        certificates.append(mode.certificate())

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        body = program if ranks else lambda rank: program(*args)
        mesh = emu.Mesh(dp=ranks or 1)
        run = run_virtual(body, mesh, track=False, args=args if ranks else (), within=within, order=order)
    finally:
        torch.set_default_dtype(before)
    if not ranks:
        assert certificates[0].holds, certificates[0]
        return run.results[0]
    return run.results


def first_difference(ours, right, equal=torch.equal, loss=None):
    """What of the ranks' outcomes is not what the single device has, to the bit; None if nothing is.

    Args:
        ours: every rank's outcome.
        equal: compares tensors.
        loss: compares losses; as tensors where not given.
    """
    for r, found in enumerate(ours):
        for i, (a, b) in enumerate(zip(found["loss"], right["loss"], strict=True)):
            if not (loss or equal)(a, b):
                return f"rank {r}: loss {i}"
        for what in ("gradients", "values"):
            if set(found[what]) != set(right[what]):
                return f"rank {r}: names of {what}"
            for name, value in right[what].items():
                if not equal(found[what][name], value):
                    return f"rank {r}: {what} of {name}"
        for name, value in right["values"].items():
            if not equal(found["used"][name], value):
                return f"rank {r}: {name}, as the model uses it"
    held = [[("value", piece) for piece in found["pieces"]] for found in ours]
    expected = {("value", name): value for name, value in right["values"].items()}
    return pieces_differ(held, expected, equal) or pieces_differ(
        [[(key, piece) for key, pieces in found["states"].items() for piece in pieces] for found in ours],
        right["states"],
        equal,
    )


def pieces_differ(held, expected, equal=torch.equal):
    """Whether pieces, by rank, hold something else than whole tensors by (key, name); or not all of them."""
    covered = {key: torch.zeros(value.numel()) for key, value in expected.items()}
    for r, pieces in enumerate(held):
        for key, piece in pieces:
            where = (key, piece.name)
            if where not in expected:
                return f"rank {r}: a piece of {where}, which is nowhere else"
            end = piece.start + piece.tensor.numel()
            if not equal(piece.tensor, expected[where].reshape(-1)[piece.start : end]):
                return f"rank {r}: {where} from {piece.start} to {end}"
            covered[where][piece.start : end] += 1
    for where, count in covered.items():
        if count.min() < 1 or (len(where) and where[0] == "value" and count.max() != count.min()):
            return f"{where}: elements are held {count.tolist()} times"
    return None


def same_on_grid(a, b):
    """Losses mix sums of grid numbers, and so are equal on the grid."""
    return torch.equal(round_to_grid(a, 28), round_to_grid(b, 28))
