"""What a server takes at most: bodies, requests at a time, seconds of a slow client.

What a request began ends with it: nothing is computed for a client that has left.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

from h11 import LocalProtocolError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tq_onnx.serving.metrics import CLIENT_CLOSED, Metrics, Record
from tq_onnx.serving.protocol import RequestError, refusal

FEWEST_BYTES: Final = 1 << 16
BYTES: Final = 32
"""Of a body, for each token that the model takes: a character may take 12 if it is escaped."""
PATH: Final = 60
"""Characters of a path in the log."""


@dataclass(frozen=True)
class Limits:
    """What a server takes at most."""

    #: bytes of a request's body; None for what any prompt of the model needs
    max_body: int | None = None
    max_concurrent_requests: int = 64  #: that wait or are computed at a time
    #: seconds until a client has sent the head of a request, then its body, and has taken what
    #: there is of its answer
    timeout: float = 30


class Gate:
    """Lets requests with a body in, ends what they began, and counts them.

    The state of each has ``ends``, an ``ExitStack`` that is closed when the answer was sent, the
    client has left, or the server ends; and ``record``, what it took.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        tokens: int,
        metrics: Metrics,
        api_key: str | None = None,
    ) -> None:
        """Wrap an application; see the class for arguments."""
        self.app = app
        self.limits = limits
        self.most_bytes = limits.max_body or FEWEST_BYTES + BYTES * tokens
        self.ongoing = 0
        self._metrics = metrics
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if not self._is_allowed(scope):
            error = RequestError(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
            await refusal(error)(scope, receive, send)
        elif scope["method"] == "POST":
            await self._pass(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] == "/health":
            return True
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(values) == 1 and hmac.compare_digest(values[0], self._key)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = Record(ascii(scope["path"][:PATH])[1:-1])
        scope.setdefault("state", {})["record"] = record

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        self.ongoing += 1
        try:
            if self.ongoing > self.limits.max_concurrent_requests:
                raise RequestError(
                    f"{self.limits.max_concurrent_requests} requests are being answered, the most "
                    "that this server takes; try again later",
                    status=429,
                    code="rate_limit_exceeded",
                    headers={"Retry-After": "1"},
                )
            body = await self._body(receive)
            if body is not None:
                await self._answer(scope, body, receive, noting)
        except RequestError as error:
            with suppress(LocalProtocolError):  # the client has sent what is no HTTP
                await refusal(error)(scope, receive, noting)
        except Exception:  # which is answered outside of this
            record.status = 500
            raise
        finally:
            self.ongoing -= 1
            record.status = record.status or CLIENT_CLOSED
            self._metrics.add(record)

    async def _body(self, receive: Receive) -> bytes | None:
        """Return the body; None if the client leaves before its end."""
        seconds = self.limits.timeout
        try:
            return await asyncio.wait_for(_read(receive, self.most_bytes), seconds)
        except asyncio.TimeoutError as error:
            raise RequestError(
                f"the body did not come within {seconds:g} seconds; send it sooner",
                status=408,
                headers={"Connection": "close"},
            ) from error
        except asyncio.CancelledError:
            raise _ending() from None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run the application until it has answered, or the client has left."""
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        begun = False

        async def request() -> Message:
            if unread:
                return unread.pop()
            await asyncio.shield(departure)
            return {"type": "http.disconnect"}

        async def response(message: Message) -> None:
            nonlocal begun
            begun = True
            try:
                await asyncio.wait_for(send(message), self.limits.timeout)
            except asyncio.TimeoutError:  # as good as left
                answer.cancel()
                await asyncio.Event().wait()

        with ExitStack() as ends:
            scope.setdefault("state", {})["ends"] = ends
            departure = asyncio.ensure_future(_left(receive))
            answer = asyncio.ensure_future(self.app(scope, request, response))
            try:
                await asyncio.wait({departure, answer}, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if not begun:
                    raise _ending() from None
            finally:
                departure.cancel()
                answer.cancel()
                await asyncio.wait({departure, answer})
            if not answer.cancelled():
                answer.result()


async def _read(receive: Receive, most: int) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise RequestError(f"the body has more than {most:,} bytes; send less", status=413)
        if not message.get("more_body", False):
            return bytes(body)


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _ending() -> RequestError:
    return RequestError("the server is ending; ask again", status=503)


def connections(seconds: float) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1, with connections that are closed if no request comes in time."""

    class Connection(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self.timer is not None:
                self.timer.cancel()

        def _await_request(self) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.loop.call_later(seconds, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    return Connection
