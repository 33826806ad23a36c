"""Show a model in Netron, opened at its first converted layer.

Netron is an optional dependency (``pip install tq-onnx[view]``) and imported here only. Its package
serves a page that has no address for a node, and allows scripts of its own origin only. So a server
in front of it passes everything on, and adds one script to the page, which selects the node as a
click would. A Netron that the script does not know shows the model from the top.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copyfileobj
from threading import Thread
from typing import Final

from tq_onnx.conversion.branches import load_decoder
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.files.load import load
from tq_onnx.plan import plan_in
from tq_onnx.targets.registry import target_of_plan

HOST: Final = "127.0.0.1"
_SCRIPT: Final = "/tq-onnx.js"
SELECT: Final = """\
const name = NAME;
const observer = new MutationObserver(() => {
  const view = window.__view__;
  const graph = view && view.activeTarget;
  const node = graph && graph.nodes.find((node) => node.name === name);
  if (node && view._target && view._target.target === graph) {
    observer.disconnect();
    view.showNodeProperties(node);
    view._target.scrollTo(view._target.select([node]));
  }
});
const watched = { subtree: true, childList: true, attributeFilter: ["class"] };
window.addEventListener("load", () => observer.observe(document.body, watched));
"""
"""Selects a node as soon as the graph that holds it is drawn."""


def first_node(path: Path) -> str | None:
    """Return the name of the node at which a model is opened.

    Args:
        path: an original or a converted model.

    Returns:
        The attention of the first converted layer, or the If whose branch holds it; None for an
        original, and for a conversion to standard operators.

    Raises:
        ModelFileError: the file is no model that can be read.
        UnsupportedModelError: the model lacks nodes that its plan promises.
    """
    loaded = load_decoder(path)
    plan = plan_in(loaded.model.metadata_props)
    if plan is None or not target_of_plan(plan).has_operators:
        return None
    if loaded.branch:
        return next(node.name for node in load(path).model.graph if node.op_type == "If")
    return converted_layers(loaded.model, plan)[0].attention.node.name


@contextmanager
def served(path: Path, *, port: int = 0) -> Iterator[str]:
    """Serve Netron with a model on this machine, until the context ends.

    Args:
        path: the model.
        port: where; 0 for any port that is free.

    Yields:
        The address of the page.

    Raises:
        UsageError: Netron is not installed, or the port is taken.
        ModelFileError: the file is no model that can be read.
    """
    try:
        import netron
    except ImportError as missing:
        raise UsageError(
            "netron, which shows the graph, is not installed",
            fix="pip install 'tq-onnx[view]', or pip install netron",
        ) from missing
    if not path.is_file():
        raise ModelFileError("there is no such file", where=str(path))
    name = first_node(path)
    script = b"" if name is None else SELECT.replace("NAME", json.dumps(name)).encode()
    behind = netron.start(str(path), address=(HOST, 0), browse=False)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site can have its own name lead here, and read what it is answered.
            if self.headers.get("Host") != f"{HOST}:{server.server_port}":
                self.send_error(HTTPStatus.FORBIDDEN)
                return
            if self.path == _SCRIPT:
                self._answer("text/javascript", script)
                return
            connection = HTTPConnection(*behind)
            with closing(connection):
                connection.request("GET", self.path)
                response = connection.getresponse()
                kind = response.getheader("Content-Type", "application/octet-stream")
                if response.status != HTTPStatus.OK:
                    self.send_error(response.status)
                elif kind == "text/html":
                    added = f'<script src="{_SCRIPT}"></script></head>'.encode()
                    self._answer(kind, response.read().replace(b"</head>", added, 1))
                else:
                    self._begin(kind, response.length or 0)
                    copyfileobj(response, self.wfile)

        def _answer(self, kind: str, content: bytes) -> None:
            self._begin(kind, len(content))
            self.wfile.write(content)

        def _begin(self, kind: str, length: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet: the terminal is the user's."""

    try:
        try:
            server = ThreadingHTTPServer((HOST, port), Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}", fix="leave `port` out"
            ) from error
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HOST}:{server.server_port}/"
        finally:
            server.shutdown()
            server.server_close()
    finally:
        netron.stop(behind)
