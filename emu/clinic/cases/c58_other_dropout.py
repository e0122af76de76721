"""A layer with dropout is computed again in backward, to save memory."""

import torch

import emu
from emu.clinic.examined import Case


def data():
    g = torch.Generator().manual_seed(58)
    return [torch.randn(*shape, generator=g) for shape in ((6, 4), (4, 8), (8, 1))]


def layer(x, w):
    return torch.dropout(torch.tanh(x @ w), 0.5, True)


class Recomputed(torch.autograd.Function):
    """Keeps the layer's inputs alone, and runs it again in backward."""

    @staticmethod
    def forward(ctx, x, w, first, again):
        ctx.again = again
        ctx.save_for_backward(x, w)
        return first(x, w)

    @staticmethod
    def backward(ctx, grad):
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            out = ctx.again(x, w)
        return (*torch.autograd.grad(out, (x, w), grad), None, None)


def train(apply):
    torch.manual_seed(5)
    x, w1, w2 = data()
    hidden = apply(x, w1.requires_grad_())
    loss = ((hidden @ w2.requires_grad_()) ** 2).sum()
    loss.backward()
    return {"loss": loss, "w1": w1.grad, "w2": w2.grad, "next": torch.rand(2)}


def broken(rank):
    return train(lambda x, w: Recomputed.apply(x, w, layer, layer))  # the fault: the second run draws another mask


def mended(rank):
    states = []

    def first(x, w):
        states.append(torch.get_rng_state())
        return layer(x, w)

    def again(x, w):
        with torch.random.fork_rng(devices=[]):  # and random numbers go on as if nothing had been
            torch.set_rng_state(states.pop())
            return layer(x, w)

    return train(lambda x, w: Recomputed.apply(x, w, first, again))


def reference():
    return train(layer)


CASE = Case(
    number=58,
    kind="checkpointing",
    title="A recomputed layer drops other numbers",
    report="Recomputation did not restore the state of the random numbers, so backward used other dropout masks than forward.",
    url="https://github.com/openai/guided-diffusion/issues/167",
    mesh=emu.Mesh(dp=1),
    broken=broken,
    mended=mended,
    reference=reference,
    tier="float64",
    cure="Keep the state of the random numbers before the layer, set it for the recomputation, and put back afterwards what "
    "it was. The loss does not show the fault, as it is computed before.",
)
