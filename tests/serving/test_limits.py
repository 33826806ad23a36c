"""What slow, greedy and absent clients cost the server: not what others get."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("fastapi", "httpx", "onnxruntime_genai")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
if not MISSING:
    import httpx

    from tests.serving.listening import listening, served
    from tests.serving.processes import answering, free_port, module_path
    from tq_onnx.serving.limits import Gate, Limits
    from tq_onnx.serving.metrics import Metrics
    from tq_onnx.serving.model import CHARACTERS

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: tests/serving/requirements.txt"),
]

ROUTE = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
SHORT = {"model": "int4", "messages": [HELLO], "max_tokens": 2, "temperature": 0}
LONG = {"model": "int4", "messages": [HELLO], "temperature": 0}
ABSENT = 12
LITTLE = 0.5
"""Seconds that a client gets."""


@pytest.fixture(scope="module")
def opened(int4: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    model = served(int4, tmp_path_factory.mktemp("limits"), alone=True)
    close, model.engine.close = model.engine.close, lambda: None  # more than one server has it
    yield model
    close()


@pytest.fixture
def model(opened: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Notes the ends of answers, and lets a test wait for their beginnings and cancellations."""
    submit, cancel = opened.engine.submit, opened.engine.cancel
    opened.begun, opened.ends, opened.cancelled = threading.Semaphore(0), [], []
    opened.go_on = threading.Event()
    opened.go_on.set()

    def noted(prompt: Any, deliver: Any, **options: Any) -> Any:
        def note(step: Any) -> None:
            if step.is_last:
                opened.ends.append(step.finish)
            deliver(step)
            assert opened.go_on.wait(60)

        job = submit(prompt, note, **options)
        opened.begun.release()
        return job

    def cancelled(job: Any) -> None:
        cancel(job)
        opened.cancelled.append(job)

    monkeypatch.setattr(opened.engine, "submit", noted)
    monkeypatch.setattr(opened.engine, "cancel", cancelled)
    return opened


@contextmanager
def held(model: Any) -> Iterator[None]:
    """No answer gets beyond its first token meanwhile, however slow the others are."""
    model.go_on.clear()
    try:
        yield
    finally:
        model.go_on.set()


def post(port: int, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"http://127.0.0.1:{port}{ROUTE}", json=body, timeout=120)


def connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def request(body: bytes, *headers: str, length: int | None = None) -> bytes:
    given = ["Host: here", "Content-Type: application/json", *headers]
    if "Transfer-Encoding: chunked" not in headers:
        given.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([f"POST {ROUTE} HTTP/1.1", *given, "", ""]).encode() + body


def asked(port: int, body: dict[str, Any]) -> socket.socket:
    """Asks, and does not read."""
    client = connection(port)
    client.sendall(request(json.dumps(body).encode()))
    return client


def everything(client: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    parts = []
    while part := client.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_computed_for_clients_that_left(model: Any, stream: bool) -> None:
    """One of them is being answered; the others are before their first piece."""
    with listening(model) as port:
        with held(model):
            clients = [asked(port, LONG | {"stream": stream}) for _ in range(ABSENT)]
            for _ in clients:
                model.begun.acquire()
            if stream:
                clients[0].recv(1)
            for client in clients:
                client.close()
            while len(model.cancelled) < ABSENT:
                time.sleep(0.01)
        assert post(port, SHORT).status_code == 200
    assert sorted(model.ends) == ["cancelled"] * ABSENT + ["length"]


def test_others_are_answered_while_a_prompt_is_read(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    encode = model._tokenizer.encode

    class Slow:
        def encode(self, text: str, **options: Any) -> Any:
            if "slow" in text:
                reading.set()
                assert go_on.wait(60)
            return encode(text, **options)

    monkeypatch.setattr(model, "_tokenizer", Slow())
    slow = SHORT | {"messages": [{"role": "user", "content": "slow"}]}
    with listening(model) as port, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, port, slow)
        assert reading.wait(60)
        assert post(port, SHORT).status_code == 200
        go_on.set()
        assert waiting.result().status_code == 200


def test_long_prompts_are_not_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_tokenizer", None)
    most = CHARACTERS * 2048
    with listening(model) as port:
        long = SHORT | {"messages": [{"role": "user", "content": "a" * (most + 1)}]}
        error = post(port, long).json()["error"]
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert "has 32,769 characters, and this server takes 32,768" in error["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused(model: Any, chunked: bool) -> None:
    limits = {"max_body": 1000, "timeout": LITTLE}
    with listening(model, **limits) as port, closing(connection(port)) as client:
        if chunked:
            client.sendall(request(b"400\r\n" + b" " * 1024, "Transfer-Encoding: chunked"))
        else:
            client.sendall(request(b" " * 1001, length=1 << 30))
        answer = everything(client)
        assert b"413 Request Entity Too Large" in answer or b"413 Content Too Large" in answer
        assert b"the body has more than 1,000 bytes; send less" in answer
        assert post(port, SHORT).status_code == 200


def test_bodies_have_a_limit_by_default(model: Any) -> None:
    with listening(model) as port:
        answer = post(port, SHORT | {"user": "a" * 10_000_000})
        assert "the body has more than 131,072 bytes" in answer.json()["error"]["message"]


def test_requests_beyond_the_most_are_sent_away(model: Any) -> None:
    with listening(model, max_concurrent_requests=2) as port:
        with ExitStack() as clients:
            clients.enter_context(held(model))
            for _ in range(2):
                clients.enter_context(closing(asked(port, LONG)))
                model.begun.acquire()
            answer = post(port, SHORT)
            assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        while (answer := post(port, SHORT)).status_code == 429:
            pass
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST", b""),
        (f"GET /health HTTP/1.1\r\nHost: here\r\n{'A: b' * 100}".encode(), b""),
        (request(b"{", length=100), b"408 Request Timeout"),
        (request(b"5\r\n{}", "Transfer-Encoding: chunked"), b"408 Request Timeout"),
        (b"GET /health HTTP/1.1\r\nHost: here\r\n\r\nGET", b"200 OK"),
    ],
)
def test_slow_clients_are_left(model: Any, sent: bytes, status: bytes) -> None:
    with listening(model, timeout=LITTLE) as port:
        with closing(connection(port)) as client:
            client.sendall(sent)
            answer = everything(client)
            assert answer.partition(b"\r\n")[0].partition(b" ")[2] == status
        assert post(port, SHORT).status_code == 200


def test_a_client_that_takes_nothing_is_left(model: Any) -> None:
    """Its answer ends, and so does what it began."""
    ended: list[bool] = []
    bodies = [{"type": "http.request", "body": b"{}"}]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["ends"].callback(ended.append, True)
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Any:
        if bodies:
            return bodies.pop()
        return await asyncio.get_running_loop().create_future()

    async def send(_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    gate = Gate(app, Limits(timeout=LITTLE), 1, Metrics())
    asyncio.run(gate({"type": "http", "method": "POST", "path": ROUTE}, receive, send))
    assert (ended, gate.ongoing) == ([True], 0)


def test_many_silent_and_pipelining_clients(model: Any) -> None:
    with listening(model) as port, ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(closing(connection(port)))
        client = clients.enter_context(closing(connection(port)))
        body = json.dumps(SHORT).encode()
        client.sendall(request(body) * 3 + request(body, "Connection: close"))
        assert everything(client).count(b"HTTP/1.1 200 OK") == 4


def test_a_key_is_asked_for(model: Any) -> None:
    with listening(model, api_key="secret") as port:
        url = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{url}/health").status_code == 200
        twice = [("Authorization", "Bearer secret")] * 2  # which of them counts, nobody knows
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}, twice):
            for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
                assert httpx.get(url + path, headers=headers).status_code == 401
            # Nothing of the body is read.
            answer = httpx.post(url + ROUTE, content=b"x" * 10_000_000, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        key = {"Authorization": "Bearer secret"}
        assert httpx.post(url + ROUTE, json=SHORT, headers=key, timeout=120).status_code == 200
        assert httpx.get(f"{url}/v1/models", headers=key).status_code == 200


def test_requests_are_counted_and_logged(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tq_onnx.serving")
    with listening(model) as port:
        post(port, SHORT)
        post(port, SHORT | {"n": 2})
        post(port, SHORT | {"model": "gpt"})
        with held(model):
            client = asked(port, LONG)
            for _ in range(4):
                model.begun.acquire()
            client.close()
            while len(caplog.messages) < 4:
                time.sleep(0.01)
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    lines = text.splitlines()
    for line in (
        'tq_onnx_requests_total{status="200"} 2',
        'tq_onnx_requests_total{status="404"} 1',
        'tq_onnx_requests_total{status="499"} 1',
        "tq_onnx_requests_waiting 0",
        'tq_onnx_request_seconds_bucket{le="+Inf"} 2',
    ):
        assert line in lines
    # Of the one that left, as many as it got.
    assert "tq_onnx_prompt_tokens_total 15" in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(names)) == len(names) > 8
    first, second, third, left = caplog.messages
    assert first.startswith(f"{ROUTE} 200, 5 prompt tokens, 0 cached, 2 new tokens, first after ")
    assert first.endswith(", length")
    assert "5 prompt tokens, 0 cached, 4 new tokens" in second
    assert third.startswith(f"{ROUTE} 404, ")
    assert left.startswith(f"{ROUTE} 499, 5 prompt tokens")
    assert left.endswith("no end")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_have_a_time(model: Any, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(model, "_timeout", LITTLE / 2)
    with listening(model) as port:
        answer = post(port, LONG | {"stream": stream})
        assert answer.status_code == (200 if stream else 503)
        assert "took more than 0.25 seconds; ask for fewer tokens, or later" in answer.text
        assert "[DONE]" not in answer.text
        monkeypatch.setattr(model, "_timeout", None)
        assert post(port, SHORT).status_code == 200
    assert model.ends == ["cancelled", "length"]


STUCK = """
import sys, time
import tq_onnx.serving.model as model

class Stuck(model.Engine):
    def submit(self, *_, **__):
        print("waits", flush=True)
    def cancel(self, _):
        pass
    def close(self):
        time.sleep(3600)

model.Engine = Stuck
from tq_onnx.cli.main import main
main()
"""


def test_the_server_ends_whatever_it_computes(int4: Path, tmp_path: Path) -> None:
    """An Engine that never answers, and does not close."""
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "stuck.py").write_text(STUCK)
    port = free_port()
    command = [
        *(sys.executable, str(tmp_path / "stuck.py"), "serve", str(int4), "--port", str(port)),
        *("--chat-template", str(tmp_path / "chat.jinja"), "--shutdown-timeout", "1"),
    ]
    variables = os.environ | {"PYTHONPATH": module_path()}
    with (
        answering(command, variables, tmp_path, f"http://127.0.0.1:{port}") as process,
        closing(asked(port, LONG)) as whole,
        closing(asked(port, LONG | {"stream": True})),
    ):
        while (tmp_path / "log.txt").read_text().count("waits") < 2:
            pass
        process.send_signal(signal.SIGTERM)
        answer = everything(whole)
        assert b"503 Service Unavailable" in answer
        assert b"the server is ending" in answer
        assert process.wait(60) == 0
