"""Plans are written as TOML tables and read again; what is wrong in a file is told with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from emu.cli import main
from emu.parallel.plan import Plan
from emu.spmd import PlanError

from .plans import CHOICES, plan_of, possible


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    case = possible({option: draw(st.sampled_from(values)) for option, values in CHOICES.items()})
    assume(case is not None)
    assert case is not None
    more: dict[str, Any] = {"seed": draw(st.integers(0, 2**63 - 1))}
    if case["cp"] == 1:
        more["capacity"] = draw(st.none() | st.floats(1e-300, 1e300) | st.integers(1, 2**60))
    if case["microbatches"] == 1 and case["schedule"] == "1f1b":
        more["micro_batch"] = draw(st.none() | st.integers(1, 5))
    plan = plan_of(case)
    return Plan(**{**vars(plan), **more})


@given(plans())
def test_a_plan_that_is_written_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    file = tmp_path_factory.mktemp("plans") / "plan.toml"
    file.write_text(plan.to_toml())
    assert Plan.from_toml(file) == plan
    file.write_text(plan.to_toml().removeprefix("[plan]\n"))  # at the top of a file of its own
    assert Plan.from_toml(str(file)) == plan


def test_what_is_as_by_default_is_not_written() -> None:
    assert Plan("dp=2,tp=4", zero=1, sp=True).to_toml() == '[plan]\nmesh = "dp=2,tp=4"\nzero = 1\nsp = true\n'
    assert Plan().to_toml() == '[plan]\nmesh = "dp=1"\n'


WRONG = [
    ("[plan]\nmesh = 'dp=2'\nzreo = 1\n", 3, r"zreo = 1 is no field", "did you mean zero"),
    ("mesh = 'dp=2'\n\nschedul = 'gpipe'", 3, "schedul = 'gpipe' is no field", "did you mean schedule"),
    ("[paln]\nmesh = 'dp=2'\n", 1, "paln = {'mesh': 'dp=2'} is no field", "did you mean plan"),
    ("# a comment\nplan = { mesh = 'dp=2', zeros = 1 }\n", 2, "zeros = 1 is no field", "did you mean zero"),
    ("plan.mesh = 'dp=2'\nplan.xyz = 1\n", 2, "xyz = 1 is no field", "they are mesh, zero, "),
    ("plan = 3\n", 1, "plan = 3 is no table", "write"),
    ("zero = 1\n[plan]\nmesh = 'dp=2'\n", 1, "zero stands outside the table", "move it below"),
    ("[plan]\nmesh = 'dp=2\n", 2, "no valid TOML", "a line is name = value"),
    ("[plan]\nzero = 1\nzero = 2\n", 3, "no valid TOML", "a line is name = value"),
    ("[plan]\nmesh = 'dp=2'\nzero = 4", 3, "there is no zero=4", "use 0"),
    ("[plan]\nzero = '3'\nmesh = 'dp=2'\n", 2, "there is no zero='3'", "use 0"),
    ("[plan]\nmesh = 'dp=2'\nsp = true\n", 3, "sp cuts the sequence over tp", "the nearest plan has sp off"),
    ("[plan]\nmesh = 'dp:2'\n", 2, "'dp:2' is not an axis", "write the mesh as"),
    ("[plan]\nmesh = { dp = 2 }\n", 2, "is a dict", "write it as text"),
    ("[plan]\nmesh = 'dp=2'\nschedule = '__import__(\"os\").abort()'\n", 3, "there is no schedule", "schedules are"),
]


@pytest.mark.parametrize(("text", "line", "says", "hint"), WRONG, ids=[says for _, _, says, _ in WRONG])
def test_what_is_wrong_in_a_file_is_told_with_its_line(
    tmp_path: Path, text: str, line: int, says: str, hint: str
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(file)
    error: Any = caught.value
    assert (error.file, error.line) == (str(file), line)
    assert error.message.startswith(f"{file}, line {line}: ") and says in error.message and hint in error.hint


def test_tables_beside_a_plan_are_for_others(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    others = "[model]\nlayers = 2\n[[cluster]]\nname = 'a'\n"
    for text in ("mesh = 'dp=2'\nzero = 1\n", "[plan]\nmesh = 'dp=2'\nzero = 1\n"):
        file.write_text(text + others)
        assert Plan.from_toml(file) == Plan("dp=2", zero=1)
    file.write_text("mesh = 'dp=2'\n[plam]\nzero = 1\n")  # which would be lost without a word
    with pytest.raises(PlanError, match=r"plam = .* is no field") as caught:
        Plan.from_toml(file)
    assert "did you mean plan" in str(caught.value.hint)
    file.write_text(others)  # no plan at all
    with pytest.raises(PlanError, match=r"line 1: model = .* is no field"):
        Plan.from_toml(file)


def test_a_mark_of_the_encoding_is_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_bytes(b"\xef\xbb\xbfmesh = 'dp=2'\nzero = 1\n")
    assert Plan.from_toml(file) == Plan("dp=2", zero=1)


def test_a_field_that_contradicts_the_file_says_what_is_nearest(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\nmesh = 'dp=4'\nzero = 2\nreplicate = 3\n")
    with pytest.raises(PlanError) as caught:
        Plan.from_toml(file)
    error: Any = caught.value
    assert (error.field, error.nearest, error.line) == ("replicate", 2, 4)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"\x00"], ids=["missing", "no UTF-8", "no TOML"])
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "plan.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.toml") as caught:
        Plan.from_toml(file)
    assert caught.value.hint
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.from_toml(tmp_path)


@given(st.text())
def test_any_text_is_a_plan_or_a_complaint(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("plans") / "plan.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert isinstance(Plan.from_toml(file), Plan)
    except PlanError as error:
        assert error.hint


# The command.


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    with pytest.raises(SystemExit) as exit_:
        main(["verify", *argv, "--json"])
    return int(exit_.value.code or 0), json.loads(capsys.readouterr().out)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that emu verify was asked to verify, instead of verifying them."""
    import emu.equivalence

    found: list[Plan] = []

    def take(make: Any, plan: Plan, *rest: Any) -> Any:
        found.append(plan)
        return emu.Verdict(True, "exact", 0.0, None, 0, 0)

    monkeypatch.setattr(emu.equivalence, "verify", take)
    return found


def test_flags_count_more_than_the_file_and_the_file_more_than_defaults(capsys, tmp_path, asked) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\nmesh = 'dp=2,tp=2'\nzero = 3\nsp = true\noffload = true\nseq = 16\nseed = 5\n")
    flags = ("--no-sp", "--zero", "1", "--keep-gathered", "--global-batch", "4")
    assert answer(capsys, "--model", "gpt-tiny", "--plan", str(file), *flags)[0] == 0
    assert asked == [
        Plan("dp=2,tp=2", zero=1, reshard_after_forward=False, offload=True, seq=16, seed=5, global_batch=4)
    ]
    assert answer(capsys, "--model", "gpt-tiny", "--plan", str(file), "--mesh", "tp=4")[0] == 0
    assert asked[1] == Plan("tp=4", zero=3, sp=True, offload=True, seq=16, seed=5)
    assert answer(capsys, "--model", "gpt-tiny")[0] == 0
    assert asked[2] == Plan("dp=2")


def test_a_plan_of_a_file_is_verified(capsys, tmp_path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\nmesh = 'tp=2,dp=2'\nzero = 1\nseq = 4\nglobal_batch = 2\n")
    code, said = answer(capsys, "--model", "gpt-tiny", "--plan", str(file), "--mutants", "none")
    assert code == 0 and said["equivalent"] is True


def test_what_is_wrong_in_the_file_is_told_by_the_command(capsys, tmp_path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\nmesh = 'dp=2'\nreplicate = 2\n")
    code, said = answer(capsys, "--model", "gpt-tiny", "--plan", str(file))
    assert code == 2 and f"{file}, line 3: replicate=2" in said["error"]
    code, said = answer(capsys, "--model", "gpt-tiny", "--plan", str(file), "--replicate", "3")
    assert code == 2 and said["error"].startswith("replicate=3")  # said by the flag, not in line 3
    code, said = answer(capsys, "--model", "gpt-tiny", "--plan", str(tmp_path / "none.toml"))
    assert code == 2 and "there is no such file" in said["error"]
    file.write_text("[plan]\nprecision = 'bf16-mixed'\n")
    code, said = answer(capsys, "--model", "gpt-tiny", "--plan", str(file), "--tier", "float32")
    assert code == 2 and "precision" in said["error"]
