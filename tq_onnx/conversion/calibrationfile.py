"""Calibration files: safetensors with the statistics of ``tq_onnx.codec.calibration``.

Tensors are float32 ``layers.3.k_mean`` and so on, and int64 ``counts`` and
``fingerprint_tokens``; the metadata says the format's version, the tool's, the number of tokens,
the context, a digest of the token ids, the layers with vectors that rows cannot hold, which
coordinates of each layer's keys turn together and how that is known, and a digest of the content:
tables that change their places would be those of other layers.
A file of another version of the format is refused. A file comes from anywhere: everything in it is
checked before it is used.
Only calibration files are ever replaced by one, never a model or its data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tq_onnx.codec.calibration import LARGEST_STATISTIC, Calibration, LayerStatistics
from tq_onnx.codec.rotaryangles import STILL, Pairing, Rotary
from tq_onnx.codec.spec import MAX_HEAD_SIZE
from tq_onnx.errors import ModelFileError, OutputExistsError
from tq_onnx.files.arrays import (
    DAMAGES,
    facts_of,
    read_arrays,
    reason_of,
    unwritable,
    write_arrays,
)

FORMAT: Final = "tq_onnx.calibration"
FORMAT_VERSION: Final = "8"

_LARGEST_FILE: Final = 2 << 30
"""Bytes; covariances of 96 layers with 96 heads of size 128 take 1.2 GB."""
_MOST_HEADER: Final = 1 << 20
"""Bytes of the names, shapes and facts, and more."""

_TABLES: Final = ("k_mean", "k_energy", "v_mean", "v_energy")
_QUERIES: Final = "q_energy"
_COVARIANCE: Final = "query_covariance"
_FINGERPRINTS: Final = ("k_fingerprint", "v_fingerprint")
_TURNING: Final = ("frequencies", "k_turned_mean")
_FINGERPRINT_TOKENS: Final = "fingerprint_tokens"
_NAMES: Final = (*_TABLES, _QUERIES, _COVARIANCE, *_FINGERPRINTS, *_TURNING)
"""Tables of a layer."""

_NAME: Final = re.compile(rf"layers\.(0|[1-9][0-9]{{0,4}})\.({'|'.join(_NAMES)})")
_FACTS: Final = {
    "tool_version": re.compile(r"[0-9A-Za-z.+!-]{1,64}"),
    "tokens": re.compile(r"[1-9][0-9]{0,14}"),
    "context": re.compile(r"[1-9][0-9]{0,14}"),
    "text_digest": re.compile(r"[0-9a-f]{64}"),
    "clamped_layers": re.compile(r"\[([0-9]{1,5}(, [0-9]{1,5}){0,999})?\]"),
}
_DIGEST: Final = "content_digest"
_PAIRS: Final = "rotary"
"""The fact with the pairs of each layer, and how they are known: a JSON list."""
_MOST_WORDS: Final = 200
_WORDS: Final = re.compile(rf"[ -~]{{0,{_MOST_WORDS}}}")
_MOST_TOKENS: Final = 10**15
_MOST_FINGERPRINT_TOKENS: Final = 64
_NOISE: Final = 1e-4
"""Relative; what float32 leaves of sums that should be equal, many times over."""


def write_calibration(path: Path, calibration: Calibration, *, overwrite: bool = False) -> None:
    """Write a calibration file; it appears whole or not at all."""
    tensors = {
        "counts": calibration.counts,
        _FINGERPRINT_TOKENS: np.array(calibration.fingerprint_tokens, np.int64),
    }
    for index, layer in enumerate(calibration.layers):
        for name in _NAMES:
            table = getattr(layer, name)
            if table is not None:
                tensors[f"layers.{index}.{name}"] = np.ascontiguousarray(table, np.float32)
    facts = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tool_version": calibration.tool_version,
        "tokens": str(calibration.tokens),
        "context": str(calibration.context),
        "text_digest": calibration.text_digest,
        "clamped_layers": json.dumps(calibration.clamped_layers),
        _PAIRS: json.dumps([_pair(layer) for layer in calibration.layers]),
    }
    facts[_DIGEST] = content_digest(tensors, facts)
    check_target(path, overwrite=overwrite)
    size = _MOST_HEADER + sum(tensor.nbytes for tensor in tensors.values())
    if size > _LARGEST_FILE:
        raise ModelFileError(
            f"the calibration file would have {size:,} bytes, more than are read again "
            f"({_LARGEST_FILE:,})",
            where=str(path),
            fix="convert without `calibration`",
        )
    write_arrays(path, tensors, facts, overwrite=overwrite)


def _pair(layer: LayerStatistics) -> dict[str, Any]:
    pairs = {} if layer.pairing is None else layer.pairing.document
    # They may name a value of the graph, whose name may be anything.
    return {**pairs, "angles": re.sub(r"[^ -~]", "?", layer.angles)[:_MOST_WORDS]}


def content_digest(tensors: Mapping[str, Any], facts: Mapping[str, str]) -> str:
    """Return the SHA-256 of tables with their names, and of all facts but itself; hexadecimal."""
    content = hashlib.sha256()
    for name, fact in sorted(facts.items()):
        if name != _DIGEST:
            content.update(f"{name}={fact}\n".encode())
    for name, tensor in sorted(tensors.items()):
        content.update(f"{name}:{tensor.dtype}{tensor.shape}\n".encode())
        content.update(np.ascontiguousarray(tensor).tobytes())
    return content.hexdigest()


def check_target(path: Path, *, overwrite: bool) -> None:
    """Refuse a file to write, before any work is done for it."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        _check_folder(path.parent)
        return
    except OSError as error:
        raise unwritable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise ModelFileError(f"the output is {what}", where=str(path), fix="give a file name")
    if not overwrite:
        raise OutputExistsError(
            "the output exists", where=str(path), fix="give `overwrite=True` or another output"
        )
    if facts_of(path).get("format") != FORMAT:
        raise OutputExistsError(
            "the output exists and is no calibration file",
            where=str(path),
            fix="give another output",
        )


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file."""
    try:
        tensors, facts = read_arrays(path, largest=_LARGEST_FILE)
        _check_format(facts, path)
        return _checked(tensors, facts)
    except FileNotFoundError as error:
        raise ModelFileError(
            "there is no such file", where=str(path), fix="make one with `tq-onnx calibrate`"
        ) from error
    except DAMAGES as error:
        raise ModelFileError(
            f"the file is not a calibration file ({reason_of(error)})",
            where=str(path),
            fix="make one with `tq-onnx calibrate`",
        ) from error


def _check_folder(folder: Path) -> None:
    while not os.path.lexists(folder):  # those that do not exist are made
        folder = folder.parent
    if not folder.is_dir():
        raise ModelFileError(
            "the path is not a folder", where=str(folder), fix="give another output"
        )


def _check_format(facts: dict[str, str], path: Path) -> None:
    if facts.get("format") != FORMAT:
        raise ValueError(f"the format is not {FORMAT}")
    version = facts.get("format_version", "")
    if version in map(str, range(1, int(FORMAT_VERSION))):
        raise ModelFileError(
            "an earlier version of tq-onnx wrote the calibration file",
            where=str(path),
            fix="run `tq-onnx calibrate` again",
        )
    if version != FORMAT_VERSION:
        raise ValueError(f"the version of the format is not {FORMAT_VERSION}")
    for name, form in _FACTS.items():
        if form.fullmatch(facts.get(name, "")) is None:
            raise ValueError(f"the {name} is missing or damaged")


def _checked(tensors: dict[str, Any], facts: dict[str, str]) -> Calibration:
    digest = content_digest(tensors, facts)
    counts = tensors.pop("counts", None)
    if counts is None or counts.dtype != np.int64 or counts.ndim != 1 or len(counts) < 2:
        raise ValueError("counts are not one integer for each position")
    if (counts < 1).any() or (counts > _MOST_TOKENS).any():
        raise ValueError("counts are out of range")
    fingerprint = _fingerprint_tokens(tensors)
    found: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        parsed = _NAME.fullmatch(name)
        if parsed is None or tensor.dtype != np.float32:
            raise ValueError(f"{name[:40]!r} is no table of float32 that belongs there")
        if not (np.abs(tensor) < LARGEST_STATISTIC).all():
            raise ValueError(f"{name!r} has numbers that are not finite, or too large")
        # Covariances are large, and nothing is summed from them that float32 could not hold.
        is_narrow = parsed[2] in (_COVARIANCE, _TURNING[0])
        table = tensor if is_narrow else tensor.astype(np.float64)
        found.setdefault(int(parsed[1]), {})[parsed[2]] = table
    if sorted(found) != list(range(len(found))) or not found:
        raise ValueError("layers are missing")
    layers = []
    for index, (pairing, angles) in enumerate(_pairs(facts, len(found))):
        tables = found[index]
        if set(_NAMES).difference(tables):
            raise ValueError(f"layer {index} has not the tables of this version")
        _check_layer(index, tables, len(counts))
        layers.append(LayerStatistics(**tables, pairing=pairing, angles=angles))
        _check_turning(index, layers[-1])
    if facts.get(_DIGEST) != digest:
        raise ValueError("its content is not what was written")
    return Calibration(
        tuple(layers),
        counts,
        int(facts["tokens"]),
        int(facts["context"]),
        str(facts["tool_version"]),
        str(facts["text_digest"]),
        fingerprint_tokens=fingerprint,
        clamped_layers=tuple(json.loads(facts["clamped_layers"])),
    )


def _pairs(facts: dict[str, str], layers: int) -> list[tuple[Pairing | None, str]]:
    """Return which coordinates of each layer's keys turn together, and how that is known."""
    try:
        entries = json.loads(facts.get(_PAIRS, ""))
    except RecursionError:
        raise ValueError(f"the {_PAIRS} is nested") from None
    if not isinstance(entries, list) or len(entries) != layers:
        raise ValueError(f"the {_PAIRS} is not that of each layer")
    found = []
    for entry in entries:
        if not isinstance(entry["angles"], str) or _WORDS.fullmatch(entry["angles"]) is None:
            raise ValueError(f"the {_PAIRS} is damaged")
        found.append((Pairing.read(entry) if "layout" in entry else None, entry["angles"]))
    return found


def _check_turning(index: int, layer: LayerStatistics) -> None:
    """Refuse angles and a mean that no keys have that turn in pairs."""
    mean, frequencies = layer.k_turned_mean, layer.frequencies
    if mean.shape != (2, *layer.k_mean.shape[1:]):
        raise ValueError(f"layer {index} has a turned mean of another shape than its keys")
    rotary = layer.rotary or Rotary(frequencies, STILL, "")
    try:
        rotary.check(layer.head_size)
    except ValueError as error:
        raise ValueError(f"layer {index} has {error}") from None
    known = np.zeros_like(mean) if layer.rotary is None else rotary.turned_mean(mean[0])
    if (known != mean).any():
        raise ValueError(f"layer {index} has a mean that does not turn in pairs")


def _fingerprint_tokens(tensors: dict[str, Any]) -> tuple[int, ...]:
    """Take the ids of the fingerprint out of the tensors."""
    ids = tensors.pop(_FINGERPRINT_TOKENS, None)
    if ids is None or ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"{_FINGERPRINT_TOKENS} are no list of token ids")
    if not 0 < len(ids) <= _MOST_FINGERPRINT_TOKENS or ids.min() < 0 or ids.max() >= 1 << 31:
        raise ValueError(f"{_FINGERPRINT_TOKENS} are out of range")
    return tuple(ids.tolist())


def _check_layer(index: int, tables: dict[str, Any], positions: int) -> None:
    shape = tables["k_mean"].shape
    if len(shape) != 3 or shape[0] != positions or 0 in shape or shape[2] > MAX_HEAD_SIZE:
        raise ValueError(f"layer {index} has keys of shape {shape}")
    if any(tables[name].shape != shape for name in _TABLES):
        raise ValueError(f"the tables of layer {index} differ in shape")
    queries = tables[_QUERIES].shape
    if len(queries) != 2 or queries[1] != shape[2] or queries[0] < 1 or queries[0] % shape[1]:
        raise ValueError(f"layer {index} has queries of shape {queries}")
    if any(tables[name].shape != shape[1:] for name in _FINGERPRINTS):
        raise ValueError(f"layer {index} has a fingerprint of another shape than its keys")
    if any((tables[name] < 0).any() for name in ("k_energy", "v_energy", _QUERIES)):
        raise ValueError(f"layer {index} has a negative energy")
    of_groups = tables[_QUERIES].reshape(shape[1], -1, shape[2]).mean(axis=1)
    _check_covariance(index, tables[_COVARIANCE], of_groups)


def _check_covariance(layer: int, table: Any, energies: Any) -> None:
    """Refuse ``[N, D, D]`` that is no covariance of vectors with these energies ``[N, D]``."""
    heads, size = energies.shape
    if table.shape != (heads, size, size):
        raise ValueError(f"layer {layer} has a query covariance of shape {table.shape}")
    wide = table.astype(np.float64)
    largest = energies.max(axis=1, initial=0.0)[:, None]
    if (np.abs(wide - wide.transpose(0, 2, 1)) > _NOISE * largest[:, None]).any():
        raise ValueError(f"the query covariance of layer {layer} is not symmetric")
    if (np.abs(wide.diagonal(axis1=1, axis2=2) - energies) > _NOISE * largest).any():
        raise ValueError(f"the query covariance of layer {layer} is not that of its query energies")
    try:
        live = largest[:, 0] > 0
        relative = wide[live] / largest[live, :, None]
        np.linalg.cholesky(relative + _NOISE * size * np.eye(size))
    except np.linalg.LinAlgError:
        raise ValueError(f"the query covariance of layer {layer} is no covariance") from None
