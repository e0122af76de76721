"""How hard the property tests try: HYPOTHESIS_PROFILE=ci (the default, the same cases every time), dev or exhaustive."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, suppress_health_check=SLOW)
settings.register_profile("dev", deadline=None, max_examples=100, suppress_health_check=SLOW)
settings.register_profile("exhaustive", deadline=None, max_examples=1000, suppress_health_check=SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
gc.set_threshold(20_000, 20, 10)  # looking for garbage among all that is imported was a tenth of the time


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_is_left_is_looked_through_once():
    """Whoever collects garbage, as a full device does, would go through all that earlier files of tests left in memory."""
    yield
    if len(gc.get_objects()) > 200_000:
        gc.collect()
        gc.freeze()


@pytest.fixture
def float64():
    """torch's default dtype, for files that say `pytestmark = pytest.mark.usefixtures("float64")`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
