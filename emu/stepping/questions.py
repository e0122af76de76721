"""What a page may ask a stepper. Nothing that a browser sends is evaluated: it is one of these, or it is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from emu.spmd import EmuError

MOST_STEPS = 1_000_000
Index = Annotated[int, Field(ge=0, le=2**31)]
Rank = Annotated[int, Field(ge=0, le=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Do(_Asked):
    """Going on and back; "record" asks for all that is known so far."""

    do: Literal["next", "back", "until", "goto", "end", "record"]
    n: Annotated[int, Field(ge=1, le=MOST_STEPS)] = 1
    rank: Rank | None = None
    what: Name | None = None
    index: Index | None = None

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Do:
        if self.do == "until" and self.what is None:
            raise ValueError("until needs what: a name")
        if self.do == "goto" and self.index is None:
            raise ValueError("goto needs index: a step's number")
        return self


class _Where(_Asked):
    step: Index
    rank: Rank


class _Which(_Where):
    name: Name


class _Walked(_Asked):
    step: Index
    algorithm: Name | None = None


class Tensors(_Asked):
    """What a rank holds at a step."""

    tensors: _Where


class Tensor(_Asked):
    """The values of one tensor of a rank at a step."""

    tensor: _Which


class Walked(_Asked):
    """The last collective before a step, chunk by chunk."""

    walk: _Walked


class Spans(_Asked):
    """The record so far, priced."""

    spans: Literal[True]


Question = Do | Tensors | Tensor | Walked | Spans
KINDS: dict[str, type[Question]] = {"do": Do, "tensors": Tensors, "tensor": Tensor, "walk": Walked, "spans": Spans}


def question_of(asked: Any) -> Question:
    """What was asked.

    Raises:
        EmuError: it is no question that a stepper answers.
    """
    kinds = [kind for kind in KINDS if isinstance(asked, dict) and kind in asked]
    if len(kinds) != 1:
        raise EmuError("that is no question", f"ask one of {', '.join(KINDS)}")
    try:
        return KINDS[kinds[0]].model_validate(asked)
    except ValidationError as error:
        said = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in said["loc"])
        raise EmuError(f"that is no question: {where + ': ' if where else ''}{said['msg']}", "ask it anew") from None
