"""Ranks do their parts, one of them decides, and what goes wrong on any rank goes wrong on all, in the same words.

A file can be damaged for one rank only. If that rank alone raised, the others would wait for it, or commit half a
checkpoint. So each step of saving and loading is one consultation: every rank does its part, rank 0 hears what came of
it (a gather), decides, and answers each (a scatter). An answer may be an error; then everybody raises it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emu.parallel.state.errors import StateError
from emu.spmd import Rank

NAME = "checkpoint"  # of the collectives, in traces


def consult(rank: Rank, part: Callable[[], Any], decide: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """Does one step of something that all ranks do together, and returns rank 0's answer to this rank.

    Args:
        part: this rank's part; returns what rank 0 should hear, JSON-able.
        decide: called on rank 0 with what all ranks said, in order; returns an answer for each, JSON-able.

    Raises:
        StateError: on every rank, the error of the lowest rank whose part raised one, or that of the decision; or this is a
            shape run.
    """
    if rank.device.type == "meta":
        raise StateError(
            "a shape run has no values, so there is nothing to save or load",
            'run it with backend="virtual", or leave it out',
        )
    mine = _outcome(part)
    heard = _gather(rank, mine)
    answers: list[Any] | None = None
    if heard is not None:
        failed = next((said for said in heard if "error" in said), None)
        decided = failed or _outcome(lambda: list(decide([said["value"] for said in heard])))
        answers = [decided] * len(heard) if "error" in decided else [{"value": v} for v in decided["value"]]
    answer = _scatter(rank, answers)
    if "error" in answer:
        raise StateError(*answer["error"])
    return answer["value"]


def _outcome(part: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": part()}
    except StateError as error:
        return {"error": [error.message, error.hint, error.file]}
    except OSError as error:
        where = error.filename or "a file of the checkpoint"
        cure = "look at the folder, its rights and the room on its disk; all ranks need the same folder"
        return {"error": [f"{where}: {error.strerror or error}", cure, str(error.filename or "")]}


def _gather(rank: Rank, value: Any) -> list[Any] | None:
    group, text = rank.group(), _wire(rank, value)
    if group.size == 1:
        return [value]
    lengths = group.all_gather(torch.tensor([len(text)], device=rank.device), name=NAME).tolist()
    joined = group.gather(text, sizes=lengths, name=NAME)
    return None if joined is None else [_read(piece) for piece in joined.split(lengths)]


def _scatter(rank: Rank, values: list[Any] | None) -> Any:
    group = rank.group()
    if group.size == 1:
        assert values is not None
        return values[0]
    texts = [_wire(rank, value) for value in values or ()]
    lengths = torch.tensor([len(text) for text in texts] or [0] * group.size, device=rank.device)
    sizes = group.broadcast(lengths, name=NAME).tolist()
    whole = torch.cat(texts) if texts else torch.empty(1, dtype=torch.uint8, device=rank.device).expand(sum(sizes))
    return _read(group.scatter(whole, sizes=sizes, name=NAME))


def _wire(rank: Rank, value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(rank.device).clone()


def _read(wire: Tensor) -> Any:
    return json.loads(wire.cpu().numpy().tobytes())
