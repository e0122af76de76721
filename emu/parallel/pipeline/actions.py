"""What a stage does in a pipeline: one small instruction, in the common notation: `2F0` is stage 2's forward of microbatch 0."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from emu.spmd import EmuError

# Kinds, spelt as torch.distributed.pipelining spells them.
F: Final = "F"  # forward
B: Final = "B"  # backward, whole: of inputs and of weights
I: Final = "I"  # backward of inputs alone  # noqa: E741
W: Final = "W"  # backward of weights alone
SEND_F: Final = "SEND_F"  # the stage's output, to the next stage
RECV_F: Final = "RECV_F"  # the stage's input, from the stage before
SEND_B: Final = "SEND_B"  # its input's gradient, to the stage before
RECV_B: Final = "RECV_B"  # its output's gradient, from the next stage
UNSHARD: Final = "UNSHARD"  # gather the stage's parameters
RESHARD: Final = "RESHARD"  # free them
REDUCE_GRAD: Final = "REDUCE_GRAD"  # sum its gradients over the data axes
OVERLAP_F_B: Final = "OVERLAP_F_B"  # a forward and a backward of other stages or microbatches, at the same time

COMPUTE: Final = frozenset({F, B, I, W})
BACKWARD: Final = frozenset({B, I})  # what gives the gradient of the stage's input
COMMUNICATION: Final = frozenset({SEND_F, RECV_F, SEND_B, RECV_B})
KINDS: Final = (F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD, REDUCE_GRAD)

_WORD: Final = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d*)", re.ASCII)
_OVERLAP: Final = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)
_WHOLE: Final = frozenset({UNSHARD, RESHARD, REDUCE_GRAD})  # of a stage, whatever the microbatch


class Action(NamedTuple):
    """One instruction. Prints as `2F0`, `2SEND_F0`, `2UNSHARD` or `(2F0;3B1)OVERLAP_F_B`.

    stage: which part of the model, 0 at the input; -1 of an overlap.
    microbatch: which part of the batch; None where the kind does not care.
    parts: of an overlap, what runs at the same time; () otherwise.
    """

    stage: int
    kind: str
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    def each(self) -> tuple[Action, ...]:
        """The action itself, or the parts of an overlap."""
        return self.parts or (self,)


def overlap(*parts: Action) -> Action:
    """These actions at the same time on one rank, as in DualPipe."""
    return Action(-1, OVERLAP_F_B, None, parts)


def parse(text: str) -> Action:
    """The action that a text says, as `Action` prints it.

    >>> action = emu.parallel.pipeline.parse("2F0")
    >>> action.stage, action.kind, action.microbatch, str(action)
    (2, 'F', 0, '2F0')

    Raises:
        EmuError: it says none.
    """
    word = text.strip()
    if found := _OVERLAP.fullmatch(word):
        parts = tuple(parse(part) for part in found[1].split(";"))
        if len(parts) > 1 and all(part.kind in COMPUTE for part in parts):
            return overlap(*parts)
    elif found := _WORD.fullmatch(word):
        stage, kind, microbatch = found.groups()
        if bool(microbatch) != (kind in _WHOLE):
            return Action(int(stage), kind, int(microbatch) if microbatch else None)
    raise EmuError(
        f"{text!r} is no action of a pipeline",
        "write stage, kind, microbatch: 2F0, 3B1, 3I1, 3W1, 2SEND_F0, 2UNSHARD or (2F0;3B1)OVERLAP_F_B; "
        f"kinds are {' '.join(KINDS)}",
    )
