"""Constants that are fitted: where they stand, what they fill, and what chips get that nobody fitted."""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import median

import pytest

from emu.hardware import Cluster, HardwareError, chip, chip_names, cluster, fitted, with_constants
from emu.hardware.constants import place_of, values_of

CHIP_FAMILIES = {"gpu", "a100", "h100", "tpu"}


def test_every_constant_has_a_value_near_its_prior_and_says_where_that_is_from():
    for name, constant in fitted().items():
        assert constant.value > 0 and constant.prior > 0 and 0 < constant.width < 1, name
        assert len(constant.source) > 20, name
        assert abs(log(constant.value / constant.prior)) < 4 * constant.width, name


def test_every_family_of_a_chip_is_one_that_constants_have():
    families = {name.split(".")[0] for name in fitted()}
    taken = {family for name in chip_names() for family in chip(name).fitted}
    assert taken == CHIP_FAMILIES <= families
    assert chip("h100").fitted == chip("h200").fitted == ("gpu", "h100")
    assert chip("mi300x").fitted == ()


def test_a_constant_fills_the_field_of_its_name_in_every_chip_of_its_family():
    for name, constant in fitted().items():
        family = name.split(".")[0]
        field, key = place_of(name)
        for it in map(chip, chip_names()):
            if family in it.fitted and family != "gpu":
                value = getattr(it, field)
                assert (value[key] if key else value) == constant.value, (it.name, name)
                assert name in it.sources[f"{field}.{key}" if key else field]
    assert place_of("a100.matmul_bfloat16") == ("sustained", "bfloat16")
    assert place_of("h100.flash3_backward") == ("attention", "flash3.backward")
    assert place_of("gpu.matmul_ends") == ("matmul_ends", "")


def test_trying_other_values_changes_those_of_the_chips_families_alone():
    h100 = cluster("h100-8")
    tried = with_constants(
        h100, {"h100.matmul_bfloat16": 0.5, "gpu.kernel_s": 1e-6, "a100.flash2": 0.1, "software.step_s": 1.0}
    )
    assert tried.chip.sustained == {**h100.chip.sustained, "bfloat16": 0.5}
    assert tried.chip.kernel_s == 1e-6
    assert tried.chip.attention == h100.chip.attention
    assert tried.chip.flops_per_s("bfloat16") == 0.5 * h100.chip.peak("bfloat16")
    assert replace(tried, chip=h100.chip) == h100


def test_links_take_other_values_by_the_families_that_they_name():
    c = cluster("h100-8")
    both = replace(
        c,
        node=replace(c.node, scale_up=replace(c.node.scale_up, fitted=("omni-path",))),
        scale_out=replace(c.scale_out, fitted=("omni-path",)),
    )
    value = {"omni-path.achievable_fraction": 0.25}
    for before, after in ((both, with_constants(both, value)), (c, with_constants(c, value))):
        share = 0.25 if before is both else None
        for old, new in ((before.node.scale_up, after.node.scale_up), (before.scale_out, after.scale_out)):
            assert new == replace(old, achievable_fraction=share or old.achievable_fraction)


def test_the_fitted_values_are_what_a_preset_has_already():
    values = {name: constant.value for name, constant in fitted().items() if name.split(".")[0] in CHIP_FAMILIES}
    for name in ("a100-8", "h100-8", "tpu-v5p", "mi300x-8"):
        assert with_constants(cluster(name), values).chip == cluster(name).chip


def test_a_power_limit_survives_other_constants():
    c = cluster("h100-8")
    held = replace(c, chip=replace(c.chip, power_limit_w=500))
    tried = with_constants(held, {"gpu.power_exponent": 1.0})
    assert tried.chip.flops_per_s("bfloat16") == pytest.approx(c.chip.flops_per_s("bfloat16") * 5 / 7)


def test_a_constant_that_there_is_not_is_an_error_with_the_nearest():
    with pytest.raises(HardwareError, match="matmul_bfloat17") as error:
        with_constants(cluster("h100-8"), {"a100.matmul_bfloat17": 0.5})
    assert "a100.matmul_bfloat16" in error.value.hint


def test_a_chip_nobody_fitted_keeps_up_the_fitted_part_of_its_best_measured_product():
    a100, h100 = chip("a100"), chip("h100")
    ratios = [
        it.sustained[dtype] / (it.achievable_flops[dtype] / it.peak(dtype))
        for it, dtype in ((a100, "bfloat16"), (h100, "bfloat16"), (h100, "float8"))
    ]
    assert all(0.7 < ratio < 1 for ratio in ratios)
    for name in ("b200", "mi300x", "gaudi2"):
        it = chip(name)
        best = it.achievable_flops["bfloat16"] / it.peak("bfloat16")
        assert it.sustained["bfloat16"] == pytest.approx(best * median(ratios), abs=1e-4)
        assert it.sources["sustained.bfloat16"].startswith("unverified")
    assert chip("mi300x").matmul_ends == h100.matmul_ends and chip("trainium2").matmul_ends == 0
    assert chip("trainium2").sustained["bfloat16"] == pytest.approx(0.74 * median(ratios), abs=1e-4)
    assert chip("k40").sustained.keys() == {"float32"} and chip("v100").sustained.keys() == {"float16"}


def test_what_is_assumed_of_a_chip_nobody_fitted_says_so():
    for name in chip_names():
        it = chip(name)
        for field in ("attention.flash2", "attention.flash2.backward", "overlap_loss", "softmax_fraction"):
            part = field.split(".", 1)
            value = getattr(it, part[0]) if len(part) == 1 else getattr(it, part[0])[part[1]]
            assert 0 < value <= 1, (name, field)
            own = "fitted.toml" in it.sources[field]
            assert own or it.sources[field].startswith("unverified"), (name, field)


OWN = """
[chip]
like = "h100"
name = "mine"
sustained = { bfloat16 = 0.5 }
attention = { flash2 = 0.3, "flash2.backward" = 0.25 }
matmul_ends = 0.5
power_limit_w = 350
overlap_loss = 0
"""


def test_a_file_may_say_all_of_it_of_its_own_chip(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    it, h100 = Cluster.from_toml(path).chip, chip("h100")
    assert it.sustained == {"bfloat16": 0.5, "float8": h100.sustained["float8"]}
    assert it.attention == {**h100.attention, "flash2": 0.3, "flash2.backward": 0.25}
    assert (it.matmul_ends, it.overlap_loss, it.tiled) == (0.5, 0, True)
    assert it.flops_per_s("bfloat16") == pytest.approx(0.5 * h100.peak("bfloat16") * 0.5**it.power_exponent)
    assert "mine.toml" in it.sources["sustained.bfloat16"] and "fitted.toml" in it.sources["sustained.float8"]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("sustained = { bfloat16 = 1.5 }", "chip.sustained.bfloat16"),
        ("attention = { flash2 = 0 }", "chip.attention.flash2"),
        ('attention = { "flash2.backward" = -1 }', "chip.attention.flash2.backward"),
        ("matmul_ends = -1", "chip.matmul_ends"),
        ("overlap_loss = 1", "chip.overlap_loss"),
        ("array_side = 0", "chip.array_side"),
    ],
)
def test_a_file_that_says_the_impossible_of_it_is_refused(tmp_path, line, field):
    path = tmp_path / "mine.toml"
    path.write_text(f'[chip]\nlike = "h100"\n{line}\n')
    with pytest.raises(HardwareError) as error:
        Cluster.from_toml(path)
    assert error.value.field == field and error.value.line == 3


def test_of_no_family_there_is_nothing():
    assert values_of((), {"a100.flash2": 0.5}) == {}
    assert values_of(("a100",), {"a100.flash2": 0.5, "h100.flash2": 0.4, "a100.hbm_fraction": 0.9}) == {
        "attention": {"flash2": 0.5},
        "hbm_fraction": 0.9,
    }
