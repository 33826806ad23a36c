"""The record of a calibration in the metadata of a converted model.

The model does not contain the calibration file, only what ``inspect``, ``fit`` and ``verify`` need:
number of tokens, length of the windows, fingerprint of the model, and mean and deviation of the
vectors of each cache. One JSON document; tables are float16 in base64, some 10 bytes for each
coordinate of a layer's heads.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.rotaryangles import Pairing, Rotary
from tq_onnx.errors import ModelFileError
from tq_onnx.plan import Plan

METADATA_CALIBRATION: Final = "tq_onnx.calibration"
_VERSION: Final = 3
_MOST: Final = 10**15
_MOST_HALF: Final = 65504.0
_ELEMENT: Final = np.dtype("<f2")
_ANGLE: Final = np.dtype("<f4")

Table = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationFacts:
    """A calibration, in a few words.

    Attributes:
        tokens: tokens that it read.
        context: tokens of its longest windows.
        shortage: what its text was too short for, in a sentence; empty if it was long enough.
    """

    tokens: int
    context: int
    shortage: str = ""


@dataclass(frozen=True, eq=False)
class CacheRecord:
    """What vectors of one cache were like, before anything was done to them."""

    mean: Table  #: of the tokens that are centered by one mean, ``[N, D]``
    deviation: Table  #: their standard deviation, ``[N, D]``
    fingerprint: Table  #: see ``tq_onnx.codec.calibration``, ``[N, D]``


@dataclass(frozen=True, eq=False)
class CalibrationRecord:
    """A calibration, as far as it can be compared with a model."""

    facts: CalibrationFacts  #: what people want to know of it
    fingerprint_tokens: tuple[int, ...]  #: see ``tq_onnx.codec.calibration``
    layers: tuple[tuple[CacheRecord, CacheRecord], ...]  #: keys and values, one pair for each layer
    #: how the keys of each layer turn; None where that is not known, or not used
    rotaries: tuple[Rotary | None, ...]

    def to_json(self) -> str:
        """Return one JSON document with stable key order."""
        document = {
            "version": _VERSION,
            "tokens": self.facts.tokens,
            "context": self.facts.context,
            "shortage": self.facts.shortage,
            "fingerprint_tokens": list(self.fingerprint_tokens),
            "layers": [
                {role: _written(record) for role, record in zip(_ROLES, pair, strict=True)}
                for pair in self.layers
            ],
            "rotaries": [None if rotary is None else _angles(rotary) for rotary in self.rotaries],
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


_ROLES: Final = ("key", "value")
_TABLES: Final = ("mean", "deviation", "fingerprint")


def record_of(calibration: Calibration, center_from: int) -> CalibrationRecord:
    """Return what a model keeps of a calibration."""
    layers = []
    for index, layer in enumerate(calibration.layers):
        keys, values = calibration.moments(index, center_from)
        assert layer.k_fingerprint is not None  # calibrate reads them
        assert layer.v_fingerprint is not None
        pair = CacheRecord(*keys, layer.k_fingerprint), CacheRecord(*values, layer.v_fingerprint)
        layers.append(pair)
    facts = CalibrationFacts(calibration.tokens, calibration.context, calibration.shortage)
    rotaries = tuple(layer.rotary for layer in calibration.layers)
    return CalibrationRecord(facts, calibration.fingerprint_tokens, tuple(layers), rotaries)


def record_in(metadata: Mapping[str, str], plan: Plan) -> CalibrationRecord | None:
    """Return the record in a model's metadata; None if there is none.

    Args:
        plan: its plan, whose heads the tables must have.
    """
    text = metadata.get(METADATA_CALIBRATION)
    if text is None:
        return None
    try:
        return _read(json.loads(text), plan)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFileError(
            "the record of the model's calibration cannot be read",
            where=METADATA_CALIBRATION,
            fix=f"convert the original model again ({error})",
        ) from error


def _read(document: Any, plan: Plan) -> CalibrationRecord:
    if document["version"] != _VERSION:
        raise ValueError("another version")
    tokens, context = (_number(document[name], 1) for name in ("tokens", "context"))
    shortage = document["shortage"]
    if not isinstance(shortage, str):
        raise TypeError("shortage is no text")
    ids = tuple(_number(token, 0) for token in document["fingerprint_tokens"])
    if len(document["layers"]) != len(plan.layers):
        raise ValueError("other layers than the plan")
    layers = []
    for entry, layer in zip(document["layers"], plan.layers, strict=True):
        shape = layer.kv_num_heads, layer.head_size
        layers.append((_cache(entry["key"], shape), _cache(entry["value"], shape)))
    facts = CalibrationFacts(tokens, context, shortage)
    rotaries = tuple(
        _rotary(entry, layer.head_size)
        for entry, layer in zip(document["rotaries"], plan.layers, strict=True)
    )
    return CalibrationRecord(facts, ids, tuple(layers), rotaries)


def _angles(rotary: Rotary) -> dict[str, Any]:
    frequencies = base64.b64encode(rotary.frequencies.astype(_ANGLE).tobytes()).decode()
    return {**rotary.pairing.document, "frequencies": frequencies, "source": rotary.source}


def _rotary(entry: Any, head_size: int) -> Rotary | None:
    if entry is None:
        return None
    content = base64.b64decode(entry["frequencies"], validate=True)
    frequencies = np.frombuffer(content, _ANGLE).astype(np.float32)
    rotary = Rotary(frequencies, Pairing.read(entry), str(entry["source"]))
    rotary.check(head_size)
    return rotary


def _cache(entry: Any, shape: tuple[int, int]) -> CacheRecord:
    mean, deviation, fingerprint = (_table(entry[name], shape) for name in _TABLES)
    return CacheRecord(mean, np.abs(deviation), fingerprint)


def _written(record: CacheRecord) -> dict[str, str]:
    return {
        name: base64.b64encode(_halves(getattr(record, name)).tobytes()).decode()
        for name in _TABLES
    }


def _halves(table: Table) -> npt.NDArray[np.float16]:
    halves: npt.NDArray[np.float16] = np.clip(table, -_MOST_HALF, _MOST_HALF).astype(_ELEMENT)
    return halves


def _table(text: str, shape: tuple[int, int]) -> Table:
    table = np.frombuffer(base64.b64decode(text, validate=True), _ELEMENT).reshape(shape)
    if not np.isfinite(table).all():
        raise ValueError("a table is not finite")
    return table.astype(np.float64)


def _number(value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ValueError(f"{str(value)[:20]!r} is no number that belongs there")
    return value
