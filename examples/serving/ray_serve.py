"""Serve a converted folder from several processes or machines: `tq-onnx serve` under Ray Serve.

    python examples/serving/ray_serve.py qwen3-genai-int4 --replicas 2 --threads 4

Requests that begin alike, as those of one conversation do, go to one replica, whose Engine knows
their beginning; if it has as many requests as it takes, they go to the next.

Without --address a Ray of this machine is started. On a cluster (ray start) give --address auto.
Every machine needs the folder in the same place, and tq-onnx with its extra serve. A replica whose
process or Engine ends is replaced. Its requests fail with status 503, which OpenAI's clients send
again by themselves.

Needs ray[serve] and tq-onnx[serve].
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
import zlib
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from tq_onnx.serving.limits import Gate, Limits
from tq_onnx.serving.metrics import Metrics
from tq_onnx.serving.model import ServedModel
from tq_onnx.serving.protocol import RequestError
from tq_onnx.serving.server import make_app

APPLICATION = "chat"
ONGOING = 16
"""Requests that a replica gets at once: as many as go into a call over pages by default."""
ALL = 4096
"""Requests that wait or are answered, of all replicas."""
MOST_BODY = 1 << 20
BEGINNING = 2048
"""Characters of a prompt by which its replica is chosen."""
PASSED = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme")


class Affinity(RequestRouter):
    """Has requests with the same key go to the same replica, as long as it takes them."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas in an order of their own for each key, which few others change."""
        key = pending_request.args[0] if pending_request is not None else ""

        def rank(replica: RunningReplica) -> int:
            return zlib.crc32(f"{replica.replica_id.unique_id} {key}".encode())

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]


def beginning_of(body: bytes) -> str:
    """Return what the requests of a conversation have in common: all to its first question.

    What is no such request gets a beginning of its own.
    """
    try:
        fields = json.loads(body)
        if "messages" not in fields:
            return str(fields["prompt"])[:BEGINNING]
        roles = [message["role"] for message in fields["messages"]]
        return str(fields["messages"][: roles.index("user") + 1])[:BEGINNING]
    except (ValueError, KeyError, TypeError, RecursionError):
        return uuid.uuid4().hex


@serve.deployment(
    max_ongoing_requests=ONGOING,
    health_check_period_s=2,
    request_router_config=RequestRouterConfig(request_router_class=Affinity),
)
class Replica:
    """A process with an Engine of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Open the folder; see ``ServedModel`` for options."""
        self.model = ServedModel(**options)
        self.application = make_app(self.model)

    async def answer(self, key: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the messages of the answer to a request; ``key`` has chosen this replica."""
        del key
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        messages: asyncio.Queue[Message] = asyncio.Queue()

        async def receive() -> Message:
            return unread.pop() if unread else await asyncio.Event().wait()

        task = asyncio.ensure_future(self.application(dict(scope), receive, messages.put))
        try:
            ended = False
            while not ended:
                message = await messages.get()
                ended = message["type"] == "http.response.body" and not message.get("more_body")
                yield message
        finally:  # its client may have left
            task.cancel()

    def check_health(self) -> None:
        """Raise what ended the Engine, so that Ray replaces this replica."""
        if self.model.engine.broken is not None:
            raise self.model.engine.broken


@serve.deployment(max_ongoing_requests=ALL, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Front:
    """Takes requests from clients, and hands each to its replica."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        """Note the replicas."""
        self._answer = replicas.options(stream=True).answer

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application."""
        limits = Limits(max_body=MOST_BODY, max_concurrent_requests=ALL)
        gate = Gate(self._hand_over, limits, 0, Metrics())
        return Starlette(routes=[Mount("/", app=gate)])

    async def _hand_over(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive()).get("body", b"")
        passed = {name: scope[name] for name in PASSED}
        answer = self._answer.remote(beginning_of(body), passed, body)
        begun = False
        try:
            async for message in answer:
                begun = True
                await send(message)
        except RayError as error:
            if begun:
                raise
            raise RequestError("a replica was lost; ask again", status=503) from error
        finally:
            answer.cancel()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="of onnxruntime-genai, converted")
    add("--chat-template", type=Path, metavar="FILE", help="instead of the folder's")
    add("--warm", type=Path, metavar="FILE", action="append", default=[], help="system prompt")
    add("--threads", type=int, help="of ONNX Runtime, of each replica (default: all cores)")
    add("--replicas", type=int, default=2, help="(default: 2)")
    add("--address", help="of a Ray cluster, or auto (default: start one here)")
    add("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=8000, help="likewise (default: 8000)")
    options = vars(parser.parse_args())
    replicas, address, host, port = (
        options.pop(name) for name in ("replicas", "address", "host", "port")
    )
    for name in ("folder", "chat_template"):
        if options[name] is not None:
            options[name] = options[name].resolve()
    options["warm"] = [path.resolve() for path in options["warm"]]
    own = {} if address else {"include_dashboard": False}
    ray.init(address=address, **own)
    serve.start(http_options={"host": host, "port": port})
    cores = {"num_cpus": options["threads"] or 1}
    deployed = Replica.options(num_replicas=replicas, ray_actor_options=cores)
    with suppress(KeyboardInterrupt):
        serve.run(Front.bind(deployed.bind(options)), name=APPLICATION, blocking=True)
    serve.delete(APPLICATION)


if __name__ == "__main__":
    main()
