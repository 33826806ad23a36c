"""Turn errors of ONNX Runtime into one sentence: the problem, the file, and what to do."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Final

import onnxruntime

from tq_onnx.errors import (
    LibraryError,
    ModelFileError,
    TqOnnxError,
    UnsupportedModelError,
    UsageError,
)
from tq_onnx.runtime.providers import CPU, ExecutionProvider

_ERROR_PREFIX: Final = re.compile(r"^\s*\[ONNXRuntimeError\]\s*:\s*\d+\s*:\s*\w+\s*:\s*")
_SOURCE_PLACE: Final = re.compile(
    r"^\S*[/\\]\S+:\d+\s+(?:\S+::)*[^(]*\([^)]*\)\s*(?:\[[^]]*\]\s*)?"
)
_QUOTED: Final = re.compile(r'"([^"]+)"')
_STATUS: Final = re.compile(r"^.*Non-zero status code returned.*?Name:'([^']*)' Status Message: ")
_MESSAGE_LENGTH: Final = 240
_ADVICE_LENGTH: Final = 1000


def run_error(error: Exception, where: str, ep: ExecutionProvider = CPU) -> TqOnnxError:
    """Return the one-sentence form of an error that ONNX Runtime raised while running a graph."""
    message = message_of(error)
    # The width of the table is wrong in the model, whatever the text.
    if "cos_cache" in message and "dimension 1" not in message:
        return UsageError(
            "the text is longer than the positions of the model",
            where=where,
            fix="give fewer tokens",
        )
    return UnsupportedModelError(
        f"onnxruntime cannot run the model: {message}", where=where, fix=ep.export
    )


def load_error(error: Exception, where: str, ep: ExecutionProvider = CPU) -> TqOnnxError:
    """Return the one-sentence form of an error that ONNX Runtime raised while opening a model."""
    kind = type(error).__name__
    message = message_of(error)
    if (provider_error := _provider_error(message, error, where, ep)) is not None:
        return provider_error
    if kind == "InvalidProtobuf":
        return ModelFileError("this is not an ONNX model", where=where, fix="check the file")
    # ONNX Runtime 1.24 names only the file system's complaint.
    signs = ("xternal data", "xternal initializer", "cannot get file size")
    if kind == "NoSuchFile" or any(sign in message for sign in signs):
        named = _QUOTED.findall(" ".join(str(error).split()))
        file = f" from {named[-1]}" if named else f": {message}"
        return ModelFileError(
            f"the weights cannot be read{file}",
            where=where,
            fix="put the external data file beside the model",
        )
    if kind == "NotImplemented":
        return UnsupportedModelError(
            f"the CPU has no kernel for a node: {message}",
            where=where,
            fix="export the model for the CPU",
        )
    return UnsupportedModelError(
        f"onnxruntime {onnxruntime.__version__} refuses the graph: {message}",
        where=where,
        fix=ep.export,
    )


def _provider_error(
    message: str, error: Exception, where: str, ep: ExecutionProvider
) -> LibraryError | None:
    """Return the error of a device or its libraries; None if it is something else."""
    if ep.not_created and ep.not_created in message:
        return not_loaded(ep)
    if ep.failed and ep.failed in message:
        return LibraryError(
            f"{ep.provider} does not work here: {message}",
            where=where,
            fix="see whether the device is free and has room",
        )
    if ep.advised and ep.advised in str(error):
        # The library names the variable where its kernels are missing, and says what to do.
        return LibraryError(message_of(error, length=_ADVICE_LENGTH), where=where)
    return None


def message_of(error: Exception, length: int = _MESSAGE_LENGTH) -> str:
    """Return ONNX Runtime's message without its prefix, source places and line breaks."""
    text = _ERROR_PREFIX.sub("", " ".join(str(error).split()))
    text = _STATUS.sub(r"node \1: ", text)
    text = text.replace("Exception during initialization: ", "")
    text = _SOURCE_PLACE.sub("", text).strip().rstrip(".")
    return text if len(text) <= length else f"{text[:length]}..."


def absent(ep: ExecutionProvider) -> LibraryError | None:
    """Return the error for a provider that this ONNX Runtime does not have; None if it does."""
    available = onnxruntime.get_available_providers()
    if ep.provider in available:
        return None
    return LibraryError(
        f"this onnxruntime {onnxruntime.__version__} has no {ep.provider}, "
        f"only {', '.join(available)}",
        fix=f"install {ep.package} in an environment of its own",
    )


def not_loaded(ep: ExecutionProvider) -> LibraryError:
    """Return the error for a provider that did not load though ONNX Runtime has it."""
    reason = _loader_error(ep)
    return LibraryError(
        f"onnxruntime {onnxruntime.__version__} cannot load its {ep.provider}"
        + (f" ({reason})" if reason else ""),
        fix=f"install the libraries and the device that {ep.package} needs, and have the loader "
        "find them",
    )


def _loader_error(ep: ExecutionProvider) -> str:
    """Return the library that the loader misses: ONNX Runtime prints it and does not raise."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    for path in folder.glob(f"*onnxruntime_providers_{ep.name}.*"):
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            return str(error)
    return ""
