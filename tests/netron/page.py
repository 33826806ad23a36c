"""Opens a converted model in Netron, with a headless Chromium.

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
from urllib.request import urlopen

import netron

from tq_onnx.conversion.layers import converted_layers
from tq_onnx.files.load import load
from tq_onnx.plan import plan_in

HOST = "127.0.0.1"
DRAWING_SECONDS = 60
BRACKETS = {rb"\u3008": rb"\u27e8", rb"\u3009": rb"\u27e9"}
"""Netron's brackets around shapes are of Chinese fonts; fonts of mathematics are everywhere."""


def chromium() -> str | None:
    """The installed Chromium or Chrome, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for found in map(shutil.which, names) if found), None)


_SELECT = """
const observer = new MutationObserver(() => {
  const view = window.__view__;
  const graph = view && view.activeTarget;
  const node = graph && graph.nodes.find((node) => node.name === "NAME");
  if (node && view._target && view._target.target === graph) {
    observer.disconnect();
    view.showNodeProperties(node);
    view._target.scrollTo(view._target.select([node]));
  }
});
const drawn = new MutationObserver(() => {
  if (document.querySelector(".graph-node.select")) {
    drawn.disconnect();
    fetch("/drawn", { method: "POST", body: document.documentElement.outerHTML });
  }
});
const watched = { subtree: true, childList: true, attributeFilter: ["class"] };
window.addEventListener("load", () => {
  observer.observe(document.body, watched);
  drawn.observe(document.body, watched);
});
"""
"""Selects a node as soon as it is drawn, then sends the elements of the page to the test."""

_ENTRANCE = (
    "<script>document.cookie='consent=1; path=/'; document.write('<iframe src=/ "
    'style="position:fixed;inset:0;width:100%;height:100%;border:0"></iframe><img src=/wait>\')'
    "</script>"
)


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

    def answer(self, content: bytes, kind: str = "text/html") -> None:
        """Sends a page."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Stays quiet."""


@contextmanager
def served(model: Path) -> Iterator[Shown]:
    """Serves the model in Netron, opened at the attention of its first converted layer.

    Netron's page has no address for a node, and allows scripts of its own origin only: a server in
    front of it adds the one that selects the node. Netron first asks to accept a cookie: a page of
    ours sets it, and shows Netron in a frame. A screenshot is taken on load, when Netron's worker
    is still laying out the graph: so that page has a picture that comes when a node is selected.
    """
    loaded = load(model).model
    plan = plan_in(loaded.metadata_props)
    assert plan is not None
    node = converted_layers(loaded, plan)[0].attention.node
    behind = "http://{}:{}".format(*netron.start(str(model), address=(HOST, 0), browse=False))
    drawn = threading.Event()

    class Entrance(Answering):
        def do_GET(self) -> None:
            if self.path == "/entrance":
                self.answer(_ENTRANCE.encode())
            elif self.path == "/wait":
                drawn.wait(DRAWING_SECONDS)
                self.answer(b"")
            elif self.path == "/select.js":
                self.answer(_SELECT.replace("NAME", str(node.name)).encode(), "text/javascript")
            else:
                with urlopen(behind + self.path) as response:
                    kind = response.headers["Content-Type"] or "application/octet-stream"
                    content = response.read()
                if self.path.endswith("view.js"):
                    for sign, replacement in BRACKETS.items():
                        content = content.replace(sign, replacement)
                if kind == "text/html":
                    script = b'<script src="/select.js"></script></head>'
                    content = content.replace(b"</head>", script, 1)
                self.answer(content, kind)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            shown.elements = self.rfile.read(length).decode()
            self.answer(b"")
            drawn.set()

    entrance = ThreadingHTTPServer((HOST, 0), Entrance)
    threading.Thread(target=entrance.serve_forever, daemon=True).start()
    shown = Shown(f"http://{HOST}:{entrance.server_port}/entrance")
    try:
        yield shown
    finally:
        entrance.shutdown()
        netron.stop()


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
