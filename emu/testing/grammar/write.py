"""Writing a whole program: groups and data, some steps, and what it returns."""

from __future__ import annotations

from random import Random

from emu.testing.grammar.steps import column_row, gather_rows, local, moves_for, own_rows, steps_for
from emu.testing.grammar.writer import Weight, Writer
from emu.testing.grammar.written import WrittenProgram

HEAD = (
    "import torch",
    "import torch.nn.functional as F",
    "",
    "import emu",
    "",
    "",
)
MOST_STEPS = 3


def write_program(random: Random, max_ranks: int = 8, trained: bool | None = None) -> WrittenProgram:
    """A random program that is right, and its reference.

    Args:
        random: what chooses; a small choice is a simple one.
        max_ranks: the most ranks, at least 2.
        trained: whether it computes gradients; either where not said.
    """
    w, axes = _started(random, max(2, max_ranks), trained)
    for _ in range(random.randint(1, MOST_STEPS)):
        choices = steps_for(w)
        step = choices[random.randint(0, len(choices) - 1)]
        step(w)
        if step is own_rows:  # what comes next makes something of it
            choices = moves_for(w)
            choices[random.randint(0, len(choices) - 1)](w)
    if w.trained and not w.weights:
        local(w)
    if not any(line.kind == "communication" for line in w.lines):
        column_row(w)
    (_train if w.trained else _return)(w)
    return WrittenProgram(HEAD, tuple(w.lines), tuple(w.reference), axes)


def _started(random: Random, most: int, trained: bool | None) -> tuple[Writer, dict[str, int]]:
    """Groups, and the data cut over the outer one."""
    ranks = random.randint(2, most)
    two = most >= 4 and bool(random.randint(0, 1))
    blocks = 1
    if two:
        blocks = random.randint(2, most // 2)
        ranks = random.randint(2, most // blocks)
    trained = bool(random.randint(0, 1)) if trained is None else trained
    inner = ("tp", "cp", "sp")[random.randint(0, 2)]
    axes = {inner: ranks}
    if two:
        axes = {"dp": blocks, inner: ranks} if not random.randint(0, 1) else {inner: ranks, "dp": blocks}
    rows, columns = random.randint(ranks, ranks + 4), random.randint(2, 4)
    w = Writer(random, inner, ranks, "dp" if two else "", blocks, trained, rows, columns)
    w.everyone = "world" if two else inner
    members = random.sample(range(ranks), ranks) if not two and random.randint(0, 3) == 3 else None
    w.add(f"{inner} = rank.group(members={members})" if members else f'{inner} = rank.group("{inner}")')
    if two:
        w.add('dp = rank.group("dp")')
        w.add("world = rank.group()")
    w.both("draw = torch.Generator()")
    w.both(f"x = {w.data(rows * blocks, columns)}")
    if two:
        if w.coin(3):
            root = random.randint(0, blocks - 1)
            w.add(f"if dp.rank != {root}:", "head")
            w.add("x = torch.zeros_like(x)", depth=2)
            w.talk(f"x = dp.scatter(x, root={root})")
        else:
            w.add(f"x = x.split({rows})[dp.rank]")
    return w, axes


def _group_over(w: Writer, inner: bool) -> str:
    """The group over which something partial is added up; "" where there is none."""
    if w.outer:
        return w.everyone if inner else w.outer
    return w.group if inner else ""


def _train(w: Writer) -> None:
    """A loss, its gradients, their sums over whoever has other rows, and one late divisor."""
    divisor = w.rows * w.blocks
    w.both("loss = (x * x).sum()")
    w.both("loss.backward()")
    over = _group_over(w, w.sizes is not None)
    w.both("loss = loss.detach().clone()")
    if over:
        w.talk(f"{over}.all_reduce(loss)")
    w.both(f"loss = loss / {divisor}")
    waits = []
    for weight in w.weights:
        over = _group_over(w, weight.partial)
        grad = f"{weight.name}.grad"
        if over and w.coin(3):
            work = w.name("work")
            w.talk(f"{work} = {over}.all_reduce({grad}, async_op=True)")
            waits.append(f"{work}.wait()")
        elif over:
            w.talk(f"{over}.all_reduce({grad})")
    for text in waits:
        w.wait(text)
    for weight in w.weights:
        w.both(f"{weight.name}.grad.div_({divisor})")
        _gathered(w, weight)
    loss = ['"loss": loss']
    ours = loss + [f'"{weight.name}": {_whole_name(weight)}' for weight in w.weights]
    theirs = loss + [f'"{weight.name}": {weight.name}.grad' for weight in w.weights]
    w.add(f"return {{{', '.join(ours)}}}", "head")
    w.reference.append(f"return {{{', '.join(theirs)}}}")


def _whole_name(weight: Weight) -> str:
    return f"{weight.name}.grad" if weight.dim is None else f"{weight.name}_grad"


def _gathered(w: Writer, weight: Weight) -> None:
    """Pieces are gathered, or returned with the layout that says what they are pieces of."""
    if weight.dim is None:
        return
    where = f"dim={weight.dim}, " if weight.dim else ""
    w.talk(f"{weight.name}_grad = {w.group}.all_gather({weight.name}.grad, {where}sizes={weight.sizes})")


def _return(w: Writer) -> None:
    """The value itself, whole, and its sum."""
    over = _group_over(w, w.sizes is not None)
    w.both("loss = x.sum()")
    if over:
        w.talk(f"{over}.all_reduce(loss)")
    w.both(f"loss = loss / {w.rows * w.blocks}")
    if w.sizes is not None:
        gather_rows(w)
    if w.outer:
        w.talk("x = dp.all_gather(x)")
    w.add('return {"loss": loss, "x": x}', "head")
    w.reference.append('return {"loss": loss, "x": x}')
