"""``bench``: the speed of an original and of its conversion at several contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tq_onnx.conversion.branches import load_decoder
from tq_onnx.errors import UsageError
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_conversion, open_converted, open_original
from tq_onnx.runtime.session import placement
from tq_onnx.speed.bandwidth import read_rate
from tq_onnx.speed.timing import (
    PIECE,
    SpeedFigures,
    check_fits,
    check_positions,
    decode_steps,
    measure,
)
from tq_onnx.verification.interfaces import refuse_stranger

CONTEXTS: Final = (1024, 4096, 16384)
"""Contexts that are measured by default, where the model and the memory take them."""


@dataclass(frozen=True)
class SpeedRow:
    """Both models at one context.

    Attributes:
        context: tokens in the caches when decode begins.
        before: the original.
        after: the converted model.
        speedup: tokens per second after the conversion over tokens per second before.
        first_token_speedup: the same of the time to the first token; None if not measured.
        cache_ratio: how many times smaller the caches became.
        floor_seconds_before: time of reading the caches of the original once from memory.
        floor_seconds_after: the same of the converted model's caches.
        floors_before: the original's median step over that time.
        floors_after: the converted model's median step over that time.
    """

    context: int
    before: SpeedFigures
    after: SpeedFigures
    speedup: float
    first_token_speedup: float | None
    cache_ratio: float
    floor_seconds_before: float
    floor_seconds_after: float
    floors_before: float
    floors_after: float


@dataclass(frozen=True)
class SpeedReport:
    """The result of ``bench``.

    Attributes:
        original: the original model.
        converted: its conversion; None if that was made in memory.
        preset: preset of the conversion.
        kernels: True if the library's kernels ran, False if the function bodies did.
        threads: threads within an operator; None for onnxruntime's choice.
        tokens: steps of decode that were timed, for each model and context.
        piece: tokens of a prompt per call.
        bytes_per_second: how fast memory was read with as many threads.
        rows: the measured figures.
    """

    original: Path
    converted: Path | None
    preset: str
    kernels: bool
    threads: int | None
    tokens: int
    piece: int
    bytes_per_second: float
    rows: tuple[SpeedRow, ...]


def bench(
    original: Path,
    converted: Path | None = None,
    *,
    preset: str,
    contexts: Sequence[int] | None = None,
    tokens: int = 32,
    prompt_limit: int = 4096,
    library: bool = True,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> SpeedReport:
    """Measure a model before and after its conversion.

    Args:
        contexts: tokens in the caches; None for the ``CONTEXTS`` that fit.
        tokens: steps of decode to time.
        prompt_limit: the longest context that is read as a prompt, and not filled with copies.
    """
    tell = on_progress or silent
    tell(Progress("Opening the original"))
    loaded = load_decoder(original)
    before = open_original(original, loaded=loaded, threads=threads)
    if converted is None:
        tell(Progress("Converting the original"))
        after = open_conversion(
            original, preset=preset, loaded=loaded, library=library, threads=threads
        )
    else:
        tell(Progress("Opening the converted model"))
        loaded = load_decoder(converted)
        refuse_stranger(before, converted, loaded)
        after = open_converted(converted, loaded=loaded, library=library, threads=threads)
    del loaded  # the sessions have the weights
    tell(Progress("Finding the contexts that fit"))
    chosen = _chosen(before, after, contexts, tokens)
    tell(Progress("Measuring the memory"))
    rate = read_rate(threads)
    rows = []
    for context in chosen:
        figures = measure(
            (before, after),
            context,
            tokens=tokens,
            prompt=context <= prompt_limit,
            pause=threads != 1,
            on_progress=on_progress,
        )
        rows.append(_row(context, rate, *figures))
    return SpeedReport(
        original=original,
        converted=converted,
        preset=after.plan.preset if after.plan else preset,
        kernels=placement(after.session).uses_library,
        threads=threads,
        tokens=tokens,
        piece=PIECE,
        bytes_per_second=rate,
        rows=tuple(rows),
    )


def _chosen(
    before: OpenModel, after: OpenModel, contexts: Sequence[int] | None, tokens: int
) -> list[int]:
    """Return the contexts to measure, shortest first."""
    if contexts is not None:
        for context in (lengths := sorted(set(contexts))):
            check_fits((before, after), context, tokens=tokens)
        check_positions(after, lengths[-1], tokens=tokens)
        return lengths
    rooms = [side.longest for side in (before, after) if side.longest is not None]
    room = min(rooms, default=None)
    usual = list(CONTEXTS)
    if room is not None and room < usual[0]:
        usual = [max(1, room - decode_steps(tokens))]
    while True:
        try:
            check_fits((before, after), usual[-1], tokens=tokens)
            check_positions(after, usual[-1], tokens=tokens)
            return usual
        except UsageError:
            if len(usual) == 1:
                raise
            usual.pop()


def _row(context: int, rate: float, before: SpeedFigures, after: SpeedFigures) -> SpeedRow:
    first = None
    floors = [side.cache_bytes / rate for side in (before, after)]
    if before.first_token_seconds is not None and after.first_token_seconds is not None:
        first = before.first_token_seconds / after.first_token_seconds
    return SpeedRow(
        context=context,
        before=before,
        after=after,
        speedup=after.tokens_per_second / before.tokens_per_second,
        first_token_speedup=first,
        cache_ratio=before.cache_bytes / after.cache_bytes,
        floor_seconds_before=floors[0],
        floor_seconds_after=floors[1],
        floors_before=before.step_seconds / floors[0],
        floors_after=after.step_seconds / floors[1],
    )
