"""A calibrated model against what its calibration says of the original.

The record in the model's metadata (``tq_onnx.conversion.calibrationrecord``) has a fingerprint and
the mean and deviation of every coordinate of every cache. The original is run again: a few fixed
token ids tell whether the record is of this model, and any text tells whether its tables belong to
the layers and heads in whose place they are. Texts differ, so that no table fits exactly, and keys
may be nearer to a wider table than to their own; but two tables that were exchanged fit worse in
the mean of both. Where a calibration knows how keys turn, they are compared as they were before
they turned; that they turn so is seen from a text of one token, repeated.

The distance of vectors from a table is the Bhattacharyya distance of normal distributions with
these means and variances, by coordinate:

    1/8 (m - mu)^2 / w + 1/2 log(w / (sigma s)),  w = (sigma^2 + s^2) / 2

Measured on SmolLM2 and calibrated on the text of tq-onnx, 64 to 512 tokens of prose, code, tables,
Chinese, German and of pseudo-random ids, with weights of 32 and of 4 bits: a layer's keys are 0.03
to 0.15 from their own table, at most 0.53 times as far as from that of another layer or of other
heads; with tables exchanged it is 1.6 times and more, mostly ten. Values: at most 1.36 times;
exchanged 1.1 and more, mostly three. The mean of two is between theirs. Of a decoder with random
weights, calibrated on ids of another distribution, it is at most 1.34 times. Layers exchanged there
are told in half of the cases from 2,048 tokens, and heads, which are alike, in a quarter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.rotaryangles import LARGEST_RESIDUAL, POSITIONS, Rotary
from tq_onnx.conversion.calibrationrecord import CacheRecord, CalibrationRecord
from tq_onnx.conversion.options import CENTER_FROM
from tq_onnx.measure.feeding_modes import all_caches
from tq_onnx.measure.readings import widened
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.fingerprint import differing_layers, read_fingerprint, takes_prompt
from tq_onnx.runtime.model import OpenModel
from tq_onnx.verification.checks import CONVERT_AGAIN, PropertyCheck, failed

OF_THIS_MODEL: Final = "the calibration is of this model"
OF_THESE_ANGLES: Final = "the original turns its keys by the calibration's angles"
OF_THESE_HEADS: Final = "the calibration's tables are those of their layers and heads"

TEXT_TOKENS: Final = 512
"""Tokens of the text whose keys and values are compared with the tables."""
_FEWEST: Final = 12
"""Tokens of it that tell anything."""

MAX_RATIO: Final = {"keys": 1.5, "values": 2.0}
"""Of the distance of a layer from its own table to that from another, see above."""
MAX_WHOLE_RATIO: Final = 1.4
"""The same of all layers together, where chance weighs less."""
MAX_TURNED: Final = 2 * LARGEST_RESIDUAL
"""Of the energy of a layer's keys: twice what a calibration takes for an angle."""
CALIBRATE_AGAIN: Final = "calibrate this very original and convert it again"

_SMALLEST_VARIANCE: Final = 1e-2
"""Of a head's mean variance: coordinates that are nearly still decide nothing."""

Floats = npt.NDArray[np.float64]
_Place = tuple[int, int]
"""A layer, and 0 for its keys or 1 for its values."""


@dataclass(frozen=True, eq=False)
class _Moments:
    """Mean and variance of vectors, each ``[N, D]``."""

    mean: Floats
    variance: Floats

    def distances(self, table: _Moments, *, crossed: bool = False) -> Floats:
        """Return the distance of each head from its own in another table, or from each."""
        mean, left, right = self.mean, self._floored(), table._floored()
        if crossed:
            mean, left = mean[:, None], left[:, None]
        middle = (left + right) / 2
        apart = (mean - table.mean) ** 2 / (8 * middle)
        distances: Floats = (apart + np.log(middle / np.sqrt(left * right)) / 2).mean(axis=-1)
        return distances

    def _floored(self) -> Floats:
        least = _SMALLEST_VARIANCE * self.variance.mean(axis=-1, keepdims=True)
        floored: Floats = np.maximum(self.variance + least, np.finfo(np.float64).tiny)
        return floored


def calibration_checks(
    record: CalibrationRecord | None,
    before: OpenModel,
    text: npt.NDArray[np.int64],
    *,
    tokens: int = TEXT_TOKENS,
) -> list[PropertyCheck]:
    """Compare an original with the calibration that its conversion was made with.

    Args:
        text: ids ``[n]``.

    Returns:
        Nothing for a model without a calibration. Checks that could not be done say why.
    """
    if record is None:
        return []
    context = record.facts.context
    longest = min(tokens, len(text), context, before.longest or len(text))
    checks = [_of_this_model(record, before)]
    if any(record.rotaries) and longest:
        repeated = np.full(min(POSITIONS, before.longest or POSITIONS), text[0])
        checks.append(_of_these_angles(record, _read(before.decoder(), repeated)[::2]))
    return [*checks, _of_these_heads(record, _read(before.decoder(), text[:longest]))]


def advice(checks: Sequence[PropertyCheck], record: CalibrationRecord | None) -> str:
    """Return what to do where checks do not hold."""
    lost = {check.name for check in failed(checks)}
    if lost & {OF_THIS_MODEL, OF_THESE_ANGLES, OF_THESE_HEADS}:
        return CALIBRATE_AGAIN
    return CONVERT_AGAIN if record is None else record.facts.shortage or CONVERT_AGAIN


def _of_this_model(record: CalibrationRecord, before: OpenModel) -> PropertyCheck:
    ids = record.fingerprint_tokens
    decoder = before.decoder()
    if max(ids) >= before.vocabulary:
        why = f"the original does not know the {len(ids)} tokens that tell"
        return PropertyCheck(OF_THIS_MODEL, None, why)
    if not takes_prompt(before, decoder, len(ids)):
        why = f"the original takes no prompt of {len(ids)} tokens"
        return PropertyCheck(OF_THIS_MODEL, None, why)
    expected = [(key.fingerprint, value.fingerprint) for key, value in record.layers]
    differing = list(differing_layers(expected, read_fingerprint(decoder, ids)))
    detail = f"all layers cache the same for {len(ids)} tokens as when it was calibrated"
    if differing:
        layer, how = differing[0]
        detail = (
            f"{len(differing)} of {len(expected)} layers cache something else for the same tokens; "
            f"layer {layer}: {how}"
        )
    return PropertyCheck(OF_THIS_MODEL, not differing, detail)


def _read(decoder: Decoder, text: npt.NDArray[np.int64]) -> list[npt.NDArray[Any]]:
    """Return what an original caches for a text, ``[N, S, D]`` in signature order."""
    size = decoder.longest_call or 1
    for call in decoder.calls(len(text) // size * size):
        decoder.prefill(text[None, call])
    return [cache[0] for cache in all_caches(decoder)]


def _of_these_angles(record: CalibrationRecord, keys: Sequence[npt.NDArray[Any]]) -> PropertyCheck:
    """Turn the keys of one token, repeated, back: they differ in nothing else."""
    worst, where = 0.0, 0
    for layer, (rotary, cache) in enumerate(zip(record.rotaries, keys, strict=True)):
        if rotary is None:
            continue
        still = rotary.unturned(widened(cache[None], len(rotary.frequencies))[0], 0)
        energy = float((still**2).sum())
        left = float(((still - still.mean(axis=1, keepdims=True)) ** 2).sum())
        share = left / energy if energy else 0.0
        if not share <= worst:
            worst, where = share, layer
    detail = f"{worst:.2%} of keys of one token repeated is left in layer {where}, the most"
    allowed = f"{MAX_TURNED:.0%} allowed, at {keys[0].shape[1]} positions"
    return PropertyCheck(OF_THESE_ANGLES, worst <= MAX_TURNED, f"{detail}; {allowed}")


def _of_these_heads(record: CalibrationRecord, caches: Sequence[npt.NDArray[Any]]) -> PropertyCheck:
    """Compare each layer with its own tables, and with those of other layers and heads."""
    rows = min(cache.shape[1] for cache in caches) - CENTER_FROM
    if rows < _FEWEST:
        why = f"the text has {max(rows, 0)} tokens behind the first {CENTER_FROM}, too few"
        return PropertyCheck(OF_THESE_HEADS, None, why)
    tables = {
        (layer, role): _table(cache_record)
        for layer, pair in enumerate(record.layers)
        for role, cache_record in enumerate(pair)
    }
    read = {
        place: _moments(
            cache, table.mean.shape[-1], None if place[1] else record.rotaries[place[0]]
        )
        for (place, table), cache in zip(tables.items(), caches, strict=True)
    }
    # Four times what two samples of one distribution differ by.
    noise = 1 / rows + 1 / record.facts.tokens
    problems: list[str] = []
    details = []
    for role, name in enumerate(("keys", "values")):
        fits_of_layers = [_fits(read, tables, (layer, role)) for layer in range(len(record.layers))]
        problems += [
            f"the {name} of layer {layer} are {fit.own:.2f} from their tables, and {fit.other:.2f} "
            f"from those exchanged {fit.where}"
            for layer, fits in enumerate(fits_of_layers)
            for fit in fits
            if not fit.own <= MAX_RATIO[name] * fit.other + noise
        ][:1]
        worst = [max(fits, key=_ratio) for fits in fits_of_layers]
        own_distance = float(np.mean([fit.own for fit in worst]))
        other_distance = float(np.mean([fit.other for fit in worst]))
        if not problems and not own_distance <= MAX_WHOLE_RATIO * other_distance + noise:
            problems.append(
                f"the {name} of all layers are {own_distance:.2f} from their tables, and "
                f"{other_distance:.2f} from those exchanged with other layers or heads"
            )
        details.append(
            f"{name} {own_distance:.3f} from their tables, {other_distance:.3f} if exchanged"
        )
    detail = "; ".join(problems or details)
    return PropertyCheck(OF_THESE_HEADS, not problems, f"{detail}, on {rows} tokens")


@dataclass(frozen=True)
class _Fit:
    """The mean distance of two caches or heads from their tables, and from each other's."""

    own: float
    other: float
    where: str


def _ratio(fit: _Fit) -> float:
    return fit.own / fit.other if fit.other else np.inf


def _fits(
    read: Mapping[_Place, _Moments], tables: Mapping[_Place, _Moments], place: _Place
) -> list[_Fit]:
    """Compare a cache and its table with each cache that might have exchanged tables with it."""
    layer, role = place
    fits = []
    for second, table in tables.items():
        of_layer = second[0] == layer
        alike = table.mean.shape == tables[place].mean.shape
        if second != place and alike and (of_layer or second[1] == role):
            own = read[place].distances(tables[place]) + read[second].distances(table)
            exchanged = read[place].distances(table) + read[second].distances(tables[place])
            name = ("its values", "its keys")[role] if of_layer else f"layer {second[0]}"
            fits.append(_Fit(own.mean() / 2, exchanged.mean() / 2, f"with {name}"))
    matrix = read[place].distances(tables[place], crossed=True)
    for head, second_head in zip(*np.triu_indices(len(matrix), 1), strict=True):
        pair = matrix[np.ix_([head, second_head], [head, second_head])]
        where = f"between heads {head} and {second_head}"
        fits.append(_Fit(pair.trace() / 2, pair[::-1].trace() / 2, where))
    return fits


def _table(record: CacheRecord) -> _Moments:
    return _Moments(record.mean, record.deviation**2)


def _moments(cache: npt.NDArray[Any], size: int, rotary: Rotary | None) -> _Moments:
    """Return the moments of a cache's rows ``[N, S, D]`` behind the first ones.

    Args:
        cache: the rows, from slot 0 on.
    """
    wide = widened(cache[None].astype(np.float64), size)[0, :, CENTER_FROM:]
    if rotary is None:
        return _Moments(wide.mean(axis=1), wide.var(axis=1))
    still = rotary.unturned(wide, CENTER_FROM)
    return _Moments(still.mean(axis=1), rotary.averaged(still.var(axis=1)))
