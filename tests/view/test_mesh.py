"""A picture of the mesh shows every rank on the device it lies on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emu.hardware import cluster
from emu.spmd import Mesh
from emu.view import mesh_figure, mesh_html, png_bytes
from emu.view.mesh import _colour, mesh_places

two_nodes = cluster("h100", nodes=2)


@given(st.integers(1, 3), st.integers(1, 5))
@settings(deadline=None)
def test_every_rank_lies_on_its_own_device_of_its_own_node(dp, tp):
    places = mesh_places(Mesh(dp=dp, tp=tp), two_nodes)
    assert [place.rank for place in places if place.rank is not None] == list(range(dp * tp))
    assert all(place.node == two_nodes.node_of(place.rank) for place in places if place.rank is not None)
    assert len(places) % 8 == 0


def panel_texts(figure, panel):
    return [text.get_text() for text in figure.axes[panel].texts]


def test_an_axis_is_a_panel_with_every_rank_and_its_coordinates():
    figure = mesh_figure(Mesh(pp=2, dp=3, tp=2), two_nodes)
    assert len(figure.axes) == 3
    assert "7\npp1 dp0 tp1" in panel_texts(figure, 0)
    assert {"node 0", "node 1"} <= set(panel_texts(figure, 0))
    png_bytes(figure)


def test_colours_are_the_coordinate_along_the_axis():
    mesh = Mesh(dp=2, tp=4)
    for panel, axis in enumerate(mesh.axes):
        patches = mesh_figure(mesh, two_nodes).axes[panel].patches
        colours = [tuple(patch.get_facecolor()) for patch in patches[:8]]
        for one in range(8):
            for other in range(8):
                same = mesh.coords(one)[axis] == mesh.coords(other)[axis]
                assert (colours[one] == colours[other]) == same


def test_sixteen_coordinates_have_sixteen_colours():
    assert len({_colour(i, 16) for i in range(16)}) == 16


def test_what_is_said_of_links_is_true_of_the_group_it_names():
    titles = [axes.get_title(loc="left") for axes in mesh_figure(Mesh(pp=2, dp=3, tp=2), two_nodes).axes]
    # Ranks 0, 2, 4 share a node; 6, 8, 10 are the dp group that does not.
    assert titles[1].startswith("dp=3: ranks 6, 8, 10 are one dp group, across nodes")
    assert titles[2].startswith("tp=2: ranks 0, 1 are one tp group, inside a node (NVLink 4, 450 GB/s)")


def test_many_nodes_are_sampled_and_said_to_be():
    html = mesh_html(Mesh(dp=32, tp=8), cluster("h100", nodes=32))
    assert "6 of 32 nodes shown" in html and "node 31" in html
    assert "nodes shown" not in mesh_html(Mesh(dp=2, tp=8), two_nodes)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=1), Mesh(dp=3), Mesh(dp=4, ep=2)])
def test_a_mesh_without_a_cluster_is_drawn(mesh):
    png_bytes(mesh_figure(mesh))
    assert f"{mesh}" in mesh_html(mesh)


def test_html_holds_every_rank_and_escapes_names():
    mesh = Mesh(**{"<script>": 2})
    assert "<script>" not in mesh_html(mesh) and "&lt;script&gt;=2" in mesh_html(mesh)
    assert mesh_html(Mesh(dp=8), two_nodes).count("<small>dp") == 8
