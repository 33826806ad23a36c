"""tq-onnx: a 4-bit TurboQuant KV cache for ONNX language models.

    import tq_onnx
    report = tq_onnx.convert("model.onnx", preset="int4")
    assert tq_onnx.verify("model.onnx", report.output).holds

Names are imported when they are first used: ``import tq_onnx`` itself loads neither onnx nor
onnxruntime. Every error is a ``tq_onnx.errors.TqOnnxError`` and says what to do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from tq_onnx.version import __version__

if TYPE_CHECKING:
    from tq_onnx import errors
    from tq_onnx.api.calibrating import calibrate
    from tq_onnx.api.converting import adopt, convert, diff, inspect
    from tq_onnx.api.fitting import fit
    from tq_onnx.api.measuring import bench, report, verify
    from tq_onnx.api.running import get_library_path, library_path, load, register, session_options
    from tq_onnx.codec.presets import PRESETS
    from tq_onnx.language.cache import Cache
    from tq_onnx.language.chat import Chat
    from tq_onnx.language.engine import Engine
    from tq_onnx.language.model import LanguageModel
    from tq_onnx.language.promptstore import PromptStore
    from tq_onnx.language.text import Completion, Piece
    from tq_onnx.progress import Progress
    from tq_onnx.runtime.guidance import Guidance
    from tq_onnx.runtime.sampling import Sampling

__all__ = [
    "PRESETS",
    "Cache",
    "Chat",
    "Completion",
    "Engine",
    "Guidance",
    "LanguageModel",
    "Piece",
    "Progress",
    "PromptStore",
    "Sampling",
    "__version__",
    "adopt",
    "bench",
    "calibrate",
    "convert",
    "diff",
    "errors",
    "fit",
    "get_library_path",
    "inspect",
    "library_path",
    "load",
    "register",
    "report",
    "session_options",
    "verify",
]

ROOMS: Final = {
    "api.converting": ("adopt", "convert", "diff", "inspect"),
    "api.calibrating": ("calibrate",),
    "api.fitting": ("fit",),
    "api.measuring": ("bench", "report", "verify"),
    "api.running": ("get_library_path", "library_path", "load", "register", "session_options"),
    "codec.presets": ("PRESETS",),
    "language.cache": ("Cache",),
    "language.chat": ("Chat",),
    "language.engine": ("Engine",),
    "language.model": ("LanguageModel",),
    "language.promptstore": ("PromptStore",),
    "language.text": ("Completion", "Piece"),
    "runtime.guidance": ("Guidance",),
    "runtime.sampling": ("Sampling",),
    "progress": ("Progress",),
}
"""Where public names come from."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name == "errors":
        return importlib.import_module("tq_onnx.errors")
    for room, names in ROOMS.items():
        if name in names:
            value = getattr(importlib.import_module(f"tq_onnx.{room}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
