"""Move weights that no longer fit into the model's own file into a data file beside it.

An ONNX file is one protobuf message, which cannot have more than 2 GiB. A conversion adds rotations
and function bodies, so a model that only just fitted may not fit any more. ``stage_model`` writes a
model and, where it would exceed the limit, its largest initializers into ``MODEL.data``: the usual
external data, in which every tensor begins at a multiple of 64 KiB, so that it can be mapped.

Refused with ``ModelFileError``: a model that is too large even so, by its nodes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

from tq_onnx.errors import ModelFileError, OutputExistsError
from tq_onnx.files.load import MAX_PROTOBUF_BYTES
from tq_onnx.files.transaction import Transaction

_ALIGNMENT: Final = 64 << 10


@dataclass(frozen=True)
class StagedModel:
    """The result of ``stage_model``."""

    size: int  #: bytes of the model file
    data: Path | None  #: the file that holds its moved weights; None if they all stayed inside
    data_size: int  #: bytes of that file


def stage_model(
    transaction: Transaction,
    model: ir.Model,
    target: Path,
    *,
    occupied: Collection[Path] = (),
) -> StagedModel:
    """Stage a model file, after a data file for its weights if one is needed.

    Args:
        occupied: files that the data file must not be.

    Raises:
        OSError: the files cannot be written.
    """
    limit = MAX_PROTOBUF_BYTES
    data, data_size, proto = None, 0, None
    inside = sum(_bytes(value) for value in _movable(model))
    # Beyond the limit protobuf fails rather than counts; what is no weight is far below a half.
    if inside <= limit - limit // 16:
        proto = ir.to_proto(model)
    if proto is None or _size(proto) > limit:
        data = _free_name(target, occupied)
        if data.exists() and not transaction.overwrite:
            raise OutputExistsError(
                "the output exists", where=str(data), fix="give `overwrite=True` or another output"
            )
        data_size = transaction.write(data, _move(_largest(model, inside - limit // 2), data))
        proto = ir.to_proto(model)
    size = _size(proto)
    if size > limit:
        raise ModelFileError(
            f"the converted graph alone has {size} bytes, and an ONNX file cannot have more than "
            "2 GiB",
            where=str(target),
            fix="export the original with external data",
        )
    transaction.write(target, [proto.SerializeToString(deterministic=True)])
    return StagedModel(size, data, data_size)


def _movable(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the initializers whose content is inside the model."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor):
            continue
        if tensor.dtype != ir.DataType.STRING:
            yield value


def _bytes(value: ir.Value) -> int:
    return 0 if value.const_value is None else int(value.const_value.nbytes)


def _largest(model: ir.Model, excess: int) -> list[ir.Value]:
    """Return the fewest initializers that hold ``excess`` bytes, in the order of the graph."""
    order = list(_movable(model))
    chosen: set[ir.Value] = set()
    for value in sorted(order, key=_bytes, reverse=True):
        if excess <= 0:
            break
        chosen.add(value)
        excess -= _bytes(value)
    return [value for value in order if value in chosen]


def _move(values: Iterable[ir.Value], data: Path) -> Iterator[bytes]:
    """Yield the content of the data file; each weight becomes a reference as it is passed."""
    offset = 0
    for value in values:
        tensor = value.const_value
        assert tensor is not None  # by _movable
        padding = -offset % _ALIGNMENT
        yield bytes(padding)
        yield tensor.tobytes()
        offset += padding
        value.const_value = ir.ExternalTensor(
            data.name,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=tensor.name or value.name or "",
            doc_string=tensor.doc_string,
            base_dir=data.parent,
        )
        offset += tensor.nbytes


def _free_name(target: Path, occupied: Collection[Path]) -> Path:
    data, number = target.with_name(f"{target.name}.data"), 1
    while data in occupied:
        data, number = target.with_name(f"{target.name}.{number}.data"), number + 1
    return data


def _size(proto: onnx.ModelProto) -> int:
    try:
        return int(proto.ByteSize())
    except Exception:  # which one depends on the implementation of protobuf
        return MAX_PROTOBUF_BYTES + 1
