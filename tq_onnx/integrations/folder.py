"""Survey a model folder: decoders, other models, their data, and what goes along with them.

``survey`` looks at a folder of onnxruntime-genai (``genai_config.json``) or of Hugging Face
(``config.json`` beside ``*.onnx``, perhaps in ``onnx/``). Every ONNX file is inspected; a decoder
is one that has caches. The other files are sorted into those that go along (tokenizer,
configurations, chat template, ...), data of the models, and those that do not: weights that no
model here reads, folders and locks of tools.

A link counts as its target if that lies in the folder, or in the ``blobs`` of the Hugging Face
cache that holds the folder; any other link is refused with ``ModelFileError``.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from tq_onnx.conversion.inspect import examine, foresee
from tq_onnx.conversion.original import Original
from tq_onnx.conversion.reports import InspectionReport
from tq_onnx.errors import (
    AlreadyConvertedError,
    ModelFileError,
    UnsupportedModelError,
    UsageError,
)
from tq_onnx.files.preflight import is_blob
from tq_onnx.integrations.genai import CONFIG_FILE, GenaiConfig, read_config
from tq_onnx.progress import OnProgress, Progress, silent

Role = Literal["decoder", "converted", "other"]

_TOOL_FOLDERS: Final = frozenset({".git", ".cache", "__pycache__"})
_TOOL_FILES: Final = re.compile(r".*\.(lock|incomplete|tmp|pyc)|\.DS_Store")
_WEIGHTS: Final = re.compile(
    r".*\.(data|data[_.-]?\d+|onnx_data|onnx_data_\d+|safetensors|gguf|ggml|ckpt|pt|pth|h5|msgpack|ot)"
    r"|pytorch_model.*\.bin|openvino.*\.bin|.*\.safetensors\.index\.json|pytorch_model.*\.json",
    re.IGNORECASE,
)
_READ_BY_NAME: Final = re.compile(
    r".*\.(onnx|onnx_adapter|json|jinja|model)|(vocab|merges)\.txt", re.IGNORECASE
)
"""Models, configurations, tokenizers. Weights are read where a model names them."""
_LARGEST_COMPANION: Final = 256 << 20
"""No tokenizer is larger; what is, and is read by no model here, is weights of some kind."""
_MOST_KEPT: Final = 1 << 31
"""Bytes of the decoders that are kept in memory between survey and conversion: as many as one file
can have. Others are read twice."""
_SHOWN: Final = 6
UNREAD: Final = "weights that no ONNX file here reads"


@dataclass(frozen=True)
class FolderModel:
    """An ONNX file of a folder.

    Attributes:
        name: its path relative to the folder, with forward slashes.
        role: ``decoder`` has caches to convert, ``converted`` has TurboQuant caches already,
            ``other`` has none.
        report: what ``inspect`` found.
    """

    name: str
    role: Role
    report: InspectionReport


@dataclass(frozen=True)
class LeftOut:
    """A file that does not go along, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Folder:
    """The content of a model folder."""

    path: Path  #: its real path
    models: tuple[FolderModel, ...]  #: the ONNX files
    data: tuple[str, ...]  #: data files of those that go along, relative to the folder
    companions: tuple[str, ...]  #: the other files that go along, likewise
    left_out: tuple[LeftOut, ...]  #: what does not
    genai: GenaiConfig | None  #: its genai_config.json, if it has one
    #: decoders by name, as they were read, if a conversion is to follow; not those for which there
    #: was no room in memory
    originals: dict[str, Original]

    @property
    def decoders(self) -> tuple[FolderModel, ...]:
        """The models to convert."""
        return tuple(model for model in self.models if model.role == "decoder")


def survey(
    folder: Path, on_progress: OnProgress | None = None, *, to_convert: bool = False
) -> Folder:
    """Look at a folder; change nothing.

    Args:
        to_convert: whether to keep the decoders for a conversion, instead of telling what scales
            from their norm weights would do.
    """
    root = Path(os.path.realpath(folder))
    if (root / "snapshots").is_dir() and (root / "blobs").is_dir():
        raise UsageError(
            "this is a whole repository of the Hugging Face cache",
            where=str(folder),
            fix="give one of the folders in its snapshots",
        )
    left_out: list[LeftOut] = []
    names = tuple(_files(root, folder, left_out))
    genai = read_config(root)
    for name in () if genai is None else (*genai.decoders, *genai.others):
        if name not in names:
            raise ModelFileError(
                f"the configuration names {name}, which is not in the folder",
                where=str(folder / CONFIG_FILE),
                fix="complete the download or the export",
            )
    models: list[FolderModel] = []
    originals: dict[str, Original] = {}
    room = _MOST_KEPT
    for name in names:
        if not name.endswith(".onnx"):
            continue
        (on_progress or silent)(Progress(f"Looking at {name}"))
        model, original = _model(root, folder, name, genai)
        size = (root / name).stat().st_size
        if original is not None and not to_convert:
            model = replace(model, report=foresee(model.report, original))
        elif original is not None and model.role == "decoder" and size <= room:
            originals[name] = original
            room -= size
        models.append(model)
    data = dict.fromkeys(
        file.relative_to(root).as_posix()
        for model in models
        if model.role != "converted"
        for file in model.report.external_files
    )
    left_out += [
        LeftOut(model.name, "converted by tq-onnx already")
        for model in models
        if model.role == "converted"
    ]
    plain_files = [name for name in names if not name.endswith(".onnx") and name not in data]
    reasons = {name: _why_not(root / name) for name in plain_files}
    left_out += [LeftOut(name, reason) for name, reason in reasons.items() if reason]
    companions = tuple(name for name, reason in reasons.items() if not reason)
    return Folder(root, tuple(models), tuple(data), companions, tuple(left_out), genai, originals)


def without_models(content: Folder, reasons: Mapping[str, str]) -> Folder:
    """Leave models out, and the data that only they read."""
    if not reasons:
        return content
    models = tuple(model for model in content.models if model.name not in reasons)
    read = {
        file.relative_to(content.path).as_posix()
        for model in models
        for file in model.report.external_files
    }
    gone = [LeftOut(name, reason) for name, reason in reasons.items()]
    gone += [LeftOut(name, UNREAD) for name in content.data if name not in read]
    return replace(
        content,
        models=models,
        data=tuple(name for name in content.data if name in read),
        left_out=(*content.left_out, *gone),
    )


def require_decoder(content: Folder, folder: Path) -> None:
    """Refuse a folder that has nothing to convert."""
    if content.decoders:
        return
    if any(model.role == "converted" for model in content.models):
        raise AlreadyConvertedError(
            "the decoders in this folder have TurboQuant caches already",
            where=str(folder),
            fix="convert the original folder instead",
        )
    if content.models:
        seen = [
            f"{model.name}: {model.report.misses[0].reason if model.report.misses else 'no caches'}"
            for model in content.models
        ]
        raise UnsupportedModelError(
            f"no ONNX file in this folder is a decoder with caches ({shortened(seen)})",
            where=str(folder),
            fix="export the decoder with past key/value inputs and outputs",
        )
    raise no_model(folder)


def read_by_name(root: Path) -> Iterator[str]:
    """Yield the files below a folder that runtimes look for, by relative name, in order."""
    for home, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _TOOL_FOLDERS)
        names = (name for name in sorted(files) if _READ_BY_NAME.fullmatch(name))
        yield from ((Path(home) / name).relative_to(root).as_posix() for name in names)


def no_model(folder: Path) -> ModelFileError:
    """Return the refusal of a folder without an ONNX file."""
    seen = sorted(entry.name for entry in folder.glob("*"))
    return ModelFileError(
        f"there is no ONNX file in this folder (it has {shortened(seen) or 'no files'})",
        where=str(folder),
        fix="export the model to ONNX first",
    )


def find_model(path: Path) -> Path:
    """Find the model file that a user means: the path itself, or the decoder in a folder."""
    if not path.is_dir():
        return path
    genai = read_config(path)
    if genai is not None and len(genai.decoders) == 1:
        return path / genai.decoders[0]
    for usual in ("model.onnx", "onnx/model.onnx", "decode.onnx", "decoder_with_past_model.onnx"):
        if (path / usual).is_file():
            return path / usual
    files = sorted(entry for pattern in ("*.onnx", "onnx/*.onnx") for entry in path.glob(pattern))
    if len(files) == 1:
        return files[0]
    if not files:
        raise no_model(path)
    names = shortened([entry.relative_to(path).as_posix() for entry in files])
    raise UsageError(
        f"there are several ONNX files in this folder ({names})",
        where=str(path),
        fix="name the one you mean",
    )


def _files(root: Path, folder: Path, left_out: list[LeftOut]) -> Iterator[str]:
    """Yield the regular files below the root, by relative name, in order."""
    for home, folders, files in os.walk(root, onerror=_raise):
        parent = Path(home)
        for name in sorted(folders):
            if (parent / name).is_symlink():
                shown = (parent / name).relative_to(root).as_posix()
                left_out.append(LeftOut(shown, "a link to a folder"))
        folders[:] = sorted(set(folders) - _TOOL_FOLDERS)
        for name in sorted(files):
            path = parent / name
            shown = path.relative_to(root).as_posix()
            if _TOOL_FILES.fullmatch(name):
                continue
            if _is_file(path, root, folder / shown):
                yield shown
            else:
                left_out.append(LeftOut(shown, "not a regular file"))


def _is_file(path: Path, root: Path, where: Path) -> bool:
    """Return True if a path is a regular file, here or where a link may lead."""
    if path.is_symlink():
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ModelFileError(
                "is a link to a file that is missing",
                where=str(where),
                fix="complete the download, or remove the link",
            ) from error
        if not real.is_relative_to(root) and not is_blob(real, path.parent):
            raise ModelFileError(
                "is a link that leaves the folder",
                where=str(where),
                fix="put the file itself there",
            )
        path = real
    return stat.S_ISREG(path.stat().st_mode)


def _model(
    root: Path, folder: Path, name: str, genai: GenaiConfig | None
) -> tuple[FolderModel, Original | None]:
    path = root / name
    shown = folder / name
    report, original = examine(shown)
    if report.model.parent != path.parent:
        raise ModelFileError(
            "is a link to a model in another folder", where=str(shown), fix="put the file there"
        )
    return FolderModel(name, _role(name, report, original, genai), report), original


def _role(
    name: str, report: InspectionReport, original: Original | None, genai: GenaiConfig | None
) -> Role:
    if original is None:
        return "converted"
    if genai is not None and name in genai.others:
        return "other"
    if genai is not None and (name,) == genai.decoders:
        return "decoder"
    if report.layers:
        return "decoder"
    if all(miss.layer is None for miss in report.misses):
        return "other"
    # A decoder gives logits, keys and values; an image in and an image out look like a cache too.
    return "decoder" if len(original.interface.outputs) > 2 else "other"


def _why_not(path: Path) -> str:
    """Return why a file that is no model does not go along; empty if it does."""
    if path.name.endswith(".calibration.safetensors"):
        return "statistics of the original, which only conversions read"
    if _WEIGHTS.fullmatch(path.name):
        return UNREAD
    if path.stat().st_size > _LARGEST_COMPANION:
        return "large, and no ONNX file here reads it"
    return ""


def shortened(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    remainder = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + remainder


def _raise(error: OSError) -> None:
    raise error
