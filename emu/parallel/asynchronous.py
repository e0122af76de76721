"""Asynchronous SGD: a parameter server applies every worker's gradient as it comes, however old it is by then.

Nobody waits for the slowest worker; the price is staleness: a gradient was computed from parameters that others have
changed since. Under `emu.launch(..., order="time")` gradients come in the order of virtual time, so a slow worker's are
staler, and the same program gives the same bits every time. DistBelief (Dean et al., NeurIPS 2012) trained so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from emu.parallel.batch import checked_plain, checked_rank
from emu.spmd import EmuError, Rank, Work, wait_any


class Update(NamedTuple):
    """One update of the parameters.

    Attributes:
        worker: the group rank whose gradient it is.
        step: which of that worker's steps, from 0.
        staleness: how many updates there were between its pull of the parameters and this one.
    """

    worker: int
    step: int
    staleness: int


class ParameterServer:
    """Rank 0 of a group holds the parameters and the optimizer; the others compute gradients.

        server = ParameterServer(model, rank, "dp")
        if server.serves:
            updates = server.serve(torch.optim.SGD(model.parameters(), lr=0.1), steps=10)
        else:
            for step in range(10):
                server.pull()
                model.loss_sum(x, y).backward()
                server.push()
        server.finish()

    The server takes one gradient at a time and answers with the new parameters, so it is busy while they are on their
    way, and a worker should pull right after it has pushed. Only parameters are shared: buffers are every rank's own.
    The server keeps one buffer of the gradients' size for every worker.

    Args:
        model: a plain module; of what the ranks start with, the server's parameters count.
        rank: the rank it runs on.
        axes: the mesh axes that span the group; none means all ranks.
        max_staleness: a worker may be at most so many steps ahead of the slowest: stale-synchronous, Ho et al., NeurIPS
            2013. With W workers no gradient is then staler than (W - 1) (2 max_staleness + 1) updates; 0 lets them go
            step by step together. None sets no bound.

    Raises:
        EmuError: no module or rank, a group of one, a bound that is no whole number from 0 on, or a model without parameters
            to train.
    """

    def __init__(self, model: nn.Module, rank: Rank, *axes: str, max_staleness: int | None = None) -> None:
        call = 'ParameterServer(model, rank, "dp")'
        self.model, self.rank = checked_plain(model, call), checked_rank(rank, call)
        self.group = rank.group(*axes)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if self.group.size < 2:
            raise EmuError(
                f"the group {self.group.label!r} has one rank: a server and no worker", "use a mesh with more ranks"
            )
        if not self.parameters:
            raise EmuError(f"{type(model).__name__} has no parameters to train", "give it some that require grad")
        if max_staleness is not None and (type(max_staleness) is not int or max_staleness < 0):
            raise EmuError(
                f"max_staleness={max_staleness!r}", "give a whole number of steps, 0 or more, or None for no bound"
            )
        self.max_staleness = max_staleness
        self._pulled = False
        rank.watch(model)

    @property
    def serves(self) -> bool:
        """Whether this rank is the server."""
        return self.group.rank == 0

    # The workers' side.

    def pull(self) -> None:
        """Takes the newest parameters from the server. With `max_staleness`, waits until the slowest is near enough.

        Raises:
            EmuError: on the server; or twice without a push.
        """
        self._check("pull", on_server=False)
        if self._pulled:
            raise EmuError("pulled twice: the server answers once to every gradient", "call push() after backward()")
        self._pulled = True
        self.group.exchange([("recv", p.detach(), 0) for p in self.parameters], name="pull")

    def push(self) -> None:
        """Gives the gradients to the server, zeros where there are none, and clears them.

        Raises:
            EmuError: on the server; or without a pull before it.
        """
        self._check("push", on_server=False)
        if not self._pulled:
            raise EmuError("pushed without a pull: the server does not wait for it", "call pull() before every step")
        self._pulled = False
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.group.exchange([("send", g.detach(), 0) for g in gradients], name="push")
        for p in self.parameters:
            p.grad = None

    # The server's side.

    def serve(
        self,
        optimizer: torch.optim.Optimizer,
        steps: int | Sequence[int],
        after: Callable[[Update], object] = lambda update: None,
    ) -> list[Update]:
        """Applies gradients as they come, until every worker has taken all its steps.

        Args:
            optimizer: of the model's parameters; it steps once for every gradient.
            steps: how many every worker takes, or for each worker how many, in group order from rank 1 on.
            after: called after every update, e.g. to note the loss.

        Returns:
            every update, in order. A trace keeps that order where it is priced on another cluster.

        Raises:
            EmuError: on a worker; steps that are not one whole number from 0 on for each.
            Deadlock: a worker takes fewer or more steps than that.
        """
        self._check("serve", on_server=True)
        todo = dict(enumerate(self._steps(steps), start=1))
        buffers = {w: [torch.empty_like(p) for p in self.parameters] for w in todo}
        for buffer in (buffer for each in buffers.values() for buffer in each):
            self.rank.account(buffer, "communication")
        done = dict.fromkeys(todo, 0)
        pulled: dict[int, int] = {}  # worker -> the update that its parameters were new after
        under_way: dict[int, Work] = {}
        updates: list[Update] = []
        held = [w for w in todo if todo[w]]  # those that wait for parameters
        while held or under_way:
            for w in self._near_enough(held, done, todo):
                held.remove(w)
                self.group.exchange([("send", p.detach(), w) for p in self.parameters], name="pull")
                pulled[w] = len(updates)
                messages = [("recv", buffer, w) for buffer in buffers[w]]
                under_way[w] = self.group.exchange(messages, async_op=True, name="push")
            worker = list(under_way)[wait_any(list(under_way.values()))]
            under_way.pop(worker).wait()
            self._apply(optimizer, buffers[worker])
            updates.append(Update(worker, done[worker], len(updates) - pulled[worker]))
            done[worker] += 1
            if done[worker] < todo[worker]:
                held.append(worker)
            after(updates[-1])
        return updates

    def _apply(self, optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
        for p, gradient in zip(self.parameters, gradients):
            p.grad = gradient
        optimizer.step()
        for p in self.parameters:
            p.grad = None  # the buffer takes the next gradient

    def _near_enough(self, held: Sequence[int], done: dict[int, int], todo: dict[int, int]) -> list[int]:
        """Those that may go on; one that has all its steps behind it holds nobody back."""
        if self.max_staleness is None:
            return list(held)
        slowest = min((done[w] for w in todo if done[w] < todo[w]), default=0)
        return [w for w in held if done[w] <= slowest + self.max_staleness]

    def _steps(self, steps: int | Sequence[int]) -> list[int]:
        workers = self.group.size - 1
        each = [steps] * workers if isinstance(steps, int) else list(steps)
        if len(each) != workers or any(type(n) is not int or n < 0 for n in each):
            raise EmuError(
                f"steps={steps!r} do not say how many steps {workers} workers take",
                "give one whole number, or one for every worker",
            )
        return each

    # Both.

    def finish(self) -> None:
        """Gives everybody the parameters that came out; every rank calls it, after its last step."""
        for p in self.parameters:
            self.group.broadcast(p.detach(), name="finish")

    def _check(self, call: str, on_server: bool) -> None:
        if self.serves is not on_server:
            who, instead = ("a worker", "push() and pull()") if on_server else ("the server", "serve(optimizer, steps)")
            raise EmuError(
                f"{call}() on {who}, rank {self.group.members[self.group.rank]}",
                f"ask `if server.serves:` and call {instead} there",
            )

    def __repr__(self) -> str:
        role = "serves" if self.serves else f"works for rank {self.group.members[0]}"
        bound = "any staleness" if self.max_staleness is None else f"at most {self.max_staleness} steps ahead"
        return f"ParameterServer({type(self.model).__name__} over {self.group.label!r}: this rank {role}, {bound})"


def largest_stable_lr(curvature: float, staleness: int) -> float:
    """The learning rate below which SGD with gradients of constant staleness converges on a quadratic.

    With curvature h, w(k+1) = w(k) - lr h w(k - s). A solution z^k neither grows nor shrinks if z = exp(i t): then
    z^s (z - 1) = -lr h, so (s + 1/2) t = pi / 2, and lr h = 2 sin(t / 2) = 2 sin(pi / (2 (2 s + 1))). That is 2 without
    staleness, 1 at s = 1, and about pi / (2 s) when it is large (Levin and May, Theor. Popul. Biol. 9, 1976; for
    networks, Giladi et al., arXiv 1909.12340).

    Args:
        curvature: the largest second derivative, more than 0.
        staleness: updates between pull and push; W - 1 for W workers of equal speed.

    Raises:
        EmuError: a curvature or staleness that cannot be.
    """
    if not curvature > 0 or staleness < 0:
        raise EmuError(
            f"curvature {curvature!r} and staleness {staleness!r}", "give a curvature above 0 and a staleness from 0 on"
        )
    return 2 * math.sin(math.pi / (2 * (2 * staleness + 1))) / curvature
