"""Rows written and read as a file would be; and what emu finds on its own cases, priced once."""

from __future__ import annotations

import json

import pytest
from published import RUN, changed

from emu.validate.cases import Case, case_of
from emu.validate.reading import PACKAGED, packaged_rows, read_rows
from emu.validate.report import examined


@pytest.fixture
def written(tmp_path):
    """Writes rows, or lines as they are, to a file of cases."""

    def write(*rows: dict | str, name: str = "cases.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


@pytest.fixture
def case(written):
    """The case of the plain run with other values."""

    def make(**fields) -> Case:
        (line,) = read_rows(written(changed(RUN, **fields)))
        return case_of(line)

    return make


@pytest.fixture(scope="session")
def packaged():
    """What `emu validate` finds on its own cases."""
    return examined(packaged_rows(), PACKAGED, held_out=True)
