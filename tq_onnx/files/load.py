"""Load a model: the only place that opens one.

``load(path)`` resolves the path once, refuses what is not an ONNX model, runs ``preflight`` and
builds the onnx-ir graph. Weights in external data are never read: they stay references, whose
base folder is the real folder of the model. (onnx-ir checks containment only when a base folder is
set, so none of its tensors may leave here without one.)

Every refusal is a ``ModelFileError`` of one sentence; a pipe or a device is refused before it is
opened, so nothing can hang.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import onnx_ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx_ir import external_data

from tq_onnx.errors import ModelFileError, UnsupportedModelError
from tq_onnx.files.preflight import is_blob, preflight
from tq_onnx.files.regular import open_regular

MAX_PROTOBUF_BYTES: Final = (1 << 31) - 1

_DEFAULT_DOMAINS: Final = ("", "ai.onnx")
_SNIFFED: Final = (
    (
        b"version https://git-lfs",
        "the file is a Git LFS pointer, not the model",
        "run `git lfs pull`",
    ),
    (b"GGUF", "the file is a GGUF file, not an ONNX model", "export the model to ONNX"),
    (b"PK\x03\x04", "the file is a zip archive, not an ONNX model", "unpack it first"),
    (b"\x1f\x8b", "the file is a gzip archive, not an ONNX model", "unpack it first"),
)
_EXPECTED: Final = "give the .onnx file of an exported decoder"


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, its weights still on disk."""

    model: onnx_ir.Model  #: the graph; the stages after this one change it in place
    #: real path of the model; its parent is the folder that external data is relative to
    path: Path
    #: the external data files, below that folder, in order of first use
    external_files: tuple[Path, ...]
    opset: int  #: version of the default ONNX domain
    branch: str = ""  #: the branch of an If in the file that the model is; empty for the whole file


def load(path: Path) -> LoadedModel:
    """Load a model without reading its external weights."""
    where = str(path)
    home, content = _locate(path, where)
    proto = _parse(content, where)
    files = preflight(proto, home.parent, where)
    opsets = [entry.version for entry in proto.opset_import if entry.domain in _DEFAULT_DOMAINS]
    if not opsets:
        raise ModelFileError(
            "the model does not declare its ONNX opset", where=where, fix="export it again"
        )
    try:
        model = onnx_ir.from_proto(proto)
    except Exception as error:  # onnx-ir has no closed set of errors for damaged graphs
        detail = f"{type(error.__cause__ or error).__name__}"
        raise ModelFileError(
            f"the graph cannot be read ({detail})", where=where, fix="export it again"
        ) from error
    _set_base(model, home.parent, files)
    return LoadedModel(model, home, files, max(opsets))


def _locate(path: Path, where: str) -> tuple[Path, bytes]:
    """Resolve the path and read the file.

    A link in the Hugging Face cache stays where it is, because its external data lies beside the
    link; any other link is followed, because it lies beside the target.
    """
    try:
        target = path.resolve(strict=True)
        status = target.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(
                "the path is a folder, not a model", where=where, fix=_in_folder(target)
            )
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError("the path is not a regular file", where=where, fix=_EXPECTED)
        if status.st_size == 0:
            raise ModelFileError(
                "the file is empty", where=where, fix="export or download it again"
            )
        if status.st_size > MAX_PROTOBUF_BYTES:
            raise ModelFileError(
                f"the file has {status.st_size} bytes, and an ONNX file has at most 2 GiB",
                where=where,
                fix="export it with external data",
            )
        folder = path.parent.resolve(strict=True)
        home = folder / path.name if is_blob(target, folder) else target
        with open_regular(target) as file:
            return home, file.read()
    except FileNotFoundError as error:
        raise ModelFileError("there is no such file", where=where, fix=_EXPECTED) from error
    except (OSError, RuntimeError, ValueError) as error:
        detail = getattr(error, "strerror", None) or type(error).__name__
        raise ModelFileError(
            f"the file cannot be read ({detail})", where=where, fix=_EXPECTED
        ) from error


def _in_folder(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.glob("*.onnx"))[:3]
    return f"give the file in it, such as {names[0]}" if names else _EXPECTED


def _parse(content: bytes, where: str) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError as error:
        what, fix = _sniff(content)
        raise ModelFileError(what, where=where, fix=fix) from error
    if not proto.HasField("graph"):
        what, fix = _sniff(content)
        raise ModelFileError(what, where=where, fix=fix)
    if not proto.graph.node:
        raise ModelFileError("the graph is empty", where=where, fix=_EXPECTED)
    # onnx-ir drops both without a word.
    if proto.graph.sparse_initializer or proto.training_info:
        what = "sparse initializers" if proto.graph.sparse_initializer else "training information"
        raise UnsupportedModelError(
            f"the model has {what}", where=where, fix="export it for inference"
        )
    return proto


def _sniff(content: bytes) -> tuple[str, str]:
    """Return the probable kind of a file that is no ONNX model, and the advice for it."""
    for magic, what, fix in _SNIFFED:
        if content.startswith(magic):
            return what, fix
    if content[4:8] == b"ORTM":
        return (
            "the file is in ONNX Runtime's own format",
            "give the .onnx file that it was made from",
        )
    head = content[:512]
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return "the file is a web page, not an ONNX model", "download the file itself"
    if head[8:9] == b"{":
        return (
            "the file looks like a safetensors file, not an ONNX model",
            "export the model to ONNX",
        )
    if all(byte >= 0x20 or byte in b"\t\r\n\f" for byte in head):
        return "the file is a text file, not an ONNX model", _EXPECTED
    return (
        "the file is not an ONNX model, or it is damaged or cut short",
        "export or download it again",
    )


class _LinkedTensor(onnx_ir.ExternalTensor):
    """External data behind a link that ``preflight`` has followed and found to be inside.

    onnx-ir refuses to read through symbolic links that leave the folder, and files with several
    hard links. The location that is written back stays the one that was read.
    """

    __slots__ = ("_file",)

    def __init__(self, tensor: onnx_ir.ExternalTensor, file: Path) -> None:
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=tensor.metadata_props,
        )
        self._file = file

    @property
    def path(self) -> str:
        """The real file."""
        return str(self._file)


def _set_base(model: onnx_ir.Model, folder: Path, files: tuple[Path, ...]) -> None:
    for graph in model.graphs():
        external_data.set_base_dir(graph, folder)
    for function in model.functions.values():
        external_data.set_base_dir(function.graph, folder)
    linked = {f for f in files if f.is_symlink() or f.resolve() != f or f.stat().st_nlink > 1}
    if not linked:
        return
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, onnx_ir.ExternalTensor):
                file = Path(tensor.path).resolve()
                if any(file == link.resolve() for link in linked):
                    value.const_value = _LinkedTensor(tensor, file)
