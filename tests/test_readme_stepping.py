"""The README's stepper: run as it stands there."""

import re
import runpy
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def block(heading: str) -> str:
    return re.search(r"```python\n(.*?)```", README[README.index(heading) :], re.DOTALL).group(1)


def test_a_program_is_stepped_through_as_is_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "program.py").write_text(block("## A program\n"))
    (tmp_path / "stepped.py").write_text(block("## Step through it"))
    sys.modules.pop("program", None)
    runpy.run_path("stepped.py")
    sys.modules.pop("program", None)  # another test's is another
    said = capsys.readouterr().out
    assert "rank 0" in said and "rank 1" in said and "chunk" in said
