"""Sum statistics over the tokens of a text, to make a ``Calibration``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypedDict

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import extremes
from tq_onnx.codec.calibration import (
    CENTERED_FROM,
    LARGEST_STATISTIC,
    Calibration,
    Float32,
    Float64,
    LayerStatistics,
)
from tq_onnx.codec.rotaryangles import Measurement, Pairing, useful_mean
from tq_onnx.errors import UnsupportedModelError, UsageError

FEWEST_TOKENS: Final = 64
"""Means of fewer are noise, which offsets would add to what is encoded."""


class _Turning(TypedDict):
    frequencies: Float32
    k_turned_mean: Float64
    pairing: Pairing | None
    angles: str


class Gathering:
    """Running sums of one model's statistics."""

    def __init__(self, layers: int, positions: int, measured: Sequence[Measurement]) -> None:
        """Begin with no tokens."""
        self._positions = positions
        self._measured = measured
        self._counts = np.zeros(positions, np.int64)
        self._sums: list[dict[str, Float64]] = [{} for _ in range(layers)]
        self._extremes: dict[tuple[int, str], extremes.Extremes] = {}

    def count(self, start: int, new: int) -> None:
        """Take note of tokens at positions start to start + new of a window."""
        own = self._own(start, new)
        self._counts[start : start + own] += 1
        self._counts[-1] += new - own

    def add(
        self,
        layer: int,
        start: int,
        query: npt.NDArray[np.generic],
        key: npt.NDArray[np.generic],
        value: npt.NDArray[np.generic],
    ) -> None:
        """Add what one layer made of tokens that were counted.

        Args:
            query: ``[H, T, D]``.
            key: ``[N, T, D]``.
            value: ``[N, T, D]``.
        """
        sums = self._sums[layer]
        own = self._own(start, key.shape[1])
        for name, vectors in (("k", key), ("v", value)):
            cache = {"k": "key", "v": "value"}[name]
            found = extremes.of_vectors(vectors, layer=layer, cache=cache)
            before = self._extremes.get((layer, cache))
            self._extremes[layer, cache] = before.with_others(found) if before else found
            by_token = vectors.astype(np.float64).transpose(1, 0, 2)
            for kind, numbers in (("mean", by_token), ("energy", by_token**2)):
                shape = (self._positions, *numbers.shape[1:])
                into = sums.setdefault(f"{name}_{kind}", np.zeros(shape))
                into[start : start + own] += numbers[:own]
                into[-1] += numbers[own:].sum(axis=0)
        wide = query.astype(np.float64)
        rotary = self._measured[layer].rotary
        if rotary is not None:
            # Those of a query that stands anywhere are what errors of a key meet at any length.
            wide = rotary.unturned(wide, start)
            centered = rotary.unturned(key, start)[:, max(CENTERED_FROM - start, 0) :]
            sums["k_unturned"] = sums.get("k_unturned", 0.0) + centered.sum(axis=1)
        sums["q_energy"] = sums.get("q_energy", 0.0) + (wide**2).sum(axis=1)
        # The query heads of a group stand side by side, [N, G T, D].
        grouped = wide.reshape(len(key), -1, wide.shape[2])
        products = grouped.transpose(0, 2, 1) @ grouped
        sums["query_covariance"] = sums.get("query_covariance", 0.0) + products

    def result(
        self, *, tokens: int, context: int, tool_version: str, text_digest: str
    ) -> Calibration:
        """Return the statistics; positions that no window reached are left out."""
        counted = int(self._counts.sum())
        if counted < FEWEST_TOKENS:
            raise UsageError(
                f"{counted} tokens are too few to calibrate on",
                fix=f"give a text of {FEWEST_TOKENS} tokens at the very least",
            )
        reached = int((self._counts > 0).sum())
        counts = self._counts[:reached]
        layers = []
        for index, sums in enumerate(self._sums):
            group = len(sums["q_energy"]) // len(sums["query_covariance"])
            counted_by = {"q_energy": counted, "query_covariance": counted * group}
            unturned = sums.pop("k_unturned", None)
            tables = {
                name: table / counted_by[name]
                if name in counted_by
                else table[:reached] / counts[:, None, None]
                for name, table in sums.items()
            }
            for name, table in tables.items():
                if not (np.abs(table) < LARGEST_STATISTIC).all():
                    what = {"k": "keys", "v": "values", "q": "queries"}[name[0]]
                    raise UnsupportedModelError(
                        f"the {what} of layer {index} overflow on this text",
                        fix="calibrate an export in float32",
                    )
            of_queries = tables.pop("query_covariance").astype(np.float32)
            layers.append(
                LayerStatistics(
                    **tables,
                    query_covariance=of_queries,
                    **self._turning(index, unturned, tables["k_energy"][CENTERED_FROM:]),
                )
            )
        return Calibration(
            tuple(layers),
            counts,
            tokens,
            context,
            tool_version,
            text_digest,
            tuple(self._extremes.values()),
            clamped_layers=tuple(
                sorted({count.layer for count in self._extremes.values() if count.clamped})
            ),
        )

    def _turning(self, layer: int, sums: Float64 | None, energies: Float64) -> _Turning:
        """Return how the keys of a layer turn, and what turns.

        Args:
            sums: of its keys before they turn, behind the first positions, ``[N, D]``.
            energies: squares of the keys of these positions, ``[P - 4, N, D]``.
        """
        measurement = self._measured[layer]
        counts = self._counts[CENTERED_FROM : CENTERED_FROM + len(energies)]
        rotary, tokens = measurement.rotary, int(counts.sum())
        size = energies.shape[1:]
        if rotary is None:
            zeros = np.zeros(size[1], np.float32)
            return _Turning(
                frequencies=zeros,
                k_turned_mean=np.zeros((2, *size)),
                pairing=None,
                angles=measurement.reason,
            )
        mean = np.zeros(size)
        if sums is not None and tokens:
            energy = np.tensordot(counts / tokens, energies, axes=1)
            mean = useful_mean(rotary, sums / tokens, energy, tokens)
        return _Turning(
            frequencies=rotary.frequencies,
            k_turned_mean=rotary.turned_mean(mean),
            pairing=rotary.pairing,
            angles=rotary.source,
        )

    def _own(self, start: int, new: int) -> int:
        """Return the number of these tokens that have a position row of their own."""
        return min(max(self._positions - 1 - start, 0), new)
