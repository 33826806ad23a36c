"""The preset table: one row each. Adding a preset is adding a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tq_onnx.codec.kind import NORM_KEPT, NOT_CORRECTED, UNBIASED
from tq_onnx.codec.rotated import LLOYD_MAX, PROD, U8, UNIFORM_SIGNED
from tq_onnx.codec.search import MAX_GAINS, SIGNED_GAINS
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import FP8, Q8_0, RAW, UNIFORM
from tq_onnx.errors import UsageError

DEFAULT_PRESET: Final = "int4"
COMMON_PRESETS: Final = ("int4", "int5", "int3", "int2", "k8v4")
"""What tables of presets show unless all are asked for."""

DEFAULT_SEED: Final = 42
MAX_SEED: Final = 2**32 - 1
"""The generator is seeded with 32 bits; torch drops the others."""

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
        norm_correction: what scales make up for, of ``kind.NORM_CORRECTIONS``, for kinds that can.
        gains: how many gains the encoder tries, for kinds that search; 0 for none.
        window: how many of the newest tokens models keep exactly beside their rows, unless another
            number is asked for.
        sinks: how many of the first tokens, likewise.
        experimental: whether other presets of its size are known to do better on real models.
        vllm_slot: bytes of vLLM's slot of one token and KV head of size 128; None where the preset
            is not vLLM's.
        aliases: names of other tools for it, which are taken in place of its own.
    """

    name: str
    key: Codec
    value: Codec
    rotation: str
    source: str
    norm_correction: int = NORM_KEPT
    gains: int = 0
    window: int = 0
    sinks: int = 0
    experimental: bool = False
    vllm_slot: int | None = None
    aliases: tuple[str, ...] = ()


_ALGORITHM_1: Final = "TurboQuant paper, Algorithm 1"
_ALGORITHM_2: Final = "TurboQuant paper, Algorithm 2"
_SEARCH: Final = "tq-onnx: the best of several gains"
_SIGNED: Final = "tq-onnx: integers that INT4 kernels of vendors can read"
_KEYS: Final = "tq-onnx: more bits for the keys, which are more fragile"
_ASCEND: Final = "cache layout of an Ascend design note"
_LOSSLESS: Final = "tq-onnx: lossless, to check a conversion without quantisation"

# docs/presets.md has the measurement.
_WINDOW: Final = 32
_SINKS: Final = 4

_INT1, _INT2, _INT3, _INT4, _INT5 = (Codec(LLOYD_MAX, bits) for bits in range(1, 6))
_UNIFORM3, _UNIFORM4 = Codec(UNIFORM, 3), Codec(UNIFORM, 4)
_SIGNED3, _SIGNED4 = Codec(UNIFORM_SIGNED, 3), Codec(UNIFORM_SIGNED, 4)
_FP8, _Q8_0 = Codec(FP8, 8), Codec(Q8_0, 8)
_PROD3, _PROD4 = Codec(PROD, 3), Codec(PROD, 4)
_U8, _RAW = Codec(U8, 4), Codec(RAW, 32)


def _searching(
    name: str, key: Codec, value: Codec, source: str, *, gains: int = MAX_GAINS
) -> Preset:
    return Preset(
        name,
        key,
        value,
        QR,
        source,
        norm_correction=UNBIASED,
        gains=gains,
        window=_WINDOW,
        sinks=_SINKS,
    )


def _experimental(name: str, codec: Codec, rotation: str, source: str) -> Preset:
    correction = NOT_CORRECTED
    return Preset(
        name, codec, codec, rotation, source, norm_correction=correction, experimental=True
    )


def _vllm(name: str, key: Codec, value: Codec, rotation: str, slot: int) -> Preset:
    alias = f"turboquant_{name}"
    return Preset(name, key, value, rotation, f"vLLM {alias}", vllm_slot=slot, aliases=(alias,))


LISTED_PRESETS: Final = (
    _searching("int4", _INT4, _INT4, _SEARCH),
    _searching("int5", _INT5, _INT5, _SEARCH),
    _searching("int3", _INT3, _INT3, _SEARCH),
    _searching("int2", _INT2, _INT2, _SEARCH),
    _searching("signed4", _SIGNED4, _SIGNED4, _SIGNED, gains=SIGNED_GAINS),
    _searching("signed3", _SIGNED3, _SIGNED3, _SIGNED, gains=SIGNED_GAINS),
    _searching("k5v3", _INT5, _INT3, _KEYS),
    _searching("k4v3", _INT4, _INT3, _KEYS),
    _searching("k4v2", _INT4, _INT2, _KEYS),
    Preset("mse4", _INT4, _INT4, QR, _ALGORITHM_1, norm_correction=NOT_CORRECTED),
    Preset("mse3", _INT3, _INT3, QR, _ALGORITHM_1, norm_correction=NOT_CORRECTED),
    Preset("mse2", _INT2, _INT2, QR, _ALGORITHM_1, norm_correction=NOT_CORRECTED),
    Preset("mse1", _INT1, _INT1, QR, _ALGORITHM_1, norm_correction=NOT_CORRECTED),
    _experimental("prod4", _PROD4, QR, _ALGORITHM_2),
    _experimental("prod3", _PROD3, QR, _ALGORITHM_2),
    _vllm("k8v4", _FP8, _UNIFORM4, NO_ROTATION, 196),
    _vllm("4bit_nc", _INT4, _UNIFORM4, HADAMARD, 134),
    _vllm("k3v4_nc", _INT3, _UNIFORM4, HADAMARD, 118),
    _vllm("3bit_nc", _INT3, _UNIFORM3, HADAMARD, 102),
    Preset("safe-lowbit", _Q8_0, _INT4, HADAMARD, "SKaiNET", norm_correction=NOT_CORRECTED),
    Preset("ascend-u8", _U8, _U8, QR, _ASCEND),
    Preset("raw", _RAW, _RAW, NO_ROTATION, _LOSSLESS),
)
"""The presets that tables show, the default one first."""

_BY_NAME: Final = {preset.name: preset for preset in LISTED_PRESETS}
_SKAINET: Final = {"balanced": "mse4", "experimental-max": "prod3"}
"""Names of SKaiNET for codecs that other presets have: these, rotated by Hadamard matrices."""

PRESETS: Final[dict[str, Preset]] = _BY_NAME | {
    name: replace(_BY_NAME[preset], name=name, rotation=HADAMARD, source="SKaiNET")
    for name, preset in _SKAINET.items()
}
"""All presets by name, those that no table shows last."""

_BY_ALIAS: Final = {alias: preset for preset in LISTED_PRESETS for alias in preset.aliases}

_NEAREST: Final[dict[str, dict[str, str | None]]] = {
    "llama.cpp": {
        **dict.fromkeys(("q8_0", "q5_1", "q5_0"), "int5"),
        **dict.fromkeys(("q4_1", "q4_0", "iq4_nl"), "int4"),
        **dict.fromkeys(("f32", "f16", "bf16")),
    },
    "vLLM": {
        **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_per_token_head"), "int5"),
        **dict.fromkeys(("int8_per_token_head",), "int5"),
        **dict.fromkeys(("int4_per_token_head", "nvfp4", "nvfp4_4over6"), "int4"),
        **dict.fromkeys(("auto", "float16", "bfloat16")),
    },
}
"""Cache types of other tools that no preset is, by tool: the nearest preset, which is the smallest
of no worse quality; None for types that keep a cache as the model has it."""


_GONE: Final = ("int2.75", "int2.5")
"""Presets of before."""


def find_preset(name: str) -> Preset:
    """Return the preset of that name, or of the name that another tool has for it."""
    if name in PRESETS:
        return PRESETS[name]
    if name in _BY_ALIAS:
        return _BY_ALIAS[name]
    for tool, types in _NEAREST.items():
        if name in types:
            nearest = types[name]
            raise UsageError(
                f"{name!r} is a cache type of {tool}, not a preset",
                fix="run the model as it is, without a conversion"
                if nearest is None
                else f"use the nearest preset, {nearest}",
            )
    if name in _GONE:
        raise UsageError(f"{' and '.join(_GONE)} were removed", fix="use int3, or int2 calibrated")
    raise UsageError(f"preset {name!r} is not one of {', '.join(PRESETS)}")
