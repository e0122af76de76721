"""What is no program and no mesh is told by everything that runs one, in the same words."""

import pytest

import emu


def ones(rank):
    return 1


ASKS = {
    "launch": emu.launch,
    "hazards": emu.hazards,
    "check": lambda program, mesh: emu.check(program, mesh, ones),
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("mesh", ["dp=2", 2, {"dp": 2}, None])
def test_what_is_no_mesh_is_told(ask, mesh):
    with pytest.raises(emu.EmuError) as caught:
        ask(ones, mesh)
    said = (caught.value.message, caught.value.hint)
    assert said == (f"the mesh is a {type(mesh).__name__}", "pass a mesh: emu.Mesh(dp=8)")


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("program", ["f.py:step", 3, None])
def test_what_is_no_program_is_told(ask, program):
    with pytest.raises(emu.EmuError) as caught:
        ask(program, emu.Mesh(dp=2))
    said = (caught.value.message, caught.value.hint)
    assert said == (f"the program is a {type(program).__name__}", "pass a function program(rank)")


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_program_on_a_mesh_is_run(ask):
    assert ask(ones, emu.Mesh(dp=2))
