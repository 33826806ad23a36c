"""One decoder in, a folder with its graphs of fixed sizes out, written at once or not at all.

A graph that a provider compiles takes a fixed number of tokens in a call, so that prompts and steps
have one each. Both continue the same caches, and the runtime here takes both where it is given the
folder. What tells a tokenizer and a model's sizes goes along.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tq_onnx.codec.presets import DEFAULT_PRESET
from tq_onnx.conversion import pipeline
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.planning import DEFAULT_OPTIONS
from tq_onnx.conversion.reports import ConversionReport
from tq_onnx.conversion.target import STEP_FILE, Target
from tq_onnx.errors import ModelFileError, OutputExistsError
from tq_onnx.files.abandoned import is_empty
from tq_onnx.files.oversize import stage_model
from tq_onnx.files.save import SavedFiles, refusal
from tq_onnx.files.transaction import Transaction
from tq_onnx.integrations.folderconversion import FolderReport
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.fingerprint import expect_model_of

COMPANIONS: Final = (
    *("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
)
"""Files beside a decoder that belong to its tokenizer or tell its sizes."""


def convert_to_graphs(
    path: Path,
    output: Path,
    *,
    preset: str = DEFAULT_PRESET,
    options: Options = DEFAULT_OPTIONS,
    target: Target,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> FolderReport:
    """Convert a decoder to the graphs of its target's ``files``, in one folder.

    Args:
        path: the original, a file; it is never changed.
        output: the folder to write.
        preset: a name in ``codec.presets.PRESETS``.
        options: what else is asked for.
        target: of several files.
        overwrite: whether files of a folder that exists may be replaced; others in it stay.
        on_progress: called as each file is begun.

    Raises:
        OutputExistsError: there is something in the folder and ``overwrite`` is false.
        ModelFileError: the output is no folder, or cannot be written.
        TqOnnxError: as for ``tq_onnx.conversion.pipeline.convert``.
    """
    tell = on_progress or silent
    folder = _folder(output, overwrite)
    transaction = Transaction(overwrite)
    reports: list[ConversionReport] = []
    written = 0
    try:
        transaction.make_folder(folder)
        for index, (name, values) in enumerate(target.files.items()):
            tell(Progress(f"Converting to {name}", index, len(target.files)))
            # A number of tokens that was asked for is one of prompts.
            overrides = {} if name == STEP_FILE else target.values
            chosen = target.having(**{**values, **overrides})
            prepared = pipeline.prepare(
                path,
                preset=preset,
                options=options,
                target=chosen,
                on_calibration=None if reports else expect_model_of,
            )
            staged = stage_model(transaction, prepared.loaded.model, folder / name)
            files = SavedFiles(folder / name, (), None, staged.size, staged.data)
            reports.append(prepared.report(files))
            written += staged.size + staged.data_size
        carried = tuple(name for name in COMPANIONS if (path.parent / name).is_file())
        for name in carried:
            size = transaction.copy(path.parent / name, folder / name, 0, 0, None)
            written += size
        transaction.commit()
    except BaseException as error:
        transaction.undo()
        if isinstance(error, OSError):
            raise refusal(error, output) from error
        raise
    return FolderReport(path, folder, tuple(reports), carried, (), None, (), None, written)


def _folder(output: Path, overwrite: bool) -> Path:
    """Return the output as a real path, or refuse it."""
    folder = Path(os.path.realpath(output))
    if os.path.lexists(folder) and not folder.is_dir():
        raise ModelFileError(
            "the output exists and is not a folder",
            where=str(output),
            fix="give another folder as `output`",
        )
    if folder.is_dir() and not overwrite and not is_empty(folder):
        raise OutputExistsError(
            "the output folder exists",
            where=str(output),
            fix="give `overwrite=True` to replace what has the same names in it, or another folder",
        )
    return folder
