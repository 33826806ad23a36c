"""Gather the statistics of a model, for ``convert(..., calibration=)``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tq_onnx.api.arguments import AnyPath, at_least, path_of
from tq_onnx.codec.extremes import Extremes, warnings_of
from tq_onnx.runtime import arguments

if TYPE_CHECKING:
    from tq_onnx.progress import OnProgress

DEFAULT_CONTEXT: Final = 2048
"""Tokens per window."""


@dataclass(frozen=True)
class CalibrationReport:
    """The report of ``calibrate``.

    Attributes:
        model: the original.
        output: the calibration file.
        source: where the tokens come from.
        bytes: its size.
        layers: attention layers of the model.
        tokens: tokens that were read.
        context: tokens of the longest windows.
        text_digest: SHA-256 of their ids.
        extremes: vectors that scales in float16 cannot hold, of every cache.
        warnings: one sentence about them, if there are any, one about a text that is too short, and
            one about layers whose keys do not turn with their positions as rotary embedding does.
    """

    model: Path
    output: Path
    source: str
    bytes: int
    layers: int
    tokens: int
    context: int
    text_digest: str
    extremes: tuple[Extremes, ...] = ()
    warnings: tuple[str, ...] = ()


def calibrate(
    model: AnyPath,
    text: AnyPath | None = None,
    output: AnyPath | None = None,
    *,
    tokens: int = 16384,
    skip: int = 0,
    context: int | None = None,
    tokenizer: AnyPath | None = None,
    threads: int | None = None,
    library: bool = True,
    overwrite: bool = False,
    on_progress: OnProgress | None = None,
) -> CalibrationReport:
    """Gather statistics of an original on a text, for ``convert(..., calibration=)``.

    Args:
        model: the original; it is not changed.
        text: UTF-8 text to read, of the kind that the model will see; by default a text that comes
            with tq-onnx: prose, code, lists and tables, in several languages.
        output: the file to write; by default MODEL with ``.calibration.safetensors``.
        tokens: tokens of the text to read.
        skip: tokens at the start of the text to leave out.
        context: tokens of the longest windows; others have a half and a quarter of them. Each
            begins with empty caches. By default 2,048, or as many as the model takes.
        tokenizer: folder with ``tokenizer.json``; by default the folder of the model.
        threads: threads within an operator; by default onnxruntime's choice.
        library: whether the kernels of the operator library run; if not, the function bodies.
        overwrite: whether an output that exists may be replaced.
        on_progress: called as tokens are read.

    Returns:
        What was written.

    Raises:
        UnsupportedModelError: the model cannot be converted or run.
        OutputExistsError: the output exists.
        LibraryError: the operator library is missing or does not fit.
    """
    at_least(1, tokens=tokens, context=context)
    at_least(0, skip=skip)
    threads = arguments.thread_count(threads)
    from tq_onnx.conversion.branches import load_decoder
    from tq_onnx.conversion.calibrationfile import check_target, write_calibration
    from tq_onnx.conversion.original import recognise_original
    from tq_onnx.files.configuration import configured_positions
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import OWN_TEXT, calibration_tokens

    source = find_model(path_of(model))
    target = path_of(output) or _default_output(source)
    check_target(target, overwrite=overwrite)
    original = recognise_original(load_decoder(source), source)
    ids, begin = calibration_tokens(source, path_of(text), path_of(tokenizer), tokens, skip)
    from tq_onnx.quality import calibrate as room

    calibration = room.calibrate(
        source,
        ids,
        original=original,
        context=context or min(DEFAULT_CONTEXT, configured_positions(source) or DEFAULT_CONTEXT),
        begin=begin,
        library=library,
        threads=threads,
        on_progress=on_progress,
    )
    write_calibration(target, calibration, overwrite=overwrite)
    return CalibrationReport(
        model=source,
        output=target,
        source=OWN_TEXT if text is None else str(path_of(text)),
        bytes=target.stat().st_size,
        layers=len(calibration.layers),
        tokens=calibration.tokens,
        context=calibration.context,
        text_digest=calibration.text_digest,
        extremes=calibration.extremes,
        warnings=(
            *warnings_of(calibration.extremes),
            *(doubt for doubt in (calibration.shortage, calibration.turns_unknown) if doubt),
        ),
    )


def beside(model: Path, on_progress: OnProgress | None = None) -> Path:
    """Return the calibration file that lies beside a model; make it if there is none.

    Args:
        model: the original, a file or a folder with one decoder.
        on_progress: called as tokens are read.

    Raises:
        ModelFileError: the model cannot be read, or there is no tokenizer either.
        UnsupportedModelError, LibraryError: as ``calibrate``.
    """
    from tq_onnx.files.load import load
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.integrations.tokens import expect_tokenizer, tokenizer_folder

    source = find_model(model)
    target = _default_output(source)
    if not target.exists():
        if tokenizer_folder(None, source) is None:
            load(source)  # a tokenizer does not help a file that is damaged
        expect_tokenizer(source)
        calibrate(source, on_progress=on_progress)
    return target


def _default_output(model: Path) -> Path:
    return model.with_name(f"{model.stem}.calibration.safetensors")
