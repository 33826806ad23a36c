"""All checks on an Ascend NPU, with the bundled trained model among them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tq_onnx.api.arguments import AnyPath, path_of
from tq_onnx.ascend import verification as npu

if TYPE_CHECKING:
    from tq_onnx.progress import OnProgress

PROMPT_TOKENS: Final = 24


def verify_on_npu(
    models: Sequence[AnyPath] = (),
    *,
    seconds: float = npu.PART_SECONDS,
    kept: AnyPath | None = None,
    on_progress: OnProgress | None = None,
) -> npu.NpuReport:
    """Check operators, models, placement and graph mode on an Ascend NPU.

    Args:
        models: models to check besides the bundled one, converted for CANN or originals.
        seconds: how long each part may take.
        kept: a file for the parts that are finished: the next call goes on from it. It is left
            there. None to keep nothing.
        on_progress: called as each part begins.

    Returns:
        All checks, times and the environment; ``holds`` is the verdict.

    Raises:
        LibraryError: there is no CANN in this environment.
    """
    from tq_onnx.integrations.bundled import build_bundled, heldout_text
    from tq_onnx.integrations.folder import find_model

    files = tuple(find_model(path_of(model)) for model in models)
    # A token of the bundled model is a byte.
    prompt = tuple(heldout_text().encode()[:PROMPT_TOKENS])
    with tempfile.TemporaryDirectory(prefix="tq-onnx-npu-") as folder:
        trained = build_bundled("dynamo", Path(folder) / "trained")
        return npu.verify_on_npu(
            npu.Request(trained, prompt, files),
            part_seconds=seconds,
            kept=None if kept is None else path_of(kept),
            on_progress=on_progress,
        )
