"""Where fields of a TOML file stand, against files that a parser has read."""

from __future__ import annotations

import pytest

from emu.hardware.packaged import packaged, parse_toml
from emu.hardware.places import File, in_words

TRICKY = '''\
a = 1 # [not.a.table]
[c.d]
e = """x
[neither]
f = 2
"""
g = { h = 1, i = { j = 'it # is' } }
k = [ 1,
  2, # 3
  [4, 5], { l = "a \\" b" } ]
[[m.n]]
o = 1
[[m.n]]
o = 2
[m.n.p]
"q r".s = \'\'\'two
lines\'\'\'
t.u = 1979-05-27
'''
LINES = {
    "a": 1,
    "c.d": 2,
    "c.d.e": 3,
    "c.d.g.h": 7,
    "c.d.g.i.j": 7,
    "c.d.k": 8,
    "c.d.k.0": 8,
    "c.d.k.1": 9,
    "c.d.k.2.0": 10,
    "c.d.k.2.1": 10,
    "c.d.k.3.l": 10,
    "m.n.0": 11,
    "m.n.0.o": 12,
    "m.n.1": 13,
    "m.n.1.o": 14,
    "m.n.1.p": 15,
    "m.n.1.p.q r.s": 16,
    "m.n.1.p.t.u": 18,
}


def leaves(value, path=()):
    """Every value that is no table or list, with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, (dict, list)):
        yield path, value
    for key, item in items:
        yield from leaves(item, (*path, str(key)))


def test_every_field_is_on_its_line():
    file = File("tricky.toml", TRICKY)
    assert {path: file.line_of(path) for path in LINES} == LINES
    assert {".".join(path) for path, _ in leaves(parse_toml(TRICKY))} <= set(LINES)
    assert all(file.sets(path) for path in LINES) and not file.sets("f") and not file.sets("neither")


def test_what_is_not_said_is_at_the_nearest_table_around_it_or_at_the_end():
    file = File("tricky.toml", TRICKY)
    assert (file.line_of("m.n.1.z"), file.line_of("m.n.1.p.z"), file.line_of("c.d.z.y")) == (13, 15, 2)
    assert file.line_of("z") == 18
    assert file.line_of("c") == 2 and not file.sets("c")  # named only by [c.d]
    assert File("empty.toml", "").line_of("z") == 1


@pytest.mark.parametrize("name", ["nodes", "links", "clusters", "fitted"])
def test_every_value_that_a_parser_finds_is_on_a_line_that_shows_it(name):
    from importlib.resources import files

    text = (files("emu.hardware") / "data" / f"{name}.toml").read_text(encoding="utf-8")
    file, lines = File(name, text), text.splitlines()
    found = list(leaves(packaged(name)))
    assert len(found) > 30
    for path, value in found:
        assert file.sets(".".join(path)), path
        line = lines[file.line_of(".".join(path)) - 1]
        shown = value if isinstance(value, str) else path[-1] if not path[-1].isdigit() else str(value)
        assert shown in line, (path, line)


def test_of_two_fields_that_clash_the_files_own_is_to_blame():
    file = File("f.toml", "x = 1\ny = 2\n")
    both = file.clash(("x", 1), "is below", ("y", 2), "Correct one.")
    assert (both.field, both.line, both.value) == ("x", 1, 1)
    assert str(both) == "f.toml, line 1: x = 1 is below y = 2 (line 2). Correct one."
    second = file.clash(("z", 3), "is above", ("y", 2), "Correct one.")
    assert (second.field, second.line, second.value) == ("y", 2, 2)
    assert "z = 3 (not in this file) is above y = 2." in str(second)


@pytest.mark.parametrize(
    "value, words",
    [(450e9, "4.5e+11"), (8, "8"), (True, "true"), ("a", "'a'"), (10**400, "401 digits"), ([1, 2], "[1, 2]")],
)
def test_values_are_shown_shortly(value, words):
    assert words in in_words(value) and len(in_words("long" * 99)) <= 80
