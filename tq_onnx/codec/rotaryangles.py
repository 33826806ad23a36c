"""Find by which angles a layer turns its keys, from keys that differ in nothing but their position.

A text that repeats one token has the same hidden state at every position, because attention
averages values that are all the same. So the key at position p is exactly R(p) k, with R the rotary
embedding of the layer: pairs of coordinates, taken as complex numbers z, turn by an angle theta a
position,

    z_p = exp(i theta p) z_0,    theta = arg(sum of conj(z_p) z_(p + lag)) / lag  (mod 2 pi / lag)

which a lag of 1 tells from all others and longer lags refine. Which coordinates are pairs is seen
from the products of neighbouring keys. Nothing of a graph is needed, so that it works for tables,
computed angles and operators, for a part of a head, interleaved pairs and scaled frequencies.

Where a table of the graph, or the powers of a base, turns the keys as well as the measured angles
do, its numbers are taken: they are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

POSITIONS: Final = 256
"""Tokens of a text of one token; float32 then tells angles to 1e-9."""

SLOWEST_DROPPED: Final = 16
"""Positions of a turn; pairs that take as many or more keep their mean whatever it is."""

_WORTH: Final = 0.01
"""Of the energy of centered keys: what means of the fastest pairs may cost if they are left out."""

_SURE: Final = 16.0
"""Squares of standard errors that a mean has, of tokens that follow each other; less is chance."""

LARGEST_RESIDUAL: Final = 1e-2
"""Of the energy of keys: what may be left of them beyond what turns. Weights of 4 bits with
activations of 8 leave 1e-4; learned positions leave nearly all."""

_SAME_RESIDUAL: Final = 1.2
"""Exact frequencies leave as much as measured ones do, or less."""
_ROUNDING: Final = 1e-8
"""Of the energy of keys: what is left where a graph rounds angles to float32."""
_STILL: Final = 1e-11
"""Of the energy of a coordinate: what rounding to float32 changes from position to position."""
_SIGNIFICANT: Final = 4.0
"""Standard errors that a frequency is from zero, below which it is none."""
_WITNESSES: Final = 8
"""Coordinates that turn fastest, which tell the distance of the members of a pair."""
_DIGITS: Final = range(1, 8)
"""Digits of a base of frequencies that are tried."""
_LARGEST_BASE: Final = 1e12

Layout = Literal["halves", "interleaved"]


@dataclass(frozen=True)
class Pairing:
    """Which coordinates of a head turn together."""

    layout: Layout  #: halves, pairs (i, i + size / 2); or interleaved, pairs (2 i, 2 i + 1)
    start: int  #: the first coordinate of the part that turns
    size: int  #: coordinates of that part, even; 0 if none turns

    @property
    def document(self) -> dict[str, Any]:
        """What ``read`` makes it from again, for JSON."""
        return asdict(self)

    @classmethod
    def read(cls, document: Any) -> Pairing:
        """Return a pairing from a document that came from anywhere.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        layout, start, size = (document[field.name] for field in fields(cls))
        if layout not in get_args(Layout):
            raise ValueError("a layout of pairs that is not known")
        if any(type(count) is not int or count < 0 for count in (start, size)) or size % 2:
            raise ValueError("pairs of coordinates that no head has")
        return cls(layout, start, size)

    @property
    def pairs(self) -> tuple[Indices, Indices]:
        """The first and the second members of all pairs, ``[size / 2]`` each."""
        index = np.arange(self.size // 2)
        if self.layout == "halves":
            return self.start + index, self.start + index + self.size // 2
        return self.start + 2 * index, self.start + 2 * index + 1


STILL: Final = Pairing("halves", 0, 0)
"""No coordinate turns."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """How the keys of a layer turn with their position."""

    frequencies: Float32  #: radians a position, float32 ``[D]``, both members of a pair alike
    pairing: Pairing  #: which coordinates turn together
    source: str  #: where the frequencies are from, a noun phrase

    def check(self, head_size: int) -> None:
        """Refuse angles that came from anywhere.

        Raises:
            ValueError: no head of D coordinates turns like that.
        """
        if self.frequencies.shape != (head_size,):
            raise ValueError("not one angle for each coordinate")
        if not (np.abs(self.frequencies) <= np.pi).all():
            raise ValueError("angles beyond half a turn")
        if self.pairing.start + self.pairing.size > head_size:
            raise ValueError("pairs of coordinates that the head does not have")
        expected = np.zeros(head_size, np.float32)
        first, second = self.pairing.pairs
        expected[first] = expected[second] = self.frequencies[first]
        if (expected != self.frequencies).any():
            raise ValueError("angles of coordinates that are no pairs")

    @property
    def partners(self) -> tuple[Indices, Float64]:
        """For each coordinate its partner, and 1 for a first member and -1 for a second, ``[D]``.

        A coordinate that does not turn is its own partner, with 0.
        """
        partner, sign = np.arange(len(self.frequencies)), np.zeros(len(self.frequencies))
        first, second = (each[self.frequencies[each] != 0] for each in self.pairing.pairs)
        partner[first], partner[second] = second, first
        sign[first], sign[second] = 1.0, -1.0
        return partner, sign

    def unturned(self, vectors: npt.NDArray[np.generic], start: int) -> Float64:
        """Return vectors ``[..., T, D]`` as they were before they turned.

        Returns:
            float64 ``[..., T, D]``.
        """
        wide = np.asarray(vectors, np.float64)
        partner, sign = self.partners
        positions = np.arange(start, start + wide.shape[-2])
        phases = positions[:, None] * self.frequencies.astype(np.float64)
        turned: Float64 = wide * np.cos(phases) + wide[..., partner] * (sign * np.sin(phases))
        return turned

    def turned_mean(self, mean: Float64) -> Float64:
        """Return what turns into a mean ``[N, D]`` at each position, ``[2, N, D]``.

        At position p it is ``[0] cos(frequencies p) + [1] sin(frequencies p)``.
        """
        partner, sign = self.partners
        return np.stack([mean, -sign * mean[..., partner]])

    def averaged(self, energies: Float64) -> Float64:
        """Return energies ``[..., D]`` averaged over the phase of each pair."""
        mean: Float64 = (energies + energies[..., self.partners[0]]) / 2
        return mean

    def turned_covariance(self, covariance: Float64, positions: Float64) -> Float64:
        """Return the mean of covariances that turn with some positions.

        Args:
            covariance: of vectors before they turn, ``[N, D, D]``.
            positions: ``[M]``.
        """
        partner, sign = self.partners
        phases = positions[:, None] * self.frequencies.astype(np.float64)
        cosines, sines = np.cos(phases), sign * np.sin(phases)
        across = cosines.T @ sines / len(positions)
        by_rows, by_columns = covariance[:, partner], covariance[..., partner]
        turned: Float64 = (
            covariance * (cosines.T @ cosines / len(positions))
            - by_columns * across
            - by_rows * across.T
            + by_rows[..., partner] * (sines.T @ sines / len(positions))
        )
        return turned


@dataclass(frozen=True)
class Measurement:
    """What keys of repeated tokens say of a layer."""

    rotary: Rotary | None  #: how its keys turn; None if they do not turn like that
    #: the part of their energy that differs by position otherwise; NaN if there were no two
    #: positions
    residual: float
    doubt: str = ""  #: why they may turn otherwise in texts of other lengths; empty if they do not

    @property
    def reason(self) -> str:
        """Why it is not known how keys turn; empty if it is."""
        if self.rotary is not None:
            return ""
        if self.doubt:
            return self.doubt
        if not np.isfinite(self.residual):
            return "the graph takes no text of two tokens and more"
        return f"{self.residual:.0%} of keys of one token repeated differ by more than an angle"


def useful_mean(rotary: Rotary, mean: Float64, energy: Float64, tokens: int) -> Float64:
    """Return a mean of keys with zeros in the pairs where it does no good.

    A mean that is chance is none. The fastest pairs are left out too if their means are as small as
    they are in some models: what turns slowly is cheaper to add to scores.

    Args:
        mean: of the keys before they turn, ``[N, D]``.
        energy: their mean squares, ``[N, D]``.
    """
    squares = rotary.averaged(mean**2)
    variances = np.maximum(rotary.averaged(energy) - squares, 0)
    significant = np.where(squares * tokens > _SURE * variances, mean, 0.0)
    gains = rotary.averaged(significant**2).sum(axis=0)
    left = (rotary.averaged(energy) - rotary.averaged(significant**2)).sum()
    speeds = np.abs(rotary.frequencies)
    fast = np.unique(speeds[speeds > 2 * np.pi / SLOWEST_DROPPED])
    lost = 0.0
    for speed in fast[::-1]:
        lost += gains[speeds == speed].sum()
        if lost > _WORTH * left:
            break
        significant[:, speeds == speed] = 0.0
    return significant


def measure_rotary(
    keys: npt.NDArray[np.generic], constants: Sequence[npt.NDArray[np.floating]] = ()
) -> Measurement:
    """Find how the keys of a layer turn.

    Args:
        keys: of texts that repeat one token each, from position 0 on, ``[texts, N, T, D]`` with
            at least two positions.
        constants: rows of numbers in the graph ``[m]`` that may be frequencies.
    """
    # Texts and heads are alike here: vectors of [texts N, T, D].
    vectors = np.asarray(keys, np.float64).reshape(-1, *keys.shape[-2:])
    energy = (vectors**2).sum()
    if not np.isfinite(energy):
        return Measurement(None, float("nan"))
    if energy == 0:  # padding: nothing turns
        size = vectors.shape[-1]
        return Measurement(Rotary(np.zeros(size, np.float32), STILL, "keys that are zero"), 0.0)
    fits = [_Fit.of(vectors, pairing) for pairing in _pairings(vectors)]
    fit = min(fits, key=lambda each: each.residual)
    share = float(fit.residual / energy)
    if not share <= LARGEST_RESIDUAL:
        return Measurement(None, share)
    frequencies, source = _exact(vectors, fit, constants)
    return Measurement(_rotary(fit.pairing, frequencies, source, vectors.shape[-1]), share)


def _rotary(pairing: Pairing, frequencies: Float64, source: str, head_size: int) -> Rotary:
    full = np.zeros(head_size, np.float32)
    turning = np.flatnonzero(frequencies)
    if not len(turning):
        return Rotary(full, STILL, "keys that do not turn")
    if pairing.layout == "interleaved":  # how many of them turn is known only now
        pairing = replace(pairing, size=2 * int(turning[-1] + 1))
    for members in pairing.pairs:
        full[members] = frequencies[: len(members)]
    return Rotary(full, pairing, source)


def _pairings(vectors: Float64) -> list[Pairing]:
    """Return the pairings that the fastest coordinates of vectors ``[V, T, D]`` allow."""
    size = vectors.shape[-1]
    before, after = vectors[:, :-1].reshape(-1, size), vectors[:, 1:].reshape(-1, size)
    energies = ((before**2).sum(0) + (after**2).sum(0)) / 2
    changes = ((after - before) ** 2).sum(0)
    largest = energies.max()
    moving = np.flatnonzero((changes > _STILL * largest) & (energies > _STILL * largest))
    witnesses = moving[np.argsort(-changes[moving] / energies[moving], kind="stable")]
    products = before.T @ after
    diagonal = np.diagonal(products)
    turning = np.hypot(diagonal[:, None] + diagonal[None], products - products.T)
    smaller = np.minimum(energies[:, None], energies[None])
    lacking = (energies[:, None] + energies[None] - turning) / np.maximum(smaller, _STILL * largest)
    np.fill_diagonal(lacking, np.inf)
    distances = []
    for coordinate in witnesses[:_WITNESSES]:
        partner = int(lacking[coordinate].argmin())
        distances.append((abs(partner - int(coordinate)), min(partner, int(coordinate))))
    candidates = [STILL]
    for distance, first in dict.fromkeys(distances):
        if distance == 1:
            candidates.append(Pairing("interleaved", first % 2, (size - first % 2) // 2 * 2))
        else:
            starts = (0, size - 2 * distance, first)
            candidates += [
                Pairing("halves", start, 2 * distance)
                for start in dict.fromkeys(starts)
                if 0 <= start <= size - 2 * distance
            ]
    return list(dict.fromkeys(candidates))


@dataclass(frozen=True, eq=False)
class _Fit:
    """Frequencies that fit vectors best, for one pairing."""

    pairing: Pairing
    frequencies: Float64  #: of its pairs, radians a position, float64 ``[size / 2]``
    errors: Float64  #: their standard errors
    energies: Float64  #: of the pairs
    residual: float  #: energy of all coordinates that is left

    @classmethod
    def of(cls, vectors: Float64, pairing: Pairing) -> _Fit:
        first, second = pairing.pairs
        turning = vectors[..., first] + 1j * vectors[..., second]
        frequencies = np.zeros(len(first))
        length = vectors.shape[1]
        lag = 1
        while lag <= max(length // 2, 1):
            products = (turning[:, :-lag].conj() * turning[:, lag:]).sum((0, 1))
            phases = np.angle(products)
            turns = np.rint((frequencies * lag - phases) / (2 * np.pi))
            frequencies = (phases + 2 * np.pi * turns) / lag
            lag *= 2
        left = _left(turning, frequencies)
        energies = (np.abs(turning) ** 2).sum((0, 1))
        still = np.setdiff1d(np.arange(vectors.shape[-1]), np.concatenate([first, second]))
        rest = vectors[..., still]
        unmoved = ((rest - rest.mean(1, keepdims=True)) ** 2).sum()
        # Of a slope over all positions whose phases have this noise.
        noise = np.sqrt(left / np.where(energies > 0, energies, 1) / turning[..., :1].size)
        errors = np.where(energies > 0, noise * np.sqrt(12) / length, np.inf)
        return cls(pairing, frequencies, errors, energies, float(left.sum() + unmoved))


def _left(turning: npt.NDArray[np.complex128], frequencies: Float64) -> Float64:
    """Return the energy of pairs ``[V, T, pairs]`` that frequencies leave, ``[pairs]``."""
    phases = np.arange(turning.shape[1])[:, None] * frequencies
    still = turning * np.exp(-1j * phases)
    left: Float64 = (np.abs(still - still.mean(1, keepdims=True)) ** 2).sum((0, 1))
    return left


def _exact(
    vectors: Float64, fit: _Fit, constants: Sequence[npt.NDArray[np.floating]]
) -> tuple[Float64, str]:
    """Return the frequencies that a model most likely has, and where they are from."""
    first, second = fit.pairing.pairs
    turning = vectors[..., first] + 1j * vectors[..., second]
    allowed = _SAME_RESIDUAL * _left(turning, fit.frequencies).sum()
    allowed += _ROUNDING * fit.energies.sum()
    measured = np.where(np.abs(fit.frequencies) > _SIGNIFICANT * fit.errors, fit.frequencies, 0.0)
    for frequencies, source in (*_in_graph(measured, constants), *_powers(fit, measured)):
        if _left(turning, frequencies).sum() <= allowed:
            return frequencies, source
    return measured, "measured angles"


def _in_graph(
    measured: Float64, constants: Sequence[npt.NDArray[np.floating]]
) -> Iterator[tuple[Float64, str]]:
    """Yield constants that may be the frequencies of all pairs, or of the first of them."""
    sign = -1.0 if measured.sum() < 0 else 1.0
    for constant in constants:
        frequencies = np.zeros(len(measured))
        row = np.asarray(constant, np.float64).reshape(-1)
        half = len(row) // 2
        for first, second in ((row[:half], row[half:]), (row[::2], row[1::2])):
            if np.array_equal(first, second):  # once for each member of a pair
                row = first
        if not 0 < len(row) <= len(measured) or not np.isfinite(row).all():
            continue
        frequencies[: len(row)] = sign * row
        scale = np.abs(measured).max(initial=0.0)
        if np.abs(frequencies - measured).max() <= 0.1 * scale:
            yield frequencies, "a table of the graph"


def _powers(fit: _Fit, measured: Float64) -> Iterator[tuple[Float64, str]]:
    """Yield powers base^(-i / pairs) of bases, round ones first, whole or divided by a factor."""
    turning = np.flatnonzero(measured)
    if len(turning) < 2:
        return
    sign = -1.0 if measured.sum() < 0 else 1.0
    # The fastest pair of all models turns by 1, before frequencies are divided.
    divisor = float(f"{1 / abs(measured[0]):.3g}") if measured[0] else 1.0
    forms = {
        (count, factor): _base(fit, measured, count, factor)
        for factor in (1.0, divisor)
        for count in (int(turning[-1]) + 1, len(measured))
    }
    for digits in _DIGITS:
        for (count, factor), base in forms.items():
            if not 1 < base < _LARGEST_BASE:
                continue
            rounded = np.float32(f"{base:.{digits}g}")
            # In float32, as models compute them.
            exponents = np.arange(count, dtype=np.float32) / np.float32(count)
            frequencies = np.zeros(len(measured))
            frequencies[:count] = sign * (1 / rounded**exponents / np.float32(factor))
            scaled = "" if factor == 1 else f" divided by {factor:g}"
            yield frequencies, f"powers of the base {rounded:.7g}{scaled}"


def _base(fit: _Fit, measured: Float64, count: int, factor: float) -> float:
    """Return the base whose powers, divided by a factor, fit angles best; NaN for none."""
    moving = np.flatnonzero(measured[:count])
    exponents = moving / count
    weights = measured[moving] ** 2 * fit.energies[moving] * exponents
    logarithms = np.log(np.abs(measured[moving]) * factor)
    whole = (weights * exponents).sum()
    return float(np.exp(-(weights * logarithms).sum() / whole)) if whole > 0 else float("nan")
