"""The preset table: one row each. Adding a preset is adding a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tq_onnx.codec.spec import LLOYD_MAX, RAW, Codec

DEFAULT_PRESET: Final = "int4"
DEFAULT_SEED: Final = 42

QR: Final = "qr"
HADAMARD: Final = "hadamard"
ROTATIONS: Final = (QR, HADAMARD)
NO_ROTATION: Final = "none"
"""The rotation of a preset that does not rotate; not to be asked for."""


@dataclass(frozen=True)
class Preset:
    """A named choice of codecs.

    Attributes:
        name: what the user types.
        key: codec of the key cache; see ``Codec.for_elements`` for what a model gets.
        value: codec of the value cache, likewise.
        rotation: ``qr``, ``hadamard`` or, where nothing is rotated, ``none``.
        source: where the choice comes from.
    """

    name: str
    key: Codec
    value: Codec
    rotation: str
    source: str


_ALGORITHM_1 = "TurboQuant paper, Algorithm 1"
_LOSSLESS = "nothing is lost: proves a conversion apart from quantisation"

PRESETS: Final[dict[str, Preset]] = {
    preset.name: preset
    for preset in (
        Preset("int4", Codec(LLOYD_MAX, 4), Codec(LLOYD_MAX, 4), QR, _ALGORITHM_1),
        Preset("int3", Codec(LLOYD_MAX, 3), Codec(LLOYD_MAX, 3), QR, _ALGORITHM_1),
        Preset("int2", Codec(LLOYD_MAX, 2), Codec(LLOYD_MAX, 2), QR, _ALGORITHM_1),
        Preset("raw", Codec(RAW, 32), Codec(RAW, 32), NO_ROTATION, _LOSSLESS),
    )
}
