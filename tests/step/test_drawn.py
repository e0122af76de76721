"""A stepper draws itself: the picture has every rank, where its host stands, and its memory to scale; nothing is cut off."""

from __future__ import annotations

import pytest
import torch
from step.stepped import MESH, stuck, to_end, training

import emu
from emu.view.stepping import CURSOR, stepping_figure
from emu.view.style import png_bytes


def texts(figure) -> list[str]:
    return [t.get_text() for axes in figure.axes for t in [axes.title, axes._left_title, *axes.texts] if t.get_text()]


def test_every_rank_has_its_cursor_its_memory_and_its_words():
    with emu.step(training, MESH) as s:
        s.until("stepped")
        state = s.state()
        figure = stepping_figure(state, s.now.timeline())
        left, right = figure.axes
        words = texts(figure)
        assert {f"rank {r}" for r in range(4)} <= set(words)
        assert any(f"before step {s.index}: rank {s.op.rank} mark stepped" in t for t in words)
        widths = sum(p.get_width() for p in right.patches)
        held = sum(sum(r["hbm"].values()) for r in state["ranks"])
        unit = {"device memory (kB) of 80.0 GB": 1e3, "device memory (B) of 80.0 GB": 1.0}[right.get_xlabel()]
        assert widths * unit == pytest.approx(held)
        cursors = [c for c in left.collections if c.get_label().startswith("_child") and len(c.get_paths()) == 1]
        red = [c for c in cursors if tuple(c.get_edgecolor()[0][:3]) == pytest.approx(_rgb(CURSOR))]
        assert len(red) == 1  # the rank that is next
        at_s = red[0].get_segments()[0][0][0]
        host_s = state["ranks"][s.op.rank]["host_s"]
        scale = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[left.get_xlabel().partition("(")[2].partition(")")[0]]
        assert at_s * scale == pytest.approx(host_s)


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))


def test_nothing_is_cut_off():
    with emu.step(training, MESH) as s:
        for goal in (None, "begin", "stepped"):
            if goal:
                s.until(goal)
            figure = stepping_figure(s.state(), s.now.timeline())
            figure.draw_without_rendering()
            width, height = figure.canvas.get_width_height()
            for axes in figure.axes:
                for text in axes.texts:
                    box = text.get_window_extent()
                    assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, (
                        text.get_text()
                    )


def test_it_draws_itself_at_every_kind_of_moment():
    with emu.step(stuck, emu.Mesh(dp=2)) as s:
        assert s._repr_png_().startswith(b"\x89PNG")
        with pytest.raises(emu.Deadlock):
            to_end(s)
        assert "ended by RankLeft" in texts(stepping_figure(s.state(), s.now.priced()))[0]
        assert s.now._repr_png_().startswith(b"\x89PNG")


def test_many_ranks_are_sampled_with_the_one_that_is_next():
    with emu.step(lambda rank: torch.ones(2) * 2, emu.Mesh(dp=40)) as s:
        s.next(rank=17)
        figure = stepping_figure(s.state(), s.now.timeline())
        shown = [t for t in texts(figure) if t.startswith("rank ")]
        assert len(shown) == 16 and "rank 17" in shown


def test_without_times_there_is_still_memory():
    with emu.step(training, MESH) as s:
        s.until("begin")
        assert png_bytes(stepping_figure({**s.state(), "provisional_s": None}, None)).startswith(b"\x89PNG")


def test_hostile_names_are_text():
    def named(rank):
        rank.mark("$\\frac{1}{$ <script>")
        return torch.ones(1)

    with emu.step(named, emu.Mesh(dp=1)) as s:
        assert s._repr_png_().startswith(b"\x89PNG") and "<script>" in repr(s)
