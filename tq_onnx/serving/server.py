"""The routes of a server, and its life: listening, ending."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from tq_onnx.errors import EngineError, TqOnnxError, UsageError
from tq_onnx.serving.forms import ChatForm, Form, TextForm, completed, first_of, streamed
from tq_onnx.serving.limits import Gate, Limits, connections
from tq_onnx.serving.metrics import CONTENT_TYPE, LOG, Metrics
from tq_onnx.serving.model import ServedModel
from tq_onnx.serving.protocol import (
    BODY,
    ChatRequest,
    CompletionRequest,
    Document,
    GenerationRequest,
    RequestError,
    explained,
    refusal,
)

ROUTES: Final = (
    "there is no such route; ask for /v1/chat/completions, /v1/completions, /v1/models, /health "
    "or /metrics"
)
ENDING_SECONDS: Final = 5
"""For the Engine's last step, which nothing interrupts."""


async def refuse(_: Request, error: Exception) -> Document:
    """Return the response to an error of any kind."""
    if isinstance(error, RequestValidationError):
        error = explained(error.errors())
    elif isinstance(error, HTTPException):
        headers = error.headers or {}
        sentences = {400: BODY, 404: ROUTES, 405: f"this route takes {headers.get('Allow')}"}
        sentence = sentences.get(error.status_code, error.detail)
        error = RequestError(sentence, status=error.status_code, headers=headers)
    elif isinstance(error, TqOnnxError):
        statuses: dict[type[Exception], int] = {UsageError: 400, EngineError: 503}
        error = RequestError(str(error), status=statuses.get(type(error), 500))
    elif not isinstance(error, RequestError):
        error = RequestError("this is a defect of the server, whose log has more", status=500)
    return refusal(error)


def make_app(
    model: ServedModel, limits: Limits | None = None, *, api_key: str | None = None
) -> FastAPI:
    """Make the application that serves a model."""
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        # The process ends, whatever the Engine is at.
        closing = threading.Thread(target=model.engine.close, daemon=True)
        closing.start()
        end = time.monotonic() + ENDING_SECONDS
        while closing.is_alive() and time.monotonic() < end:
            await asyncio.sleep(0.05)

    app = FastAPI(
        title="tq-onnx", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    tokens = model.engine.batching.longest
    app.add_middleware(
        Gate, limits=limits or Limits(), tokens=tokens, metrics=metrics, api_key=api_key
    )
    for kind in (RequestValidationError, HTTPException, RequestError, TqOnnxError, Exception):
        app.add_exception_handler(kind, refuse)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        if model.engine.broken is not None:
            raise model.engine.broken
        batches = model.engine.batching.reason or "yes"
        return {"status": "ok", "batches": batches, "process": os.getpid()}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def figures() -> Response:
        return Response(metrics.text(gauges_of(model)), media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model.describe()]}

    async def complete(query: GenerationRequest, request: Request, form: Form) -> Response:
        answers = await model.begin(query, request.state.record)
        request.state.ends.callback(answers.cancel)
        if not query.stream:
            return await completed(answers, form)
        pieces = await first_of(aiter(answers))
        return StreamingResponse(
            streamed(answers, pieces, form, with_usage=query.wants_usage),
            media_type="text/event-stream",
        )

    @app.post("/v1/chat/completions", response_model=None)
    async def complete_chat(query: ChatRequest, request: Request) -> Response:
        return await complete(query, request, ChatForm(model.name))

    @app.post("/v1/completions", response_model=None)
    async def complete_text(query: CompletionRequest, request: Request) -> Response:
        return await complete(query, request, TextForm(model.name))

    return app


def gauges_of(model: ServedModel) -> dict[str, tuple[str, float]]:
    """Return the meaning and the value of what an Engine has at the moment, by name."""
    occupancy, batching = model.engine.occupancy, model.engine.batching
    gauges: dict[str, tuple[str, float]] = {
        "requests_running": ("Answers that are being computed.", occupancy.running),
        "requests_waiting": ("Answers that wait for pages or places.", occupancy.waiting),
        "model_passes": ("Calls of the model since the start.", occupancy.passes),
    }
    if batching.joins:
        gauges["pages"] = ("Pages of the cache.", batching.num_blocks)
        gauges["pages_free"] = ("Pages that no request has reserved.", occupancy.free_pages)
    return gauges


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket at an address, which nobody else has."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            if os.name != "nt":  # there, it would share the port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            # Others who take the port are refused from now on, while the model is opened.
            listener.listen()
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            f"port {port} of {host} cannot be listened on ({error.strerror or error})",
            fix="give another `port` or `host`",
        ) from error
    return listener


def run(app: FastAPI, listener: socket.socket, limits: Limits, *, shutdown_timeout: int) -> None:
    """Serve until the process is asked to end by SIGINT or SIGTERM.

    Args:
        shutdown_timeout: seconds for answers that are being computed then.
    """
    config = uvicorn.Config(
        app,
        http=connections(limits.timeout),
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=shutdown_timeout,
    )
    host, port = listener.getsockname()[:2]
    LOG.info("listening on http://%s:%d/v1", f"[{host}]" if ":" in host else host, port)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:  # uvicorn raises the signal that has ended it again
        LOG.info("ended")
