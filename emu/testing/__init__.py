"""Hypothesis strategies for whole distributed programs: meshes, plans, models, batches, programs right and wrong.

    from hypothesis import given, settings, strategies as st
    from emu import testing

    @settings(deadline=None, max_examples=20)
    @given(st.data())
    def test_my_scheme(data):
        plan = data.draw(testing.plans(max_ranks=4, zero=[0]))
        model = data.draw(testing.models(plan))
        assert emu.verify(model, plan, batch=data.draw(testing.batches(model, plan)))

Everything shrinks to what is simplest: one rank, default options, one layer, one row. It needs hypothesis, which emu
alone does not install: pip install "emu[testing]".
"""

from importlib.util import find_spec

from emu.spmd import EmuError

if find_spec("hypothesis") is None:
    raise EmuError(
        "emu.testing needs hypothesis, which is not installed", 'pip install hypothesis, or: pip install "emu[testing]"'
    )

from emu.testing.changes import CHANGES
from emu.testing.grammar import WrittenProgram
from emu.testing.meshes import meshes
from emu.testing.models import ModelFactory, batches, models
from emu.testing.plans import plans
from emu.testing.wrong import WrongProgram, programs, write_wrong_program, wrong_programs

__all__ = [
    "CHANGES",
    "ModelFactory",
    "WrittenProgram",
    "WrongProgram",
    "batches",
    "meshes",
    "models",
    "plans",
    "programs",
    "write_wrong_program",
    "wrong_programs",
]
