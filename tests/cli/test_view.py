"""``tq-onnx view``: what is served, the end by Ctrl-C, and what is refused."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from tests.cli.processes import start
from tests.cli.run import run
from tests.decoders.running import FIXTURES
from tests.runtime.models import DYNAMO, converted
from tq_onnx.integrations.viewing import first_node


def test_the_page_opens_at_the_first_converted_layer_until_ctrl_c() -> None:
    model = converted(DYNAMO)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start("view", model, "--no-browser", **pipes) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            page = urllib.request.urlopen(address, timeout=300).read().decode()
            script = urllib.request.urlopen(f"{address}tq-onnx.js", timeout=300).read().decode()
            data = urllib.request.urlopen(f"{address}data/{model.name}", timeout=300).read()
            elsewhere = urllib.request.Request(address, headers={"Host": "evil.example"})
            with pytest.raises(HTTPError, match="403"):
                urllib.request.urlopen(elsewhere, timeout=300)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=300)
        finally:
            process.kill()
    assert address.startswith("http://127.0.0.1:")
    assert process.returncode == 0, told
    assert told == ""
    with pytest.raises(URLError):
        urllib.request.urlopen(address, timeout=300)
    assert '<script src="/tq-onnx.js"></script></head>' in page
    assert script.startswith('const name = "layers.0.attention/TurboQuantDequantAttention";')
    assert data == model.read_bytes()


def test_an_original_is_shown_from_the_top() -> None:
    assert first_node(FIXTURES / f"{DYNAMO}.onnx") is None


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FIXTURES / f"{DYNAMO}.onnx"
    assert "no such file" in run("view", tmp_path / "missing.onnx").sentence(4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used" in run("view", model, "--port", port).sentence(2)
    monkeypatch.setitem(sys.modules, "netron", None)
    assert "pip install 'tq-onnx[view]'" in run("view", model).sentence(2)
