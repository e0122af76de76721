"""A grammar of SPMD programs: random ones as Python text, each with its single-device reference."""

from emu.testing.grammar.write import write_program
from emu.testing.grammar.written import Statement, WrittenProgram

__all__ = ["Statement", "WrittenProgram", "write_program"]
