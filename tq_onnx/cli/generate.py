"""``tq-onnx generate``: continue a prompt with an original or a converted model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.runtime.providers import PROVIDERS

if TYPE_CHECKING:
    from tq_onnx.language.text import Completion


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
        cached_tokens: those of them that ``--prompt-cache`` had.
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
    cached_tokens: int
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
@flags.prompt_cache
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
    prompt_cache: Path | None,
    prompt_cache_size: str,
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
      tq-onnx generate model.int4.onnx --prompt "Call me" --prompt-cache prompts
    """
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import require_tokenizer
    from tq_onnx.language.model import LanguageModel
    from tq_onnx.language.text import STOP
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
    lm = LanguageModel(
        opened,
        context=None if opened.room else capacity,
        tokenizer=tokenizer,
        prompt_store=flags.prompt_store(prompt_cache, prompt_cache_size),
    )
    cache = lm.new_cache()
    running = lm.stream(ids, cache=cache, max_new_tokens=max_new_tokens, sampling=sampling)
    while True:
        try:
            piece = next(running)
        except StopIteration as end:
            completion: Completion = end.value
            break
        if not as_json:
            click.echo(terminal.printable(piece.text), nl=False)
            sys.stdout.flush()
    stopped, seconds = completion.finish_reason == STOP, completion.seconds
    # The last token is not fed, unless one behind it ended the text.
    steps = max(len(completion.tokens) - (not stopped), 0)
    speed = steps / seconds.decode if seconds.decode else 0.0
    if as_json:
        terminal.print_json(
            GenerateDocument(
                model=model,
                converted=opened.plan is not None,
                prompt=text,
                text=completion.text,
                tokens=completion.tokens,
                prompt_tokens=len(ids),
                cached_tokens=completion.usage.cached_tokens,
                stopped=stopped,
                capacity=capacity,
                provider=PROVIDERS[ep].provider,
                prefill_seconds=seconds.prefill,
                decode_tokens_per_second=speed,
                cache_bytes=cache.nbytes,
                cache_bytes_per_token=opened.signature.bytes_per_token,
            )
        )
        return
    terminal.print_line()
    in_place = opened.plan is None or library
    size = f"of {capacity} tokens{', in place' if in_place else ''}" if capacity else "growing"
    place = f" on {PROVIDERS[ep].provider}" if PROVIDERS[ep].has_own_memory else ""
    reused = completion.usage.cached_tokens
    click.echo(
        f"{terminal.printable(model.name)}: {len(ids)} + {len(completion.tokens)} tokens"
        f"{f' ({reused} of them loaded)' if reused else ''}{place}, prompt "
        f"{seconds.prefill:.2f} s, {speed:.1f} tokens/s; caches "
        f"{cache.nbytes:,} bytes ({size}, {opened.signature.bytes_per_token:,} per token)",
        err=True,
    )
