"""The fit of constants: what it looks at, that it finds what is there, and that what is written is what it found."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from emu.hardware import fitted
from emu.planner.closed import predict
from emu.validate import fit as fitting
from emu.validate.cases import cases_of
from emu.validate.constants_file import STATES, source, text
from emu.validate.reading import packaged_rows


@pytest.fixture(scope="module")
def targets():
    return fitting.targets()


def committed():
    return {name: constant.value for name, constant in fitted().items()}


def was_fitted(name):
    return STATES[True] in fitted()[name].source


def test_only_the_fits_fold_is_looked_at(targets):
    held_out = {case.id for case in cases_of(packaged_rows()) if not case.fit}
    assert len(targets) > 100 and not held_out & {target.id for target in targets}


def test_layers_times_of_one_layout_count_once(targets):
    layers = [target for target in targets if target.layer]
    assert {frozenset(target.measured) for target in layers} == {
        frozenset(("forward", "backward")),
        frozenset(("kernels_forward", "input", "weight")),
    }
    assert len(layers) == 5


def test_the_file_is_what_the_fit_writes():
    """Whole, of its own values: nobody has changed it by hand."""
    constants = {name: (constant, was_fitted(name)) for name, constant in fitted().items()}
    path = files("emu.hardware") / "data" / "fitted.toml"
    assert path.read_text(encoding="utf-8") == text(constants)


@pytest.mark.parametrize("told", ["a; fitted; prior: read", "a; not fitted; prior: read", "a; prior: read"])
def test_a_source_says_whether_its_constant_was_fitted(told):
    assert source(told, True) == "a; fitted; prior: read"
    assert source(told, False) == "a; not fitted; prior: read"


def test_what_was_neither_fitted_nor_read_is_unverified():
    assert source("a; fitted; prior: assumed", False) == "unverified: a; not fitted; prior: assumed"
    assert source("unverified: a; not fitted; prior: assumed", True) == "a; fitted; prior: assumed"


@pytest.mark.parametrize("name", list(fitted()))
def test_what_the_cases_do_not_tell_stays_at_its_prior_and_nothing_goes_far(name):
    """Within three widths, each of which is how far off its prior may be."""
    constant = fitted()[name]
    if not was_fitted(name):
        assert constant.value == constant.prior
    assert abs(fitting.distance(name, constant.value)) < 3


def test_committed_constants_are_an_optimum(targets):
    """No constant alone makes the fit's loss smaller by more than 0.5 %, a tenth of its prior's width up or down."""
    search = fitting.Search(targets, committed())
    for name in filter(was_fitted, committed()):
        step = 0.1 * fitted()[name].width
        for factor in (1 + step, 1 / (1 + step)):
            assert search.tried({name: search.values[name] * factor})[0] > 0.995 * search.loss, name


@pytest.mark.exhaustive
def test_fitting_again_finds_the_committed_constants(targets):
    found = fitting.fit(targets)
    assert found.told == frozenset(filter(was_fitted, committed()))
    for name, value in committed().items():
        assert found.values[name] == pytest.approx(value, rel=2e-3), name


def test_a_constant_is_found_that_the_cases_were_made_with(targets):
    """Times as predicted with H100's products a fifth slower: the fit moves that constant there, and no other far."""
    truth = {"h100.matmul_bfloat16": 0.8 * fitted()["h100.matmul_bfloat16"].prior}
    priors = {name: constant.prior for name, constant in fitted().items()}
    some = [t for t in targets if "h100" in t.families and not t.layer and t.prepared[0].workload.micro_batch]
    made = [replace(t, measured={"step": predict(t.prepared[0].workload, {**priors, **truth}).step_s}) for t in some]
    search = fitting.Search(made, priors)
    before = search.loss
    fitting.coordinates(search, list(truth), 12)
    assert search.values["h100.matmul_bfloat16"] == pytest.approx(truth["h100.matmul_bfloat16"], rel=0.03)
    assert search.loss < before / 3


def test_cases_that_tell_nothing_of_a_constant_leave_it(targets):
    a100 = [t for t in targets if "h100" not in t.families][:10]
    found = fitting.fit(a100, rounds=1, directions=0)
    assert not any(name.startswith(("h100.", "tpu.")) for name in found.told)
    assert found.values["h100.matmul_bfloat16"] == fitted()["h100.matmul_bfloat16"].prior


def test_the_command_says_value_prior_and_distance(monkeypatch, capsys, targets):
    few = targets[:8]
    monkeypatch.setattr(fitting, "targets", lambda: few)
    monkeypatch.setattr(
        fitting, "fit", lambda some: fitting.Fitted(committed(), frozenset(("h100.flash3",)), 0.1, (0.1, -0.2))
    )
    fitting.main([])
    said = capsys.readouterr().out
    assert "h100.flash3" in said and "not fitted" in said and "2 cases of the fit's fold: median error 15.0%" in said
