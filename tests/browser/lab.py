"""JupyterLab on this computer, and a notebook in it that is worked through by keys, as its reader does."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_MS = 90_000
QUIET = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


class Lab:
    """A server with its own empty settings, that asks nobody outside.

    Args:
        folder: where its notebooks, settings and data lie.
    """

    def __init__(self, folder: Path) -> None:
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        own |= {"HOME": str(folder), "IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        (folder / "config" / "labconfig").mkdir(parents=True)
        (folder / "config" / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(QUIET))
        settings = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": self.port,
            "ServerApp.port_retries": 0,
            "ServerApp.root_dir": str(self.notebooks),
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "ServerApp.disable_check_xsrf": True,
            "IdentityProvider.token": "",
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "LabApp.news_url": None,
            "LabApp.extension_manager": "readonly",
        }
        command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in settings.items())]
        with (folder / "log.txt").open("wb") as log:
            self._server = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=log, cwd=folder)
        self._log = folder / "log.txt"
        self._wait()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """What its API says."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self.url + path, timeout=10) as told:
            return json.load(told)

    def _wait(self) -> None:
        for _ in range(240):
            assert self._server.poll() is None, self._log.read_text()
            try:
                self.get("/api/status")
                return
            except OSError:
                time.sleep(0.25)
        raise AssertionError(self._log.read_text())

    def close(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def write(self, name: str, cells: list[str]) -> None:
        """A notebook with code cells that have not run."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.notebooks / name)

    def read(self, name: str) -> Any:
        """A notebook as it was saved."""
        return nbformat.read(self.notebooks / name, 4)


class Notebook:
    """A notebook in a tab of JupyterLab.

    Attributes:
        page: playwright's.
    """

    def __init__(self, lab: Lab, page: Any, name: str) -> None:
        self.page, self.name = page, name
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{lab.url}/doc/tree/{name}")
        page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").first.wait_for()

    def cell(self, i: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(i)

    def run(self, i: int) -> str:
        """Runs a cell by the keyboard, waits until it has ended, and gives the text that it wrote."""
        cell, before, deadline = self.cell(i), None, time.monotonic() + PATIENCE_MS / 1000
        while (
            before is None or self._number(cell) == before
        ):  # a page that is still being laid out takes the focus away
            assert time.monotonic() < deadline, f"cell {i} does not begin"
            for button in self.page.locator(".jp-Dialog .jp-mod-accept").all():
                button.click()  # it asks for a kernel, or says that the server was slow
            cell.locator(".cm-content").click()
            before = self._number(cell)
            self.page.keyboard.press("Control+Enter")
            self.page.wait_for_timeout(500)
        while self._number(cell) == "*":
            assert time.monotonic() < deadline, f"cell {i} does not end"
            self.page.wait_for_timeout(50)
        return self.output(i)

    def _number(self, cell: Any) -> str:
        found = re.search(r"\[(.*)\]", cell.locator(".jp-InputPrompt").first.inner_text())
        return found[1] if found else ""

    def output(self, i: int) -> str:
        """The text that a cell has written."""
        return "\n".join(self.cell(i).locator(".jp-OutputArea-output pre").all_inner_texts()).strip()

    def stepper(self, i: int) -> Any:
        """The widget below a cell."""
        return self.cell(i).locator(".emu")

    def press(self, i: int, *keys: str) -> None:
        """Presses keys in the widget below a cell."""
        self.stepper(i).focus()
        for key in keys:
            self.page.keyboard.press(key)

    def says(self, i: int, text: str) -> None:
        """Waits until the widget's line of words has a text."""
        self.stepper(i).locator(".status", has_text=text).wait_for()

    def save(self) -> None:
        self.cell(0).locator(".cm-content").click()
        self.page.keyboard.press("Control+s")
        self.page.wait_for_timeout(800)

    def pictures(self, i: int) -> list[bool]:
        """Of the pictures below a cell, which can be seen."""
        return [image.is_visible() for image in self.cell(i).locator("img[src^='data:image/png']").all()]
