"""Written programs: they are right, various, readable in messages, and the same each time."""

import re
import traceback
from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings

import emu
from emu import testing
from emu.equivalence import check
from emu.spmd import EmuError
from emu.testing.grammar import write_program

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

WORDS = """
    all_reduce reduce broadcast all_gather gather reduce_scatter scatter all_to_all ring_shift send recv exchange
    copy_to reduce_from scatter_to gather_from gather_shards reduce_to_shards exchange_shards shift
    async_op wait wait_stream record_event stream event members sizes root group backward
"""


def right(program):
    found = check(program.program, program.mesh, program.reference, mutants="none")
    assert found and found.tier == "exact" and found.max_rel_err == 0, f"{found}\n{program}"


@settings(SETTINGS, max_examples=15)
@given(testing.programs(max_ranks=5))
def test_a_program_computes_what_its_reference_computes_bit_for_bit(program):
    right(program)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_programs_are_found_right(part):
    for seed in range(part * 250, part * 250 + 250):
        right(write_program(Random(seed), 8))


def test_they_use_all_that_a_program_can_use():
    texts = [write_program(Random(seed), 8).source for seed in range(500)]
    words = set(WORDS.split())
    uses = Counter(word for text in texts for word in words if re.search(rf"\b{word}\b", text))
    assert all(uses[word] >= 3 for word in words), uses
    meshes = [write_program(Random(seed), 8).mesh for seed in range(200)]
    assert {mesh.size for mesh in meshes} == set(range(2, 9)) and {len(mesh.axes) for mesh in meshes} == {1, 2}


def test_one_statement_stands_on_a_line_and_messages_show_it():
    program = write_program(Random(3), 4)
    lines = program.source.splitlines()
    for i, statement in enumerate(program.statements):
        assert lines[program.first_line - 1 + i] == str(statement) and ";" not in statement.text
    broken = program.with_statement(2, "raise ValueError('here')")
    with pytest.raises(ValueError, match="here") as caught:
        emu.launch(broken.program, broken.mesh, track=False)
    frame = next(f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == broken.file)
    assert frame.lineno == broken.first_line + 2 and frame.line == "raise ValueError('here')"


def test_the_same_choices_make_the_same_program_under_a_name_of_its_own():
    programs = [write_program(Random(seed), 6) for seed in range(60)]
    assert programs == [write_program(Random(seed), 6) for seed in range(60)]
    assert len({program.file for program in programs}) == len({program.source for program in programs}) > 55


def test_programs_shrink_to_one_step_on_two_ranks():
    few = settings(SETTINGS, max_examples=100)
    program = find(
        testing.programs(), lambda program: "all_reduce" in program.source and len(program.axes) == 1, settings=few
    )
    assert program.mesh.size == 2 and len(program.statements) <= 14


@pytest.mark.parametrize("strategy", [testing.programs, testing.wrong_programs])
def test_a_program_of_one_rank_is_refused(strategy):
    with pytest.raises(EmuError, match="one rank"):
        find(strategy(max_ranks=1), lambda program: True)


def test_a_program_with_a_change_is_seen():
    """Negative control of `right`, with the smallest change there is: one number, one part in 2^20."""
    program = next(p for p in (write_program(Random(seed), 4, trained=True) for seed in range(9)) if p.mesh.size > 2)
    at = next(i for i, statement in enumerate(program.statements) if ".div_(" in statement.text)
    text = program.statements[at].text
    changed = program.with_statement(at, text.replace(")", " * (1 + 2**-20))"))
    with pytest.raises(AssertionError, match="NOT equivalent"):
        right(changed)
    right(program)


def test_numbers_are_on_the_grid_and_rarely_alike():
    x = torch.randint(-99, 100, (40, 4), generator=torch.Generator().manual_seed(1)) / 64
    assert torch.equal(x * 64, (x * 64).round()) and len(x.unique()) > 80
