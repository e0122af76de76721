"""A real Chromium without a network: whatever leaves the page, or goes wrong in it, fails the test."""

from __future__ import annotations

import shutil
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HERE = ("127.0.0.1", "localhost", "")


def executable():
    """The browser that is installed."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    assert path, f"these tests need a browser: none of {', '.join(NAMES)} is in the PATH"
    return path


@pytest.fixture(scope="session")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=FLAGS)
        yield browser
        browser.close()


def is_here(url):
    """Whether an address is a file, stands in the page itself, or is this computer."""
    parts = urlsplit(url)
    return parts.scheme in ("file", "data", "blob", "about") or parts.hostname in HERE


class Watched:
    """A context of the browser that keeps what was asked of the network, and what went wrong."""

    def __init__(self, browser, **how):
        self.context = browser.new_context(**how)
        self.left, self.errors = [], []
        self.context.route(lambda url: not is_here(url), self._stop)
        self.context.on("request", lambda request: self._note(request.url))
        self.context.on("weberror", lambda error: self.errors.append(str(error.error)))
        self.context.on("dialog", lambda dialog: (self.errors.append(f"dialog {dialog.message}"), dialog.dismiss()))

    def _stop(self, route):
        route.abort()

    def _note(self, url):
        if not is_here(url):
            self.left.append(url)

    def page(self):
        page = self.context.new_page()
        page.on("websocket", lambda socket: self._note(socket.url))
        page.set_default_timeout(20_000)
        return page


@pytest.fixture
def watched(chromium):
    """A context for files: it is offline, and nothing that runs in it may fail."""
    watched = Watched(chromium, offline=True, viewport={"width": 1100, "height": 900})
    yield watched
    watched.context.close()
    assert not watched.left and not watched.errors
