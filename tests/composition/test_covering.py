"""The covering array covers."""

from .covering import covering, pairs

CHOICES = {"a": [0, 1, 2], "b": [0, 1], "c": [0, 1, 2], "d": [0, 1]}


def test_every_pair_occurs_in_far_fewer_cases_than_there_are():
    cases = covering(CHOICES, lambda case: case, pool=200)
    assert len(cases) <= 15  # of 36; at least 9, the pairs of a and c
    met = set().union(*map(pairs, cases))
    assert len(met) == 3 * 2 * 4 + 3 * 3 + 2 * 2  # of every two options


def test_what_cannot_be_is_left_out_and_what_is_changed_counts_as_it_became():
    cases = covering(
        CHOICES, lambda case: None if case["a"] == 2 else case | {"d": 0 if case["b"] else case["d"]}, pool=200
    )
    met = set().union(*map(pairs, cases))
    assert not any(value == 2 for a, value, *_ in met if a == "a") and ("b", 1, "d", 1) not in met
    assert ("b", 0, "d", 1) in met
