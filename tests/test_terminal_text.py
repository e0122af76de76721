"""What names and results of a program may do to a terminal: nothing. Escape sequences and markup in them are shown."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from emu.cli import main
from emu.trace.units import plain_text

PROGRAM = """
import torch

NASTY = "\\x1b[31mred\\x1b]0;title\\x07[bold red]x[/]\\u202e\\u009b\\ud800"

def named(rank):
    rank.mark(NASTY)
    with rank.kernel(NASTY):
        x = torch.ones(4) * 2
    rank.group("dp").all_reduce(x, name=NASTY)
    return NASTY

def fails(rank):
    raise ValueError(NASTY)
"""
CONTROLS = {chr(c) for c in (*range(32), 127, *range(128, 160))} - {"\n", "\t"}


@given(st.text())
@example("\x1b[31m\ud800\u202e\x9b\r")
def test_a_plain_text_has_nothing_that_a_terminal_obeys_and_keeps_the_rest(text):
    plain = plain_text(text)
    assert all(c.isprintable() or c in "\n\t" for c in plain)
    assert plain.encode() is not None
    assert plain_text(plain) == plain and (plain == text or not text.replace("\n", "").replace("\t", "").isprintable())


def obeyed(text: str) -> set[str]:
    return CONTROLS & set(text) | {c for c in text if c == "\u202e" or 0xD800 <= ord(c) < 0xE000}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "{file}:named", "--mesh", "dp=2"], "\\x1b[31mred"),
        (["run", "{file}:fails", "--mesh", "dp=2"], "\\x1b[31mred"),
        (["step", "{file}:named", "--mesh", "dp=2"], "\\x1b[31mred"),
        (["run", "{file}:\x1b[31m", "--mesh", "dp=2"], "\\x1b[31m"),
        (["export", "\x1b[31m.emu", "--html", "x.html"], "\\x1b[31m"),
    ],
)
def test_commands_show_names_as_they_are(tmp_path: Path, capsys, monkeypatch, argv, says):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n 1\nu all_reduce\nr 0\ns\ng 0\nb\n\x1b[31m\nt\n"))
    monkeypatch.setattr("traceback.print_exc", lambda: None)  # the program's own, as Python shows it
    with pytest.raises(SystemExit):
        main([word.format(file=file) for word in argv])
    told = capsys.readouterr()
    text = told.out + told.err
    assert not obeyed(text), obeyed(text)
    assert says in text, text
    if "named" in argv[1]:
        assert "[bold red]x[/]" in text


def test_what_a_terminal_obeys_is_noticed():
    """The negative control."""
    assert obeyed("a\x1b[31mb") == {"\x1b"} and obeyed("\u202e") and not obeyed("a\n\tb")
