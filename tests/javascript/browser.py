"""Shows a page of examples/browser to a headless Chromium, and waits until it is done.

``python -m tests.javascript.browser SITE PICTURE.png`` takes a picture to be looked at.
"""

from __future__ import annotations

import argparse
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlencode

from tests.netron.page import HOST, Answering, run_browser

SECONDS = 150
SIZE = (900, 900)

_ENTRANCE = """<!doctype html><style>body {{ margin: 0 }}</style>
<iframe src="{page}?{query}" style="border:0;width:100%;height:100vh"></iframe><img src="wait">
<script>
const timer = setInterval(() => {{
  const page = document.querySelector("iframe").contentDocument;
  if (!/Done|Failed/.test(page?.getElementById("state")?.textContent)) return;
  clearInterval(timer);
  fetch("done", {{ method: "POST", body: page.body.innerText }});
}}, 100);
</script>"""
"""A page counts as loaded, and its picture is taken, when the image has come."""


def shown(site: Path, picture: Path, *, prompt: str, tokens: int, page: str = "index.html") -> str:
    """Takes a picture of the page when its text is complete; returns what can be read there.

    Other servers cannot be reached.

    Args:
        site: a folder as examples/browser/README.md makes it.
        picture: the PNG file to write.
        prompt: the text to go on with.
        tokens: how many tokens to make.
        page: its file.
    """
    done = threading.Event()
    told: list[str] = []
    query = urlencode({"prompt": prompt, "tokens": tokens})
    entrance = _ENTRANCE.format(page=page, query=query).encode()

    class Files(Answering, SimpleHTTPRequestHandler):
        extensions_map = SimpleHTTPRequestHandler.extensions_map | {
            ".mjs": "text/javascript",
            ".wasm": "application/wasm",
        }

        def do_GET(self) -> None:
            if self.path == "/wait":
                done.wait(SECONDS)
                self.answer(b"")
            elif self.path == "/entrance":
                self.answer(entrance)
            else:
                super().do_GET()

        def do_POST(self) -> None:
            told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.answer(b"")
            done.set()

    server = ThreadingHTTPServer((HOST, 0), partial(Files, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://{HOST}:{server.server_port}/entrance"
        nothing_else = f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}"
        run_browser(url, f"--screenshot={picture}", nothing_else, size=SIZE)
    finally:
        server.shutdown()
    return told[0] if told else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    print(shown(options.site, options.picture, prompt="The President of ", tokens=80))
