"""What is made of priced cases: errors of time and memory, whether runs fit, what is counted and what is left out."""

from __future__ import annotations

import pytest
from published import COLLECTIVE, RUN, changed

from emu.cost import PricingError
from emu.planner.closed import Prediction, WorkloadError
from emu.validate.judge import band
from emu.validate.reading import Line
from emu.validate.report import examined
from emu.validate.rows import CollectiveRow, RunRow


def lines(*rows: dict) -> list[Line]:
    kinds = (CollectiveRow if "op" in row else RunRow for row in rows)
    return [Line("file", i, kind.model_validate(row)) for i, (kind, row) in enumerate(zip(kinds, rows), 1)]


def always(step_s: float = 2.0, peak_bytes: tuple[float, ...] = (1e9, 3e9, 2e9), fits: bool = True):
    """A predictor that says the same of everything, and lists what it was asked."""
    asked = []

    def predictor(workload) -> Prediction:
        asked.append(workload)
        return Prediction(step_s, {}, peak_bytes, 0.0, 0.0, 1, {"forward": 0.010, "backward": 0.020}, fits)

    predictor.asked = asked
    return predictor


def report(*rows: dict, predictor=None, held_out: bool = False):
    return examined(lines(*rows), ["file"], held_out, predictor or always())


def test_errors_are_those_of_the_predictor():
    found = report(
        RUN, changed(RUN, id="b", measured={"iter_time_s": 4.0}), changed(RUN, id="c", measured={"mem_gb": 2})
    )
    said = found.as_dict()
    assert [(case["id"], case["error"]) for case in said["cases"]] == [("one", 0.0), ("b", -0.5)]
    assert (said["n"], said["mape"], said["median_ape"], said["worst"]) == (2, 0.25, 0.25, 0.5)
    assert said["memory"]["cases"] == [
        {"id": "c", "measured_bytes": 2e9, "predicted_bytes": 3e9, "error": 0.5}  # of the fullest stage
    ]


def test_the_time_of_a_layer_is_its_forward_and_backward():
    (pair,) = report(changed(RUN, measured={"layer_total_ms": 20.0})).layers
    assert (pair.measured, pair.predicted) == pytest.approx((0.020, 0.030))


@pytest.mark.parametrize("fits", [True, False])
def test_a_run_fits_if_its_prediction_says_so(fits):
    failed, ran = changed(RUN, id="failed", measured={"oom": True}), changed(RUN, id="ran")
    said = report(failed, ran, predictor=always(fits=fits)).fits()
    assert said == {
        "out_of_memory": 1,
        "out_of_memory_found": int(not fits),
        "ran": 1,
        "ran_and_fits": int(fits),
        "said_not_to_fit": [] if fits else ["ran"],
    }


def test_a_layout_is_priced_once_however_often_it_was_measured():
    predictor = always()
    assert (
        len(report(RUN, changed(RUN, id="again"), changed(RUN, id="other", seq=1024), predictor=predictor).times) == 3
    )
    assert len(predictor.asked) == 2


@pytest.mark.parametrize("error", [WorkloadError("no such thing", "take another"), PricingError("no place", "move")])
def test_what_the_predictor_refuses_is_told_and_the_rest_is_judged(error):
    good = always()

    def refusing(workload):
        if workload.seq == 1024:
            raise error
        return good(workload)

    found = report(RUN, changed(RUN, id="odd", seq=1024), predictor=refusing)
    assert [pair.id for pair in found.times] == ["one"]
    ((told,),) = [found.unusable]
    assert (told.id, told.file, told.line) == ("odd", "file", 2)
    assert told.why == f"it cannot be priced: {error.message} {error.hint}"


def test_a_mistake_of_the_predictor_is_no_unusable_row():
    def broken(workload):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        report(RUN, predictor=broken)


def test_held_out_leaves_out_the_fold_that_is_fitted_to():
    rows = [changed(RUN, id=str(n), global_batch_seqs=64 * n) for n in range(1, 21)]
    whole, held = report(*rows), report(*rows, held_out=True)
    in_fit = {o.case.id for o in whole.outcomes if o.case.fit}
    assert 0 < len(in_fit) < 20
    assert {pair.id for pair in held.times} == {pair.id for pair in whole.times} - in_fit
    assert (whole.rows()["reported_in_fit"], held.rows()["reported_in_fit"]) == (len(in_fit), 0)
    assert whole.rows()["in_fit"] == held.rows()["in_fit"] == len(in_fit)


def test_order_is_asked_of_one_source_model_hardware_and_number_of_devices():
    slow = {"measured": {"iter_time_s": 4.0}, "recompute": "full"}
    for other, pairs in (
        ({}, 1),
        ({"source__title": "another"}, 0),
        ({"model__layers": 48}, 0),
        ({"model__name": "renamed"}, 1),
        ({"hardware": "H100 (8x400G IB)"}, 0),
        ({"n_gpus": 32, "dp": 8}, 0),
        ({"measured": {"iter_time_s": 2.1}}, 0),  # noise
    ):
        said = report(RUN, changed(RUN, **{**slow, **other})).as_dict()
        assert said["rank"]["pairs"] == pairs, other
        assert said["rank"]["right"] == 0  # the predictor says the same of both
    harder = report(RUN, changed(RUN, global_batch_seqs=128, measured={"iter_time_s": 4.0})).as_dict()["rank"]
    assert (harder["pairs"], harder["equal_batch"]["pairs"]) == (1, 0)


def test_assumptions_and_ignored_fields_are_counted():
    found = report(changed(RUN, zero_stage=None), changed(RUN, zero_stage=None, colour="red"), RUN)
    assert list(found.assumed().values()) == [2]
    assert found.ignored_fields() == {"colour": 1}
    assert found.as_dict()["by_axis"]["row"].keys() == {"part assumed", "says all"}


def test_all_kinds_of_rows_are_counted_apart():
    analytic = changed(RUN, kind="analytic", model__params_b=1.0, measured={"model_state_mem_gb": 16.0})
    found = report(RUN, COLLECTIVE, analytic, changed(COLLECTIVE, bytes=None))
    rows = found.rows()
    assert (rows["rows"], rows["runs"], rows["collectives"], rows["analytic"], rows["unusable"]) == (4, 1, 2, 1, 1)
    assert found.unusable[0].line == 4
    assert found.compared == 3


@pytest.mark.parametrize(
    ("size", "name"), [(1, "1"), (2, "2-8"), (8, "2-8"), (9, "9-64"), (64, "9-64"), (65, "65-512"), (513, ">512")]
)
def test_sizes_are_grouped_in_bands(size, name):
    assert band(size) == name
