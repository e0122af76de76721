"""Files of cases: what is read, what is refused and where, and what is only kept aside."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import COLLECTIVE, GONE, RUN, changed

from emu.spmd import EmuError
from emu.validate.errors import CaseFileError
from emu.validate.reading import PACKAGED, packaged_rows, packaged_text, read_rows
from emu.validate.rows import CollectiveRow, RunRow, unknown_fields


def stated(row) -> dict:
    """A row as JSON again, without what is not stated."""
    return row.model_dump(exclude_unset=True, by_alias=False)


def without_nothing(value):
    """JSON without nulls, and the renamed field as in JSON."""
    if isinstance(value, dict):
        names = {"bytes_": "bytes"}
        return {names.get(k, k): without_nothing(v) for k, v in value.items() if v is not None}
    return value


def test_every_packaged_row_is_read_and_nothing_of_it_is_lost():
    lines = iter(packaged_rows())
    for name in PACKAGED:
        for text in packaged_text(name).splitlines():
            line = next(lines)
            assert line.file == name
            assert without_nothing(stated(line.row)) == without_nothing(json.loads(text))
            assert unknown_fields(line.row) == ()
    assert next(lines, None) is None


def test_the_packaged_files_hold_the_rows_of_the_reference():
    kinds = [line.row.kind if isinstance(line.row, RunRow) else "collective" for line in packaged_rows()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"measured": 617, "analytic": 54, "collective": 93}


def test_one_file_may_hold_all_three_kinds_and_empty_lines(written):
    analytic = changed(RUN, kind="analytic", measured={"model_state_mem_gb": 120})
    lines = read_rows(written(RUN, "", COLLECTIVE, "   ", analytic))
    assert [(type(line.row), line.line) for line in lines] == [(RunRow, 1), (CollectiveRow, 3), (RunRow, 5)]


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"n_gpus": 0}, "n_gpus", "greater than or equal to 1"),
        ({"n_gpus": -8}, "n_gpus", "greater than or equal to 1"),
        ({"n_gpus": 1.5}, "n_gpus", "not a whole number"),
        ({"n_gpus": "8"}, "n_gpus", "a text is not a number"),
        ({"n_gpus": True}, "n_gpus", "true and false are not numbers"),
        ({"n_gpus": 2**41}, "n_gpus", "less than or equal"),
        ({"n_gpus": [8]}, "n_gpus", "valid integer"),
        ({"zero_stage": 4}, "zero_stage", "less than or equal to 3"),
        ({"fsdp": "yes"}, "fsdp", "boolean"),
        ({"precision": 16}, "precision", "string"),
        ({"kind": "guessed"}, "kind", "'measured' or 'analytic'"),
        ({"model": "GPT-3"}, "model", "valid dictionary"),
        ({"model__heads": -1}, "model.heads", "greater than or equal to 1"),
        ({"model__moe": {"experts": 8, "topk": 9, "moe_ffn": 64}}, "model.moe", "topk=9 experts a token, of 8"),
        ({"model__moe": {"experts": 8, "topk": 2}}, "model.moe.moe_ffn", "required"),
        ({"measured__iter_time_s": 0}, "measured.iter_time_s", "greater than 0"),
        ({"measured__iter_time_s": -1.0}, "measured.iter_time_s", "greater than 0"),
        ({"measured__mfu": 43}, "measured.mfu", "less than or equal to 1"),
        ({"measured__oom": 1}, "measured.oom", "boolean"),
        ({"source__title": 3}, "source.title", "string"),
        ({"source__title": "red\x1b[31m"}, "source.title", "control characters"),
        ({"id": "bell\a"}, "id", "control characters"),
    ],
)
def test_a_wrong_value_is_refused_with_file_line_field_and_reason(written, fields, field, reason):
    path = written(RUN, changed(RUN, **fields))
    with pytest.raises(CaseFileError) as refused:
        read_rows(path)
    (complaint,) = refused.value.complaints
    assert (refused.value.file, complaint.line, complaint.field) == (str(path), 2, field)
    assert reason in complaint.reason
    assert f"{path}, line 2, {field}: " in refused.value.message
    assert read_rows(written(RUN))  # the plain row is none of this


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"bytes": 0}, "bytes"), ({"gpus": "8"}, "gpus"), ({"time_us": -1}, "time_us"), ({"op": None}, "op")],
)
def test_a_wrong_collective_is_refused_alike(written, fields, field):
    with pytest.raises(CaseFileError) as refused:
        read_rows(written(changed(COLLECTIVE, **fields)))
    assert [complaint.field for complaint in refused.value.complaints] == [field]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("{} {}", "not JSON"),
        ("[1, 2]", "a list, not an object"),
        ("7", "a int, not an object"),
        ('{"id": "a", "id": "b"}', "said twice"),
        ('{"measured": {"iter_time_s": NaN}}', "NaN is not a number"),
        ('{"measured": {"iter_time_s": Infinity}}', "Infinity is not a number"),
        ('{"measured": {"iter_time_s": 1e999}}', "finite"),
        ('{"n_gpus": ' + "9" * 5000 + "}", "digits"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_a_line_that_is_no_object_of_numbers_is_refused(written, line, reason):
    with pytest.raises(CaseFileError) as refused:
        read_rows(written(RUN, line))
    assert [c.line for c in refused.value.complaints] == [2]
    assert reason in refused.value.complaints[0].reason


def test_all_wrong_lines_are_told_and_the_message_stays_short(written):
    wrong = [changed(RUN, tp=0, pp=0) for _ in range(20)]
    with pytest.raises(CaseFileError) as refused:
        read_rows(written(*wrong))
    assert len(refused.value.complaints) == 40
    assert refused.value.message.count("\n") == 5
    assert "and 35 more" in refused.value.message


def test_text_in_another_encoding_is_refused_with_its_line(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_bytes(json.dumps(RUN).encode() + b"\n" + '{"id": "größe"}'.encode("latin-1"))
    with pytest.raises(CaseFileError) as refused:
        read_rows(path)
    assert refused.value.complaints[0].line == 2
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(RUN).encode())  # the mark that some editors begin a file with
    assert len(read_rows(path)) == 1


def test_a_file_that_is_not_there_or_empty_says_so(tmp_path, written):
    for path, reason in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "directory"), ("a\0b", "null")):
        with pytest.raises(EmuError, match=reason):
            read_rows(path)
    with pytest.raises(EmuError, match="holds no case"):
        read_rows(written("", ""))


def test_nothing_in_a_row_is_evaluated(written):
    hostile = "__import__('os').system('touch hacked')"
    (line,) = read_rows(written(changed(RUN, id=hostile, notes=hostile)))
    assert line.row.id == line.row.notes == hostile


def test_a_field_that_nobody_knows_is_kept_aside_and_named(written):
    row = changed(RUN, colour="red", model__flavour=3, measured__micro_bacth=8)
    (line,) = read_rows(written(row))
    assert set(unknown_fields(line.row)) == {"colour", "model.flavour", "measured.micro_bacth"}


@pytest.mark.parametrize("name", [name for name in RUN if name != "kind"])
def test_any_field_may_be_missing_or_null(written, name):
    for value in (None, GONE):
        if name == "id" and value is None:
            continue  # an id that is there is a text
        (line,) = read_rows(written(changed(RUN, **{name: value})))
        assert line.row.id


def test_a_row_without_an_id_is_called_by_its_place(written):
    path = written(RUN, changed(RUN, id=GONE))
    assert [line.row.id for line in read_rows(path)] == ["one", f"{path}:2"]


def test_a_source_may_be_a_text(written):
    (line,) = read_rows(written(changed(RUN, source="a blog")))
    assert line.row.source.title == "a blog"


@given(st.integers(1, 2**40), st.floats(1e-6, 1e6))
def test_what_is_written_is_what_is_read(n, seconds):
    row = RunRow.model_validate(changed(RUN, n_gpus=n, measured__iter_time_s=seconds))
    again = RunRow.model_validate(json.loads(json.dumps(row.model_dump(by_alias=True))))
    assert (again.n_gpus, again.measured.iter_time_s) == (n, seconds)
    assert again == row


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_count_is_whole_however_it_is_written(value):
    whole = value.is_integer() and 1 <= value <= 2**40
    try:
        assert RunRow.model_validate(changed(RUN, seq=value)).seq == value
    except ValueError:
        assert not whole
    else:
        assert whole and not math.isnan(value)
