"""``tq-onnx generate``: continue a prompt with an original or a converted model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.runtime.providers import PROVIDERS


@dataclass(frozen=True)
class GenerateDocument:
    """What ``--json`` prints.

    Attributes:
        model: the file.
        converted: whether it is a converted model.
        prompt: the text to continue.
        text: the continuation.
        tokens: its token ids.
        prompt_tokens: tokens of the prompt.
        stopped: whether the model ended the text.
        capacity: tokens that caches have room for; None for caches that grow.
        provider: the execution provider, by ONNX Runtime's name.
        prefill_seconds: time of the prompt.
        decode_tokens_per_second: of the tokens behind the first one; 0 without any.
        cache_bytes: bytes of the cache buffers at the end.
        cache_bytes_per_token: cache bytes of one token.
    """

    model: Path
    converted: bool
    prompt: str
    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    stopped: bool
    capacity: int | None
    provider: str
    prefill_seconds: float
    decode_tokens_per_second: float
    cache_bytes: int
    cache_bytes_per_token: int


@click.command()
@click.argument("model", type=flags.FilePath())
@click.option("--prompt", required=True, help="Continue this text; - reads it from stdin.")
@flags.max_new_tokens(64)
@flags.context("as needed if the model requires a fixed capacity, else caches grow")
@flags.sampling
@flags.tokenizer
@flags.threads
@flags.ep
@flags.no_library
@flags.as_json
def generate(
    *,
    model: Path,
    prompt: str,
    max_new_tokens: int,
    context: int | None,
    tokenizer: Path | None,
    threads: int | None,
    ep: str,
    library: bool,
    as_json: bool,
    **draws: Any,
) -> None:
    """Generate text with an original or a converted MODEL.

    Reads MODEL, a file or a folder with one decoder. Streams the continuation of the prompt to
    stdout, then writes speed and cache bytes to stderr.

    \b
    Example:
      tq-onnx generate model.int4.onnx --prompt "Call me Ishmael."
    """
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.huggingface import stream_text
    from tq_onnx.integrations.tokens import require_tokenizer
    from tq_onnx.runtime.generate import TokenStream
    from tq_onnx.runtime.opening import open_model
    from tq_onnx.runtime.sampling import Sampling

    model = find_model(model)
    sampling = Sampling(**draws)
    with terminal.progress("Opening the model"):
        opened = open_model(model, library=library, threads=threads, ep=PROVIDERS[ep])
        opened.refuse_text()
        words = require_tokenizer(tokenizer, model)
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = words.encode(text)
    opened.refuse_prompt(ids)
    capacity = opened.capacity_for(len(ids), max_new_tokens, requested=context)
    tokens = TokenStream(
        opened.decoder(capacity=None if opened.room else capacity),
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_ids=words.eos_ids,
    )
    pieces = []
    for piece in stream_text(words, tokens):
        pieces.append(piece)
        if not as_json:
            click.echo(terminal.printable(piece), nl=False)
            sys.stdout.flush()
    result = tokens.result
    if as_json:
        terminal.print_json(
            GenerateDocument(
                model=model,
                converted=opened.plan is not None,
                prompt=text,
                text="".join(pieces),
                tokens=result.tokens,
                prompt_tokens=result.prompt_tokens,
                stopped=result.stopped,
                capacity=capacity,
                provider=PROVIDERS[ep].provider,
                prefill_seconds=result.prefill_seconds,
                decode_tokens_per_second=result.tokens_per_second,
                cache_bytes=result.cache_bytes,
                cache_bytes_per_token=opened.signature.bytes_per_token,
            )
        )
        return
    terminal.print_line()
    in_place = opened.plan is None or library
    size = f"of {capacity} tokens{', in place' if in_place else ''}" if capacity else "growing"
    place = f" on {PROVIDERS[ep].provider}" if PROVIDERS[ep].has_own_memory else ""
    click.echo(
        f"{terminal.printable(model.name)}: {result.prompt_tokens} + {len(result.tokens)} tokens"
        f"{place}, prompt "
        f"{result.prefill_seconds:.2f} s, {result.tokens_per_second:.1f} tokens/s; caches "
        f"{result.cache_bytes:,} bytes ({size}, {opened.signature.bytes_per_token:,} per token)",
        err=True,
    )
