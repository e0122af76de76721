"""A picture of who sends what to whom says every number, and how much the busiest rank gets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from emu.parallel.expert import Routing
from emu.view import png_bytes, routing_figure


def numbers(axes):
    return [int(text.get_text().replace(",", "")) for text in axes.texts]


def test_numbers_that_have_no_room_are_left_out_and_the_darkest_is_told():
    above, _ = routing_figure([[1_000_000] * 8] * 8).axes
    assert not numbers(above) and " ".join(above.get_title(loc="left").split()).endswith("darkest: 1 million")


@given(st.integers(1, 8).flatmap(lambda n: arrays.arrays(np.int64, (n, n), elements=st.integers(0, 99_999))))
def test_every_cell_says_its_number_and_every_bar_its_columns_sum(matrix):
    above, below = routing_figure(matrix.tolist()).axes
    assert numbers(above) == matrix.reshape(-1).tolist()
    assert [bar.get_height() for bar in below.patches] == matrix.sum(0).tolist()
    loads = matrix.sum(0)
    worst = loads.max() / loads.mean() if loads.any() else 1
    assert f"{worst:.2f} times the mean" in below.get_title(loc="left")


@given(st.integers(1, 6).flatmap(lambda n: arrays.arrays(np.int64, (n, n), elements=st.integers(0, 99_999))))
def test_a_layers_routing_is_drawn_as_its_matrix_is(matrix):
    sent = tuple(map(tuple, matrix.tolist()))
    routing = Routing(sent, experts=(7, 8, 9), dropped=3)  # of these nothing is drawn
    ours, same = routing_figure(routing).axes, routing_figure(sent).axes
    assert numbers(ours[0]) == numbers(same[0]) == matrix.reshape(-1).tolist()
    assert ours[1].get_title(loc="left") == same[1].get_title(loc="left")
    assert f"gets {routing.imbalance:.2f} times the mean" in ours[1].get_title(loc="left")


def test_what_stays_at_home_is_said():
    above, _ = routing_figure([[3, 1], [0, 4]]).axes
    assert above.get_title(loc="left") == "8 copies of tokens, 88 % of them stay on their rank"


def test_more_is_darker():
    above, _ = routing_figure([[0, 50], [75, 100]]).axes
    image = above.images[0]
    shades = [sum(image.cmap(image.norm(v))[:3]) for v in (0, 50, 75, 100)]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == 4


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (64, 64), (16, 8), (2, 16)])
def test_few_and_many_ranks_are_drawn(shape):
    figure = routing_figure(np.arange(shape[0] * shape[1]).reshape(shape).tolist())
    assert bool(figure.axes[0].texts) == (max(shape) <= 16)
    png_bytes(figure)


@pytest.mark.parametrize("wrong", [[], [1, 2], [[]], [[-1, 2], [0, 1]], [[float("nan")]]])
def test_what_is_no_traffic_is_refused(wrong):
    with pytest.raises(ValueError, match="no traffic to draw"):
        routing_figure(wrong)
