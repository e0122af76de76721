"""Schedules as text: what was written is read again, ranks stay where they are, and what is no schedule is told as such."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.parallel.pipeline import Schedule, timed
from emu.parallel.pipeline.schedules import make
from emu.spmd import EmuError, PlanError

from .rows import schedules

READERS = {"parse": (Schedule.parse, str), "from_csv": (Schedule.from_csv, Schedule.to_csv)}
readers = st.sampled_from(sorted(READERS))


@given(schedules(), st.lists(st.integers(0, 4), max_size=3), readers, st.sampled_from(["", "\ufeff"]), st.booleans())
def test_what_was_written_is_read_with_ranks_in_their_places(schedule, idle, reader, mark, windows):
    """With ranks that do nothing among the others, a byte order mark before, and blank lines after."""
    rows = list(schedule.rows)
    for place in idle:
        rows.insert(place, ())
    read, written = READERS[reader]
    text = mark + written(Schedule(tuple(rows))) + "\n\n  \n"
    assert read(text.replace("\n", "\r\n") if windows else text).rows == tuple(rows)


@given(schedules(), st.data(), readers)
def test_a_blank_line_between_ranks_is_refused_with_its_number(schedule, data, reader):
    read, written = READERS[reader]
    lines = written(schedule).splitlines()
    most = len(lines) - 1
    least = 0 if reader == "from_csv" else 1  # a text in triple quotes begins with a blank line
    if least > most:
        return
    place = data.draw(st.integers(least, most))
    lines.insert(place, data.draw(st.sampled_from(["", "  "])))
    with pytest.raises(EmuError, match=f"line {place + 1} is blank") as caught:
        read("\n".join(lines))
    assert caught.value.hint


def test_a_text_in_triple_quotes_is_read_and_its_faults_have_the_lines_that_one_sees():
    text = """
        0F0 0B0
        1F0 1B0
    """
    assert Schedule.parse(text) == make("gpipe", 2, 1)
    with pytest.raises(EmuError, match=r"line 3 \(rank 1\).*'1X0'"):
        Schedule.parse(text.replace("1F0", "1X0"))


def test_csv_agrees_with_the_library_about_idle_ranks():
    rows = Schedule.parse("-\n0F0 0B0").rows
    file = io.StringIO()
    csv.writer(file).writerows([[""], ["0F0", "", "0B0"]])  # which it writes as '""'
    assert Schedule.from_csv(file.getvalue()).rows == rows
    assert [list(filter(None, row)) for row in csv.reader(io.StringIO(Schedule(rows).to_csv()))] == [[], ["0F0", "0B0"]]


@pytest.mark.parametrize("text", [b"0F0 0B0", None, 3, ["0F0"]])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_text_is_refused(reader, text):
    with pytest.raises(EmuError, match=f"Schedule.{reader} reads text, not") as caught:
        READERS[reader][0](text)
    assert ("decode" if isinstance(text, bytes) else "read_text") in caught.value.hint


@pytest.mark.parametrize("times", ["x", 0, 2.0, {}, [1.0]])
def test_times_that_are_none_are_refused(times):
    for ask in (lambda: timed(make("1f1b", 2, 2), times), lambda: make("auto", 2, 2, times=times)):
        with pytest.raises(EmuError, match=r"times=.* are no Times") as caught:
            ask()
        assert "Times(" in caught.value.hint


@pytest.mark.parametrize(
    ("option", "value"),
    [("effort", v) for v in (-1, float("nan"), float("inf"), True, "much", None, [1])]
    + [("memory", v) for v in (True, float("nan"), "all", [4])]
    + [("weight_share", v) for v in (True, 2, "half")],
)
def test_what_is_no_effort_memory_or_share_is_refused(option, value):
    make("auto", 2, 2, **{option: 1})  # which equals True, and was kept
    with pytest.raises(PlanError, match=option) as caught:
        make("auto", 2, 2, **{option: value})
    assert caught.value.field == option and caught.value.hint
