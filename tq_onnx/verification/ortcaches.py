"""A model with ONNX Runtime's own caches: its constants, its codes, and its attention.

What goes into the caches and what attention gives is compared with the original elsewhere
(``tq_onnx.verification.fidelity``), without codes. Here the model is run as it is: each code must
be that of the vector, by the steps in the graph; attention must be that over what the codes stand
for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.codec.channelcodes import ChannelCodes, largest_code, unpacked
from tq_onnx.conversion.scales import adaptation_digest
from tq_onnx.measure.probe import EncodeNames, LayerNames, Probe
from tq_onnx.measure.readings import distance
from tq_onnx.plan import ROLES, LayerPlan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.targets.ortgqa.caches import LayerCodes, constants_in
from tq_onnx.verification.checks import PropertyCheck

CONSTANTS: Final = "steps and offsets are those of the conversion"
CODES: Final = "codes are the nearest of their steps"
REACH: Final = "steps reach to what is cached"
ATTENTION: Final = "attention equals the reference over the codes"

MAX_OFF: Final = {"FLOAT": 1e-2, "FLOAT16": 0.3}
"""Of a step, by which a coordinate may be beyond the interval of its code: roundings of a vector
whose other coordinates are larger, in the element type."""
MAX_CUT: Final = {8: 0.01, 4: 0.1}
"""Share of the elements of a layer's cache that are cut off, by bits. With 8 bits none of the
calibration's is; with 4 bits some are, as that makes the others finer."""
MAX_ATTENTION_ERROR: Final = {"FLOAT": 1e-3, "FLOAT16": 1e-2}
"""Relative, of a layer."""

Floats = npt.NDArray[np.float64]
Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class _Cache:
    """One cache after a prompt, and its constants: all as float64.

    Attributes:
        scaled: vectors in steps, ``[N, S, D]``.
        codes: ``[N, S, D]``.
        constants: of the cache.
        held: what the codes stand for, offsets included.
    """

    scaled: Floats
    codes: Floats
    constants: ChannelCodes

    @property
    def held(self) -> Floats:
        steps, offset = (
            table.astype(np.float64)[:, None]
            for table in (self.constants.steps, self.constants.offset)
        )
        held: Floats = self.codes * steps + offset
        return held

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """Which elements are beyond the last code, ``[N, S, D]``."""
        return np.abs(self.scaled) > largest_code(self.constants.bits) + 0.5

    @property
    def off(self) -> float:
        """The most that an element is beyond the interval of its code, in steps."""
        most = largest_code(self.constants.bits)
        reached = np.clip(self.scaled, -most - 1, most)
        return float(np.abs(reached - self.codes).max(initial=0) - 0.5)


def channel_checks(
    probe: Probe, model: ir.Model, prompt: npt.NDArray[np.int64], *, threads: int | None
) -> list[PropertyCheck]:
    """Check the caches of a model after a prompt in two pieces and a last token of its own.

    Args:
        probe: the model with its internals exposed.
        model: the model.
        prompt: ids ``[n]``.
        threads: threads within an operator.
    """
    constants = [constants_in(model, layer.plan) for layer in probe.layers]
    changed = [
        f"layer {layer.plan.layer}"
        for layer, codes in zip(probe.layers, constants, strict=True)
        if adaptation_digest(*codes.tables) != layer.plan.adaptation
    ]
    results = [
        PropertyCheck(
            CONSTANTS,
            not changed,
            f"{', '.join(changed[:4])} of another digest" if changed else "by their digests",
        )
    ]
    decoder = probe.decoder(library=False, threads=threads)
    watched: dict[str, list[Array]] = {}
    calls = np.split(prompt, [len(prompt) // 2, len(prompt) - 1])
    for call in calls:
        decoder.prefill(call[None])
        for name, values in decoder.watched.items():
            watched.setdefault(name, []).append(values[0])
    off, cut, attention = (list[tuple[float, str]]() for _ in range(3))
    for index, (layer, codes) in enumerate(zip(probe.layers, constants, strict=True)):
        caches = []
        for side, names in enumerate(layer.caches):
            where = f"layer {layer.plan.layer}, {ROLES[side]}s"
            cache = _cache(decoder, 2 * index + side, names, watched, codes)
            off.append((cache.off / MAX_OFF[layer.plan.dtype], where))
            share = float(cache.cut.mean())
            cut.append((share / MAX_CUT[cache.constants.bits], f"{share:.2%} in {where}"))
            caches.append(cache)
        error = _attention_error(layer, codes, caches, watched)
        allowed = MAX_ATTENTION_ERROR[layer.plan.dtype]
        attention.append((error / allowed, f"layer {layer.plan.layer}: {error:.1e}, {allowed:.0e}"))
    worst, where = max(off)
    results.append(
        PropertyCheck(
            CODES,
            worst <= 1,
            f"{where}: farthest from the interval of its code, by {max(worst, 0):.1%} of what is "
            "allowed for rounding",
        )
    )
    worst, where = max(cut)
    results.append(PropertyCheck(REACH, worst <= 1, f"cut off at the most: {where}"))
    worst, where = max(attention)
    sizes = "calls of {}, {} and {} tokens".format(*map(len, calls))
    detail = f"largest relative error: {where} allowed, in {sizes}"
    results.append(PropertyCheck(ATTENTION, worst <= 1, detail))
    return results


def _cache(
    decoder: Decoder,
    index: int,
    names: EncodeNames,
    watched: dict[str, list[Array]],
    codes: LayerCodes,
) -> _Cache:
    """Return a cache, and the vectors that went into it."""
    vectors = np.concatenate(watched[names.vectors], axis=1).astype(np.float64)
    channels = codes.both[index % 2]
    if index % 2 == 0 and codes.rotation is not None:
        vectors = vectors @ codes.rotation.astype(np.float64)
    stored = decoder.cache(index)[0]
    numbers = unpacked(stored) if channels.bits == 4 else stored
    scaled = (vectors - channels.offset[:, None]) / channels.steps.astype(np.float64)[:, None]
    return _Cache(scaled, numbers.astype(np.float64), channels)


def _attention_error(
    layer: LayerNames, codes: LayerCodes, caches: list[_Cache], watched: dict[str, list[Array]]
) -> float:
    """Return how far attention is from that over what the codes stand for."""
    query = np.concatenate(watched[layer.query], axis=1).astype(np.float64)
    if codes.rotation is not None:
        query = query @ codes.rotation.astype(np.float64)
    sink = None if layer.sink is None else watched[layer.sink][0]
    expected = np.stack(list(_attended(layer.plan, query, caches, sink)))
    return distance(expected, np.concatenate(watched[layer.output], axis=1))


def _attended(
    plan: LayerPlan, query: Floats, caches: list[_Cache], sink: Array | None
) -> Iterator[Floats]:
    """Yield attention of each query head, ``[T, D]``."""
    keys, values = (cache.held for cache in caches)
    tokens = np.arange(query.shape[1])
    ago = tokens[:, None] - tokens
    seen = (ago >= 0) & (ago < (plan.sliding_window or len(tokens)))
    group = plan.num_heads // plan.kv_num_heads
    for head, vectors in enumerate(query):
        scores = plan.scale * vectors @ keys[head // group].T
        if plan.softcap:
            scores = plan.softcap * np.tanh(scores / plan.softcap)
        scores = np.where(seen, scores, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        if sink is not None:
            total += np.exp(np.float64(np.ravel(sink)[head]) - top)
        yield weights / total @ values[head // group]
