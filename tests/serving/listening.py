"""The server of examples/serving in this process, on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.serving.processes import TEMPLATE
from tests.serving.running import example


def chat_of(folder: Path, home: Path, **options: Any) -> Any:
    """A ``server.Chat`` with a template that writes messages one behind the other."""
    template = home / "chat.jinja"
    template.write_text(TEMPLATE)
    return example("server").Chat(folder, chat_template=template, **options)


@contextmanager
def listening(chat: Any, **limits: Any) -> Iterator[int]:
    """Serves in a thread; yields the port."""
    chosen = example("limits").Limits(**limits)
    config = uvicorn.Config(
        example("server").make_app(chat, chosen),
        port=0,
        http=example("limits").connections(chosen.client_seconds),
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
