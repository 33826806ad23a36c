"""``tq-onnx serve``: an OpenAI endpoint over onnxruntime-genai's Engine."""

from __future__ import annotations

import importlib.util
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.cli.signals import TerminatedError
from tq_onnx.errors import UsageError
from tq_onnx.runtime.variables import API_KEY

NEEDED: Final = ("fastapi", "uvicorn", "onnxruntime_genai")
UNPAGED: Final = (
    "the caches of this folder are not in pages: a batch of up to four requests starts when the "
    "one before has ended; `tq-onnx convert FOLDER --paged` writes a folder with pages"
)


@click.command()
@click.argument("folder", type=flags.FilePath())
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen on this address.")
@click.option(
    "--port",
    type=flags.Whole(0, 65535),
    default=8000,
    show_default=True,
    help="Listen on this port; 0 for any that is free.",
)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar=API_KEY.name,
    help="Refuse requests without this key, except for /health.  [default: the environment "
    f"variable {API_KEY.name}; required unless --host is a loopback address]",
)
@click.option(
    "--served-model-name",
    metavar="NAME",
    help="Name of the model for clients.  [default: the name of the folder]",
)
@click.option(
    "--chat-template",
    type=flags.FilePath(),
    metavar="FILE",
    help="Jinja template for messages.  [default: that of the folder]",
)
@click.option(
    "--warm",
    type=flags.FilePath(),
    metavar="FILE",
    multiple=True,
    help="Read the system prompt in this text file before any request. May be repeated.",
)
@click.option(
    "--max-model-len",
    type=flags.Whole(1),
    help="Limit a prompt with its answer to N tokens.  [default: that of the folder]",
)
@click.option(
    "--max-num-seqs",
    type=flags.Whole(1),
    help="Compute at most N answers at a time.  [default: that of the folder]",
)
@click.option(
    "--max-concurrent-requests",
    type=flags.Whole(1),
    default=64,
    show_default=True,
    help="Take N requests that wait or are computed; more get status 429.",
)
@click.option(
    "--max-body",
    type=flags.Whole(1),
    help="Refuse bodies of more than N bytes.  [default: 65,536 and 32 for each token]",
)
@click.option(
    "--max-characters",
    type=flags.Whole(1),
    help="Refuse prompts of more than N characters.  [default: 16 for each token]",
)
@click.option(
    "--timeout",
    type=flags.Whole(1),
    default=30,
    show_default=True,
    help="Seconds for a client to send its headers, to send its body, and to take each piece of "
    "an answer.",
)
@click.option(
    "--request-timeout",
    type=flags.Whole(1),
    help="End answers that take more than N seconds, waiting included.  [default: no limit]",
)
@click.option(
    "--shutdown-timeout",
    type=flags.Whole(0),
    default=30,
    show_default=True,
    help="Seconds for running answers after SIGTERM or Ctrl-C.",
)
@click.option(
    "--alone",
    is_flag=True,
    help="Compute one request at a time, so that no answer depends on other requests.",
)
@flags.threads
def serve(*, folder: Path, host: str, port: int, api_key: str | None, **options: Any) -> None:
    """Serve a converted FOLDER of onnxruntime-genai to OpenAI's clients.

    Answers /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics until Ctrl-C or
    SIGTERM. FOLDER is what `tq-onnx convert FOLDER --paged` writes. Logs a line for each request to
    stderr. Needs fastapi, uvicorn and onnxruntime-genai (`pip install 'tq-onnx[serve]'`).

    \b
    Example:
      tq-onnx serve qwen3-genai-int4-paged
      tq-onnx serve qwen3-genai-int4-paged --port 8080 --warm system.txt
      curl http://127.0.0.1:8000/v1/models
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        names = ", ".join(missing).replace("_", "-")
        raise UsageError(f"{names} is not installed", fix="pip install 'tq-onnx[serve]'")
    from tq_onnx.serving.limits import Limits
    from tq_onnx.serving.model import ServedModel
    from tq_onnx.serving.server import bound_socket, is_loopback, make_app, run

    if api_key == "":
        raise UsageError("`api_key` is empty", fix="give a key, or leave it out")
    if api_key is None and not is_loopback(host):
        raise UsageError(
            f"{host} is no loopback address, so that others could use this server",
            fix="give `api_key`",
        )
    _log_to_stderr()
    limits = Limits(
        options.pop("max_body"), options.pop("max_concurrent_requests"), options.pop("timeout")
    )
    shutdown_timeout = options.pop("shutdown_timeout")
    with bound_socket(host, port) as listener, suppress(KeyboardInterrupt, TerminatedError):
        with terminal.progress("Opening the model"):
            model = ServedModel(
                folder,
                name=options.pop("served_model_name"),
                max_length=options.pop("max_model_len"),
                max_batch_size=options.pop("max_num_seqs"),
                **options,
            )
        batching = model.engine.batching
        notes = [batching.reason, "" if batching.joins or batching.reason else UNPAGED]
        if not model.has_template:
            notes.append("there is no chat template: only /v1/completions answers")
        terminal.print_warnings(filter(None, notes))
        app = make_app(model, limits, api_key=api_key)
        run(app, listener, limits, shutdown_timeout=shutdown_timeout)


def _log_to_stderr() -> None:
    """Log requests with their time, and without what control characters would do."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("tq_onnx.serving")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
