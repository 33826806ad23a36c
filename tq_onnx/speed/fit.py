"""``fit``: the largest context for a memory, of a model and of its conversions by all presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tq_onnx.codec.presets import LISTED_PRESETS
from tq_onnx.conversion.branches import load_decoder
from tq_onnx.conversion.calibrationrecord import CalibrationFacts, record_in
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.planning import make_plan
from tq_onnx.errors import ModelFileError, TqOnnxError, UnsupportedModelError, UsageError, located
from tq_onnx.files.configuration import context_length
from tq_onnx.files.load import LoadedModel
from tq_onnx.plan import METADATA_PLAN, Interface, Plan, plan_in
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.recognise.positions import table_positions
from tq_onnx.runtime.memory import free_memory
from tq_onnx.speed.footprint import (
    PROCESS,
    RECOGNISED,
    CacheShape,
    Footprint,
    slots_of,
    values_of,
    weights_of,
)

LONGEST: Final = 1 << 24
"""Tokens at most where the length of the model is not known."""


@dataclass(frozen=True)
class FitRow:
    """A model with one kind of caches.

    Attributes:
        preset: of the conversion; None for the model as it is.
        growing: whether its caches can only grow, and so are there twice in a step.
        bytes_per_token: cache bytes of a token of one sequence, in caches that keep all tokens.
        window_bytes: cache bytes of the exact tokens of one sequence.
        context: tokens of each sequence, the largest that fit or those that were asked for; 0 if
            the model itself does not fit.
        limited_by: ``memory``, ``model``: more would fit than the model takes, or ``request``.
        cache_bytes: of all sequences, twice if growing.
        peak_bytes: of the process.
        fits: whether that is within the memory.
        refusal: why there is no such conversion, or empty.
    """

    preset: str | None
    growing: bool
    bytes_per_token: int
    window_bytes: int
    context: int
    limited_by: str
    cache_bytes: int
    peak_bytes: int
    fits: bool
    refusal: str = ""


@dataclass(frozen=True)
class FitReport:
    """The result of ``fit``.

    Attributes:
        model: the model file.
        memory: bytes that were given, or are free.
        given: whether they were given.
        sequences: texts in memory at the same time.
        positions: tokens that the model takes; None if nothing beside it says so.
        weights: bytes of the weights in memory.
        rows: the model as it is, then what presets would make of it.
        calibration: of a converted model, the calibration that it was made with; None without one.
    """

    model: Path
    memory: int
    given: bool
    sequences: int
    positions: int | None
    weights: int
    rows: tuple[FitRow, ...]
    calibration: CalibrationFacts | None = None


def fit(
    path: Path,
    *,
    memory: int | None = None,
    context: int | None = None,
    sequences: int = 1,
    on_progress: OnProgress | None = None,
) -> FitReport:
    """Find the largest contexts for a memory, or the memory for a context.

    Args:
        memory: bytes for the process; None for what is free, limits of containers included.
        context: tokens of each sequence; None for the largest.
    """
    allowed = free_memory() if memory is None else memory
    if allowed is None:
        raise UsageError("this system does not say how much memory is free", fix="give `memory`")
    tell = on_progress or silent
    tell(Progress("Reading the graph"))
    loaded = load_decoder(path)
    tell(Progress("Counting what a call takes"))
    converted = METADATA_PLAN in loaded.model.metadata_props
    candidates, interface = (_converted if converted else _original)(loaded, path)
    limits = (
        context_length(loaded.path),
        table_positions(loaded.model, interface),
        *(footprint.slots for _, footprint in candidates if footprint is not None),
    )
    positions = min((size for size in limits if size), default=None)
    if context is not None and positions is not None and context > positions:
        raise UsageError(
            f"the model takes {positions:,} tokens, not {context:,}",
            where=str(path),
            fix=f"give a context of {positions} or less",
        )
    rows = [
        row
        if footprint is None
        else _with_context(row, footprint, allowed, positions, context, sequences=sequences)
        for row, footprint in candidates
    ]
    weights = next(footprint.weights for _, footprint in candidates if footprint is not None)
    return FitReport(
        loaded.path,
        allowed,
        memory is not None,
        sequences,
        positions,
        weights,
        tuple(rows),
        _calibration(loaded, path) if converted else None,
    )


def _calibration(loaded: LoadedModel, path: Path) -> CalibrationFacts | None:
    metadata = loaded.model.metadata_props
    with located(path):
        plan = plan_in(metadata)
        record = None if plan is None else record_in(metadata, plan)
    return None if record is None else record.facts


_Rows = tuple[list[tuple[FitRow, Footprint | None]], Interface]


def _row(preset: str | None, refusal: str = "") -> FitRow:
    return FitRow(preset, False, 0, 0, 0, "", 0, 0, False, refusal)


def _with_context(
    row: FitRow,
    footprint: Footprint,
    memory: int,
    positions: int | None,
    context: int | None,
    *,
    sequences: int,
) -> FitRow:
    if context is not None:
        tokens, limit = context, "request"
    else:
        most = positions or LONGEST
        tokens = footprint.largest_context(memory, most, sequences)
        limit = "model" if tokens == positions else "memory"
    peak = footprint.peak(tokens, sequences)
    return replace(
        row,
        growing=footprint.growing,
        bytes_per_token=footprint.bytes_per_token,
        window_bytes=footprint.window_bytes,
        context=tokens,
        limited_by=limit,
        cache_bytes=footprint.caches(tokens, sequences),
        peak_bytes=peak,
        fits=peak <= memory and tokens > 0,
    )


def _converted(loaded: LoadedModel, path: Path) -> _Rows:
    with located(path):
        plan = plan_in(loaded.model.metadata_props)
        if plan is None:
            raise ModelFileError("the conversion metadata is empty")
    caches = [
        CacheShape(
            cache.past,
            layer.kv_num_heads,
            cache.row_bytes,
            plan.overlay_rows + plan.spare_rows,
            plan.block_size,
        )
        for layer in plan.layers
        for cache in layer.caches
    ]
    weights, largest = weights_of(loaded.model.graph)
    values = values_of(loaded.model, plan.interface, caches, 0)
    footprint = Footprint(
        weights,
        largest,
        plan.bytes_per_token,
        plan.window_bytes,
        not plan.fixed_capacity,
        values,
        slots=slots_of(loaded.model.graph, caches),
    )
    return [(_row(plan.preset), footprint)], plan.interface


def _original(loaded: LoadedModel, path: Path) -> _Rows:
    original = recognise_original(loaded, path)
    recognition = original.recognition
    interface = recognition.interface
    if recognition.misses or interface is None or not recognition.sites:
        reason = str(recognition.misses[0]) if recognition.misses else "no attention layer is known"
        raise UnsupportedModelError(reason, where=str(path), fix="see `tq-onnx inspect`")
    caches = []
    for site in recognition.sites:
        for role, cache in (("key", site.key), ("value", site.value)):
            dtype = (cache.past or cache.present).dtype or site.dtype
            name = None if cache.past is None else cache.past.name
            row = site.size_of(role) * dtype.bitwidth // 8
            caches.append(CacheShape(name, site.kv_num_heads, row))
    weights, largest = weights_of(loaded.model.graph)
    heads = max(site.num_heads for site in recognition.sites)
    values = values_of(loaded.model, interface, caches, heads)
    fixed = recognition.fixed_capacity and all(site.counts_tokens for site in recognition.sites)
    slots = slots_of(loaded.model.graph, caches)
    now = Footprint(
        weights,
        largest,
        original.bytes_per_token,
        0,
        not fixed,
        values,
        PROCESS + RECOGNISED,
        slots,
        tuple((s.sliding_window, s.bytes_per_token) for s in recognition.sites if s.ring),
    )
    rows: list[tuple[FitRow, Footprint | None]] = [(_row(None), now)]
    for preset in LISTED_PRESETS:
        try:
            plan = make_plan(recognition, preset)
        except TqOnnxError as error:
            rows.append((_row(preset.name, error.what), None))
            continue
        rows.append((_row(preset.name), _after(now, plan)))
    return rows, interface


def _after(now: Footprint, plan: Plan) -> Footprint:
    """Return the footprint of a conversion: its attention makes no scores that grow."""
    values = replace(now.values, near=now.values.alone, far=now.values.alone)
    return replace(
        now,
        bytes_per_token=plan.bytes_per_token,
        window_bytes=plan.window_bytes,
        growing=not plan.fixed_capacity,
        values=values,
        process=PROCESS,
        rings=(),
    )
