"""Requests of any form to the server, on loopback.

Whatever arrives, a whole request is answered in the documented form, never with status 500. The
next plain request gets the text that it always gets, pages are free again, and memory stays flat.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.fuzz import json_edits
from tests.fuzz.commands import Case
from tests.fuzz.schemas import Schemas
from tests.integrations.genai_folder import bundled_genai
from tests.serving.listening import listening, served
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.serving.server import make_app
from tq_onnx.targets.registry import target_of

REQUESTS: Final = 20
"""Of a case."""
CLIENTS: Final = 6
SECONDS: Final = 60
"""Until an answer is missing."""
CLIENT_SECONDS: Final = 2
"""That the server gives a client."""
TOKENS: Final = 64
"""Of a prompt and its answer: answers are short."""
WARM: Final = 20
"""Cases until memory is what it stays."""
MOST_GROWTH: Final = 32 << 20
STATUSES: Final = (200, 400, 404, 405, 408, 413, 429, 503)
ROUTE: Final = "/v1/chat/completions"
ROUTES: Final = {"ChatRequest": ROUTE, "CompletionRequest": "/v1/completions"}
NAME: Final = "paged"
PATHS: Final = (
    *ROUTES.values(),
    "/health",
    "/v1/models",
    "/openapi.json",
    "/",
    "/docs",
    f"{ROUTE}/",
    "/\0",
    "*",
)
METHODS: Final = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "CONNECT", "get", "X")
PLAIN: Final = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Call me Ishmael."}],
    "temperature": 0,
    "max_tokens": 16,
}


@dataclass
class Request:
    """What one client does.

    Attributes:
        content: that it sends.
        method: of the request.
        due: whether an answer is due, to the method.
        waits: seconds until it leaves, if none is.
    """

    content: bytes
    method: str = "POST"
    due: bool = True
    waits: float = 0.0


@dataclass
class Server:
    """The server of this process."""

    port: int
    model: Any
    plain: str = ""
    cases: int = 0
    resident: int = 0
    schemas: dict[str, Any] = field(default_factory=dict)


def check(draw: random.Random, folder: Path) -> Case:
    """Sends some requests, a few at a time, and then a plain one."""
    case = Case(folder)
    server = _server()
    requests = [_request(draw, server) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda request: _answer(server.port, request), requests))
    for request, (status, problem) in zip(requests, answers, strict=True):
        if problem:
            case.what = ascii(request.content[:2000])
            case.broken("answer", problem)
        case.outcomes[f"status {status}"] = "seen"
    _stands(server, case)
    return case


def _stands(server: Server, case: Case) -> None:
    """Judges the server after what was sent."""
    end = time.monotonic() + SECONDS
    engine = server.model.engine
    while (
        (now := engine.occupancy).running
        or now.waiting
        or (now.free_pages != engine.batching.num_blocks)
    ):
        if time.monotonic() > end:
            case.broken("pages", f"{now} of {engine.batching.num_blocks} pages")
            return
        time.sleep(0.001)
    text = _plain(server.port)
    if text != server.plain:
        case.broken("text", f"{text!r} instead of {server.plain!r}")
    server.cases += 1
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if server.cases <= WARM:
        server.resident = max(server.resident, resident)
    elif resident > server.resident + MOST_GROWTH:
        case.broken("growth", f"{resident >> 20} MiB after {server.resident >> 20} MiB")


def _answer(port: int, request: Request) -> tuple[int, str]:
    """The status of the answer, 0 for none, and what is wrong with it."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        try:
            client.sendall(request.content)
            if not request.due:
                client.settimeout(request.waits or 0.001)
            response = http.client.HTTPResponse(client, method=request.method)
            response.begin()
            body = response.read()
        except TimeoutError:
            return 0, "no answer" if request.due else ""
        except (ConnectionError, http.client.HTTPException) as error:
            return 0, f"no answer: {error!r}" if request.due else ""
    if response.status not in STATUSES:
        return response.status, f"status {response.status}: {body[:500]!r}"
    if not request.due or request.method == "HEAD":
        return response.status, ""
    return response.status, _wrong_form(response, body)


def _wrong_form(response: http.client.HTTPResponse, body: bytes) -> str:
    """What is wrong with the form of an answer; empty if it is the documented one."""
    shown = f"{response.status} {body[:500]!r}"
    if response.getheader("Content-Type", "").startswith("text/event-stream"):
        events = body.decode().split("\n\n")
        whole = events[-1] == "" and (events[-2] == "data: [DONE]" or '"error"' in events[-2])
        return "" if whole else f"events: {shown}"
    try:
        document = json.loads(body)
    except ValueError:
        return f"no JSON: {shown}"
    if response.status == 200:
        return "" if isinstance(document, dict) and "error" not in document else shown
    error = document.get("error", {})
    text = error.get("message", "")
    sentence = 0 < len(text) < 500 and text.isprintable() and "Input should" not in text
    keys = set(error) == {"message", "type", "param", "code"}
    return "" if sentence and keys else f"error: {shown}"


def _request(draw: random.Random, server: Server) -> Request:
    kinds: tuple[tuple[float, Callable[[random.Random, Server], Request]], ...] = (
        (60, _by_schema),
        (10, _anywhere),
        (14, _raw),
        (15, _leaving),
        (0.1, _slow),
    )
    weights, makers = zip(*kinds, strict=True)
    maker: Callable[[random.Random, Server], Request] = draw.choices(makers, weights)[0]
    return maker(draw, server)


def _by_schema(draw: random.Random, server: Server) -> Request:
    kind = draw.choice(tuple(ROUTES))
    return Request(_post(_body(draw, server, kind), draw, ROUTES[kind]))


def _body(draw: random.Random, server: Server, kind: str = "ChatRequest") -> bytes:
    document = Schemas(server.schemas, draw).value(server.schemas[kind])
    if isinstance(document, dict) and draw.random() < 0.9:
        document["model"] = NAME
        # Few texts of any role make a prompt, and the other fields count where there is one.
        if draw.random() < 0.7 and kind == "ChatRequest":
            document["messages"] = PLAIN["messages"]
    text = json.dumps(document)
    if draw.random() < 0.3:
        return json_edits.edited(text, draw)
    return text.encode()


def _post(body: bytes, draw: random.Random, route: str = ROUTE) -> bytes:
    """A request of HTTP, whose body has its length or comes in chunks."""
    kind = draw.choices(
        ("application/json", "text/plain", "", "application/json; a=b"), (40, 1, 1, 9)
    )
    headers = [f"Content-Type: {kind[0]}"] if kind[0] else []
    version = "1.1"
    if draw.random() < 0.15:
        size = draw.choice((1, 7, 1000, 1 << 20))
        parts = [body[at : at + size] for at in range(0, len(body), size)][:5000]
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        headers.append("Transfer-Encoding: chunked")
    else:
        headers.append(f"Content-Length: {len(body)}")
        version = draw.choices(("1.1", "1.0"), (9, 1))[0]
    if draw.random() < 0.1:
        headers.append(draw.choice(("Expect: 100-continue", "Upgrade: websocket", "Accept: x/y")))
    return _http(f"POST {route} HTTP/{version}", headers) + body


def _http(line: str, headers: list[str]) -> bytes:
    lines = [line, "Host: here", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode()


def _anywhere(draw: random.Random, _: Server) -> Request:
    """A route and a method, whether they exist or not."""
    method, path = draw.choice(METHODS), draw.choice(PATHS)
    due = method not in ("CONNECT", "X", "get") and path not in ("*", "/\0")
    return Request(_http(f"{method} {path} HTTP/1.1", ["Content-Length: 0"]), method, due)


def _raw(draw: random.Random, server: Server) -> Request:
    """Bytes that may be no request."""
    content = bytearray(_post(_body(draw, server), draw))
    for _ in range(draw.choice((1, 2, 8))):
        at = draw.randrange(len(content) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            del content[at:]
        elif kind == 1:
            content[at:at] = draw.choice((b"\r\n", b"\0", b"\xff", b"\r\n\r\n", b" " * 99, b"A: b"))
        elif kind == 2:
            content[at:at] = content[: draw.randrange(1, 200)]
        else:
            content[at : at + 1] = bytes([draw.randrange(256)])
    return Request(bytes(content), due=False, waits=0.02)


def _leaving(draw: random.Random, server: Server) -> Request:
    """A client that does not wait for its answer, or for its first piece."""
    long = {"model": NAME, "messages": PLAIN["messages"], "stream": draw.random() < 0.5}
    content = _post(json.dumps(long).encode(), draw)
    cut = draw.choice((len(content), len(content), draw.randrange(1, len(content))))
    return Request(content[:cut], due=False, waits=draw.choice((0.0, 0.002, 0.02)))


def _slow(draw: random.Random, _: Server) -> Request:
    """A client that the server has to leave."""
    content = _post(json.dumps(PLAIN).encode(), draw)
    return Request(content[: -draw.randrange(1, 20)], due=False, waits=2 * CLIENT_SECONDS)


def _plain(port: int) -> str:
    """The text of the plain request, or what came instead."""
    end = time.monotonic() + SECONDS
    body = json.dumps(PLAIN)
    while True:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        client.request("POST", ROUTE, body, {"Content-Type": "application/json"})
        response = client.getresponse()
        content = response.read()
        client.close()
        if response.status == 200:
            return str(json.loads(content)["choices"][0]["message"]["content"])
        # Clients that have just left may still be counted.
        if response.status != 429 or time.monotonic() > end:
            return f"status {response.status}: {content!r}"


@cache
def _home() -> tempfile.TemporaryDirectory[str]:
    """Goes with this process."""
    home = tempfile.TemporaryDirectory(prefix="tq-fuzz-")
    folder = bundled_genai(Path(home.name) / "original", "genai")
    target = target_of("paged", block_size=16, num_blocks=40)
    convert_folder(folder, Path(home.name) / NAME, target=target)
    return home


@cache
def _server() -> Server:
    """Begins to serve, in this process."""
    stack = ExitStack()
    atexit.register(stack.close)
    home = Path(_home().name)
    model = served(home / NAME, home, max_length=TOKENS, threads=1)
    limits = {"max_concurrent_requests": 5, "timeout": CLIENT_SECONDS}
    port = stack.enter_context(listening(model, **limits))
    schemas = make_app(model).openapi()["components"]["schemas"]
    return Server(port, model, _plain(port), schemas=schemas)


def warm() -> None:
    """Makes what all cases share."""
    _home()
