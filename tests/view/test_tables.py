"""Metrics as a table that a student can read, in a terminal and in HTML."""

import io
from dataclasses import fields

import pytest

from emu.cost import Metrics
from emu.view import Table, comparison_table, metrics_table
from emu.view.tables import METRICS, value_text


def terminal(table, width=200):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width).print(table.rich(width))
    return out.getvalue()


def test_every_metric_has_a_name_and_a_meaning():
    for field in fields(Metrics):
        name, meaning = METRICS[field.name]
        assert name and (meaning or field.name == "flops_convention")


def test_the_table_shows_what_the_metrics_say(make):
    metrics = make.priced().metrics()
    rows = {row[0]: row[1] for row in metrics_table(metrics).rows}
    assert rows["step time"] == value_text("step_time_s", metrics.step_time_s)
    assert value_text("step_time_s", 0.03579) == "35.8 ms"
    assert rows["MFU"] == f"{100 * metrics.mfu:.1f} %"
    assert rows["bytes sent, dp"] == value_text("comm_bytes", metrics.comm_bytes["dp"])
    assert (rows["peak memory"], rows["peak memory, least"]) == ("8.77 GB", "7.89 GB")
    assert "tokens per s" not in rows  # it was not given, and is not made up
    assert metrics.flops_convention in metrics_table(metrics).note


def test_another_run_gives_another_table(make):
    one, less = make.priced(), make.priced(make.training_step(2))
    assert metrics_table(one.metrics()).rows != metrics_table(less.metrics()).rows


def test_runs_stand_side_by_side(make):
    table = comparison_table(
        {"1 device": make.priced(make.training_step(1)).metrics(), "8 devices": make.priced().metrics(tokens=100)}
    )
    assert table.headers == ("", "1 device", "8 devices", "what it means")
    rows = {row[0]: row[1:3] for row in table.rows}
    assert rows["tokens per s"][0] == "–" and rows["tokens per s"][1] != "–"
    assert [row[0] for row in table.rows][:3] == ["step time", "MFU", "HFU"]


def test_keys_that_are_not_known_are_shown_by_their_unit():
    rows = metrics_table({"warmup_s": 0.25, "cache_bytes": 2_000_000, "odd": "yes", "fits": False}).rows
    assert [row[:2] for row in rows] == [
        ("fits", "no"), ("warmup_s", "250 ms"), ("cache_bytes", "2.00 MB"), ("odd", "yes")
    ]  # fmt: skip


def test_in_a_narrow_terminal_the_words_go_below(make):
    metrics = make.priced().metrics()
    table = comparison_table({"1 device": metrics, "8 devices": metrics, "8 shrunk": metrics})
    meaning, share = METRICS["mfu"][1], f"{100 * metrics.mfu:.1f} %"
    narrow, wide = terminal(table, width=80).splitlines(), terminal(table, width=200).splitlines()
    assert max(map(len, narrow)) <= 80
    assert any(line.strip() == f"MFU: {meaning}" for line in narrow)
    assert any("MFU" in line and line.count(share) == 3 for line in narrow)
    assert any("MFU" in line and meaning in line and share in line for line in wide)
    assert not any(line.strip().startswith("MFU:") for line in wide)


def test_markup_in_names_is_shown_and_not_obeyed():
    table = Table(("[red]a[/red]", "<script>"), [("[bold]x", "</td><script>alert(1)</script>")], "[b]<i>", "<u>")
    assert "[red]a[/red]" in terminal(table) and "[bold]x" in terminal(table) and "[b]<i>" in terminal(table)
    html = table.html()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert not any(tag in html for tag in ("<script", "<i>", "<u>"))


def test_a_ragged_row_is_refused():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table(("a", "b"), [("only one",)])
