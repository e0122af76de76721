"""Documents of 4 and 12 tokens in one sequence of 16, cut over two ranks: eight tokens each."""

import torch

import emu
from emu.clinic.examined import Case, Finding
from emu.trace.events import Kernel

START = [0] * 4 + [4] * 12  # where the document of each token begins
WIDTH = 4


def data():
    g = torch.Generator().manual_seed(40)
    return [torch.randn(16, WIDTH, generator=g) for _ in "qkv"]


def attend(tokens):
    """Each token's query to the keys of its document up to its own."""
    q, k, v = data()
    seen = [slice(START[t], t + 1) for t in tokens]
    return torch.cat([(q[t : t + 1] @ k[s].T).softmax(-1) @ v[s] for t, s in zip(tokens, seen)])


def across(rank, order):
    """Each rank attends for one half of the tokens in this order; the result is in the order of the sequence."""
    half = attend(order[8 * rank : 8 * rank + 8])
    return {"out": rank.group("cp").all_gather(half)[torch.tensor(order).argsort()]}


def broken(rank):
    first, second = [0, 3, 1, 2], [*range(4, 7), *range(13, 16), *range(7, 13)]  # heads and tails, then what is between
    return across(rank, first + second)  # the fault: cut in the middle, one half has all of the first document


def mended(rank):
    outer, inner = [0, 3, *range(4, 7), *range(13, 16)], [1, 2, *range(7, 13)]  # of both documents
    return across(rank, outer + inner)


def reference():
    return {"out": attend(range(16))}


def work(run):
    """Pairs of a query and a key that every rank attends to, from the work of its matrix products."""
    flops = [sum(kernel.flops for _, kernel in run.trace.of(Kernel, rank=r) if kernel.dims) for r in run.trace.ranks]
    pairs = [n // (4 * WIDTH) for n in flops]
    times = max(pairs) * len(pairs) / sum(pairs)
    said = f"pairs of a query and a key by rank: {pairs}, so attention lasts {times:.2f}x as long as if they were even"
    return Finding(max(pairs) == min(pairs), said, "run.trace.of(Kernel)")


CASE = Case(
    number=40,
    kind="context parallel",
    title="Equal tokens, unequal work",
    report="An order by documents, cut in the middle, left one rank with most of the causal work. Outputs were right, so "
    "that no test noticed.",
    url="https://github.com/pytorch/pytorch/pull/189902",
    mesh=emu.Mesh(cp=2),
    broken=broken,
    mended=mended,
    reference=reference,
    question=work,
    tier="float64",
    cure="A late token sees more keys than an early one. Deal head and tail of every document to each rank, so that pairs "
    "are even: 44 and 44, not 26 and 62.",
)
