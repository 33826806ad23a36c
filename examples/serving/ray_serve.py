"""Serve a converted folder from several processes or machines: `tq-onnx serve` under Ray Serve.

    python examples/serving/ray_serve.py qwen3-genai-int4 --replicas 2 --threads 4

Without --address a Ray of this machine is started. On a cluster (ray start) give --address auto.
Every machine needs the folder in the same place, and tq-onnx with its extra serve. A replica whose
process or Engine ends is replaced. Its requests fail with status 500 or 503, which OpenAI's clients
send again by themselves.

Needs ray[serve] and tq-onnx[serve].
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from tq_onnx.serving.model import ServedModel
from tq_onnx.serving.server import make_app

APPLICATION = "chat"
ONGOING = 16
"""Requests that a replica gets at once: as many as go into a call over pages by default."""


@serve.deployment(max_ongoing_requests=ONGOING, health_check_period_s=2)
@serve.ingress()
class Replica:
    """A process with an Engine of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        """Open the folder; see ``ServedModel`` for options."""
        self.model = ServedModel(**options)
        self.application = make_app(self.model)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application."""
        return self.application

    def check_health(self) -> None:
        """Raise what ended the Engine, so that Ray replaces this replica."""
        if self.model.engine.broken is not None:
            raise self.model.engine.broken


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
        serve.run(deployed.bind(options), name=APPLICATION, blocking=True)
    serve.delete(APPLICATION)


if __name__ == "__main__":
    main()
