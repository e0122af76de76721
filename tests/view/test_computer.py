"""A cluster's summary as tables: all of it is there, and unknown figures are not made up."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from emu.hardware import Summary, cluster
from emu.view import attach, ladder, summaries_table, summary_html, summary_tables


def printed(table):
    out = StringIO()
    Console(file=out, width=140).print(table)
    return out.getvalue()


def test_both_tables_hold_every_level_and_total():
    summary = cluster("h100-16384").summary()
    totals, levels = summary_tables(summary)
    assert {row[0] for row in totals.rows} >= {"devices", "racks", "peak bfloat16", "power with hosts"}
    assert totals.headers[0] == "all 16,384 devices together"  # a peak in it is no device's
    assert len(levels.rows) == len(summary.levels)
    for level, row in zip(summary.levels, levels.rows):  # the picture of the same levels has the same words
        assert row[0].startswith(ladder.NAMES[level.name].partition(":")[0])
    assert "16.2 EFLOP/s" in printed(totals) and "1:7 above" in printed(levels) and "240 PB" in printed(levels)


def test_a_summary_shows_itself_in_a_notebook_and_escapes_names(monkeypatch):
    monkeypatch.setattr(Summary, "_repr_html_", None, raising=False)
    monkeypatch.delattr(Summary, "_repr_html_")
    summary = replace(cluster("h100-8").summary(), name="<b>mine</b>")
    assert not hasattr(summary, "_repr_html_")
    attach()
    shown = summary._repr_html_()
    assert shown == summary_html(summary) and shown.count("<table>") == 2
    assert "&lt;b&gt;mine" in shown and "<b>mine" not in shown


def test_side_by_side_the_trade_of_cloudmatrix_is_seen():
    table = summaries_table(cluster("gb200-nvl72").summary(), cluster("cloudmatrix-384").summary())
    rows = {name: cells for name, *cells in table.rows}
    assert rows["devices"] == ["72", "384"]
    assert rows["matrix peak of a device"] == ["2.5 PFLOP/s", "752 TFLOP/s"]
    assert rows["of all"] == ["180 PFLOP/s", "289 PFLOP/s"]
    assert rows["power"] == ["120 kW", "559 kW"]
    assert rows["FLOP/s per watt"] == ["1.5 TFLOP/s", "517 GFLOP/s"]


def test_power_that_is_not_known_is_not_made_up():
    rows = {name: cells for name, *cells in summaries_table(cluster("tpu-v5p-pod").summary()).rows}
    assert rows["power"] == rows["FLOP/s per watt"] == ["not known"]
    power = cluster("dgx-1").summary()
    rows = {name: cells for name, *cells in summaries_table(power, replace(power, power_w=None)).rows}
    assert rows["power"] == ["3.2 kW", "2.4 kW"]
