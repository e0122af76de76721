"""The bubbles of Zero Bubble Pipeline Parallelism, from its measured F, B, W and communication.

Source: Qi et al., https://arxiv.org/abs/2401.10241, tables 3, 4, 5 and 9.
"""

from typing import NamedTuple

import pytest

from emu.parallel.pipeline.schedules import make
from emu.parallel.pipeline.timing import Times, timed

SEQUENCE = 1024
SIZES = {"1.5B": (8, 2304, 24), "14.6B": (16, 5120, 40)}  # ranks, hidden size, heads: Table 3

PROFILED = {  # (model, microbatches) -> T_F, T_B, T_W, T_comm in milliseconds: Table 9
    ("1.5B", 24): (18.522, 18.086, 9.337, 0.601),
    ("1.5B", 32): (18.513, 18.086, 9.331, 0.626),
    ("1.5B", 64): (18.546, 18.097, 9.321, 0.762),
    ("14.6B", 48): (11.347, 11.248, 8.132, 0.377),
    ("14.6B", 64): (11.307, 11.254, 8.101, 0.379),
    ("14.6B", 128): (11.325, 11.308, 8.109, 0.378),
}
BUBBLES = {  # (model, microbatches) -> (cost - m (T_F + T_B + T_W)) / cost of each schedule: Table 5
    ("1.5B", 24): {"1F1B": 0.2431, "1F1B-I": 0.1055, "ZB-1p": 0.1585, "ZB-2p": 0.0433},
    ("1.5B", 32): {"1F1B": 0.1985, "1F1B-I": 0.0818, "ZB-1p": 0.1242, "ZB-2p": 0.0039},
    ("1.5B", 64): {"1F1B": 0.1240, "1F1B-I": 0.0443, "ZB-1p": 0.0674, "ZB-2p": 0.0026},
    ("14.6B", 48): {"1F1B": 0.2552, "1F1B-I": 0.1104, "ZB-1p": 0.1397, "ZB-2p": 0.0066},
    ("14.6B", 64): {"1F1B": 0.2082, "1F1B-I": 0.0852, "ZB-1p": 0.1088, "ZB-2p": 0.0054},
    ("14.6B", 128): {"1F1B": 0.1251, "1F1B-I": 0.0445, "ZB-1p": 0.0576, "ZB-2p": 0.0028},
}
MEASURED = {  # (model, microbatches) -> samples per GPU and second: Table 4
    ("1.5B", 24): {"1F1B": 11.8, "1F1B-I": 13.1, "ZB-1p": 12.9, "ZB-2p": 14.5},
    ("1.5B", 32): {"1F1B": 12.5, "1F1B-I": 13.4, "ZB-1p": 13.4, "ZB-2p": 14.8},
    ("1.5B", 64): {"1F1B": 13.6, "1F1B-I": 13.9, "ZB-1p": 14.2, "ZB-2p": 14.9},
    ("14.6B", 48): {"1F1B": 1.40, "1F1B-I": 1.54, "ZB-1p": 1.61, "ZB-2p": 1.81},
    ("14.6B", 64): {"1F1B": 1.49, "1F1B-I": 1.59, "ZB-1p": 1.67, "ZB-2p": 1.83},
    ("14.6B", 128): {"1F1B": 1.64, "1F1B-I": 1.66, "ZB-1p": 1.76, "ZB-2p": 1.85},
}
MICRO_BATCH = {"1.5B": 6, "14.6B": 1}  # samples
CHUNKS = 3  # of 1F1B-I: 24 and 48 layers' places for 8 and 16 ranks, a layer each


class Case(NamedTuple):
    model: str
    microbatches: int
    schedule: str


CASES = [Case(*point, name) for point, row in BUBBLES.items() for name in row]


def weight_share(model: str) -> float:
    """M_W / M_B = 32 s b h / (s b (34 h + 5 a s)), from the table of FLOPs and memory of each pass."""
    _, hidden, heads = SIZES[model]
    return 32 * hidden / (34 * hidden + 5 * heads * SEQUENCE)


def cost(model: str, microbatches: int, schedule: str, communication: float = 1.0) -> float:
    """The step's cost in milliseconds: the longest span of a rank."""
    ranks = SIZES[model][0]
    forward, backward, weight, comm = PROFILED[model, microbatches]
    comm *= communication
    if schedule == "1F1B-I":
        times = Times(forward / CHUNKS, backward / CHUNKS, weight / CHUNKS, comm)
        return timed(make("interleaved", ranks, microbatches, CHUNKS), times).cost
    times = Times(forward, backward, weight, comm)
    if schedule == "1F1B":
        return timed(make("1f1b", ranks, microbatches), times).cost
    memory = {"ZB-1p": ranks, "ZB-2p": 2 * ranks}[schedule]
    made = make("auto", ranks, microbatches, times=times, memory=memory, weight_share=weight_share(model))
    return timed(made, times).cost


def bubble(case: Case, communication: float = 1.0) -> float:
    found = cost(*case, communication)
    return (found - case.microbatches * sum(PROFILED[case[:2]][:3])) / found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_bubble_is_the_published_one(case):
    # The authors' interleaved cost leaves up to 0.0036 of ours out; all others agree to 0.002, 1F1B and ZB-1p to the digit.
    assert bubble(case) == pytest.approx(BUBBLES[case[:2]][case.schedule], abs=0.01)


@pytest.mark.parametrize("case", [case for case in CASES if case.schedule in ("1F1B", "ZB-1p")], ids=str)
def test_where_memory_leaves_no_choice_it_is_so_to_the_last_digit_printed(case):
    assert bubble(case) == pytest.approx(BUBBLES[case[:2]][case.schedule], abs=0.5e-4 + 1e-6)


def test_without_communication_it_would_not_be():
    case = Case("1.5B", 24, "1F1B")
    assert abs(bubble(case, communication=0.0) - BUBBLES[case[:2]][case.schedule]) > 0.01


@pytest.mark.parametrize("point", BUBBLES, ids=str)
def test_throughput_comes_in_the_measured_order(point):
    order = ("1F1B", "ZB-1p", "ZB-2p")
    computed = [1 / cost(*point, name) for name in order]
    measured = [MEASURED[point][name] for name in order]
    assert computed == sorted(computed) and measured == sorted(measured)
    assert len(set(computed)) == len(set(measured)) == 3


@pytest.mark.parametrize("point", BUBBLES, ids=str)
def test_interleaving_is_measured_slower_than_its_schedule_explains(point):
    """Of what the schedule allows, 1F1B reaches 92-96 % when run, ZB-2p 90-93 %, interleaved only 85-90 %."""
    reached = {
        name: rate * SIZES[point[0]][0] * cost(*point, name) * 1e-3 / (MICRO_BATCH[point[0]] * point[1])
        for name, rate in MEASURED[point].items()
    }
    assert 0.91 < reached["1F1B"] < 0.96 and 0.91 < reached["ZB-1p"] < 0.95 and 0.89 < reached["ZB-2p"] < 0.94
    assert 0.85 < reached["1F1B-I"] < 0.91
    assert reached["1F1B-I"] == min(reached.values())
