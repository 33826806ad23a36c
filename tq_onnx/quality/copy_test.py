"""The copy test: a passage that comes again is predicted from its first copy in the caches.

A sequence is made of pieces. Some of them come a second time 200, 1,000 or 2,000 tokens later, with
other pieces between. A model that copies predicts the second copy much better than the first; that
is the gain. Coarse codes of distant keys and values lower it, even if the newest tokens are kept in
float16.

    gain = mean loss of the original on the first copy - on the second
    rise = mean loss on the second copy, of the converted model - of the original

Natural pieces are passages of the text; random ones are ids of the text in no order, which only
copying predicts. The first tokens of a piece do not count: nothing says yet that it is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tq_onnx.measure.divergence import log_softmax, read
from tq_onnx.measure.windows import Ids, Window
from tq_onnx.progress import OnProgress
from tq_onnx.runtime.decoder import Decoder

Kind = Literal["natural", "random"]
KINDS: Final[tuple[Kind, ...]] = ("natural", "random")

DISTANCES: Final = (200, 1000, 2000)
"""Tokens from a passage to its copy."""

PIECE: Final = 40
"""Tokens of a passage; distances are multiples of it."""

LEAD: Final = 8
"""Tokens of a copy that do not count."""

_COPIES: Final = {0: 50, 1: 50, 2: 50, 3: 50, 4: 50} | dict.fromkeys(range(5, 15), 25)
_PAIRS: Final = tuple(
    (first, first + step)
    for first, step in (_COPIES | dict.fromkeys((*range(15, 20), *range(40, 45)), 5)).items()
)
"""Places of the first and the second copy, in pieces."""

_SEQUENCES: Final = 2
_LEAST_GAIN: Final = 0.1
"""Nats per token. A model that gains less does not copy, and nothing can be said of it."""


@dataclass(frozen=True)
class CopyFigures:
    """Copies of one kind at one distance.

    Attributes:
        kind: ``natural`` or ``random``.
        distance: tokens from the first copy to the second.
        tokens: tokens that count.
        gain: what the original gains by copying, in nats per token.
        rise: increase of the other model's loss on the second copy, in nats per token.
        rise_error: standard error of the rise, if tokens are independent.
        relative_rise: rise divided by gain; None if the original hardly copies (below 0.1 nats).
    """

    kind: Kind
    distance: int
    tokens: int
    gain: float
    rise: float
    rise_error: float
    relative_rise: float | None


def copy_figures(
    kind: Kind,
    distance: int,
    first: npt.NDArray[np.float64],
    second: npt.NDArray[np.float64],
    converted: npt.NDArray[np.float64],
) -> CopyFigures:
    """Return the figures of copies of one kind at one distance.

    Args:
        kind: ``natural`` or ``random``.
        distance: tokens from the first copy to the second.
        first: losses of the original on first copies, ``[n]``.
        second: its losses on second ones.
        converted: the losses of the other model on second ones.
    """
    rises = converted - second
    gain, rise = float((first - second).mean()), float(rises.mean())
    return CopyFigures(
        kind=kind,
        distance=distance,
        tokens=len(rises),
        gain=gain,
        rise=rise,
        rise_error=float(rises.std() / np.sqrt(len(rises))),
        relative_rise=rise / gain if gain >= _LEAST_GAIN else None,
    )


@dataclass(frozen=True)
class _Pair:
    """Two copies in the sequences: positions of their tokens in the flat text."""

    kind: Kind
    distance: int
    first: slice
    second: slice


class CopyTest:
    """The original's losses on sequences with copies; other models are compared with them.

    Args:
        decoder: the original, batch 1, growing.
        text: ids ``[n]``.
        vocabulary: number of token ids.
        room: tokens that the models take; None for any number.
        on_progress: called as sequences are read.
    """

    def __init__(
        self,
        decoder: Decoder,
        text: Ids,
        *,
        vocabulary: int,
        room: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Make the sequences and read them; see the class for arguments."""
        self._vocabulary = vocabulary
        self._ids, self._windows, self._pairs = _sequences(text, room)
        self._own = self._losses(decoder, "the original", on_progress)

    def compare(
        self, decoder: Decoder, *, name: str, on_progress: OnProgress | None = None
    ) -> tuple[CopyFigures, ...]:
        """Read the sequences with another model; no figures where there is no room for copies.

        Args:
            decoder: batch 1, growing.
            name: name of the model, for progress.
            on_progress: called as sequences are read.
        """
        losses = self._losses(decoder, name, on_progress)
        figures = []
        for kind in KINDS:
            for distance in DISTANCES:
                chosen = [p for p in self._pairs if (p.kind, p.distance) == (kind, distance)]
                if chosen:
                    figures.append(self._figures(kind, distance, chosen, losses))
        return tuple(figures)

    def _figures(
        self, kind: Kind, distance: int, pairs: Sequence[_Pair], losses: npt.NDArray[np.float64]
    ) -> CopyFigures:
        first, second = (
            np.concatenate([self._own[slices] for slices in part])
            for part in zip(*((pair.first, pair.second) for pair in pairs), strict=True)
        )
        converted = np.concatenate([losses[pair.second] for pair in pairs])
        return copy_figures(kind, distance, first, second, converted)

    def _losses(
        self, decoder: Decoder, name: str, on_progress: OnProgress | None
    ) -> npt.NDArray[np.float64]:
        """Return the loss of each token ``[n]``; the first of a sequence has none, and gets 0."""
        losses = np.zeros(len(self._ids))
        doing = f"Reading copies with {name}"
        length = self._windows[0].stop if self._windows else 1
        at, before = -1, length
        for (logits,), following, positions in read(
            (decoder,), self._ids, self._windows, self._vocabulary, on_progress, doing=doing
        ):
            at += int(positions[0] <= before)  # the next sequence
            before = int(positions[0])
            rows = np.arange(len(following))
            losses[at * length + positions + 1] = -log_softmax(logits)[rows, following]
        return losses


def _sequences(text: Ids, room: int | None) -> tuple[Ids, list[Window], list[_Pair]]:
    """Lay pieces and their copies out: all sequences one after the other, windows, pairs."""
    last = max(second for _, second in _PAIRS) + 1
    # Every natural piece is another passage of the text.
    pieces = min(last, (last if room is None else room // PIECE), len(text) // PIECE)
    inside = [(first, second) for first, second in _PAIRS if second < pieces]
    if not inside:
        return np.zeros(0, np.int64), [], []
    rng = np.random.default_rng(0)
    known = np.unique(text)
    ids, pairs = [], []
    size = pieces * PIECE
    for sequence in range(_SEQUENCES):
        start = min(sequence * size, len(text) - size)
        sequences = text[start : start + size].reshape(pieces, PIECE).copy()
        for count, (first, second) in enumerate(inside):
            kind = KINDS[(count + sequence) % len(KINDS)]
            if kind == "random":
                sequences[first] = rng.choice(known, PIECE)
            sequences[second] = sequences[first]
            starts = [sequence * size + place * PIECE for place in (first, second)]
            slices = [slice(start + LEAD, start + PIECE) for start in starts]
            pairs.append(_Pair(kind, (second - first) * PIECE, *slices))
        ids.append(sequences.reshape(-1))
    windows = [Window(n * size, (n + 1) * size, n * size) for n in range(_SEQUENCES)]
    return np.concatenate(ids), windows, pairs
