"""The properties that a conversion must have: ``verify`` fails if one does not hold.

Each function turns figures into a ``Check`` with its verdict and the measured numbers. The
tolerances stand here, each with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.acceptance import FIELD_STEPS, SEARCHED_TIE_SHARE, TIE_SHARE, UNROUNDED_TIE_SHARE
from tq_onnx.codec.codebook import codebook_of
from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.conversion.bake import rotation_table
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.measure.feeding_modes import SAME_NUMBERS, CallDistance, FeedingFigures
from tq_onnx.measure.oracle import BODY, KERNEL, OracleFigures
from tq_onnx.measure.probe import Probe
from tq_onnx.measure.reconstruction import CacheDistance, ReconstructionFigures
from tq_onnx.plan import Plan
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.session import placement

CONVERT_AGAIN: Final = "convert the original again with this version of tq-onnx"
"""What to do where checks do not hold, and nothing tells more."""

LEFT_OUT: Final = (
    "quality on a text and greedy continuation",
    "caches fed in chunks and in place",
    "errors of rows against theory",
    "function bodies beside the kernels",
)
"""What a quick verification does not do."""

MAX_ATTENTION_ERROR: Final = {"FLOAT": 2e-5, "FLOAT16": 1e-3, "BFLOAT16": 8e-3}
# Kernels that multiply prompts as integers round queries and weights to 16 bits; what rounding them
# to 8 bits does is measured on the call itself, see ``OracleFigures.rounding``.
MAX_KERNEL_ATTENTION_ERROR: Final = {**MAX_ATTENTION_ERROR, "FLOAT": 2e-4}
QUERY_ROUNDINGS: Final = 3.0
"""What roundings of queries and weights make of the reference has the size of a backend's error and
does not bound it. In the layers of SmolLM2, kernels are off by 0.9 to 1.3 of it where that is 1e-4
or more, and function bodies of float16, which read other queries than were drawn, by up to 2.3."""
SCORE_ROUNDING: Final = 2.0**-24
"""Of the largest scores: what float32 rounds away of a score moves its weight by as much. Keys with
a bias have scores in the thousands, and only there is it more than the bounds above. Seen: 2.0e-5
with keys of length 393."""
MAX_THEORY_EXCESS: Final = 0.05
# One rotation and a limited number of vectors scatter around the expectation of theory.
THEORY_SPREADS: Final = 3.0
# Large vectors count more here than in theory's mean, and may reconstruct less well.
MAX_FIRST_LAYER_DISTANCE: Final = 2.0
# The two graphs may round what they cache differently, by a few units in the last place.
ROUNDING_DISTANCE: Final = {"FLOAT": 1e-10, "FLOAT16": 1e-5, "BFLOAT16": 1e-3}
ROUNDING_BY_CALL: Final = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul"})
"""Operators that round to 8 bits by the range of all that they are given."""
MAX_CHUNK_FLIPS: Final = 1e-3
"""Share of bytes, in all layers or in the first where any differ: what other codes there make of
the next layer's vectors tips more codes there, and so on."""
FLIPS_PER_DISTANCE: Final = 50.0
"""Share of bytes per relative distance of the original's own caches: 2.3 codes of 4 bits, 35 of 8
bits, and the float16 scale of a row, whose steps are 2^-11 of it."""
MAX_TIPPED_ROWS: Final = 4
"""Rows of the first layer where any differ. Where a gain tips, or a code that error feedback hands
on, most of the row is another; whatever its bytes, it is one tie. Seen: 2 of 256."""
MAX_TIPPED_SHARE: Final = 0.5
"""Of one token's rows there, over KV heads, keys and values. Ties meet rows one by one. A token
that was fed wrongly has other numbers in all of its rows."""
MAX_CHUNK_DRIFT: Final = 1.5
"""Of the relative squared distance from the original's caches after one call. Codes that tip in one
layer of many make others tip in the next; what they hold is no worse for it."""
MAX_TABLE_ERROR: Final = 1e-5


@dataclass(frozen=True)
class Check:
    """A property that must hold.

    Attributes:
        name: the property, with sizes where it has some.
        holds: the verdict; None if the check was not done.
    """

    name: str
    holds: bool | None


@dataclass(frozen=True)
class PropertyCheck(Check):
    """A property of a conversion.

    Attributes:
        detail: the measured numbers, in words.
    """

    detail: str


def failed(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return the checks that do not hold; checks that were not done are not among them."""
    return tuple(check for check in checks if check.holds is False)


def failure(checks: Sequence[Check]) -> str:
    """Return one clause that counts the failed checks and names them."""
    lost = failed(checks)
    names = "; ".join(check.name for check in lost)
    return f"{len(lost)} of {len(checks)} checks do not hold: {names}"


def placed(after: OpenModel, library: bool) -> PropertyCheck:
    """Check that kernels or function bodies run, as asked for, and no mixture."""
    where = placement(after.session)
    encoders = len(after.signature.caches)
    plan = after.plan
    readers = encoders // 2 if plan is None else sum(layer.readers for layer in plan.layers)
    expected = (encoders, readers) if library else (0, 0)
    return PropertyCheck(
        "TurboQuant nodes run where they should",
        (where.encode, where.attention) == expected,
        f"{where.encode} encode and {where.attention} attention nodes on the library's kernels, "
        f"{expected[0]} and {expected[1]} expected",
    )


def cache_sizes(converted: OpenModel, cache_bytes: int, tokens: int) -> PropertyCheck:
    """Compare the bytes of the cache buffers after some tokens with the bytes in the plan."""
    planned = converted.plan.bytes_per_token if converted.plan else 0
    window = converted.plan.window_bytes if converted.plan else 0
    measured = (cache_bytes - window) / tokens
    besides = f" besides {window} of exact tokens" if window else ""
    return PropertyCheck(
        "cache buffers have the planned size",
        measured == planned,
        f"{measured:g} bytes per token measured, {planned} planned{besides}",
    )


def feeding_modes_agree(
    modes: FeedingFigures,
    model: ir.Model,
    *,
    call_drift: Sequence[CallDistance],
    drift: Sequence[CacheDistance],
    chunked_drift: Sequence[CacheDistance],
) -> list[PropertyCheck]:
    """Compare the ways to feed caches; a graph for first prompts is fed in one way only.

    A graph that rounds its activations by the range of a call computes other numbers where a call
    is another part of the prompt, and so does its original, with which it is compared call by call.
    So it is where the original was seen to do so for another reason.

    Args:
        call_drift: how far the original's caches are apart after the prompt in chunks, by cache.
        drift: every layer's caches after one call against the original's.
        chunked_drift: the same after the prompt in chunks.
    """
    if modes.first_only:
        return []
    flips = modes.chunk_bytes_differing / modes.cache_bytes
    few = flips <= MAX_CHUNK_FLIPS
    alike = few or _tipped(modes, call_drift, drift, chunked_drift)
    rounds = any(each.op_type in ROUNDING_BY_CALL for each in model.graph.all_nodes())
    reason = ""
    if rounds and not few:
        reason = ", as the graph rounds activations by the range of each call"
    elif not alike and any(each.largest > SAME_NUMBERS for each in call_drift):
        reason = ", and the original caches other numbers in chunks, too"
    seen = f", {MAX_CHUNK_FLIPS * modes.cache_bytes:.0f} allowed" if few else ""
    if not few and not reason:
        seen = f", {modes.chunk_layer_bytes_differing} in layer {modes.chunk_layer}, the first"
    chunked = PropertyCheck(
        "a prompt in chunks leaves the same bytes",
        None if reason else alike,
        f"{modes.chunk_bytes_differing} of {modes.cache_bytes} bytes differ{seen}{reason}",
    )
    if not modes.fixed_capacity:
        return [chunked]
    fixed = PropertyCheck(
        "caches in place equal growing caches",
        modes.in_place_bytes_differing == 0 and modes.in_place_tokens_equal,
        f"{modes.in_place_bytes_differing} bytes differ after {modes.prompt_tokens} + "
        f"{modes.new_tokens} tokens, greedy tokens are "
        f"{'the same' if modes.in_place_tokens_equal else 'different'}",
    )
    return [fixed, chunked]


def _tipped(
    modes: FeedingFigures,
    call_drift: Sequence[CallDistance],
    drift: Sequence[CacheDistance],
    chunked_drift: Sequence[CacheDistance],
) -> bool:
    """Return True if roundings explain the bytes that differ after a prompt in chunks."""
    at = modes.chunk_layer
    if at is None:
        return True
    noise = max((each.rms for each in call_drift[: 2 * at + 2]), default=0.0)
    share = MAX_CHUNK_FLIPS + FLIPS_PER_DISTANCE * noise
    few = modes.chunk_layer_bytes_differing <= share * modes.chunk_layer_bytes
    lone = (
        modes.chunk_layer_rows_differing <= MAX_TIPPED_ROWS
        and modes.chunk_layer_token_share <= MAX_TIPPED_SHARE
    )
    return (few or lone) and all(
        chunked_distance <= MAX_CHUNK_DRIFT * whole_distance + ROUNDING_DISTANCE["FLOAT"]
        for whole, chunked in zip(drift, chunked_drift, strict=True)
        for whole_distance, chunked_distance in (
            (whole.key, chunked.key),
            (whole.value, chunked.value),
        )
    )


def tables(model: ir.Model, plan: Plan) -> PropertyCheck:
    """Compare rotations and codebooks in a model with the tables that its plan names."""
    problems = []
    rotated = False
    for layer in converted_layers(model, plan):
        for encoder in layer.encoders:
            codec, size = encoder.codec, layer.plan.head_size
            if not codec.is_rotated:
                continue
            rotated = True
            rotation = rotation_table(plan, layer.plan, codec)
            centroids, boundaries = _floats(encoder.centroids), _floats(encoder.boundaries)
            book = codebook_of(codec, size)
            for name, holds in (
                ("rotation", _close(_floats(encoder.rotation), rotation)),
                ("centroids", _close(centroids, book.centroids)),
                ("boundaries", _close(boundaries, book.boundaries)),
            ):
                if not holds:
                    problems.append(f"layer {layer.plan.layer} {encoder.role}: {name}")
    baked = f"{plan.rotation} rotations of seed {plan.seed}, codebooks"
    planned = baked if rotated else "the codecs have none"
    detail = f"not as planned: {', '.join(problems)}" if problems else planned
    return PropertyCheck("baked tables match the plan", not problems, detail)


def _floats(value: ir.Value | None) -> npt.NDArray[np.float32] | None:
    tensor = None if value is None else value.const_value
    return None if tensor is None else np.asarray(tensor.numpy(), np.float32)


def _close(table: npt.NDArray[np.float32] | None, expected: npt.NDArray[np.float32]) -> bool:
    if table is None or table.shape != expected.shape:
        return False
    return bool(np.abs(table - expected).max() <= MAX_TABLE_ERROR)


def same_weights(distances: Sequence[CacheDistance], probe: Probe) -> PropertyCheck:
    """Compare the first layer's caches with the original's: no layer before it can blur them."""
    first = distances[0]
    dtype = probe.layers[0].plan.dtype
    bounds = [
        MAX_FIRST_LAYER_DISTANCE * expected + ROUNDING_DISTANCE[dtype]
        for expected in (first.key_expected, first.value_expected)
    ]
    return PropertyCheck(
        "the first layer caches what the original's does",
        first.key <= bounds[0] and first.value <= bounds[1],
        f"relative squared distance of keys {first.key:.5f}, of values {first.value:.5f}; "
        f"{bounds[0]:.5f} and {bounds[1]:.5f} allowed",
    )


def backends_hold(
    probe: Probe, figures: Sequence[OracleFigures], *, has_planes: bool
) -> list[PropertyCheck]:
    """Compare every backend with the reference; see ``tq_onnx.measure.oracle``.

    Args:
        has_planes: whether caches lie in planes, which on a device attention of float16 may read.
    """
    dtypes = {layer.plan.layer: layer.plan.dtype for layer in probe.layers}
    checks = []
    for backend in dict.fromkeys(entry.backend for entry in figures):
        entries = [entry for entry in figures if entry.backend == backend]
        codes = sum(entry.codes for entry in entries)
        differing = sum(entry.codes_differing for entry in entries)
        wrong = sum(entry.codes_wrong for entry in entries)
        steps = max(entry.scale_steps for entry in entries)
        dtype = dtypes[entries[0].layer]
        rate = UNROUNDED_TIE_SHARE[ELEMENTS[dtype]] if backend == BODY else TIE_SHARE
        if any(cache.tables.searches for layer in probe.layers for cache in layer.caches):
            rate = SEARCHED_TIE_SHARE[ELEMENTS[dtype] if backend == BODY else "float32"]
        # One tie in a short text is no rate.
        few = differing <= max(1, rate * sum(entry.ties for entry in entries))
        checks.append(
            PropertyCheck(
                f"encode: {backend} equals the reference",
                few and wrong == 0 and steps <= FIELD_STEPS,
                f"{differing} of {codes} codes differ, {wrong} of them not at a decision boundary; "
                f"stored scales within {steps} steps of their type",
            )
        )
        element = "FLOAT16" if has_planes and backend not in {KERNEL, BODY} else dtype
        limit = (MAX_KERNEL_ATTENTION_ERROR if backend == KERNEL else MAX_ATTENTION_ERROR)[element]

        def allowed(entry: OracleFigures, limit: float = limit) -> float:
            rounded = SCORE_ROUNDING * entry.scores
            return max(limit, rounded) + QUERY_ROUNDINGS * entry.rounding

        worst = max(entries, key=lambda entry: _nan_last(entry.attention_error / allowed(entry)))
        checks.append(
            PropertyCheck(
                f"attention: {backend} equals the reference",
                all(entry.attention_error <= allowed(entry) for entry in entries),
                f"largest relative error {worst.attention_error:.1e} (layer {worst.layer}), "
                f"{allowed(worst):.0e} allowed",
            )
        )
    return checks


def _nan_last(value: float) -> float:
    return float("inf") if np.isnan(value) else value


def theory_holds(losses: Sequence[ReconstructionFigures]) -> list[PropertyCheck]:
    """Compare errors of reconstruction with theory, or with what the codec's steps allow."""

    def beyond(loss: ReconstructionFigures) -> float:
        assert loss.theory is not None  # only such losses come here
        if loss.theory == 0:
            return _nan_last(abs(loss.excess)) or -np.inf
        allowed = MAX_THEORY_EXCESS + THEORY_SPREADS * loss.spread / loss.theory
        return _nan_last(abs(loss.excess) - allowed)

    checks = []
    zeros = [loss for loss in losses if loss.rows == 0 and loss.error == 0]  # all were zero
    promised = [loss for loss in losses if loss.theory is not None and loss not in zeros]
    if promised:
        worst = max(promised, key=beyond)
        checks.append(
            PropertyCheck(
                "keys and values reconstruct as theory says",
                beyond(worst) <= 0,
                f"worst: layer {worst.layer} {worst.cache}, relative squared error "
                f"{worst.error:.5f}, theory {worst.theory:.5f} ({worst.excess:+.1%} over "
                f"{worst.rows} vectors, standard error "
                f"{worst.spread / max(worst.theory or 0.0, 1e-30):.1%})",
            )
        )
    stepped = [(loss.share, loss) for loss in losses if loss.share is not None]
    if stepped:
        share, loss = max(stepped, key=lambda entry: _nan_last(entry[0]))
        codecs = ", ".join(dict.fromkeys(loss_of_codec.codec for _, loss_of_codec in stepped))
        checks.append(
            PropertyCheck(
                "rows err by no more than half a step",
                _nan_last(share) <= 1,
                f"{codecs} promise no error of their own, as they do not rotate; worst: layer "
                f"{loss.layer} {loss.cache}, {share:.1%} of the squared error that the steps allow",
            )
        )
    return checks
