"""`emu validate` as a shell sees it: what it prints, how it exits, what it refuses."""

from __future__ import annotations

import json
import re

import pytest
from published import COLLECTIVE, RUN, changed

from emu.cli import main
from emu.validate.reading import packaged_rows

KEYS = {"n", "mape", "median_ape", "rank_accuracy", "by_source", "cases"}


@pytest.fixture
def emu(capsys, monkeypatch):
    """Runs the command; gives its exit code, and what it printed."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["validate", *map(str, arguments)])
        printed = capsys.readouterr()
        return ended.value.code, printed.out, printed.err

    return run


@pytest.fixture
def as_json(emu):
    def run(*arguments):
        code, out, _ = emu("--json", *arguments)
        return code, json.loads(out)

    return run


def test_without_a_file_the_published_cases_are_judged_on_held_out_layouts(as_json):
    code, said = as_json()
    assert code == 0
    assert said.keys() >= KEYS
    assert (said["n"], len(said["cases"])) == (492, 492)
    assert said["rows"]["reported"] == "held out"
    assert (said["rows"]["in_fit"], said["rows"]["reported_in_fit"]) == (112, 0)
    assert 0 < said["median_ape"] < said["mape"] < 0.12
    assert 0.9 < said["rank_accuracy"] <= 1
    assert sum(found["n"] for found in said["by_source"].values()) == 492
    assert all(case.keys() == {"id", "measured_s", "predicted_s", "error"} for case in said["cases"])
    for case in said["cases"]:
        assert case["error"] == pytest.approx(case["predicted_s"] / case["measured_s"] - 1)


def test_all_of_the_published_cases_can_be_asked_for(as_json):
    code, said = as_json("--all")
    assert (code, said["n"]) == (0, 599)
    assert said["rows"]["reported_in_fit"] == 112


def test_a_file_is_judged_on_all_its_rows_and_says_how_many_were_fitted_to(as_json, written):
    runs = [line.row for line in packaged_rows() if line.file == "published_runs_vtrain.jsonl"][:40]
    path = written(*(row.model_dump_json() for row in runs))
    code, said = as_json("--cases", path)
    assert (code, said["rows"]["reported"], said["rows"]["runs"]) == (0, "all", 40)
    assert 0 < said["rows"]["in_fit"] == said["rows"]["reported_in_fit"] < 40
    _, held = as_json("--cases", path, "--held-out")
    assert held["n"] == said["n"] - said["rows"]["in_fit"]


def test_several_files_are_judged_together(as_json, written):
    one, two = written(RUN, name="a.jsonl"), written(changed(RUN, id="b"), COLLECTIVE, name="b.jsonl")
    code, said = as_json("--cases", one, "--cases", two)
    assert (code, said["n"], said["collectives"]["large"]["n"]) == (0, 2, 1)
    assert said["rows"]["files"] == [str(one), str(two)]
    assert [case["id"] for case in said["cases"]] == ["one", "b"]


def test_what_cannot_be_compared_is_told_and_the_rest_is_judged(as_json, written):
    path = written(RUN, changed(RUN, id="odd", hardware="abacus"), changed(RUN, id="new", colour="red"))
    code, said = as_json("--cases", path)
    assert (code, said["n"]) == (0, 2)
    (unusable,) = said["unusable"]
    assert (unusable["id"], unusable["file"], unusable["line"]) == ("odd", str(path), 2)
    assert "abacus" in unusable["why"]
    assert said["ignored_fields"] == {"colour": 1}


def test_a_file_of_which_nothing_can_be_compared_is_not_true(as_json, written):
    code, said = as_json("--cases", written(changed(RUN, hardware="abacus")))
    assert (code, said["n"]) == (1, 0)
    assert said["mape"] is said["median_ape"] is said["rank_accuracy"] is None
    assert (said["by_source"], said["cases"]) == ({}, [])


def test_a_file_of_collectives_alone_is_judged(as_json, written):
    code, said = as_json("--cases", written(COLLECTIVE))
    assert (code, said["n"]) == (0, 0)
    assert said["collectives"]["large"]["n"] == 1


def test_a_malformed_file_is_refused_with_line_and_reason(as_json, emu, written):
    path = written(RUN, changed(RUN, tp=0))
    code, said = as_json("--cases", path)
    assert code == 2
    assert said.keys() == {"error", "hint"}
    assert f"{path}, line 2, tp:" in said["error"]
    code, out, err = emu("--cases", path)
    assert (code, out) == (2, "")
    assert "line 2, tp:" in err


@pytest.mark.parametrize(
    "arguments",
    [("--cases", "nowhere.jsonl"), ("--picture", "x.gif"), ("--picture", "no/such/folder/x.png"), ("--no",)],
)
def test_a_bad_request_is_refused_in_json(as_json, arguments):
    code, said = as_json(*arguments)
    assert code == 2
    assert said["error"] and said["hint"]


def test_the_terminal_shows_figures_by_source_and_axis_the_worst_and_the_promises(emu):
    code, out, _ = emu()
    assert code == 0
    assert "505 runs of layouts that no constant was fitted to (112 others were)" in " ".join(out.split())
    assert re.search(r"Step time of 492: median error \d", out)
    for words in ("by source", "vTrain", "by axis", "recompute", "The worst", "promised", "Not usable"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_file_says_in_words_how_many_rows_were_fitted_to(emu, written):
    code, out, _ = emu("--cases", written(RUN))
    assert code == 0
    assert "all 1 runs; 0 of them have layouts of the fold that constants are fitted to" in " ".join(out.split())


def test_markup_in_a_row_is_shown_as_it_is(emu, written):
    code, out, _ = emu("--cases", written(changed(RUN, id="[bold]x[/bold]", source__title="[red]title")))
    assert code == 0
    assert "[bold]x[/bold]" in out
    assert "[red]title" in out


def test_check_makes_a_missed_promise_the_exit_code(emu, written):
    right = json.loads(emu("--json", "--cases", written(RUN))[1])["cases"][0]["predicted_s"]
    good = written(changed(RUN, measured={"iter_time_s": right}), name="good.jsonl")
    bad = written(changed(RUN, measured={"iter_time_s": right * 1.5}), name="bad.jsonl")
    assert emu("--cases", bad)[0] == 0
    assert emu("--cases", bad, "--check")[0] == 1
    assert emu("--cases", good, "--check")[0] == 0


def test_a_picture_is_written_as_png_or_as_a_page(emu, tmp_path):
    png, page = tmp_path / "seen.png", tmp_path / "seen.html"
    assert emu("--picture", png)[0] == emu("--picture", page)[0] == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/png;base64," in text
    for words in ("by source", "vTrain", "The worst", "Not usable"):
        assert words in text


def test_a_picture_of_nothing_is_refused(as_json, written, tmp_path):
    code, said = as_json("--cases", written(COLLECTIVE), "--picture", tmp_path / "x.png")
    assert code == 2
    assert "nothing to draw" in said["error"]


def test_500_cases_at_once(as_json, written):
    """How long it takes: tests/benchmarks/bench_validate.py."""
    runs = [line.row for line in packaged_rows() if line.file.startswith("published")]
    path = written(*(row.model_dump_json() for row in runs[-500:]))
    code, said = as_json("--cases", path)
    assert (code, said["rows"]["runs"]) == (0, 500)
