"""The server in this process, on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.serving.processes import TEMPLATE
from tq_onnx.serving.limits import Limits, connections
from tq_onnx.serving.model import ServedModel
from tq_onnx.serving.server import make_app


def served(folder: Path, home: Path, **options: Any) -> ServedModel:
    """With a template that writes messages one behind the other."""
    template = home / "chat.jinja"
    template.write_text(TEMPLATE)
    return ServedModel(folder, chat_template=template, **options)


@contextmanager
def listening(model: ServedModel, api_key: str | None = None, **limits: Any) -> Iterator[int]:
    """Serves in a thread; yields the port."""
    chosen = Limits(**limits)
    config = uvicorn.Config(
        make_app(model, chosen, api_key=api_key),
        port=0,
        http=connections(chosen.timeout),
        ws="none",
        log_level="error",
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
