"""What a hazard proof says in words, what it says of deadlocks and choices, and where it comes from."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import emu
from emu.equivalence import prove
from emu.equivalence.hazard_proof import crossing
from emu.spmd import EmuError
from emu.spmd.calls import wait_any
from emu.trace.events import At, Choice, HostWait, Use
from emu.trace.files import dumps, loads

MESH = emu.Mesh(dp=2)


def late_wait(rank):
    bucket = torch.ones(4)
    work = rank.group("dp").all_reduce(bucket, async_op=True)
    bucket.mul_(2)
    work.wait()
    bucket.neg()


def overlaps(rank):
    """A step on two streams, with one wait too many."""
    side, main = rank.stream("side"), rank.stream("default")
    x = torch.ones(4)
    work = rank.group("dp").all_reduce(x, async_op=True)
    work.wait()
    side.wait_stream(main)
    main.wait_stream(side)
    with side:
        y = x * 2
    main.wait_stream(side)
    return y


def waits_nothing(rank):
    """What a communication reads was written by the stream that issues it: nothing is waited for."""
    x, y = torch.ones(4), torch.ones(4)
    rank.group("dp").all_reduce(x, async_op=True)
    rank.group("dp").all_reduce(y, async_op=True)


def waits_once(rank):
    x = torch.ones(4)
    rank.group("dp").all_reduce(x, async_op=True).wait()
    return x * 2


def side_stream(rank):
    x = torch.ones(4)
    rank.stream("side").wait_stream(rank.stream("default"))
    with rank.stream("side"):
        x.mul_(2)


@pytest.mark.parametrize(
    ("program", "ranks", "told"),
    [
        (waits_nothing, 2, r"\d pairs across streams, each ordered by the issue of one of \d communications$"),
        (waits_once, 2, r"each ordered by one of \d waits or by the issue of one of \d communications$"),
        (side_stream, 2, r"2 pairs across streams, each ordered by one of 2 waits$"),
        (side_stream, 1, r"1 pair across streams, ordered by one wait$"),
    ],
)
def test_what_orders_is_told_in_words_that_can_be_read(program, ranks, told):
    said = str(emu.hazards(program, emu.Mesh(dp=ranks))).splitlines()[0]
    assert said.startswith("no hazard on ") and re.search(told, said)


def test_both_lines_and_the_wait_that_is_missing():
    (found,) = emu.hazards(late_wait, MESH).found
    assert found.kind == "write after write" and found.ranks == (0, 1) and found.times == 2
    assert (found.first.what, found.first.stream) == ("dp.all_reduce number 0", "dp")
    assert (found.second.what, found.second.stream) == ("mul_", "default")
    here = late_wait.__code__.co_firstlineno
    file = "test_hazards_told.py"
    assert (found.first.line, found.second.line) == (f"{file}:{here + 2}", f"{file}:{here + 3}")
    assert f"call wait() on the work of dp.all_reduce number 0 at {file}:{here + 2} before mul_" in found.cure
    assert str(emu.hazards(late_wait, MESH)).startswith(
        "1 hazard on 2 ranks:\nranks 0, 1: write after write of 16 bytes of"
    )


def test_before_a_communication_the_stream_that_issues_it_must_wait():
    def program(rank):
        with rank.stream("side"):
            x = torch.ones(4)
        rank.group("dp").all_reduce(x, async_op=True).wait()
        rank.stream("side").wait_stream(rank.stream("default"))

    (found,) = emu.hazards(program, MESH).found
    assert found.cure.startswith("make stream 'default' wait, before dp.all_reduce number 0 at ")


def test_a_proof_says_how_much_it_is_of_and_which_wait_memory_does_not_need():
    found = emu.hazards(overlaps, MESH)
    assert found and re.match(
        r"no hazard on 2 ranks: \d+ uses of memory, \d+ pairs across streams, each ordered", str(found)
    )
    spare = f"test_hazards_told.py:{overlaps.__code__.co_firstlineno + 7}"
    assert found.spare == [(spare, 2)] and f"without the waits at {spare} (2 waits)" in str(found)
    assert [wait.line for wait in found.redundant] == [spare] * 2 and str(found.redundant[0]).startswith(
        "stream 'default'"
    )
    told = json.loads(json.dumps(found.as_dict()))
    assert told["free"] is True and told["hazards"] == [] and told["needed"] == 6 and told["ordered"] == found.n_ordered


def test_two_waits_of_which_either_would_do_cannot_both_go():
    def program(rank):
        side, main = rank.stream("side"), rank.stream("default")
        x = torch.ones(4)
        side.wait_stream(main)
        side.wait_stream(main)
        with side:
            y = x * 2
        main.wait_stream(side)
        return y

    found = emu.hazards(program, emu.Mesh(dp=1))
    assert len(found.redundant) == 2 and found.spare == [(found.redundant[0].line, 1)]


def test_the_witness_of_a_pair_is_the_first_wait_that_orders_it():
    def program(rank):
        side, main = rank.stream("side"), rank.stream("default")
        x = torch.ones(4)
        side.wait_stream(main)
        y = torch.ones(4)
        side.wait_stream(main)
        with side:
            z = x + y
        main.wait_stream(side)
        return z

    found, here = emu.hazards(program, emu.Mesh(dp=1)), program.__code__.co_firstlineno
    lines = [[found.trace[0][i].line for i in (first, witness + 1)] for _, first, _, witness in found.pairs[:2]]
    assert lines == [[f"test_hazards_told.py:{here + n}" for n in made] for made in ((2, 3), (4, 5))]


def test_memory_freed_in_flight():
    def program(rank):
        side = rank.stream("side")
        x = torch.ones(4)
        side.wait_stream(rank.stream("default"))
        with side:
            y = x * 2
        del x
        rank.stream("default").wait_stream(side)
        return y

    (found,) = emu.hazards(program, MESH).found
    assert (
        found.kind == "freed in flight"
        and "keep a reference" in found.cure
        and "'default' may be given it again" in str(found)
    )


@pytest.mark.parametrize("way", ["with the program", "by a statement", "before more work", "by resize_"])
def test_what_dies_with_the_program_is_no_fault_and_all_else_is(way):
    def uses(rank):
        x = torch.ones(4)
        side = rank.stream("side")
        side.wait_stream(rank.stream("default"))
        with side:
            x.neg()
        if way == "by a statement":
            del x
        elif way == "by resize_":
            x.untyped_storage().resize_(0)

    def program(rank):
        uses(rank)
        if way == "before more work":
            torch.ones(4)

    right = way == "with the program"
    found = emu.hazards(program, MESH)
    assert [hazard.kind for hazard in found.found] == ([] if right else ["freed in flight"])
    with nullcontext() if right else pytest.raises(emu.spmd.BufferInFlight, match="is freed"):
        emu.launch(program, MESH)


def test_of_many_faults_all_are_told_once_each():
    def program(rank):
        dp, x, y = rank.group("dp"), torch.ones(4), torch.ones(4)
        for _ in range(3):
            a = dp.all_reduce(x, async_op=True)
            x.neg()
            a.wait()
            b = dp.all_reduce(y, async_op=True)
            y.neg()
            b.wait()

    found = emu.hazards(program, MESH)
    assert len(found.found) == 2 and all(
        h.times == 6 and h.ranks == (0, 1) and ", 6 times" in str(h) for h in found.found
    )


def test_a_value_that_the_host_reads_is_no_wait_that_could_go():
    def program(rank):
        with rank.stream("side"):
            return torch.ones(4).sum().item()

    found = emu.hazards(program, emu.Mesh(dp=1))
    assert found and not found.redundant and list(found.trace.of(HostWait))


def test_uses_that_the_same_wait_would_order_are_one_hazard():
    def program(rank):
        x = torch.ones(4)
        with rank.stream("side") as side:
            side.wait_stream(rank.stream("default"))
            x.add_(1)
        y = x.neg()
        z = x.abs()
        return y, z

    (found,) = emu.hazards(program, MESH).found
    assert (found.first.what, found.second.what, found.times) == ("add_", "neg", 2)


def test_an_event_that_the_host_waits_for_is_not_all_of_its_stream():
    def program(rank, late):
        side, main = rank.stream("side"), rank.stream("default")
        x = torch.ones(4)
        side.wait_stream(main)
        early = side.record_event()
        with side:
            x.add_(1)
        (side.record_event() if late else early).synchronize()
        return x

    mesh = emu.Mesh(dp=1)
    assert emu.hazards(program, mesh, args=(True,)) and not emu.hazards(program, mesh, args=(False,))


def test_the_readme_shows_what_is_said():
    body = "\n\ndef step(rank):\n    bucket = torch.ones(4)\n    work = rank.group('dp').all_reduce(bucket, async_op=True)\n"
    names = {"torch": torch}
    exec(compile(body + "    bucket.mul_(2)\n    work.wait()\n", "train.py", "exec"), names)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"```\n{emu.hazards(names['step'], MESH)}\n```" in readme


def test_the_proof_is_sharper_than_the_error_where_the_host_waited_before_there_were_streams():
    def program(rank, touched):
        x, y = torch.ones(4), torch.ones(4)
        rank.synchronize()
        x.add_(1)
        with rank.stream("side") as side:
            z = (x if touched else y) * 2
        side.synchronize()
        return z

    assert emu.hazards(program, MESH, args=(False,)) and not emu.hazards(program, MESH, args=(True,))
    for touched in (False, True):  # nobody noted which of the two came after the wait
        with pytest.raises(emu.spmd.BufferInFlight):
            emu.launch(program, MESH, args=(touched,))


# Deadlocks that need bad luck.


def in_orders(rank, orders):
    """Every rank calls the groups of its row, in turn."""
    works = [rank.group(members=group).all_reduce(torch.ones(2), async_op=True) for group in orders[rank.id]]
    for work in works:
        work.wait()


A, B, C = (0, 1), (1, 2), (0, 2)
ALL = (0, 1, 2)


@pytest.mark.parametrize(
    ("orders", "ranks"),
    [
        ([[A, ALL], [ALL, A], [ALL]], {0, 1}),
        ([[C, A], [A, B], [B, C]], {0, 1, 2}),  # a circle that no two ranks make
        ([[A, ALL], [A, ALL], [ALL]], set()),
        ([[A, C], [A, B], [B, C]], set()),
        ([[ALL, A, C], [ALL, A, B], [ALL, B, C]], set()),
        ([[ALL, A, C], [ALL, B, A], [C, ALL, B]], {0, 2}),
        ([[(0, 2), A], [A, (1, 3)], [(2, 3), (0, 2)], [(1, 3), (2, 3)]], {0, 1, 2, 3}),  # the circle is 0, 1, 3, 2
    ],
)
def test_ranks_that_issue_the_collectives_they_share_in_different_orders(orders, ranks):
    mesh = emu.Mesh(dp=len(orders))
    emu.launch(in_orders, mesh, args=(orders,))  # which passes
    found = emu.hazards(in_orders, mesh, args=(orders,)).found
    assert {hazard.kind for hazard in found} <= {"opposite order"}
    assert {rank for hazard in found for rank in hazard.ranks} >= ranks and bool(found) is bool(ranks)
    for hazard in found:
        assert list(hazard.ranks) == sorted(hazard.ranks)
        assert f"rank {hazard.ranks[1]} calls" in hazard.cure and "in one order on all ranks" in hazard.cure


def numbered(orders) -> bool:
    """Whether some order of all groups fits every rank's: by trying all."""
    from itertools import permutations

    groups = sorted({group for order in orders for group in order})
    return any(
        all(list(order) == sorted(order, key=list(way).index) for order in orders) for way in permutations(groups)
    )


def test_every_choice_of_three_orders_is_judged_as_by_trying_all():
    from itertools import permutations, product

    from emu.trace.events import Collective
    from emu.trace.trace import Trace

    own = [[g for g in (A, B, C, ALL) if rank in g] for rank in range(3)]
    seen = set()
    for orders in product(*(permutations(groups) for groups in own)):
        events = {
            rank: [
                Collective("all_reduce", str(g), g, 0, 8, (), "float32", "sum", "", -1, str(g), "default", i, "")
                for i, g in enumerate(order)
            ]
            for rank, order in enumerate(orders)
        }
        circles = list(crossing.circles(Trace({"dp": 3}, events)))
        assert bool(circles) is not numbered(orders)
        for circle in circles:
            assert all(first.rank == second.rank and first.event < second.event for first, second in circle)
            for (_, a), (b, _) in zip(circle, [*circle[1:], circle[0]]):
                assert a.what == b.what and a.rank != b.rank
        seen.add(bool(circles))
    assert seen == {True, False}


# Choices.


def takes_the_first(rank):
    dp, x, y = rank.group("dp"), torch.ones(4), torch.ones(4)
    works = [dp.all_reduce(x, async_op=True), dp.all_reduce(y, async_op=True)]
    works.pop(wait_any(works)).wait()
    works[0].done()
    works[0].wait()
    return x, y


def test_what_depends_on_time_is_told():
    found = emu.hazards(takes_the_first, MESH)
    here = takes_the_first.__code__.co_firstlineno
    lines = [f"test_hazards_told.py:{here + n}" for n in (3, 4)]
    assert found and found.choices == [("wait_any", lines[0], 2), ("done", lines[1], 2)]
    assert f"depends on time at wait_any ({lines[0]}), done ({lines[1]})" in str(found)
    assert "depends on time" not in str(emu.hazards(overlaps, MESH))


# The record.


def stripped(trace):
    return {rank: [e for e in trace[rank] if not isinstance(e, (Use, At, Choice))] for rank in trace.ranks}


@pytest.mark.parametrize("program", [late_wait, overlaps, takes_the_first])
def test_nothing_is_recorded_unasked_and_nothing_else_when_asked(program):
    asked = emu.launch(program, MESH, uses=True).trace
    if program is not late_wait:
        plain = emu.launch(program, MESH).trace
        assert plain.events == stripped(plain) == stripped(asked)
    assert len(list(asked.of(Use))) > 0 and loads(dumps(asked)) == asked


def test_a_saved_run_proves_what_it_recorded(tmp_path):
    path = tmp_path / "run.emu"
    run = emu.launch(overlaps, MESH, uses=True)
    run.save(path)
    assert str(emu.Run.load(path).hazards()) == str(run.hazards()) == str(emu.launch(overlaps, MESH).hazards())
    assert run.metrics == emu.launch(overlaps, MESH).metrics, "uses cost nothing"
    assert not emu.launch(late_wait, MESH, uses=True).hazards(), "which is no error there"
    for program in (overlaps, lambda rank: torch.ones(4).neg()):
        emu.launch(program, MESH).save(path)
        with pytest.raises(EmuError, match="does not say who uses which memory"):
            emu.Run.load(path).hazards()
    emu.launch(lambda rank: None, MESH).save(path)
    assert emu.Run.load(path).hazards(), "of nothing there is nothing to record"


def test_the_rest_of_a_record_is_still_one():
    run = emu.launch(overlaps, MESH, uses=True)
    rest = run.without("dp.*").trace
    assert {e.work for _, e in rest.of(Use)} == {0} and prove(rest)
    assert len(list(rest.of(At))) == len(list(run.trace.of(At))) - 4  # the call's, and the wait's, of two ranks


def test_a_run_is_proved_as_it_was_launched():
    seen = []

    def program(rank):
        x = torch.ones(4)
        seen.append((rank.id, x.dtype, x.is_meta))
        rank.group("dp").all_reduce(x, async_op=True).wait()

    mesh = emu.Mesh(dp=1024)
    run = emu.launch(program, mesh, backend="shape", ranks=[7], precision=emu.Precision(param="bf16"))
    for part in (run, run.without("dp.*")):
        found = part.hazards()
        assert found and found.n_ranks == 1 and found.n_uses == 2
    assert seen == [(7, torch.bfloat16, True)] * 3


@pytest.mark.parametrize("how", [{"track": False}, {"backend": "real"}])
def test_who_does_not_track_memory_cannot_record_who_uses_it(how):
    with pytest.raises(EmuError, match="only virtual devices"):
        emu.launch(overlaps, MESH, uses=True, **how)


def test_shapes_alone_prove_the_same():
    shapes, numbers = emu.hazards(overlaps, MESH, shapes=True), emu.hazards(overlaps, MESH)
    assert str(shapes) == str(numbers) and shapes.pairs == numbers.pairs
    assert emu.hazards(late_wait, MESH, shapes=True).found == emu.hazards(late_wait, MESH).found


def test_the_command(tmp_path, capsys):
    from emu.cli import main

    file = tmp_path / "programs.py"
    body = "    x = torch.ones(4)\n    work = rank.group('dp').all_reduce(x, async_op=True)\n"
    right = f"def right(rank):\n{body}    work.wait()\n    x.neg()\n"
    file.write_text(f"import torch\n{right}def wrong(rank):\n{body}    x.neg()\n    work.wait()\n")

    def answer(name, *more):
        with pytest.raises(SystemExit) as end:
            main(["run", f"{file}:{name}", "--mesh", "dp=2", "--hazards", *more])
        return end.value.code or 0, capsys.readouterr().out

    code, out = answer("right")
    assert code == 0 and "no hazard on 2 ranks" in " ".join(out.split())
    code, out = answer("wrong", "--json")
    (found,) = json.loads(out)["hazards"]["hazards"]
    assert code == 1 and found["first"]["line"] == "programs.py:9" and found["second"]["line"] == "programs.py:10"
    assert answer("wrong", "--real")[0] == 2


def test_the_host_waits_say_for_which_event():
    def program(rank):
        rank.stream("side").record_event().synchronize()

    trace = emu.launch(program, emu.Mesh(dp=1)).trace
    assert [e.reason for _, e in trace.of(HostWait)] == ["event 1"]
