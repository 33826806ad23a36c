"""Opens a model as ``tq-onnx view`` does, with a headless Chromium.

``python tests/netron/page.py MODEL.onnx PICTURE.png`` takes a picture to be looked at; the test
reads the page's elements.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

from tq_onnx.integrations import viewing

HOST = "127.0.0.1"
DRAWING_SECONDS = 60


def chromium() -> str | None:
    """The installed Chromium or Chrome, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for found in map(shutil.which, names) if found), None)


_TOLD = """
const drawn = new MutationObserver(() => {
  if (document.querySelector(".graph-node.select")) {
    drawn.disconnect();
    const body = document.documentElement.outerHTML;
    fetch("ENTRANCE/drawn", { method: "POST", mode: "no-cors", body });
  }
});
window.addEventListener("load", () => drawn.observe(document.body, watched));
"""
"""Sends the elements of Netron's page to the test as soon as a node is selected."""


@dataclass
class Shown:
    """Netron with a model.

    Attributes:
        url: a page that counts as loaded when a node is selected.
        elements: of Netron's page, once a browser has shown it.
    """

    url: str
    elements: str = ""


class Answering(BaseHTTPRequestHandler):
    """A handler of requests that says nothing in the terminal."""

    def answer(self, content: bytes) -> None:
        """Sends a page."""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stays quiet."""


@contextmanager
def served(model: Path) -> Iterator[Shown]:
    """Serves the model, opened at its first converted layer.

    Netron first asks to accept a cookie. Cookies belong to a host, not to a port: a page of ours on
    the same host sets it, and shows Netron in a frame. A screenshot is taken on load, when Netron's
    worker is still laying out the graph: so the page has a picture that comes when a node is
    selected.
    """
    drawn = threading.Event()

    class Entrance(Answering):
        def do_GET(self) -> None:
            if self.path == "/wait":
                drawn.wait(DRAWING_SECONDS)
            self.answer(page.encode())

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            shown.elements = self.rfile.read(length).decode()
            self.answer(b"")
            drawn.set()

    entrance = ThreadingHTTPServer((HOST, 0), Entrance)
    threading.Thread(target=entrance.serve_forever, daemon=True).start()
    shown = Shown(f"http://{HOST}:{entrance.server_port}/")
    script = viewing.SELECT + _TOLD.replace("ENTRANCE/", shown.url)
    try:
        with mock.patch.object(viewing, "SELECT", script), viewing.served(model) as address:
            page = (
                "<script>document.cookie='consent=1; path=/'; document.write('<iframe "
                f'src={address} style="position:fixed;inset:0;width:100%;height:100%;border:0">'
                "</iframe><img src=/wait>')</script>"
            )
            yield shown
    finally:
        entrance.shutdown()


def run_browser(url: str, *arguments: str, size: tuple[int, int]) -> None:
    """Loads a page.

    Raises:
        RuntimeError: there is no browser.
    """
    browser = chromium()
    if browser is None:
        raise RuntimeError("no Chromium is installed")
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}",
                *arguments,
                url,
            ],
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )


def picture(model: Path, output: Path, size: tuple[int, int] = (1600, 1200)) -> str:
    """Writes a screenshot of Netron showing the model; returns the elements of its page."""
    with served(model) as shown:
        run_browser(shown.url, f"--screenshot={output}", size=size)
        return shown.elements


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    picture(arguments.model, arguments.picture)
