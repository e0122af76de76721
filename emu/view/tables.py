"""Tables for people: of metrics, each row with what it means, for the terminal (rich) and for HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from emu.trace.units import plain_text
from emu.view.units import bytes_text, count_text, percent_text, time_text

if TYPE_CHECKING:
    import rich.table

# What each metric is called and what it means, in the order of the table.
METRICS = {
    "step_time_s": ("step time", "until the last stream and host are done"),
    "mfu": ("MFU", "useful matrix work over the chips' peak"),
    "hfu": ("HFU", "the same, with recomputed work"),
    "kernel_hfu": ("kernel HFU", "the same, while a matrix kernel runs"),
    "tflops_per_device": ("TFLOP/s per device", "useful matrix work, 10^12 operations per s"),
    "dtype": ("dtype", "of most matrix work; sets the peak"),
    "tokens_per_s": ("tokens per s", "trained on by all devices together"),
    "tokens_per_s_per_device": ("tokens per s per device", "the same, per device"),
    "busy_fraction": ("devices busy", "share of the step with a kernel running"),
    "comm_s": ("communication", "time a rank sends, receives or waits"),
    "exposed_comm_s": ("exposed communication", "the part of it that no kernel hides"),
    "exposed_comm_fraction": ("exposed, share of step", "that part over step time"),
    "bubble_fraction": ("bubble", "share of the step that stages idle"),
    "bubble_ratio": ("bubble, of the ideal", "idle time of stages over their work"),
    "comm_bytes": ("bytes sent", "over links, by the rank that sends most"),
    "host_copy_s": ("host copies", "time that the link to the host is busy, busiest rank"),
    "exposed_host_copy_s": ("exposed host copies", "the part of it that no kernel hides"),
    "host_copy_bytes": ("bytes to and from the host", "by the rank that copies most"),
    "peak_host_bytes": ("host memory", "the most that waits there at once, fullest rank"),
    "peak_hbm_bytes": ("peak memory", "the most that tensors hold at once, fullest rank"),
    "reserved_hbm_bytes": ("reserved memory", "what the allocator holds for it"),
    "fits": ("fits", "whether the peak is below the chip's memory"),
    "energy_j": ("energy", "electrical energy of the step, in joules"),
    "flops_convention": ("how work is counted", ""),
}

LEAST_WORDS = 24  # characters: a narrower column of words is no pleasure to read


@dataclass(frozen=True)
class Table:
    """Text in rows and columns, to be shown in a terminal or in HTML.

    Args:
        headers: of the columns.
        rows: of cells, as many as headers; anything in them is shown as it is, never as markup.
        title: above the table.
        note: below the table.
        left: columns that hold words and are aligned left; the others hold numbers and are aligned right.

    Raises:
        ValueError: a row that is longer or shorter than the headers.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    left: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"the row {list(row)} has {len(row)} cells for {len(self.headers)} columns")

    def rich(self, width: int | None = None) -> rich.table.Table:
        """For `rich.print` or a rich Console.

        Args:
            width: of the terminal in characters; None asks it. Where a last column of words would be squeezed into
                less than 24, its words go below the table instead.
        """
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        widths = [max(len(str(line[i])) for line in (self.headers, *self.rows)) for i in range(len(self.headers))]
        last = len(self.headers) - 1
        room = (width or Console().width) - sum(widths[:last]) - 3 * (last + 1)
        squeezed = last in self.left and last > 1 and room < min(LEAST_WORDS, widths[last])
        notes = [self.note] if self.note else []
        if squeezed:
            notes = [f"{row[0]}: {row[last]}" for row in self.rows if row[last]] + notes
        table = RichTable(
            title=Text(plain_text(self.title)) if self.title else None,
            caption=Text(plain_text("\n".join(notes))) if notes else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        columns = range(last) if squeezed else range(last + 1)
        for i in columns:
            # The names of the rows keep their width: numbers without them say nothing.
            table.add_column(
                Text(plain_text(self.headers[i])), justify="left" if i in self.left else "right", no_wrap=i == 0
            )
        for row in self.rows:
            table.add_row(*(Text(plain_text(str(row[i]))) for i in columns))
        return table

    def html(self) -> str:
        """A `<table>` with everything escaped; its looks are the page's, or the notebook's."""

        def cell(tag: str, i: int, text: str) -> str:
            side = "left" if i in self.left else "right"
            return f'<{tag} style="text-align:{side}">{escape(str(text))}</{tag}>'

        head = "".join(cell("th", i, header) for i, header in enumerate(self.headers))
        body = "".join(f"<tr>{''.join(cell('td', i, text) for i, text in enumerate(row))}</tr>\n" for row in self.rows)
        caption = f'<caption style="text-align:left">{escape(self.title)}</caption>' if self.title else ""
        note = f"<p><small>{escape(self.note)}</small></p>" if self.note else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>{note}"

    _repr_html_ = html


def metrics_table(metrics: Any, title: str = "") -> Table:
    """The metrics of one run: name, value, what it means.

    Args:
        metrics: a Metrics, or a mapping from the same names (API.md) to numbers.
        title: above the table.
    """
    rows = [(name, value, meaning) for (name, meaning), value in _values(metrics).items()]
    note = _as_dict(metrics).get("flops_convention") or ""
    return Table(("", "value", "what it means"), rows, title, f"Operations: {note}" if note else "", left=(0, 2))


def comparison_table(runs: Mapping[str, Any], title: str = "", note: str = "") -> Table:
    """The metrics of several runs side by side.

    Args:
        runs: name -> Metrics or mapping; a metric that a run does not have is a dash.
        title: above the table.
        note: below it.
    """
    columns = {name: _values(metrics) for name, metrics in runs.items()}
    keys = sorted(dict.fromkeys(key for values in columns.values() for key in values), key=_order)
    rows = [(key[0], *(values.get(key, "–") for values in columns.values()), key[1]) for key in keys]
    return Table(("", *runs, "what it means"), rows, title, note, left=(0, len(runs) + 1))


def _order(key: tuple[str, str]) -> int:
    meanings = [meaning for _, meaning in METRICS.values()]
    return meanings.index(key[1]) if key[1] in meanings else len(meanings)


def _as_dict(metrics: Any) -> Mapping[str, Any]:
    return metrics if isinstance(metrics, Mapping) else metrics.as_dict()


def _values(metrics: Any) -> dict[tuple[str, str], str]:
    """(name, meaning) -> value as text, in the table's order; what METRICS does not know comes last under its own name."""
    given = _as_dict(metrics)
    if not given.get("host_copy_bytes"):  # nobody copies: no rows of zeros
        given = {key: value for key, value in given.items() if "host" not in key}
    out: dict[tuple[str, str], str] = {}
    for key in (*METRICS, *(key for key in given if key not in METRICS)):
        value = given.get(key)
        if value is None or key == "flops_convention" or value == "":
            continue
        name, meaning = METRICS.get(key, (key, ""))
        if isinstance(value, Mapping):
            for group, size in value.items():
                out[f"{name}, {group}", meaning] = value_text(key, size)
        else:
            out[name, meaning] = value_text(key, value)
            if isinstance(value, (list, tuple)) and value and value_text(key, min(value)) != value_text(key, value):
                out[f"{name}, least", "the same, of the emptiest rank"] = value_text(key, min(value))
    return out


def value_text(key: str, value: Any) -> str:
    """A value as text, by the unit in its name: "step_time_s" in seconds, "peak_hbm_bytes" in bytes.

    A list holds one value a rank (or stage): the largest is shown.
    """
    if isinstance(value, (list, tuple)):
        return value_text(key, max(value)) if value else "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if key in ("mfu", "hfu", "kernel_hfu") or key.endswith("fraction"):
        return percent_text(value)
    if "_per_" in key:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if key.endswith("_s"):
        return time_text(value)
    return bytes_text(value) if key.endswith("bytes") else count_text(value)
