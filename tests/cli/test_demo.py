from __future__ import annotations

import importlib.util
import socket
from pathlib import Path

import pytest

from tests.cli.run import run
from tq_onnx.api import demonstrating


@pytest.fixture(autouse=True)
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo on less text."""
    monkeypatch.setattr(demonstrating, "TEXT_TOKENS", 1024)
    monkeypatch.setattr(demonstrating, "CONTEXT", 512)
    monkeypatch.setattr(demonstrating, "NEW_TOKENS", 24)


def test_the_table_and_both_continuations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("demo")
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    for word in (
        "cache bytes per token",
        "8,192",
        "1,056",
        "7.76 x smaller",
        "perplexity",
        "tokens/s",
        "original continues",
        "int4 continues",
    ):
        assert word in outcome.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("route", ["genai", "dynamo"])
def test_json_and_kept_models(tmp_path: Path, route: str) -> None:
    folder = tmp_path / "kept"
    outcome = run("demo", "--route", route, "--keep", folder, "--json", "--threads", 1)
    assert outcome.code == 0, outcome.err
    document = outcome.document
    before, after = document["original"], document["converted"]
    assert Path(before["model"]).is_file()
    assert Path(after["model"]).is_file()
    assert before["cache_bytes_per_token"] == 8192
    assert after["cache_bytes_per_token"] == 1056
    assert abs(after["perplexity"] / before["perplexity"] - 1) < 0.02
    # A model of bytes that learnt nothing has a perplexity of 256.
    assert before["perplexity"] < 8
    assert len(document["greedy"]["original"]) == 24
    assert document["top1_agreement"] > 0.9
    assert "error: " in run("demo", "--route", route, "--keep", folder).err


def test_a_folder_that_holds_a_model_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    assert "model.onnx" in run("demo", "--keep", tmp_path).sentence(4)
    assert (tmp_path / "model.onnx").read_text() == "mine"


# What ``tq-onnx serve`` refuses before it listens; tests/serving has the rest.


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
