"""Faults from public reports, tried on the core. Each test names the report; the numbers are ours."""

from __future__ import annotations

import re

import pytest
import torch

from emu import spmd
from emu.spmd import BufferInFlight, CollectiveMismatch, Deadlock, Mesh, RankLeft
from emu.virtual.launch import run_virtual


def fails(kind, program, n: int, *parts: str):
    with pytest.raises(kind) as caught:
        run_virtual(program, Mesh(dp=n))
    for part in parts:
        assert re.search(part, str(caught.value)), f"{part!r} is not in: {caught.value}"
    assert "test_core.py" in str(caught.value) and caught.value.hint
    return caught.value


class TestRanksWithDifferentNumbersOfBatches:
    """https://github.com/pytorch/pytorch/issues/38174: the longer ranks wait for ever in the gradient reduction."""

    @staticmethod
    def train(rank, steps):
        w = torch.zeros(2, dtype=torch.float64)
        for step in range(steps[rank]):
            grad = torch.full((2,), float(rank + 10 * step), dtype=torch.float64)
            rank.group("dp").all_reduce(grad, name="gradient")
            w -= grad
        return w

    def test_it_is_a_deadlock_that_says_who_has_finished(self):
        error = fails(
            RankLeft,
            lambda rank: self.train(rank, (3, 3, 2)),
            3,
            "rank 2 finished",
            "rank 0 waits in .*all_reduce number 2",
            "rank 1 waits in .*all_reduce number 2",
        )
        assert error.finished == [2]

    def test_equal_numbers_pass(self):
        results = run_virtual(self.train, Mesh(dp=3), args=((3, 3, 3),)).results
        assert all(torch.equal(w, torch.full((2,), -99.0, dtype=torch.float64)) for w in results)


class TestBothPeersSendFirst:
    """https://github.com/pytorch/pytorch/issues/172668: both block in a send before posting the receive the other needs."""

    @staticmethod
    def meet(first: tuple[str, ...], second: tuple[str, ...]):
        def program(rank):
            group, out = rank.group(), torch.empty(3)
            for step in (first, second)[rank]:
                if step == "send":
                    group.send(torch.full((3,), float(rank)), 1 - rank)
                elif step == "recv":
                    group.recv(out, 1 - rank)
                else:
                    group.exchange([("send", torch.full((3,), float(rank)), 1 - rank), ("recv", out, 1 - rank)])
            return out.tolist()

        return program

    def test_it_is_a_deadlock_that_names_both(self):
        error = fails(
            Deadlock,
            self.meet(("send", "recv"), ("send", "recv")),
            2,
            r"rank 0 waits in world.send number 0 to rank 1 of float32\[3\]",
            r"rank 1 waits in world.send number 0 to rank 0 of float32\[3\]",
            "circle: 0 -> 1 -> 0",
        )
        assert "swap the order" in error.hint and "exchange" in error.hint

    @pytest.mark.parametrize("second", [("recv", "send"), ("exchange",)])
    def test_swapping_or_grouping_passes(self, second):
        first = ("exchange",) if second == ("exchange",) else ("send", "recv")
        assert run_virtual(self.meet(first, second), Mesh(dp=2)).results == [[1.0] * 3, [0.0] * 3]

    @pytest.mark.parametrize("wrong", [True, False])
    def test_a_pipeline_that_sends_the_next_forward_before_the_backward_it_owes(self, wrong):
        def program(rank):
            group, f1, f2, b0 = rank.group(), torch.ones(2), torch.ones(2) * 2, torch.empty(2)
            if rank == 0:
                group.send(f1, 1, name="F1")
                steps = [lambda: group.recv(b0, 1, name="B0"), lambda: group.send(f2, 1, name="F2")]
                for step in reversed(steps) if wrong else steps:
                    step()
                return b0.tolist()
            got = torch.empty(2)
            group.recv(got, 0, name="F1")
            group.send(got * 10, 0, name="B0")
            return group.recv(torch.empty(2), 0, name="F2").tolist()

        if wrong:
            fails(Deadlock, program, 2, "rank 0 waits in world.send number 1 to rank 1.*'F2'", "rank 1 .*send.*'B0'")
        else:
            assert run_virtual(program, Mesh(dp=2)).results == [[10.0, 10.0], [2.0, 2.0]]


class TestUnevenAllToAll:
    """https://github.com/pytorch/pytorch/pull/177381: an emulation sized receive slices wrongly."""

    SPLITS = ([[3, 2, 1], [2, 2, 2], [1, 2, 3]], [[0, 4, 0], [2, 0, 1], [0, 0, 0]])

    @staticmethod
    def oracle(splits):
        """What each rank receives: rank 100 r + row of every sender's piece for it, in order of senders."""
        received: list[list[float]] = [[], [], []]
        for source, row in enumerate(splits):
            value = 100.0 * source
            for target, count in enumerate(row):
                received[target] += [value + k for k in range(count)]
                value += count
        return received

    @staticmethod
    def run(splits, told=None):
        def program(rank):
            send = splits[rank]
            recv = [row[rank] for row in told or splits]
            x = (100.0 * rank + torch.arange(float(sum(send)), dtype=torch.float64)).requires_grad_()
            out = spmd.exchange_shards(x, rank.group("dp"), send, recv)
            (back,) = torch.autograd.grad(out, x, out.detach() * 2)
            return out.tolist(), torch.equal(back, 2 * x.detach())

        return run_virtual(program, Mesh(dp=3)).results

    @pytest.mark.parametrize("splits", SPLITS)
    def test_what_arrives_and_what_goes_back(self, splits):
        results = self.run(splits)
        assert [out for out, _ in results] == self.oracle(splits)
        assert all(returned for _, returned in results), "backward is the exchange in reverse"

    def test_the_reported_case(self):
        assert self.run(self.SPLITS[0])[0][0] == [0, 1, 2, 100, 101, 200]

    def test_an_even_split_is_another_answer_and_stated_it_is_refused(self):
        even = [[2, 2, 2]] * 3
        assert self.oracle(even) != self.oracle(self.SPLITS[0])
        with pytest.raises(CollectiveMismatch, match=r"pair \(\d->\d\): rank \d sent \d.*expected 2"):
            self.run(self.SPLITS[0], told=even)


class TestCollectivesThatDiffer:
    """https://github.com/NVIDIA/nccl/issues/1417: an all-reduce of different shapes hangs, or returns wrong tails."""

    CALLS = {
        "shape": (lambda g: g.all_reduce(torch.ones(5)), lambda g: g.all_reduce(torch.ones(6)), r"\[5\]", r"\[6\]"),
        "dtype": (
            lambda g: g.all_reduce(torch.ones(5)),
            lambda g: g.all_reduce(torch.ones(5).bfloat16()),
            "float32",
            "bfloat16",
        ),
        "op": (lambda g: g.all_reduce(torch.ones(5)), lambda g: g.all_reduce(torch.ones(5), "max"), "op=sum", "op=max"),
    }

    @pytest.mark.parametrize("field", CALLS)
    def test_an_error_before_any_data_moves(self, field):
        first, second, *words = self.CALLS[field]
        error = fails(
            CollectiveMismatch,
            lambda rank: (first, second)[rank](rank.group("dp")),
            2,
            "rank 0 called all_reduce",
            "rank 1 called all_reduce",
            *words,
        )
        assert error.field == field

    def test_different_groups(self):
        def program(rank):
            group = rank.group("dp") if rank < 2 else rank.group(members=[1, 2])
            group.all_reduce(torch.ones(5))

        fails(Deadlock, program, 3, "rank 2 waits in .1,2..all_reduce", "rank 0 waits in dp.all_reduce")


class TestOneRankValidatesAlone:
    """https://github.com/pytorch/pytorch/issues/54059: validating through the wrapped model on one rank alone."""

    @staticmethod
    def program(through_wrapper: bool):
        def run(rank):
            group = rank.group("dp")
            module = torch.nn.BatchNorm1d(2)

            def wrapped(x):
                for buffer in module.buffers():
                    group.broadcast(buffer)
                return module(x)

            wrapped(torch.ones(4, 2) + rank)
            if rank == 0:
                (wrapped if through_wrapper else module)(torch.ones(4, 2))
            group.barrier()
            return True

        return run

    def test_a_wrapper_that_communicates_is_noticed(self):
        error = fails(
            CollectiveMismatch, self.program(True), 2, "rank 0 called broadcast", "rank 1 called barrier", "number 3"
        )
        assert error.field == "kind" and "branch" in error.hint

    def test_the_plain_module_passes(self):
        assert run_virtual(self.program(False), Mesh(dp=2)).results == [True, True]

    def test_a_metric_that_a_rank_with_no_data_leaves_out(self):
        def program(rank):
            shard = torch.ones(3)[: 3 * (1 - rank)]
            if len(shard):
                rank.group("dp").all_reduce(shard.sum())
            rank.group("dp").barrier()

        fails(CollectiveMismatch, program, 2, "rank 0 called all_reduce", "rank 1 called barrier")


class TestOverlapWithoutWaits:
    """https://github.com/deepspeedai/DeepSpeed/issues/5545: a bucket is used again while it is being reduced."""

    @staticmethod
    def accumulate(rank, waits: bool):
        bucket, totals, work = torch.zeros(4, dtype=torch.float64), [], None
        for step in range(3):
            if work is not None and waits:
                totals.append(work.wait().clone())
            bucket.fill_(float(step + rank))
            work = rank.group("dp").all_reduce(bucket, async_op=True)
        return [*totals, work.wait().clone()]

    def test_writing_the_next_gradients_is_a_race(self):
        error = fails(
            BufferInFlight, lambda rank: self.accumulate(rank, False), 2, "32 bytes", "'dp'", "'default'", "all_reduce"
        )
        assert error.streams == ("dp", "default")

    def test_reading_before_the_wait_is_a_race(self):
        def program(rank):
            bucket = torch.ones(4)
            rank.group("dp").all_reduce(bucket, async_op=True)
            return bucket + 1

        assert fails(BufferInFlight, program, 2, "reads", "4 bytes|16 bytes").streams == ("dp", "default")

    def test_a_reducer_that_waits_for_one_of_two_producers(self):
        def program(rank, waits_for=("first",)):
            bucket, reducer = [torch.zeros(2), torch.zeros(2)], rank.stream("reducer")
            ready = rank.event().record()
            for name, part in zip(("first", "second"), bucket):
                ready.wait(rank.stream(name))
                with rank.stream(name):
                    part.add_(1.0)
            for name in waits_for:
                reducer.wait_stream(rank.stream(name))
            with reducer:
                for part in bucket:
                    rank.group("dp").all_reduce(part)
                reducer.synchronize()
                return [part.tolist() for part in bucket]

        assert fails(BufferInFlight, program, 2, "add_", "all_reduce").streams == ("second", "reducer")
        both = run_virtual(program, Mesh(dp=2), args=(("first", "second"),)).results
        assert both == [[[2.0, 2.0], [2.0, 2.0]]] * 2

    def test_with_waits_the_sums_are_exact(self):
        for totals in run_virtual(self.accumulate, Mesh(dp=2), args=(True,)).results:
            assert [t.tolist() for t in totals] == [[2.0 * step + 1] * 4 for step in range(3)]

    def test_double_buffering_overlaps_in_virtual_time(self):
        import emu

        def program(rank, asynchronous: bool):
            buckets, works = [torch.zeros(1 << 18), torch.zeros(1 << 18)], [None, None]
            a = torch.ones(512, 512)
            for step in range(6):
                if works[step % 2] is not None:
                    works[step % 2].wait()
                for _ in range(4):
                    b = a @ a
                buckets[step % 2].copy_(b.view(-1)[: 1 << 18])
                work = rank.group("dp").all_reduce(buckets[step % 2], async_op=asynchronous)
                works[step % 2] = work if asynchronous else None
            return [bucket[0].item() for bucket in buckets if not asynchronous] or [w.wait()[0].item() for w in works]

        runs = [emu.launch(program, Mesh(dp=2), args=(asynchronous,)) for asynchronous in (True, False)]
        overlapped, plain = runs
        assert overlapped.results == plain.results
        assert overlapped.metrics.step_time_s < plain.metrics.step_time_s
        assert overlapped.metrics.exposed_comm_s < plain.metrics.exposed_comm_s


class TestSplitsThatDisagree:
    """https://github.com/pytorch/pytorch/issues/117486: sender and receiver disagree, and it hangs or passes by luck."""

    @pytest.mark.parametrize("expected", [3, 0, 2])
    def test_the_pair_is_named(self, expected):
        def program(rank):
            send = [1, 1]
            recv = [1, 1] if rank == 0 else [expected, 1]
            rank.group("dp").all_to_all(torch.ones(2), send, recv)

        with pytest.raises(CollectiveMismatch, match=rf"\(0->1\).*sent 1.*expected {expected}") as caught:
            run_virtual(program, Mesh(dp=2))
        assert (caught.value.ranks, caught.value.sent, caught.value.expected) == ((0, 1), 1, expected)

    def test_sizes_that_would_pass_by_luck(self):
        """In total rank 1 receives what it expects, but not from whom."""

        def program(rank):
            rank.group("dp").all_to_all(torch.ones(2), [[2, 0], [0, 2]][rank], [[1, 1], [1, 1]][rank])

        with pytest.raises(CollectiveMismatch, match="sent"):
            run_virtual(program, Mesh(dp=2))
