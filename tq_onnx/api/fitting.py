"""Tell how long a context fits into memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from tq_onnx.api.arguments import AnyPath, at_least, path_of, within
from tq_onnx.errors import UsageError

if TYPE_CHECKING:
    from tq_onnx.progress import OnProgress
    from tq_onnx.speed.fit import FitReport

MAX_MEMORY: Final = 2**60
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(i?)b?|b)?\s*", re.IGNORECASE)
_POWERS: Final = {"k": 1, "m": 2, "g": 3, "t": 4}


def fit(
    path: AnyPath,
    *,
    memory: int | str | None = None,
    context: int | None = None,
    sequences: int = 1,
    on_progress: OnProgress | None = None,
) -> FitReport:
    """Find the largest contexts for a memory, or the memory for a context.

    Nothing is run: the weights are not read, and what a call needs is counted in the graph.

    Args:
        path: an original or a converted model, or a folder with one decoder.
        memory: for the whole process, in bytes or as ``"16GB"`` (1000s) or ``"16GiB"`` (1024s); by
            default what is free, limits of containers included.
        context: tokens of each sequence; by default the largest that fit.
        sequences: texts whose caches are in memory at the same time.
        on_progress: called as each step begins.

    Returns:
        For the model as it is and, if it is an original, for every preset: the context, the bytes
        of its caches, and the peak of the process.

    Raises:
        UnsupportedModelError: it is no decoder that tq-onnx recognises.
    """
    at_least(1, context=context, sequences=sequences)
    size = memory_of(memory) if isinstance(memory, str) else memory
    within(1, MAX_MEMORY, memory=size)
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.speed.fit import fit as run

    return run(
        find_model(path_of(path)),
        memory=size,
        context=context,
        sequences=sequences,
        on_progress=on_progress,
    )


def memory_of(text: str) -> int:
    """Return the bytes of a size like ``16GB``, ``512MiB`` or ``1000000``.

    Raises:
        UsageError: it is no such text, or more than there is.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no size", fix="write it like 16GB, 512MiB or 1000000")
    number, unit, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** _POWERS.get((unit or "").lower(), 0)
    if size > MAX_MEMORY:
        raise UsageError(f"{text!r} is more than any machine has")
    return int(size)
