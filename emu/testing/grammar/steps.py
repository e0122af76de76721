"""What a program may do with its value next: each step writes lines for the ranks and for the reference.

A step goes on from a value that is whole on every rank of the inner group, or from one whose rows are shared out.
"""

from __future__ import annotations

from collections.abc import Callable

from emu.testing.grammar.writer import Writer, trainable

Step = Callable[[Writer], None]


def local(w: Writer) -> None:
    """A linear map of whatever rows there are."""
    columns = w.random.randint(2, 4)
    name = w.weight(w.columns, columns)
    w.both(f"x = x @ {name}")
    if w.coin():
        w.both("x = F.leaky_relu(x, 0.25)")
    w.columns = columns


def broadcast_weights(w: Writer) -> None:
    """A linear map whose weights one rank has and sends."""
    columns, root = w.random.randint(2, 4), w.random.randint(0, w.ranks - 1)
    name, value = w.name("w"), w.data(w.columns, columns)
    w.reference.append(f"{name} = {trainable(value, w.trained)}")
    w.add(f"{name} = {value} if {w.group}.rank == {root} else torch.zeros({w.columns}, {columns})")
    if w.coin():
        w.talk(f"sent = {w.group}.broadcast({name}, root={root}, async_op=True)")
        w.both("x = x / 2")
        w.wait("sent.wait()")
    else:
        w.talk(f"{w.group}.broadcast({name}, root={root})")
    if w.trained:
        w.add(f"{name}.requires_grad_()")
    w.note(name)
    w.both(f"x = x @ {name}")
    w.columns = columns


def own_rows(w: Writer) -> None:
    """whole -> rows: each rank takes its own, or one sends them."""
    sizes = w.cut(w.rows)
    root = w.random.randint(0, w.ranks - 1)
    if w.trained and w.learnt:
        w.talk(f"x = emu.spmd.scatter_to(x, {w.group}, sizes={sizes})")
    elif w.coin():
        w.add(f"if {w.group}.rank != {root}:", "head")
        w.add("x = torch.zeros_like(x)", depth=2)
        w.talk(f"x = {w.group}.scatter(x, root={root}, sizes={sizes})")
    else:
        w.add(f"x = x.split({sizes})[{w.group}.rank]")
    w.sizes = sizes


def gather_rows(w: Writer) -> None:
    """rows -> whole."""
    sizes, root = w.sizes, w.random.randint(0, w.ranks - 1)
    if w.trained:
        w.talk(f"x = emu.spmd.gather_from(x, {w.group}, sizes={sizes})")
    elif w.coin():
        w.talk(f"x = {w.group}.gather(x, root={root}, sizes={sizes})")
        w.add(f"x = x if {w.group}.rank == {root} else torch.zeros({w.rows}, {w.columns})")
        w.talk(f"{w.group}.broadcast(x, root={root})")
    elif w.coin():
        w.talk(f"gathered = {w.group}.all_gather(x, sizes={sizes}, async_op=True)")
        w.wait("x = gathered.wait()")
    else:
        w.talk(f"x = {w.group}.all_gather(x, sizes={sizes})")
    w.sizes = None


def column_row(w: Writer) -> None:
    """whole -> whole: a weight cut by columns, then one cut by rows; partial sums are added up."""
    inner, columns = w.random.randint(w.ranks, w.ranks + 3), w.random.randint(2, 4)
    residual = w.coin()
    columns = w.columns if residual else columns
    sizes = w.cut(inner)
    up, down = w.weight(w.columns, inner, 1, sizes), w.weight(inner, columns, 0, sizes)
    h = w.name("h")
    if w.trained:
        w.talk(f"{h} = emu.spmd.copy_to(x, {w.group})")
        w.reference.append(f"{h} = x")
    else:
        w.both(f"{h} = x")
    w.both(f"{h} = F.leaky_relu({h} @ {up}, 0.25)")
    w.both(f"{h} = {h} @ {down}")
    _reduced(w, h)
    w.both(f"x = x + {h}" if residual else f"x = {h}")
    w.columns = columns


def _reduced(w: Writer, h: str) -> None:
    """Adds partial sums up over the inner group."""
    if w.trained:
        w.talk(f"{h} = emu.spmd.reduce_from({h}, {w.group})")
        return
    way = w.random.randint(0, 4)
    if way == 1:
        root = w.random.randint(0, w.ranks - 1)
        w.talk(f"{w.group}.reduce({h}, root={root})")
        w.talk(f"{w.group}.broadcast({h}, root={root})")
    elif way == 2:
        w.talk(f"work = {w.group}.all_reduce({h}, async_op=True)")
        w.both("x = x / 2")
        w.wait("work.wait()")
    elif way == 3 and w.ranks % 2 == 0 and not w.outer and w.group == "tp":
        w.add("even = rank - rank % 2")
        w.add("pair = rank.group(members=[even, even + 1])")
        w.add(f"across = rank.group(members=list(range(rank % 2, {w.ranks}, 2)))")
        w.talk(f"pair.all_reduce({h})")
        w.talk(f"across.all_reduce({h})")
    elif way == 4:
        ready, done = w.name("ready"), w.name("done")
        w.add('comm = rank.stream("comm")')
        w.add(f"{ready} = rank.event().record()")
        w.add("with comm:", "head")
        w.wait(f"{ready}.wait()", 2)
        w.talk(f"{w.group}.all_reduce({h})", 2)
        w.add(f"{done} = comm.record_event()")
        w.both("x = x / 2")
        w.wait(f"{done}.wait()")
    else:
        w.talk(f"{w.group}.all_reduce({h})")


def columns_gathered(w: Writer) -> None:
    """whole -> whole: a weight cut by columns, whose outputs are gathered."""
    columns = w.random.randint(w.ranks, w.ranks + 2)
    sizes = w.cut(columns)
    name = w.weight(w.columns, columns, 1, sizes)
    if w.trained:
        w.talk(f"x = emu.spmd.copy_to(x, {w.group})")
        w.both(f"x = x @ {name}")
        w.talk(f"x = emu.spmd.gather_from(x, {w.group}, dim=1, sizes={sizes})")
    else:
        w.both(f"x = x @ {name}")
        w.talk(f"x = {w.group}.all_gather(x, dim=1, sizes={sizes})")
    w.columns = columns


def sequence_parallel(w: Writer) -> None:
    """rows -> rows: all rows meet a column-cut and a row-cut weight, and their sums come back as rows."""
    inner, columns = w.random.randint(w.ranks, w.ranks + 3), w.random.randint(2, 4)
    cut, rows = w.cut(inner), w.sizes
    up, down = w.weight(w.columns, inner, 1, cut), w.weight(inner, columns, 0, cut)
    gather = f"emu.spmd.gather_shards(x, {w.group}" if w.trained else f"{w.group}.all_gather(x"
    reduce = f"emu.spmd.reduce_to_shards(x, {w.group}" if w.trained else f"{w.group}.reduce_scatter(x"
    w.talk(f"x = {gather}, sizes={rows})")
    w.both(f"x = F.leaky_relu(x @ {up}, 0.25)")
    w.both(f"x = x @ {down}")
    w.talk(f"x = {reduce}, sizes={rows})")
    w.columns = columns


def experts(w: Writer) -> None:
    """rows -> rows: rows travel to the ranks of their experts, and back."""
    assert w.sizes is not None
    table = [w.cut(n, least=0) for n in w.sizes]
    columns, flat = w.random.randint(2, 4), [n for row in table for n in row]
    name, value = w.name("w"), w.data(w.ranks * w.columns, columns)
    table_name = w.name("table")
    w.reference.append(f"{name} = {trainable(value, w.trained)}")
    w.reference.append(f"parts = x.split({flat * w.blocks})")
    chosen = f"{name}.split({w.columns})[i % {w.ranks}]"
    w.reference.append(f"x = torch.cat([part @ {chosen} for i, part in enumerate(parts)])")
    w.add(f"{table_name} = {table}")
    w.add(f"send = {table_name}[{w.group}.rank]")
    w.add(f"recv = [row[{w.group}.rank] for row in {table_name}]")
    own = f"({value}).split({w.columns})[{w.group}.rank]"
    w.add(f"{name} = {own}{'.clone().requires_grad_()' if w.trained else ''}")
    w.note(name, 0, [w.columns] * w.ranks)
    there, back = "send_sizes=send, recv_sizes=recv", "send_sizes=recv, recv_sizes=send"
    call = f"emu.spmd.exchange_shards(x, {w.group}" if w.trained else f"{w.group}.all_to_all(x"
    w.talk(f"x = {call}, {there})")
    w.add(f"x = x @ {name}")
    w.talk(f"x = {call}, {back})")
    w.columns = columns


def ring(w: Writer) -> None:
    """rows -> rows: all rows move on around the ring."""
    assert w.sizes is not None
    by = w.random.randint(1, w.ranks - 1)
    call = f"emu.spmd.shift(x, {w.group}" if w.trained else f"{w.group}.ring_shift(x"
    w.talk(f"x = {call}, by={by}, sizes={w.sizes})")
    w.per_block(f"b.roll({sum(w.sizes[-by:])}, 0)")
    w.sizes = w.sizes[-by:] + w.sizes[:-by]


def ring_sum(w: Writer) -> None:
    """rows -> rows: every rank adds up what it sees pass by."""
    w.add("block = x.sum(0, keepdim=True)")
    if w.trained:
        w.talk(f"total = emu.spmd.reduce_from(block, {w.group})")
        w.talk(f"total = emu.spmd.copy_to(total, {w.group})")
    else:
        w.add("total = block.clone()")
        w.add(f"for _ in range({w.ranks - 1}):", "head")
        w.talk(f"block = {w.group}.ring_shift(block)", 2)
        w.add("total = total + block", depth=2)
    w.add("x = x + total / 8")
    w.per_block("b + b.sum(0, keepdim=True) / 8")


def halo(w: Writer) -> None:
    """rows -> rows: each row meets the one before it, which may be a neighbour's."""
    w.add(f"edge = torch.zeros(1, {w.columns})")
    if w.coin():
        w.add("messages = []")
        w.add(f"if {w.group}.rank + 1 < {w.ranks}:", "head")
        w.add(f'messages.append(("send", x[-1:], {w.group}.rank + 1))', depth=2)
        w.add(f"if {w.group}.rank > 0:", "head")
        w.add(f'messages.append(("recv", edge, {w.group}.rank - 1))', depth=2)
        w.talk(f"{w.group}.exchange(messages)")
    else:
        w.add(f"if {w.group}.rank + 1 < {w.ranks}:", "head")
        w.talk(f"{w.group}.send(x[-1:], {w.group}.rank + 1)", 2)
        w.add(f"if {w.group}.rank > 0:", "head")
        w.talk(f"{w.group}.recv(edge, {w.group}.rank - 1)", 2)
    w.add("x = x + torch.cat([edge, x[:-1]])")
    w.per_block(f"b + torch.cat([torch.zeros(1, {w.columns}), b[:-1]])")


def clamp(w: Writer) -> None:
    """Nothing is larger than half of the largest of all."""
    top = w.name("top")
    w.both(f"{top} = x.abs().amax()")
    w.talk(f'{w.everyone}.all_reduce({top}, op="max")')
    w.both(f"x = torch.minimum(x, {top} / 2)")


def side_stream(w: Writer) -> None:
    """A second branch is computed on a stream of its own."""
    name = w.weight(w.columns, w.columns)
    w.add('side = rank.stream("side")')
    if w.coin():
        w.wait('side.wait_stream(rank.stream("default"))')
        w.add("with side:", "head")
    else:
        ready = w.name("ready")
        w.add(f"{ready} = rank.event().record()")
        w.add("with side:", "head")
        w.wait(f"{ready}.wait()", 2)
    w.add(f"branch = x @ {name}", depth=2)
    w.reference.append(f"branch = x @ {name}")
    if w.coin():
        w.wait('rank.stream("default").wait_stream(side)')
    else:
        done = w.name("done")
        w.add(f"{done} = side.record_event()")
        w.wait(f"{done}.wait()")
    w.both("x = x + branch")


EITHER: tuple[Step, ...] = (local, broadcast_weights)
WHOLE: tuple[Step, ...] = (*EITHER, column_row, column_row, columns_gathered, own_rows, own_rows, own_rows)
MOVES: tuple[Step, ...] = (sequence_parallel, experts, ring, ring_sum)
RAW: tuple[Step, ...] = (clamp, side_stream)  # these and halo where nothing is trained


def steps_for(w: Writer) -> tuple[Step, ...]:
    """What may come next."""
    raw = () if w.trained else RAW
    return (*WHOLE, *raw) if w.sizes is None else (*EITHER, *moves_for(w), *raw, gather_rows)


def moves_for(w: Writer) -> tuple[Step, ...]:
    """What may be done with rows that are shared out, and needs the others."""
    return MOVES if w.trained else (*MOVES, halo, halo)
