"""The parameter server: what staleness there is follows from time alone, and what comes out from the staleness."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import emu
from emu.equivalence import check
from emu.parallel.asynchronous import ParameterServer, largest_stable_lr

SECOND = 10**12  # flops of a kernel that lasts far longer than all real ones of these models


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loss_of(model, worker, step):
    g = torch.Generator().manual_seed(100 * worker + step)
    x, y = torch.randn(2, 3, generator=g), torch.randn(2, 2, generator=g)
    return ((model(x) - y) ** 2).sum()


def program(rank, steps, slowness, optimizer, max_staleness=None):
    """Worker w needs slowness[w - 1] times as long for a step as one of slowness 1."""
    model = small_model()
    server = ParameterServer(model, rank, max_staleness=max_staleness)
    updates = None
    if server.serves:
        updates = server.serve(optimizer(model.parameters()), steps)
    else:
        for step in range(steps):
            server.pull()
            with rank.kernel("compute", flops=slowness[rank - 1] * SECOND, bytes=0):
                pass
            loss_of(model, rank.id, step).backward()
            server.push()
    server.finish()
    return [p.detach().clone() for p in model.parameters()], updates


def trained(steps, slowness, optimizer, max_staleness=None, order="time", backend="virtual"):
    """The parameters that came out, the same on every rank, and the updates."""
    mesh = emu.Mesh(ranks=len(slowness) + 1)
    args = (steps, slowness, optimizer, max_staleness)
    results = emu.launch(program, mesh, order=order, args=args, backend=backend).results
    if backend == "virtual":
        assert all(torch.equal(a, b) for p, _ in results for a, b in zip(p, results[0][0]))
    return results[0]


def replayed(updates, optimizer, fresh=False):
    """Plain torch: every gradient at the parameters that its staleness says, or at the newest."""
    model, older = small_model(), small_model()
    steps = optimizer(model.parameters())
    history = [[p.detach().clone() for p in model.parameters()]]
    for i, (worker, step, staleness) in enumerate(updates):
        for p, then in zip(older.parameters(), history[i if fresh else i - staleness]):
            p.data.copy_(then)
        older.zero_grad()
        loss_of(older, worker, step).backward()
        for p, q in zip(model.parameters(), older.parameters()):
            p.grad = q.grad.clone()
        steps.step()
        history.append([p.detach().clone() for p in model.parameters()])
    return history[-1]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.01),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.5, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}
optimizers = st.sampled_from(list(OPTIMIZERS))
slownesses = st.lists(st.integers(1, 9), min_size=2, max_size=4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_plain_sgd_bit_for_bit(name):
    parameters, updates = trained(5, [1], OPTIMIZERS[name])
    assert updates == [(1, step, 0) for step in range(5)]
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, 1, step).backward()
        optimizer.step()
    assert equal(parameters, model.parameters())


@given(slownesses, optimizers, st.integers(1, 5), st.sampled_from([None, 0, 1, 2]))
@example([1, 1, 9], "momentum", 4, None)
def test_the_parameters_are_those_of_plain_torch_with_gradients_as_old_as_recorded(slowness, name, steps, bound):
    optimizer = OPTIMIZERS[name]
    parameters, updates = trained(steps, slowness, optimizer, bound)
    assert equal(parameters, replayed(updates, optimizer))
    for worker in range(1, len(slowness) + 1):
        assert [u.step for u in updates if u.worker == worker] == list(range(steps))
    if steps > 1:  # the control: with fresh gradients it would come out otherwise
        assert not equal(parameters, replayed(updates, optimizer, fresh=True))


@given(st.integers(1, 6), st.integers(1, 6))
def test_workers_of_equal_speed_are_stale_by_all_the_others(workers, steps):
    """The first round sees 0, 1, ... updates before it; from then on every other worker comes once in between."""
    _, updates = trained(steps, [1] * workers, OPTIMIZERS["sgd"])
    expected = Counter(range(workers)) + Counter({workers - 1: workers * (steps - 1)})
    assert Counter(u.staleness for u in updates) == expected
    assert [u.worker for u in updates] == list(range(1, workers + 1)) * steps


@given(slownesses.filter(lambda s: len(set(s)) == len(s)))
@example([1, 4])
@example([4, 1])
def test_a_slower_worker_comes_later_and_is_staler(slowness):
    """Worker w's k-th gradient comes k * slowness[w] after the start; all else is short against that."""
    steps = 5
    _, updates = trained(steps, slowness, OPTIMIZERS["sgd"])
    due = {(w, k): (k + 1) * slowness[w - 1] for w in range(1, len(slowness) + 1) for k in range(steps)}
    times = [due[u.worker, u.step] for u in updates]
    assert times == sorted(times)
    slow, fast = slowness.index(max(slowness)) + 1, slowness.index(min(slowness)) + 1
    first = {w: next(u.staleness for u in updates if u.worker == w) for w in (slow, fast)}
    assert first[slow] > first[fast] == 0


def test_a_worker_is_slow_because_it_has_more_rows_as_well():
    def program(rank, rows):
        model = nn.Linear(2048, 2048)
        server = ParameterServer(model, rank)
        if server.serves:
            return [u.worker for u in server.serve(torch.optim.SGD(model.parameters(), lr=0.0), 6)]
        for _ in range(6):
            server.pull()
            model(torch.zeros(rows[rank - 1], 2048, device=rank.device)).sum().backward()
            server.push()

    def came(rows):
        return emu.launch(program, emu.Mesh(ranks=3), order="time", backend="shape", args=(rows,)).results[0]

    assert came([2**22, 2**17]) == [2] * 6 + [1] * 6
    assert came([2**17, 2**17]) == [1, 2] * 6  # the control


@settings(max_examples=15)
@given(slownesses, st.integers(0, 2))
@example([1, 9, 9], 0)
@example([1, 1, 9, 9], 2)
def test_nobody_runs_ahead_of_the_slowest_by_more_than_the_bound(slowness, bound):
    steps, workers = 8, len(slowness)
    _, updates = trained(steps, slowness, OPTIMIZERS["sgd"], bound)
    assert max(u.staleness for u in updates) <= (workers - 1) * (2 * bound + 1)
    done = dict.fromkeys(range(1, workers + 1), 0)
    for u in updates:
        done[u.worker] += 1
        assert max(done.values()) - min(done.values()) <= bound + 1  # one more while its gradient is on its way


def test_without_a_bound_they_do():
    _, updates = trained(8, [1, 9], OPTIMIZERS["sgd"])
    assert [u.worker for u in updates[:8]] == [1] * 8 and updates[8] == (2, 0, 8)


def test_with_bound_zero_a_round_is_one_step_with_the_sum_of_the_gradients():
    parameters, _ = trained(4, [1, 5, 2], OPTIMIZERS["sgd"], 0)
    model = small_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        sum(loss_of(model, worker, step) for worker in (1, 2, 3)).backward()
        optimizer.step()
    for ours, plain in zip(parameters, model.parameters()):
        torch.testing.assert_close(ours, plain.detach(), rtol=1e-5, atol=1e-6)  # three subtractions for one: rounding
    unbounded, _ = trained(4, [1, 5, 2], OPTIMIZERS["sgd"])
    assert max(float((a - b).abs().max()) for a, b in zip(unbounded, parameters)) > 1e-4  # the control


@pytest.mark.parametrize("order", ["time", "program", 3])
def test_the_same_program_gives_the_same_bits_every_time(order):
    runs = [trained(4, [1, 7, 3], OPTIMIZERS["momentum"], order=order) for _ in range(3)]
    assert all(equal(p, runs[0][0]) and updates == runs[0][1] for p, updates in runs)
    if order == 3:  # the control: another order is another training
        assert any(trained(4, [1, 7, 3], OPTIMIZERS["momentum"], order=seed)[1] != runs[0][1] for seed in range(4, 9))


def test_shapes_alone_give_the_same_updates():
    args = (5, [2, 1, 7], OPTIMIZERS["momentum"])
    assert trained(*args, backend="shape")[1] == trained(*args)[1]
    assert trained(5, [2, 1, 3], OPTIMIZERS["momentum"], backend="shape")[1] != trained(*args)[1]  # the control


# Stale gradients on a quadratic, w(k+1) = w(k) - lr h w(k - s).


def on_a_quadratic(lr_times_curvature, workers, steps=400):
    """|w| after many updates from w = 1, by asynchronous workers of equal speed, each of which follows -dw = h w."""

    def program(rank):
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        server = ParameterServer(model, rank)
        path = []
        if server.serves:
            optimizer = torch.optim.SGD(model.parameters(), lr=lr_times_curvature / 2)
            server.serve(optimizer, steps // workers, after=lambda update: path.append(float(model.weight.detach())))
            return path
        for _ in range(steps // workers):
            server.pull()
            with rank.kernel("compute", flops=SECOND, bytes=0):
                pass
            model.weight.grad = 2 * model.weight.detach()  # curvature 2
            server.push()

    return emu.launch(program, emu.Mesh(ranks=workers + 1), order="time").results[0]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_it_converges_below_the_closed_forms_learning_rate_and_diverges_above(workers):
    limit = largest_stable_lr(1.0, workers - 1)
    assert abs(on_a_quadratic(0.95 * limit, workers)[-1]) < 0.1
    assert max(map(abs, on_a_quadratic(1.05 * limit, workers)[-20:])) > 3
    if workers > 1:  # the control: what diverges here converges where no gradient is stale
        assert abs(on_a_quadratic(1.05 * limit, 1)[-1]) < 1e-6


def test_the_path_on_the_quadratic_is_the_recurrences():
    path, w = on_a_quadratic(0.25, 3, steps=30), [1.0] * 3
    for _ in range(30):
        w.append(w[-1] - 0.125 * (2 * w[-3]))
    assert path == w[3:]


@given(st.integers(0, 40))
def test_the_largest_stable_learning_rate_is_where_a_root_crosses_the_unit_circle(staleness):
    def largest_root(a):  # of z^(s+1) - z^s + a
        companion = torch.zeros(staleness + 1, staleness + 1, dtype=torch.float64)
        companion[0, 0], companion[0, -1] = 1, companion[0, -1] - a
        if staleness == 0:
            companion[0, 0] = 1 - a
        companion[1:, :-1] += torch.eye(staleness, dtype=torch.float64)
        return float(torch.linalg.eigvals(companion).abs().max())

    limit = largest_stable_lr(4.0, staleness) * 4
    assert largest_root(limit) == pytest.approx(1, abs=1e-9)  # eigenvalues are found to about 1e-14 of the largest
    assert largest_root(0.99 * limit) < 1 < largest_root(1.01 * limit)
    if staleness > 20:
        assert limit == pytest.approx(math.pi / (2 * staleness), rel=0.03)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_server_holds_parameters_momentum_and_a_buffer_for_every_worker(workers):
    def program(rank):
        model = nn.Linear(64, 64, bias=False)
        server = ParameterServer(model, rank)
        if server.serves:
            server.serve(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False), 2)
        else:
            for _ in range(2):
                server.pull()
                model.weight.grad = torch.zeros_like(model.weight)
                server.push()

    run, size = emu.launch(program, emu.Mesh(ranks=workers + 1)), 64 * 64 * 4
    most = {category: max(held) for category, held in run.memory.series(0)[1].items()}
    assert (most["parameters"], most["communication"], most["optimizer"]) == (size, workers * size, size)
    assert run.memory.peak_bytes(1) == 2 * size  # parameters and gradients


# Checked against a reference, and what goes wrong.


def one_worker(rank, steps):
    model = small_model()
    server = ParameterServer(model, rank)
    if server.serves:
        server.serve(torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5), steps)
    else:
        for step in range(steps):
            server.pull()
            loss_of(model, 1, step).backward()
            server.push()
    server.finish()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain(steps):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 1, step).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_mutant_of_the_messages_is_killed():
    verdict = check(one_worker, emu.Mesh(ranks=2), plain, args=(3,), tier="float64", mutants="all")
    assert verdict and not verdict.survivors, str(verdict)
    assert verdict.mutants == 9 and verdict.mutants_killed == 9  # pull, push, finish: dropped, scaled, stale


def server_on(rank, **options):
    return ParameterServer(nn.Linear(1, 1), rank, **options)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda rank: server_on(rank.__class__(0, emu.Mesh(ranks=1), rank._device)), "a server and no worker"),
        (lambda rank: server_on(rank, max_staleness=-1), r"max_staleness=-1\n.*0 or more"),
        (lambda rank: server_on(rank, max_staleness=0.5), r"max_staleness=0.5"),
        (lambda rank: ParameterServer(nn.ReLU(), rank), r"ReLU has no parameters to train"),
        (lambda rank: ParameterServer(nn.Linear(1, 1), 0), r"the rank is a int \(0\)\n.*ParameterServer\(model, rank"),
        (lambda rank: ParameterServer([1], rank), r"model is a list, not a module\n.*ParameterServer\(model, rank"),
        (lambda rank: server_on(rank).pull(), r"pull\(\) on the server, rank 0\n.*serve\(optimizer, steps\)"),
        (lambda rank: server_on(rank).serve(None, [1, 2]), r"steps=\[1, 2\].*1 workers take"),
        (lambda rank: server_on(rank).serve(None, -1), "steps=-1"),
    ],
)
def test_what_cannot_be_is_told(wrong, says):
    with pytest.raises(emu.EmuError, match=says) as error:
        emu.launch(lambda rank: wrong(rank) if rank == 0 else None, emu.Mesh(ranks=2))
    assert error.value.hint


def test_a_worker_out_of_step_is_told():
    def pushes_first(rank):
        server = server_on(rank)
        if server.serves:
            server.serve(torch.optim.SGD(server.parameters, lr=1), 2)
        else:
            server.push()

    def pulls_twice(rank):
        server = server_on(rank)
        if server.serves:
            server.serve(torch.optim.SGD(server.parameters, lr=1), 2)
        else:
            server.pull()
            server.pull()

    def takes_fewer_steps(rank):
        server = server_on(rank)
        if server.serves:
            server.serve(torch.optim.SGD(server.parameters, lr=1), 2)
        else:
            server.pull()
            server.push()

    for wrong, says in (
        (pushes_first, "pushed without a pull"),
        (pulls_twice, "pulled twice"),
        (takes_fewer_steps, "finished"),
    ):
        with pytest.raises(emu.EmuError, match=says):
            emu.launch(wrong, emu.Mesh(ranks=2))


def test_a_curvature_or_staleness_that_cannot_be_is_refused():
    for wrong in ((0, 1), (1, -1)):
        with pytest.raises(emu.EmuError, match="curvature above 0"):
            largest_stable_lr(*wrong)
