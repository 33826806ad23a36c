"""Check a parsed model before a graph is built from it, by integers and ``stat`` only.

``preflight(proto, folder, where)`` looks at every tensor of the model (initializers, attributes,
subgraphs, functions), and at the types and versions that it declares. It opens no file, reads no
weight and allocates nothing of a declared size; so a hostile file can neither hang nor exhaust it.

Refused, each with a ``ModelFileError``: negative or absurd dimensions, unknown element types, data
that is shorter or longer than declared, and external data that is missing, too short, not a regular
file, or outside of the model's folder (by ``..``, by an absolute path or by a symbolic link).

The Hugging Face cache keeps files as links ``snapshots/REVISION/x -> ../../blobs/HASH``: a link
that ends in the ``blobs`` folder of the same repository folder counts as inside.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import Any, Final

import onnx

from tq_onnx.errors import ModelFileError
from tq_onnx.files.declarations import check_declarations

_T = onnx.TensorProto

# Bits of one element in a file; STRING has none and is checked apart.
_BITS: Final[dict[int, int]] = {
    getattr(_T, name): bits
    for bits, names in {
        128: ("COMPLEX128",),
        64: ("DOUBLE", "INT64", "UINT64", "COMPLEX64"),
        32: ("FLOAT", "INT32", "UINT32"),
        16: ("FLOAT16", "BFLOAT16", "INT16", "UINT16"),
        8: (
            *("INT8", "UINT8", "BOOL", "FLOAT8E8M0"),
            *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
        ),
        6: ("FLOAT6E2M3", "FLOAT6E3M2"),
        4: ("INT4", "UINT4", "FLOAT4E2M1"),
        2: ("INT2", "UINT2"),
    }.items()
    for name in names
    if hasattr(_T, name)
}
_COMPLEX: Final = (_T.COMPLEX64, _T.COMPLEX128)

_INTEGER: Final = re.compile(r"[0-9]{1,19}", re.ASCII)


def preflight(proto: onnx.ModelProto, folder: Path, where: str) -> tuple[Path, ...]:
    """Check a model's declared sizes and its external data.

    Returns:
        The external data files, as paths below ``folder``, in order of first use.
    """
    check_declarations(proto, where)
    files: dict[str, tuple[Path, int]] = {}
    for tensor in _tensors(proto):
        size = _declared_bytes(tensor, where)
        if tensor.data_location == _T.EXTERNAL:
            _check_external(tensor, size, folder, where, files)
        else:
            _check_inline(tensor, size, where)
    return tuple(dict.fromkeys(path for path, _ in files.values()))


def external_file(location: str, folder: Path, where: str) -> tuple[Path, int]:
    """Find one external data file; return the path below ``folder`` and its size in bytes."""
    shown = repr(location)
    if not location or "\0" in location:
        raise ModelFileError(
            f"the model names external data without a file name ({shown})", where=where
        )
    if Path(location).is_absolute() or PureWindowsPath(location).drive or location[0] in "/\\":
        raise ModelFileError(
            f"the external data has the absolute path {shown}",
            where=where,
            fix="external data must lie in the model's folder, under a relative name",
        )
    path = Path(os.path.normpath(folder / location))
    outside = ModelFileError(
        f"the external data {shown} lies outside of the model's folder",
        where=where,
        fix="move the file beside the model",
    )
    if path == folder or not path.is_relative_to(folder):
        raise outside
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except (OSError, RuntimeError) as error:
        raise ModelFileError(
            f"the external data file {shown} is missing or cannot be reached",
            where=where,
            fix=f"put the file into {folder}",
        ) from error
    if not real.is_relative_to(folder) and not is_blob(real, folder):
        raise outside
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"the external data {shown} is not a regular file", where=where)
    return path, status.st_size


def is_blob(real: Path, folder: Path) -> bool:
    """Return True if a file is stored for ``folder`` in the Hugging Face cache that holds both."""
    for parent in (folder, *folder.parents):
        if parent.parent.name == "snapshots":
            return real.parent == parent.parent.parent / "blobs"
    return False


_FIELDS: Final[dict[int, str]] = {
    _T.FLOAT: "float_data",
    _T.COMPLEX64: "float_data",
    _T.DOUBLE: "double_data",
    _T.COMPLEX128: "double_data",
    _T.INT64: "int64_data",
    _T.UINT32: "uint64_data",
    _T.UINT64: "uint64_data",
    _T.STRING: "string_data",
}
"""Where values of an element type stand that are no raw data; the others are in int32_data."""
_ALL_FIELDS: Final = (*dict.fromkeys(_FIELDS.values()), "int32_data")


def _declared_bytes(tensor: onnx.TensorProto, where: str) -> int:
    """Return the bytes that a tensor's type and dimensions ask for; 0 for strings."""
    name = tensor.name or "(unnamed)"
    if any(dim < 0 for dim in tensor.dims):
        raise ModelFileError(
            f"the tensor {name!r} has the negative dimensions {list(tensor.dims)}", where=where
        )
    if tensor.data_type == _T.STRING:
        return 0
    if tensor.data_type not in _BITS:
        raise ModelFileError(
            f"the tensor {name!r} has the unknown element type {tensor.data_type}", where=where
        )
    bits = math.prod(tensor.dims) * _BITS[tensor.data_type]
    return int(-(-bits // 8))


def _check_inline(tensor: onnx.TensorProto, size: int, where: str) -> None:
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        held, expected, unit = len(tensor.raw_data), {size}, "bytes"
    else:
        own_field = _FIELDS.get(tensor.data_type, "int32_data")
        held = len(getattr(tensor, own_field))
        if any(len(getattr(tensor, field)) for field in _ALL_FIELDS if field != own_field):
            raise ModelFileError(
                f"the tensor {tensor.name or '(unnamed)'!r} holds values of another element type",
                where=where,
                fix="the file is damaged: export or download it again",
            )
        # Types below 8 bits are packed into the integers of int32_data.
        expected, unit = {count, size} if size < count else {count}, "values"
        if tensor.data_type in _COMPLEX:
            expected = {2 * count}
    if held not in expected:
        raise ModelFileError(
            f"the tensor {tensor.name or '(unnamed)'!r} of dimensions {list(tensor.dims)} holds "
            f"{held} {unit} instead of {max(expected)}",
            where=where,
            fix="the file is damaged: export or download it again",
        )


def _check_external(
    tensor: onnx.TensorProto,
    size: int,
    folder: Path,
    where: str,
    files: dict[str, tuple[Path, int]],
) -> None:
    name = tensor.name or "(unnamed)"
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    if location not in files:
        files[location] = external_file(location, folder, where)
    path, available = files[location]
    if tensor.data_type == _T.STRING:
        raise ModelFileError(f"the string tensor {name!r} is external data", where=where)
    numbers = {}
    for key in ("offset", "length"):
        text = entries.get(key, "")
        if text and not _INTEGER.fullmatch(text):
            raise ModelFileError(
                f"the tensor {name!r} has the external data {key} {text[:40]!r}", where=where
            )
        numbers[key] = int(text or "0")
    # No length means the bytes that the type asks for; ONNX writes "0" for it at times.
    length = numbers["length"] or size
    if length < size:
        raise ModelFileError(
            f"the tensor {name!r} needs {size} bytes and {path.name} gives it {length}",
            where=where,
            fix="the file is damaged: export or download it again",
        )
    if numbers["offset"] + length > available:
        raise ModelFileError(
            f"the external data file {path.name} is too short: tensor {name!r} ends at byte "
            f"{numbers['offset'] + length} of {available}",
            where=where,
            fix="download or export the data file again",
        )


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model, wherever it stands."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        yield from _node_tensors(function.node)
        for attribute in function.attribute_proto:
            yield from _attribute_tensors(attribute)
    for training in proto.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: Any) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    for sparse in (*attribute.sparse_tensors, *_present(attribute, "sparse_tensor")):
        yield from (sparse.values, sparse.indices)
    for graph in (*attribute.graphs, *_present(attribute, "g")):
        yield from _graph_tensors(graph)


def _present(message: Any, field: str) -> tuple[Any, ...]:
    return (getattr(message, field),) if message.HasField(field) else ()
