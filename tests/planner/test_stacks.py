"""Which software a source means, and what each stack says of itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.hardware import chip, chip_names, fitted
from emu.planner.closed import stack_for, stacks


@pytest.mark.parametrize(
    ("text", "on", "fsdp", "name"),
    [
        ("vTrain: A Simulation Framework", "A100-SXM-80GB", False, "megatron-2021"),
        ("Reducing Activation Recomputation in Large Transformer Models", "A100-SXM-80GB", False, "megatron-2022"),
        ("Zero Bubble Pipeline Parallelism", "A100-SXM-80GB", False, "zero-bubble-2023"),
        (
            "NVIDIA Megatron-Bridge performance summary 26.06 NeMo Container",
            "H100-SXM-80GB",
            False,
            "megatron-bridge-2025",
        ),
        ("NeMo performance summary", "H100-SXM-80GB", False, "nemo-2024"),
        ("MaxText high-performance configs README", "TPU-v5e", True, "maxtext"),
        ("MaxText on GPUs", "H100-SXM-80GB", True, "maxtext-gpu"),
        ("torchtitan benchmarks. FSDP", "H100-SXM-80GB", True, "torchtitan"),
        ("torchtitan benchmarks. FSDP+compile", "H100-SXM-80GB", True, "torchtitan-compiled"),
        ("torchtitan docs/performance.md. Llama 3.1 405B table", "H100-SXM-80GB", True, "torchtitan-compiled"),
        ("NVIDIA dgxc-benchmarking v25.01.1. maxtext-llama2-70b README", "H100-SXM-80GB", True, "maxtext-gpu"),
        ("MosaicML llm-foundry", "A100-SXM-40GB", True, "llm-foundry"),
    ],
)
def test_a_source_that_names_its_software_is_heard(text, on, fsdp, name):
    assert stack_for(text, on, fsdp) == (name, True)


@pytest.mark.parametrize(
    ("on", "fsdp", "name"),
    [
        ("TPU-v5p", True, "assumed-tpu"),
        ("V100-SXM2-32GB", False, "assumed-2020"),
        ("A100-SXM-80GB", False, "assumed-a100"),
        ("A100-SXM-80GB", True, "assumed-fsdp"),
        ("H100-SXM-80GB", False, "assumed"),
        ("no such chip", False, "assumed"),
    ],
)
def test_without_a_name_the_chips_time_decides_and_that_is_said(on, fsdp, name):
    assert stack_for("some blog", on, fsdp) == (name, False)


@given(st.text(), st.sampled_from(["", *(chip(name).name for name in chip_names())]), st.booleans())
def test_every_source_has_a_stack(text, on, fsdp):
    assert stack_for(text, on, fsdp)[0] in stacks()


@pytest.mark.parametrize("name", list(stacks()))
def test_a_stack_says_where_it_was_read_and_names_constants_that_exist(name):
    one = stacks()[name]
    assert one.sources.get("default") and one.meaning
    assert set(one.sources) - {"default"} <= set(vars(one))
    assert one.launch in ("", "host") or one.launch in fitted()
    assert one.overlaps <= {"tensor", "weights", "data", "pipeline"}
