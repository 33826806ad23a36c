"""Tokens per second, time to the first token and cache bytes of models, side by side.

``measure`` times any number of opened models at one context: each reads a prompt of that length, in
pieces, or has its caches filled with copies of the rows of a short one, which for the speed of
decode is the same. Then they decode in turns, a few steps each, so that whatever disturbs the
machine disturbs all of them; the median counts. Caches are buffers of fixed capacity, updated in
place, wherever the model allows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tq_onnx.errors import TqOnnxError, UnsupportedModelError, UsageError
from tq_onnx.measure.tables import byte_size
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import PROMPT_PIECE
from tq_onnx.runtime.memory import free_memory
from tq_onnx.runtime.model import OpenModel

PIECE: Final = PROMPT_PIECE
"""Tokens of a prompt per call: what a call needs besides the caches grows with them."""

TURN: Final = 8
"""Timed steps of a model before the next model's turn."""

_WAKE: Final = 2
"""Untimed steps before each turn."""

_SPIN_SECONDS: Final = 0.1
"""Longest time that the threads of the model before spin on the cores, waiting for work."""

_PROMPT_SECONDS: Final = 0.5
_MOST_PROMPTS: Final = 5
"""Short prompts are read again, until that time is up or that often; the median counts."""

_SEED_TOKENS: Final = 64
"""Tokens of the prompt whose rows are copied."""


@dataclass(frozen=True)
class SpeedFigures:
    """One model at one context.

    Attributes:
        tokens_per_second: in decode, from the median step.
        step_seconds: the median step.
        fastest_step_seconds: the shortest step.
        first_token_seconds: time of a prompt that fills the context; None if none was read.
        cache_bytes: bytes of the context in the cache buffers; all of them if the graph says how
            large they are.
        in_place: True if steps write into the caches and do not make new ones.
    """

    tokens_per_second: float
    step_seconds: float
    fastest_step_seconds: float
    first_token_seconds: float | None
    cache_bytes: int
    in_place: bool


@dataclass(eq=False)
class _Runner:
    """A model while it is measured."""

    model: OpenModel
    decoder: Decoder
    ids: list[int]
    prompts: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def read(self, context: int) -> Iterator[None]:
        """Read a prompt, piece by piece."""
        self.decoder.reset()
        seconds = 0.0
        for call in self.decoder.calls(context, PIECE):
            piece = np.resize(self.ids, (1, call.stop - call.start))
            begin = time.perf_counter()
            self.decoder.prefill(piece)
            seconds += time.perf_counter() - begin
            yield
        self.prompts.append(seconds)

    def fill(self, context: int) -> None:
        """Fill the caches with copies of the rows of a short prompt."""
        size = self.decoder.longest_call or _SEED_TOKENS
        self.decoder.reset()
        self.decoder.prefill(np.resize(self.ids, (1, min(size, context))))
        self.decoder.repeat(context)

    def take_turn(self, steps: int) -> None:
        """Decode some steps, and time them."""
        for number in range(_WAKE + steps):
            begin = time.perf_counter()
            self.decoder.step([self.ids[number % len(self.ids)]])
            if number >= _WAKE:
                self.steps.append(time.perf_counter() - begin)

    def figures(self, cache_bytes: int) -> SpeedFigures:
        """Return the figures."""
        step = statistics.median(self.steps)
        return SpeedFigures(
            tokens_per_second=1 / step,
            step_seconds=step,
            fastest_step_seconds=min(self.steps),
            first_token_seconds=statistics.median(self.prompts) if self.prompts else None,
            cache_bytes=cache_bytes,
            in_place=self.decoder.in_place,
        )


def measure(
    models: Sequence[OpenModel],
    context: int,
    *,
    tokens: int,
    prompt: bool,
    pause: bool = True,
    on_progress: OnProgress | None = None,
) -> list[SpeedFigures]:
    """Time models at one context, batch 1.

    Args:
        context: tokens in the caches when decode begins.
        prompt: True to read the context, and measure the time to the first token; False to fill
            the caches with copies.
    """
    check_fits(models, context, tokens=tokens)
    tell, doing = on_progress or silent, f"Measuring at {context:,} tokens"
    runners = [_runner(model, context, tokens) for model in models]
    turns = [min(TURN, tokens - start) for start in range(0, tokens, TURN)]
    pieces = sum(_pieces(runner, context) for runner in runners) if prompt else 0
    # Pieces and turns count alike: on a CPU both read the weights a few times.
    total = pieces + len(turns) * len(runners)
    calls = 0
    tell(Progress(doing, calls, total))
    if prompt:
        for number in range(_MOST_PROMPTS):
            for runner in runners:
                for _ in runner.read(context):
                    calls += number == 0
                    tell(Progress(doing, calls, total))
            if sum(sum(runner.prompts) for runner in runners) > _PROMPT_SECONDS * len(runners):
                break
    else:
        for runner in runners:
            runner.fill(context)
    sizes = [_cache_bytes(runner, context) for runner in runners]
    for steps in turns:
        for runner in runners:
            if pause:
                time.sleep(_SPIN_SECONDS)
            runner.take_turn(steps)
            calls += 1
            tell(Progress(doing, calls, total))
    return [runner.figures(size) for runner, size in zip(runners, sizes, strict=True)]


def decode_steps(tokens: int) -> int:
    """Return the steps that a model takes for ``tokens`` timed ones."""
    return tokens + _WAKE * -(-tokens // TURN)


def check_fits(models: Sequence[OpenModel], context: int, *, tokens: int) -> None:
    """Refuse a context that does not fit, before it is tried."""
    steps = decode_steps(tokens)
    for model in models:
        room = model.room
        if model.signature.first_only:
            raise UnsupportedModelError(
                "the graph takes a first prompt only, so it decodes nothing",
                where=str(model.path),
                fix="give the graph that was exported for decoding",
            )
        if room is not None and context + steps > room:
            raise UsageError(
                f"the caches of this model hold {room:,} tokens, and a context of {context:,} "
                f"needs {context + steps:,}, the decoded ones included",
                where=str(model.path),
                fix="give smaller `contexts`",
            )
    # Caches that grow are there twice in a step.
    needed = sum(
        model.signature.bytes_per_token
        * (context + steps)
        * (1 if model.signature.fixed_capacity else 2)
        for model in models
    )
    free = free_memory()
    if free is not None and needed > free:
        raise UsageError(
            f"a context of {context:,} tokens needs {byte_size(needed)} for the caches of "
            f"all models, and {byte_size(free)} of memory are free",
            fix="give smaller `contexts`",
        )


def check_positions(model: OpenModel, context: int, *, tokens: int) -> None:
    """Refuse a context that a model has no positions for; this runs one step at its very end."""
    last = context + decode_steps(tokens)
    try:
        runner = _runner(model, context, tokens)
        runner.fill(last - 1)
        runner.decoder.step([0])
    except TqOnnxError as error:
        raise UsageError(
            f"a context of {context:,} tokens and {last - context} after it do not run: "
            f"{error.what}",
            where=str(model.path),
            fix="give smaller `contexts`",
        ) from error


def _runner(model: OpenModel, context: int, tokens: int) -> _Runner:
    fixed = model.signature.fixed_capacity and model.room is None
    capacity = context + decode_steps(tokens) if fixed else None
    ids = np.random.default_rng(0).integers(0, model.vocabulary, PIECE)
    return _Runner(model, model.decoder(capacity=capacity), [int(number) for number in ids])


def _pieces(runner: _Runner, context: int) -> int:
    return len(runner.decoder.calls(context, PIECE))


def _cache_bytes(runner: _Runner, context: int) -> int:
    """Return the bytes of the buffers; of the context alone where their size is our choice."""
    held = runner.decoder.cache_bytes
    if runner.model.room is not None:
        return held
    plan = runner.model.plan
    window = 0 if plan is None else plan.window_bytes * runner.decoder.batch
    return window + (held - window) * context // runner.decoder.slots
