"""The likely cause that an error names is the slip that was made: over random programs, and never where none was."""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from emu.spmd import EmuError, Mesh
from emu.virtual import diagnosis
from emu.virtual.launch import run_virtual

from .slips import SLIPS, Slip, blocks, calls_in, compiled, write


@pytest.fixture(autouse=True, scope="module")
def no_search_fails():
    """A search for the cause that fails is passed over in silence, but not here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnosis, "suppress", lambda *kinds: nullcontext())
        yield


ORDERS = st.one_of(st.just("program"), st.integers(0, 99))


def failure(source: str, ranks: int, order: Any) -> tuple[str, EmuError | None]:
    """What the program's file is called, and how it fails, if it does."""
    name, program = compiled(source)
    try:
        run_virtual(program, Mesh(ranks=ranks), order=order)
    except EmuError as error:
        return name, error
    return name, None


def names_the_slip(block: list[Any], kind: str, data: Any, named: bool = True) -> None:
    total = calls_in(block)
    assume(total)
    ranks = data.draw(st.integers(2, 4), label="ranks")
    slip = Slip(kind, data.draw(st.integers(0, total - 1), label="call"), data.draw(st.integers(0, ranks - 1)))
    source, cause = write(block, slip, ranks)
    if not named:
        source = re.sub(r"(, )?name='\w+'", "", source)
    assume(cause is not None)
    assert cause is not None
    file, error = failure(source, ranks, data.draw(ORDERS, label="order"))
    assume(error is not None or named)  # two barriers in another order are the same
    assert error is not None, f"a rank missed a call, and nobody noticed:\n{source}"
    found = error.cause  # type: ignore[attr-defined]
    if not named and (found is None or found.kind == "possible"):
        return
    assert found is not None and (found.kind, found.where) == (cause[0], f"{file}:{cause[1]}"), f"{error}\n{source}"
    assert found.text in str(error)


@pytest.mark.parametrize("kind", SLIPS)
@settings(max_examples=12)
@given(block=blocks(), data=st.data())
def test_the_cause_named_is_the_slip(kind, block, data):
    names_the_slip(block, kind, data)


@settings(max_examples=25)
@given(block=blocks(), kind=st.sampled_from(SLIPS), data=st.data())
def test_where_calls_have_no_names_nothing_else_is_called_the_cause(block, kind, data):
    """Calls of one kind are then taken for each other, until the ranks are far apart."""
    names_the_slip(block, kind, data, named=False)


@pytest.mark.exhaustive
@settings(max_examples=2000, deadline=None)
@given(block=blocks(3), kind=st.sampled_from(SLIPS), data=st.data())
def test_in_many_programs_whose_calls_have_no_names_nothing_else_is_called_the_cause(block, kind, data):
    names_the_slip(block, kind, data, named=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", SLIPS)
@settings(max_examples=500, deadline=None)
@given(block=blocks(3), data=st.data())
def test_the_cause_named_is_the_slip_in_many_programs(kind, block, data):
    names_the_slip(block, kind, data)


@settings(max_examples=15)
@given(block=blocks(), ranks=st.integers(2, 4), order=ORDERS)
def test_control_without_a_slip_nothing_fails(block, ranks, order):
    assert failure(write(block, None, ranks)[0], ranks, order)[1] is None
