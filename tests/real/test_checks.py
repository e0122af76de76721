"""After a real run every process can check it, and nobody pretends to know its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real


def test_a_real_run_is_checked_on_every_rank_and_has_no_memory(processes: Any, tmp_path: Path) -> None:
    done = processes("checked.py", 2, tmp_path)
    assert done.returncode == 0, done.output[-20000:]
    for rank in (0, 1):
        said = "\n".join(line[4:] for line in done.output.splitlines() if line.startswith(f"[{rank}] "))
        assert "check False: True 5 of 5\nequivalent in tier exact: 1 tensor agrees bit for bit" in said
        assert "check True: False" in said and "2.00x too small: averaged over 'dp'" in said  # the control
        assert "memory of real devices is not recorded" in said and 'hint: launch it with backend="virtual"' in said
        assert "peak None, sent {'dp': 4}" in said
        assert "has memory after loading: False" in said
