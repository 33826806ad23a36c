"""Opens a model in Netron (the netron package's own server) with a headless Chromium.

``python tests/netron/page.py MODEL.onnx PICTURE.png`` takes a picture to be looked at; the test
reads the page's elements.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import netron

HOST = "127.0.0.1"
DRAWING_SECONDS = 8


def chromium() -> str | None:
    """The installed Chromium or Chrome, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for found in map(shutil.which, names) if found), None)


@contextmanager
def served(model: Path) -> Iterator[str]:
    """Serves the model; yields the address of pages that let Netron start without a question.

    Netron first asks to accept a cookie. Cookies belong to a host, not to a port: a page of ours on
    the same host sets it. ``/`` then goes on to Netron; ``/frame`` shows Netron in a frame and
    counts as loaded only after ``DRAWING_SECONDS``, because a screenshot is taken on load, when
    Netron's worker is still laying out the graph.
    """
    host, port = netron.start(str(model), browse=False, address=(HOST, 0))

    class Entrance(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/wait":
                time.sleep(DRAWING_SECONDS)
            address = f"http://{host}:{port}/"
            then = (
                f"document.write('<iframe src={address} style=\"position:fixed;inset:0;width:100%;"
                "height:100%;border:0\"></iframe><img src=/wait>')"
                if self.path == "/frame"
                else f"location.replace('{address}')"
            )
            page = f"<script>document.cookie='consent=1; path=/';{then}</script>".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Stays quiet."""

    entrance = ThreadingHTTPServer((HOST, 0), Entrance)
    threading.Thread(target=entrance.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{entrance.server_port}/"
    finally:
        entrance.shutdown()
        netron.stop((host, port))


def run_browser(url: str, *arguments: str, size: tuple[int, int] = (1600, 1200)) -> str:
    """Loads a page, lets it settle, and returns what the browser printed.

    Raises:
        RuntimeError: there is no browser.
    """
    browser = chromium()
    if browser is None:
        raise RuntimeError("no Chromium is installed")
    with tempfile.TemporaryDirectory() as profile:
        finished = subprocess.run(
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
    return finished.stdout


def document(model: Path) -> str:
    """The page's elements after Netron has drawn the model."""
    with served(model) as url:
        return run_browser(url, "--virtual-time-budget=60000", "--dump-dom")


def picture(model: Path, output: Path, size: tuple[int, int] = (1600, 1200)) -> None:
    """A screenshot of Netron showing the model."""
    with served(model) as url:
        run_browser(f"{url}frame", f"--screenshot={output}", size=size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    picture(arguments.model, arguments.picture)
