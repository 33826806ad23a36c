"""Hold the statistics of a model's keys, values and queries on a text, and derive from them.

Statistics are means over tokens. The first positions of a window are kept apart, each on its own,
because their keys and values lie far from those of all others (attention sinks); the last row of a
table holds all later positions together.

    offsets   rows are encoded minus the mean of their position: a constant is free to add back
              (softmax does not see q.mu where all keys have it; weights of values sum to one)
    turning   what rotary embedding does to a key is undone before the mean is taken, and done to
              the mean at each position. So it is the mean of the keys however long a text becomes
    scales    K / s and Q s leave every score as it is, whatever s > 0; the noise that quantising a
              rotated key puts into a score is proportional to |q|^2 |k|^2, which
              s_i = (E (k_i - mu_i)^2 / E q_i^2)^(1/4) makes smallest
    covariances of queries tell which errors of a key its scores see: e costs e H e^T, H = E q^T q

Where keys turn, energies are averaged over the phase of a pair, so that both members have the same
scale, and covariances over the positions that a query may have. What is learned from short texts
then holds for long ones.

Which model statistics are of is told by its fingerprint: the key and the value that each layer
caches for the last of a few fixed token ids. It is what the model does, so all exports of it have
the same one, whatever its weights are called, fused or transposed; weights of 4 bits move it by
some hundredths, and another model, layer or head has another direction altogether.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.extremes import Extremes
from tq_onnx.codec.kind import MAX_HALF
from tq_onnx.codec.prior import with_prior
from tq_onnx.codec.reference import offset_rows
from tq_onnx.codec.rotaryangles import Pairing, Rotary
from tq_onnx.errors import UnsupportedModelError, UsageError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

LARGEST_SCALE: Final = 32.0
"""The furthest that a scale is from its head's median: a channel that is nearly silent on a text
may speak on another."""

LARGEST_STATISTIC: Final = 1e36
"""Means and energies beyond it are no model's, and would not fit float32 once they are scaled."""

# What float32 leaves of a variance, energy minus mean squared, as part of the energy.
_SMALLEST_VARIANCE: Final = 1e-6

FEW_TOKENS: Final = 4
"""Tokens for each coordinate of a head, behind the first positions, below which a text is short:
the prior of covariances (``tq_onnx.codec.prior``) weighs a fifth there."""

CENTERED_FROM: Final = 4
"""Positions whose keys are not in the mean that turns."""

RANGES: Final = (2**11, 2**13, 2**15, 2**17, 2**24)
"""Positions that a query may have, over which covariances are averaged: few and many alike. Squared
errors of scores on SmolLM2, next to those with an average over all phases: 0.89 at positions up to
8,192, and 1.03 at 32,768 and beyond. The range of 8,192 alone has 0.85 there, and 1.35."""
_POSITIONS: Final = 2048
"""Positions of each range that stand for all of it."""

ENOUGH_TOKENS: Final = 4096
"""Tokens that people are told to calibrate on at the least."""


class Heads(Protocol):
    """The sizes of a layer, which statistics must share."""

    @property
    def num_heads(self) -> int:
        """Query heads H."""

    @property
    def kv_num_heads(self) -> int:
        """Key/value heads N."""

    @property
    def head_size(self) -> int:
        """D."""


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One layer: means over the tokens of each position row, in float64 but for the last.

    Attributes:
        k_mean: keys after rotary embedding, ``[P, N, D]``.
        k_energy: their squares, ``[P, N, D]``.
        v_mean: values, ``[P, N, D]``.
        v_energy: their squares, ``[P, N, D]``.
        q_energy: squares of the queries of all positions, ``[H, D]``. Where it is known how keys
            turn, of the queries before they turn.
        query_covariance: products q^T q of these queries, after norms and before the scale of the
            scores, not centered; mean over the tokens of all positions and the query heads of each
            group, float32 ``[N, D, D]``.
        k_fingerprint: the key of the last of the calibration's ``fingerprint_tokens``, ``[N, D]``;
            None until it is read.
        v_fingerprint: the value of that token, ``[N, D]``; None likewise.
        frequencies: radians by which each coordinate of a key turns from one position to the next,
            float32 ``[D]``; zero where it does not turn.
        k_turned_mean: what the mean of the keys before rotary embedding becomes when it turns with
            its position p, over tokens behind the first 4, ``[2, N, D]``: the mean of coordinate j
            at p is ``[0, n, j] cos(frequencies[j] p) + [1, n, j] sin(frequencies[j] p)``. Zero
            where a mean does no good, and for a layer whose keys are not known to turn with their
            position.
        pairing: which coordinates turn together; None where that is not known.
        angles: where the frequencies are from, or why there are none, in a few words.
    """

    k_mean: Float64
    k_energy: Float64
    v_mean: Float64
    v_energy: Float64
    q_energy: Float64
    query_covariance: Float32
    frequencies: Float32
    k_turned_mean: Float64
    k_fingerprint: Float64 | None = None
    v_fingerprint: Float64 | None = None
    pairing: Pairing | None = None
    angles: str = ""

    @property
    def rotary(self) -> Rotary | None:
        """How keys turn; None where that is not known."""
        if self.pairing is None:
            return None
        return Rotary(self.frequencies, self.pairing, self.angles)

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return int(self.q_energy.shape[0])

    @property
    def kv_num_heads(self) -> int:
        """Key/value heads N."""
        return int(self.k_mean.shape[1])

    @property
    def head_size(self) -> int:
        """D."""
        return int(self.k_mean.shape[2])


@dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics of a whole model on one text.

    Attributes:
        layers: in graph order.
        counts: tokens in each position row, int64 ``[P]``, none zero.
        tokens: tokens that were read.
        context: tokens per window.
        tool_version: version of tq-onnx that made it.
        text_digest: SHA-256 of the token ids, hexadecimal.
        extremes: vectors that scales in float16 cannot hold, of every cache; files do not keep it.
        clamped_layers: layers with vectors that are longer than float16 holds.
        fingerprint_tokens: the ids whose keys and values tell which model it was; empty in older
            files, which name none.
    """

    layers: tuple[LayerStatistics, ...]
    counts: npt.NDArray[np.int64]
    tokens: int
    context: int
    tool_version: str
    text_digest: str
    extremes: tuple[Extremes, ...] = ()
    fingerprint_tokens: tuple[int, ...] = ()
    clamped_layers: tuple[int, ...] = ()

    @property
    def turns_unknown(self) -> str:
        """Which keys have no mean because nothing tells how they turn, in a sentence, or empty."""
        unknown = {
            index: layer.angles for index, layer in enumerate(self.layers) if layer.rotary is None
        }
        if not unknown:
            return ""
        first, reason = next(iter(unknown.items()))
        which = f"layer {first}" + (f" and {len(unknown) - 1} more" if len(unknown) > 1 else "")
        return f"the keys of {which} are not centered: {reason}"

    @property
    def longest_center_from(self) -> int:
        """The most first positions that can have offsets of their own."""
        return len(self.counts) - 1

    @property
    def shortage(self) -> str:
        """What the text was too short for, in a sentence; empty if it was long enough."""
        if int(self.counts[-1]) >= FEW_TOKENS * max(layer.head_size for layer in self.layers):
            return ""
        return (
            f"the calibration has read {self.tokens:,} tokens, too few to tell all directions: "
            f"calibrate on a text of {ENOUGH_TOKENS:,} tokens or more"
        )

    def check_matches(self, layers: Sequence[Heads]) -> None:
        """Refuse a model that the statistics are not of."""
        own = [_heads(layer) for layer in self.layers]
        theirs = [_heads(layer) for layer in layers]
        if own == theirs:
            return
        if len(own) != len(theirs):
            what = f"{len(own)} layers, and the model has {len(theirs)}"
        else:
            index = next(
                i for i, pair in enumerate(zip(own, theirs, strict=True)) if len({*pair}) > 1
            )
            what = (
                f"{_describe(own[index])} in layer {index}, and the model has "
                f"{_describe(theirs[index])}"
            )
        raise UsageError(
            f"the calibration file is of a model with {what}",
            fix="calibrate the very model that you convert",
        )

    def check_lengths(self, layers: Collection[int]) -> None:
        """Refuse to compress layers whose vectors rows cannot hold."""
        clamped = [str(index) for index in self.clamped_layers if index in layers]
        if clamped:
            raise UnsupportedModelError(
                f"some keys or values are longer than {MAX_HALF:,.0f}, the most that rows hold, "
                f"in layer{'s' * (len(clamped) > 1)} {', '.join(clamped)}",
                fix="leave these layers uncompressed with `layers`",
            )

    def check_center_from(self, center_from: int) -> None:
        """Refuse a first centered token that the statistics do not reach."""
        if not 0 <= center_from <= self.longest_center_from:
            raise UsageError(
                f"`center_from={center_from}` is not between 0 and {self.longest_center_from}, "
                "the positions that the calibration file keeps apart"
            )

    def moments(
        self, layer: int, center_from: int
    ) -> tuple[tuple[Float64, Float64], tuple[Float64, Float64]]:
        """Return mean and standard deviation of a layer's keys, and of its values, ``[N, D]``.

        Those of keys are of keys before they turn, where it is known how they do, and deviations
        are averaged over the phase of each pair.

        Args:
            center_from: the first token that is centered by the common mean; those before it do
                not count.
        """
        statistics = self.layers[layer]
        value_mean, value_variance = self._centered(
            statistics.v_mean, statistics.v_energy, center_from
        )
        # Keys that are not centered have a mean, too.
        key_mean, key_variance = (
            self._centered_keys(statistics)
            if statistics.rotary is not None
            else self._centered(statistics.k_mean, statistics.k_energy, center_from)
        )
        return (key_mean, np.sqrt(key_variance)), (value_mean, np.sqrt(value_variance))

    def scales(self, layer: int, center_from: int | None = 4) -> Float32:
        """Return the scales of a layer's keys: K' = K / s, Q' = Q s.

        Args:
            center_from: the first token that is centered by the common mean; None if keys are not
                centered.

        Returns:
            float32 ``[N, D]``, all positive, geometric mean 1 per head, none further from a head's
            median than ``LARGEST_SCALE``; 1 for dead channels.
        """
        statistics = self.layers[layer]
        if center_from is None:
            energy = _averaged(statistics, self._pooled(statistics.k_energy, 0))
        else:
            energy = self._centered_keys(statistics)[1]
        return equalising_scales(_of_groups(statistics), energy)

    def offsets(
        self,
        layer: int,
        center_from: int = 4,
        *,
        key_scale: Float32 | None = None,
        turns: bool = True,
    ) -> tuple[Float32, Float32]:
        """Return the offsets of a layer's keys and values, as the operators take them.

        Args:
            center_from: the first token that is centered by the common mean; earlier ones have
                means of their own.
            key_scale: ``[N, D]``, what keys are divided by before they are encoded.

        Returns:
            Two arrays float32 ``[center_from + 1, N, D]``. That of keys that turn is
            ``[2 + center_from, N, D]``: what turns, and what the first tokens have besides.
        """
        statistics = self.layers[layer]
        mean, moving = statistics.k_turned_mean, self.frequencies(layer)
        self.check_center_from(center_from)
        first = statistics.k_mean[:center_from] * (statistics.rotary is not None)
        if turns and moving.any():
            (turned,) = offset_rows(mean, np.zeros(1, np.int64), 1, center_from, frequencies=moving)
            keys = np.concatenate([mean, first - turned.swapaxes(0, 1)])
        else:
            # What turns is right in no other slot; what stays is the same in all.
            keys = np.concatenate([first, mean[:1] * (not moving.any())])
        scaled = keys if key_scale is None else keys / key_scale
        common = self._pooled(statistics.v_mean, center_from)[None]
        values = np.concatenate([statistics.v_mean[:center_from], common])
        return np.ascontiguousarray(scaled, np.float32), np.ascontiguousarray(values, np.float32)

    def frequencies(self, layer: int) -> Float32:
        """Return the angles by which the offset of a layer's keys turns, radians a slot ``[D]``.

        Returns:
            float32 ``[D]``, zero where the offset is zero in all heads.
        """
        statistics = self.layers[layer]
        moving = statistics.k_turned_mean.any(axis=(0, 1))
        return np.where(moving, statistics.frequencies, np.float32(0))

    def query_covariance(self, layer: int) -> Float64:
        """Return the second moments of the queries of each KV head, ``[N, D, D]``, with a prior.

        Where keys turn, it is their mean over the positions that a query may have.
        """
        statistics = self.layers[layer]
        queries = int(self.counts.sum()) * statistics.num_heads // statistics.kv_num_heads
        covariance = with_prior(statistics.query_covariance, queries)
        rotary = statistics.rotary
        return covariance if rotary is None else rotary.turned_covariance(covariance, _positions())

    def _centered(
        self, means: Float64, energies: Float64, center_from: int
    ) -> tuple[Float64, Float64]:
        """Return mean and variance ``[N, D]`` over all tokens from a position on."""
        mean, energy = self._pooled(means, center_from), self._pooled(energies, center_from)
        return mean, np.maximum(energy - mean**2, _SMALLEST_VARIANCE * energy)

    def _centered_keys(self, layer: LayerStatistics) -> tuple[Float64, Float64]:
        """Return mean and variance ``[N, D]`` of keys, before they turn if it is known how."""
        mean = layer.k_turned_mean[0]
        first = min(CENTERED_FROM, self.longest_center_from)
        energy = _averaged(layer, self._pooled(layer.k_energy, first))
        variance = energy - _averaged(layer, mean**2)
        return mean, np.maximum(variance, _SMALLEST_VARIANCE * energy)

    def _pooled(self, table: Float64, start: int) -> Float64:
        """Return the mean ``[N, D]`` over all tokens from a position on, of rows ``[P, N, D]``."""
        self.check_center_from(start)
        counts = self.counts[start:]
        pooled: Float64 = np.tensordot(counts / counts.sum(), table[start:], axes=1)
        return pooled


def equalising_scales(queries: Float64, keys: Float64) -> Float32:
    """Return scales that make a score cost least: K' = K / s, Q' = Q s.

    Args:
        queries: energies of the queries that a head meets, ``[N, D]``.
        keys: energies of its keys, ``[N, D]``.

    Returns:
        float32 ``[N, D]``, all positive, geometric mean 1 per head, none further from a head's
        median than ``LARGEST_SCALE``; 1 for channels without energy, or without a finite one.
    """
    scales = np.ones(keys.shape, np.float32)
    limit = np.log(LARGEST_SCALE)
    for head, (query, key) in enumerate(zip(queries, keys, strict=True)):
        live = (key > 0) & (query > 0) & np.isfinite(key) & np.isfinite(query)
        if not live.any():
            continue
        logarithm = np.log(key[live] / query[live]) / 4
        # From the median, which channels that are nearly dead do not move.
        logarithm = np.clip(logarithm - np.median(logarithm), -limit, limit)
        scales[head, live] = np.exp(logarithm - logarithm.mean())
    return scales


def _positions() -> Float64:
    """Return positions all over the ranges; their fractions of it lie evenly."""
    even = np.arange(_POSITIONS) * ((np.sqrt(5) - 1) / 2) % 1
    return np.concatenate([even * reach for reach in RANGES])


def _averaged(layer: LayerStatistics, energies: Float64) -> Float64:
    """Return energies ``[N, D]`` averaged over the phase of each pair that turns."""
    rotary = layer.rotary
    return energies if rotary is None else rotary.averaged(energies)


def _of_groups(layer: LayerStatistics) -> Float64:
    """Return mean squares of the queries of each KV head's group, ``[N, D]``."""
    grouped = layer.q_energy.reshape(layer.kv_num_heads, -1, layer.head_size).mean(axis=1)
    return _averaged(layer, grouped)


def _heads(layer: Heads) -> tuple[int, int, int]:
    return layer.num_heads, layer.kv_num_heads, layer.head_size


def _describe(heads: tuple[int, int, int]) -> str:
    return f"{heads[0]} query heads and {heads[1]} key/value heads of size {heads[2]}"
