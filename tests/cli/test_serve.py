"""What ``tq-onnx serve`` refuses before it listens; tests/serving has the rest."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from tests.cli.run import run

NEEDED = ("fastapi", "uvicorn", "onnxruntime_genai")
HAS_ALL = all(importlib.util.find_spec(name) is not None for name in NEEDED)
needs_all = pytest.mark.skipif(not HAS_ALL, reason=f"needs {', '.join(NEEDED)}")


def sentence(*arguments: object) -> str:
    return run("serve", *arguments).sentence(2)


@pytest.mark.skipif(HAS_ALL, reason="the extra is installed")
def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    assert sentence(tmp_path).endswith("is not installed; pip install 'tq-onnx[serve]'")


@needs_all
def test_other_machines_need_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "example.invalid", "192.168.0.1"):
        expected = f"{host} is no loopback address, so that others could use this server"
        assert sentence(tmp_path, "--host", host) == f"{expected}; give --api-key"
    assert sentence(tmp_path, "--api-key", "") == "--api-key is empty; give a key, or leave it out"


@needs_all
def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        message = sentence(tmp_path, "--port", port)
    assert message.startswith(f"port {port} of 127.0.0.1 cannot be listened on (")
    assert message.endswith("; give another --port or --host")
    assert "cannot be listened on" in sentence(tmp_path, "--host", "203.0.113.1", "--api-key", "k")


@needs_all
def test_a_folder_that_is_none_of_genai(tmp_path: Path) -> None:
    error = run("serve", tmp_path, "--port", 0).sentence(4)
    assert "there is no genai_config.json" in error
