"""Convert a model or a folder, look into one, and compare it with what it was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tq_onnx.api import calibrating
from tq_onnx.api.arguments import AnyPath, at_least, path_of, within
from tq_onnx.codec.presets import DEFAULT_SEED, MAX_SEED, find_preset
from tq_onnx.codec.spec import MAX_BITS
from tq_onnx.conversion.options import CENTER_FROM, Options
from tq_onnx.conversion.target import CPU
from tq_onnx.errors import UsageError
from tq_onnx.integrations import hub
from tq_onnx.targets.registry import target_of

if TYPE_CHECKING:
    from tq_onnx.conversion.reports import ConversionReport, InspectionReport
    from tq_onnx.integrations.adoption import AdoptionReport
    from tq_onnx.integrations.folderconversion import FolderReport
    from tq_onnx.integrations.folderinspection import FolderInspection
    from tq_onnx.progress import OnProgress
    from tq_onnx.verification.diff import DiffReport

ExternalData = Literal["keep", "copy", "link"]


def convert(
    path: AnyPath,
    output: AnyPath | None = None,
    *,
    preset: str | None = None,
    target: str = CPU.name,
    overwrite: bool = False,
    external_data: ExternalData | None = None,
    rotation: str | None = None,
    seed: int = DEFAULT_SEED,
    bits_k: int | None = None,
    bits_v: int | None = None,
    boundary_layers: int = 0,
    layers: str | None = None,
    equalize: bool | None = None,
    calibration: AnyPath | None = None,
    calibrate: bool = False,
    center_from: int | None = None,
    residual_length: int | None = None,
    sink_tokens: int | None = None,
    platform: str | None = None,
    wheel: AnyPath | None = None,
    revision: str | None = None,
    include: str | None = None,
    on_progress: OnProgress | None = None,
    **target_options: int | None,
) -> ConversionReport | FolderReport:
    """Convert a decoder, or all decoders of a folder, to a TurboQuant KV cache.

    Args:
        path: the original, a file or a folder, or OWNER/NAME of Hugging Face, which is fetched
            into its cache; it is never changed.
        output: the file or folder to write; by default ``default_output``.
        preset: a name in ``tq_onnx.PRESETS``, or vLLM's name of one, as ``turboquant_4bit_nc``; by
            default int4.
        target: what the model is to run on, a name in ``tq_onnx.targets.registry``.
        overwrite: whether an output that exists may be replaced; in a folder, files of the same
            names.
        external_data: what becomes of weights in files beside the original: ``keep`` them where
            they are, ``copy`` or hard-``link`` them; by default keep for an output in the same
            folder, else copy.
        rotation: ``qr`` or ``hadamard``; by default the preset's.
        seed: base seed of the rotations.
        bits_k: bits of the keys, in the preset's kind of codec.
        bits_v: bits of the values, likewise.
        boundary_layers: that many layers at each end stay uncompressed.
        layers: the layers to compress, as ``4-12`` or ``0,2-5``, counted from 0; by default all.
        equalize: whether queries are multiplied and keys divided by scales; by default wherever
            a calibration, or the weights of norms in front of them, tells which.
        calibration: a file that ``calibrate`` made of this model.
        calibrate: whether to use the calibration file that lies beside the model, and to make it
            there first if there is none, as ``calibrate`` does by default. That runs the original.
        center_from: the first token that shares one mean with all later ones; only with
            ``calibration``, 4 by default.
        residual_length: how many of the newest tokens each cache holds in float16, too, for
            queries near them; independent of the model's sliding window. By default the preset's
            number, 0 for a target without exact tokens: web.
        sink_tokens: how many of the first tokens, likewise; independent of the sinks of a model's
            heads.
        platform: of a folder of onnxruntime-genai, the platform whose operator library it gets, as
            ``adopt`` takes it.
        wheel: where that library is, likewise.
        revision: a branch, tag or commit of OWNER/NAME; by default its main branch.
        include: a pattern of its ONNX files to fetch, as ``onnx/model_q4.onnx``; by default all.
        on_progress: called as each step begins, and while files are copied.
        **target_options: options of the target, named as those of ``tq-onnx convert``; None for
            the default.

    Returns:
        What was done. The reports of a file and of a folder both have ``source``, ``output`` and
        ``ratio``;
        that of a folder has ``decoders``, one report of a file for each.

    Raises:
        UnsupportedModelError: the model cannot be converted, or is converted already.
        LibraryError: a folder of onnxruntime-genai needs the operator library, and there is none.
    """
    if external_data not in (None, *get_args(ExternalData)):
        raise UsageError(f"external_data is {external_data!r}, not keep, copy or link")
    if calibrate and calibration is not None:
        raise UsageError(
            "`calibrate` and `calibration` name two files", fix="leave one of them out"
        )
    if calibration is None and not calibrate and center_from is not None:
        raise UsageError(
            "`center_from` says where the statistics of `calibration` begin, and there are none",
            fix="give `calibration`, or leave `center_from` out",
        )
    within(0, MAX_SEED, seed=seed)
    within(1, MAX_BITS, bits_k=bits_k, bits_v=bits_v)
    at_least(0, boundary_layers=boundary_layers, center_from=center_from)
    at_least(0, residual_length=residual_length, sink_tokens=sink_tokens)
    made_for = target_of(target, **target_options)
    chosen_preset = preset or made_for.default_preset
    source = path_of(path)
    repository = hub.repository_of(source)
    if repository is None and (revision is not None or include is not None):
        raise UsageError(
            "`revision` and `include` are about repositories of Hugging Face",
            where=str(source),
            fix="leave them out",
        )
    if repository is not None and calibrate:
        raise UsageError(
            "`calibrate` writes a file beside the model, and Hugging Face's cache is no place for "
            "it",
            where=repository,
            fix="fetch it with `hf download` into a folder, and convert that",
        )
    calibrated = calibrate or calibration is not None
    written = path_of(output) or default_output(
        source, chosen_preset, target, calibrated=calibrated
    )
    if calibrate:  # takes minutes, so an output that cannot be written is told first
        if source.is_dir():
            from tq_onnx.integrations.folderconversion import check_folder

            check_folder(source, written, overwrite)
        else:
            from tq_onnx.files.load import load
            from tq_onnx.files.save import check_output

            check_output(load(source), written, overwrite=overwrite, external_data=external_data)
        calibration = calibrating.beside(source, on_progress)
    options = Options(
        rotation=rotation,
        seed=seed,
        bits_k=bits_k,
        bits_v=bits_v,
        boundary_layers=boundary_layers,
        layers=layers,
        equalize=equalize,
        calibration=path_of(calibration),
        center_from=CENTER_FROM if center_from is None else center_from,
        residual_length=residual_length,
        sink_tokens=sink_tokens,
    )
    if repository is not None:
        source = hub.fetch(repository, revision, include)
    chosen: dict[str, Any] = {
        "preset": chosen_preset,
        "options": options,
        "target": made_for,
        "overwrite": overwrite,
        "external_data": external_data,
        "on_progress": on_progress,
    }
    is_placed = platform is not None or wheel is not None
    if source.is_dir():
        from tq_onnx.integrations.adoption import library_for
        from tq_onnx.integrations.folderconversion import convert_folder

        if not is_placed:
            return convert_folder(source, written, **chosen)
        with library_for(platform, path_of(wheel)) as library:
            return convert_folder(source, written, library=library.path, **chosen)
    if is_placed:
        from tq_onnx.integrations.folderconversion import NO_LIBRARY

        raise UsageError(NO_LIBRARY, where=str(source), fix="leave `platform` and `wheel` out")
    from tq_onnx.conversion import pipeline
    from tq_onnx.runtime.fingerprint import expect_model_of

    return pipeline.convert(source, written, **chosen, on_calibration=expect_model_of)


def default_output(
    path: AnyPath,
    preset: str | None = None,
    target: str = CPU.name,
    *,
    calibrated: bool = False,
) -> Path:
    """Return where ``convert`` writes by default, beside the original.

    Args:
        path: the original.
        preset: of the conversion; by default that of the target.
        target: of the conversion.
        calibrated: whether it has a calibration.

    Returns:
        ``MODEL.PRESET.onnx`` or ``FOLDER-PRESET``; ``PRESET-cal`` with a calibration, and
        ``-TARGET`` behind that for a target but the CPU. For OWNER/NAME of Hugging Face,
        ``NAME-PRESET`` in the current folder.
    """
    source = path_of(path)
    made_for = target_of(target)
    name = find_preset(preset or made_for.default_preset).name
    kind = made_for.kind(f"{name}-cal" if calibrated else name)
    is_repository = hub.repository_of(source) is not None
    if not source.is_dir() and not is_repository:
        return source.with_name(f"{source.stem}.{kind}.onnx")
    from tq_onnx.integrations import folderconversion

    if is_repository:
        source = Path(source.name)
    return folderconversion.default_output(source, kind)


def adopt(
    folder: AnyPath, *, platform: str | None = None, wheel: AnyPath | None = None
) -> AdoptionReport:
    """Replace the operator library in a converted folder of onnxruntime-genai.

    ``convert`` puts the library of the machine that it runs on into such a folder. The models in it
    are the same for every platform and stay.

    Args:
        folder: a folder that ``convert`` wrote.
        platform: the platform that it is for, a name in ``tq_onnx.runtime.platforms.PLATFORMS``; by
            default that of the wheel, or of this machine.
        wheel: a wheel of tq-onnx for that platform, or a folder with wheels of several. Without it
            the library of this installation is taken.

    Returns:
        The platform, its library, and what it replaced.

    Raises:
        LibraryError: there is no library of that platform.
        UnsupportedModelError: the folder carries no library of tq-onnx.
    """
    from tq_onnx.integrations.adoption import adopt_folder

    return adopt_folder(path_of(folder), platform=platform, wheel=path_of(wheel))


def diff(original: AnyPath, converted: AnyPath) -> DiffReport:
    """Compare the graphs of an original and of its conversion; neither is run.

    Args:
        original: the original, a file or a folder with one decoder.
        converted: its conversion, likewise.

    Returns:
        Nodes, caches and weights that changed, for each layer and in total.

    Raises:
        VerificationError: the converted model was not made from this original.
        UnsupportedModelError: ``original`` is a conversion, or ``converted`` is none.
    """
    from tq_onnx.integrations.folder import find_model
    from tq_onnx.verification.diff import diff as run

    return run(find_model(path_of(original)), find_model(path_of(converted)))


def inspect(
    path: AnyPath, *, on_progress: OnProgress | None = None
) -> InspectionReport | FolderInspection:
    """Describe an original (what ``convert`` would find) or a conversion (what it did).

    Args:
        path: an original or a converted model, or a folder of them; it is not changed.
        on_progress: called before each file of a folder is read.

    Returns:
        Layers, presets and their cache bytes, or why it cannot be converted; for a converted model
        its plan. For a folder, this of each model, and what else ``convert`` would take along.

    Raises:
        ModelFileError: there is no ONNX file in a folder.
        UnsupportedModelError: there is no decoder in a folder.
    """
    source = path_of(path)
    if source.is_dir():
        from tq_onnx.integrations.folderinspection import inspect_folder

        return inspect_folder(source, on_progress)
    from tq_onnx.conversion import inspect as inspection

    return inspection.inspect(source)
