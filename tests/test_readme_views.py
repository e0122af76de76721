"""The README's pictures of who holds what and of links: drawn as is shown, with the output that is stated."""

import re
import runpy
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()
SECTION = README[README.index("### Who holds what") :]


def test_pictures_are_drawn_and_the_output_is_the_stated_one(tmp_path, capsys, monkeypatch):
    program = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL).group(1)
    stated = re.search(r"```text\n(.*?)```", SECTION, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures.py").write_text(program)
    runpy.run_path("pictures.py")
    assert capsys.readouterr().out == stated
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("holds.png", "traffic.png"))
