"""A model folder in, the same folder with TurboQuant caches out, written at once or not at all.

``convert_folder`` converts every decoder of a folder with one preset and seed, under the names they
have, and takes along what belongs to them (see ``tq_onnx.integrations.folder``). Each data file is
copied, or hard-linked, once. A folder of onnxruntime-genai also gets the operator library and a
patched configuration (``tq_onnx.integrations.genai``), and runs there as it is.

Everything is written under temporary names and renamed at the end, models after their data and
configurations last; whatever goes wrong before, nothing is left. Decoders come first, so that a
refusal costs no copying. One that cannot be converted is left out and named, with its reason, where
others can: folders of transformers.js hold a decoder in many forms. The original folder is only
read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tq_onnx.codec.presets import DEFAULT_PRESET, find_preset
from tq_onnx.conversion import pipeline
from tq_onnx.conversion.options import Options, without
from tq_onnx.conversion.planning import DEFAULT_OPTIONS
from tq_onnx.conversion.reports import ConversionReport
from tq_onnx.conversion.target import CPU, Target
from tq_onnx.errors import ModelFileError, OutputExistsError, UnsupportedModelError, UsageError
from tq_onnx.files.abandoned import is_empty
from tq_onnx.files.configuration import CONFIGURATION
from tq_onnx.files.oversize import stage_model
from tq_onnx.files.save import ExternalData, SavedFiles, check_space, refusal
from tq_onnx.files.transaction import Transaction, same_content
from tq_onnx.integrations.folder import (
    Folder,
    LeftOut,
    read_by_name,
    require_decoder,
    shortened,
    survey,
    without_models,
)
from tq_onnx.integrations.genai import (
    CONFIG_FILE,
    GenaiChanges,
    GenaiConfig,
    check_config,
    patch_config,
)
from tq_onnx.integrations.modelcard import (
    MARK,
    ORIGINAL_README,
    README,
    described_config,
    folder_card,
    text_of,
)
from tq_onnx.ops.features import EXACT_WINDOW, SPARE_ROWS
from tq_onnx.plan import Plan
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.fingerprint import expect_model_of
from tq_onnx.runtime.library import get_library_path

_CONFIGURATIONS: Final = (CONFIG_FILE, CONFIGURATION)

NO_LIBRARY: Final = (
    "only folders of onnxruntime-genai carry a library; models are the same for every platform"
)


@dataclass(frozen=True)
class FolderReport:
    """The report of a folder's conversion.

    Attributes:
        source: the original folder.
        output: the converted folder.
        decoders: what was done to each decoder.
        carried: files that went along, relative to the folder: other models, tokenizer, ...
        data: external data files, likewise.
        external_data: whether those were copied or hard-linked; None without any.
        left_out: files that did not go along, and why.
        genai: what was changed in genai_config.json; None without one.
        bytes_written: size of everything that was written.
    """

    source: Path
    output: Path
    decoders: tuple[ConversionReport, ...]
    carried: tuple[str, ...]
    data: tuple[str, ...]
    external_data: ExternalData | None
    left_out: tuple[LeftOut, ...]
    genai: GenaiChanges | None
    bytes_written: int

    @property
    def ratio(self) -> float:
        """How many times smaller the caches are, of the decoder that gains least."""
        return min(decoder.ratio for decoder in self.decoders)


def default_output(folder: Path, kind: str) -> Path:
    """Return the folder beside the original that a conversion of a kind writes by default."""
    real = Path(os.path.realpath(folder)) if folder.name in ("", "..") else folder
    return real.with_name(f"{real.name}-{kind}")


def convert_folder(
    folder: Path,
    output: Path,
    *,
    preset: str = DEFAULT_PRESET,
    options: Options = DEFAULT_OPTIONS,
    target: Target = CPU,
    overwrite: bool = False,
    external_data: ExternalData | None = None,
    library: Path | None = None,
    on_progress: OnProgress | None = None,
) -> FolderReport:
    """Convert all decoders of a folder.

    Args:
        options: what else is asked for, the same for every decoder. A folder of
            onnxruntime-genai gets equal rows and exact tokens in spare rows in any case.
        overwrite: whether files of an output that exists may be replaced; others in it stay, and
            must be none that a runtime would read.
        library: the operator library for a folder of onnxruntime-genai; by default that of this
            installation.
    """
    find_preset(preset)
    if external_data == "keep":
        raise UsageError(
            "a converted folder has its data files in it", fix="choose copy or link instead of keep"
        )
    tell = on_progress or silent
    written = check_folder(folder, output, overwrite)
    content = survey(folder, on_progress, to_convert=True)
    require_decoder(content, folder)
    if content.genai is None:
        if library is not None:
            raise UsageError(NO_LIBRARY, where=str(folder), fix="leave `platform` and `wheel` out")
    else:
        check_config(content.genai)
        options = _genai_options(options, target)
        library = library or get_library_path()
    job = _Job(content, folder, written, Transaction(overwrite), external_data or "copy")
    try:
        job.check_room(library)
        job.transaction.make_folder(written)
        reports = []
        refused: dict[str, UnsupportedModelError] = {}
        for index, model in enumerate(content.decoders):
            tell(Progress(f"Converting {model.name}", index, len(content.decoders)))
            try:
                prepared = pipeline.prepare(
                    folder / model.name,
                    preset=preset,
                    options=options,
                    target=target,
                    original=content.originals.pop(model.name, None),
                    on_calibration=expect_model_of,
                )
            except UnsupportedModelError as error:
                refused[model.name] = error
                if content.genai is not None:  # which runs all of them, or none
                    raise
            else:
                reports.append(prepared.report(job.write_model(prepared, model.name)))
        _expect_decoders(reports, refused)
        _check_pairs(reports, folder)
        content = job.content = without_models(
            content, {name: error.what for name, error in refused.items()}
        )
        left_out = {entry.name for entry in content.left_out}
        _expect_no_mix(written, output, lambda name: name not in left_out)
        changes = None
        if content.genai is not None and library is not None:
            plans = dict(
                zip(
                    (model.name for model in content.decoders),
                    (r.plan for r in reports),
                    strict=True,
                )
            )
            changes = job.write_genai(content.genai, plans, library, target)
        job.describe(reports)
        tell(Progress("Copying files"))
        carried = job.copy(on_progress, library)
        job.commit()
    except BaseException as error:
        job.transaction.undo()
        if isinstance(error, OSError):
            raise refusal(error, output) from error
        raise
    return FolderReport(
        content.path,
        written,
        tuple(reports),
        carried,
        content.data,
        job.mode if content.data else None,
        content.left_out,
        changes,
        job.written,
    )


def _genai_options(options: Options, target: Target) -> Options:
    """Return the options of a folder of onnxruntime-genai: equal rows, exact tokens in spare rows.

    Buffers of max_length rows have none of their own for exact tokens.
    """
    features = target.capabilities.features
    if not target.in_pages and SPARE_ROWS not in features and EXACT_WINDOW in features:
        options = without(options, [EXACT_WINDOW])
    return replace(options, equal_rows=True, spare_rows=True)


def _expect_decoders(
    reports: Sequence[ConversionReport], refused: Mapping[str, UnsupportedModelError]
) -> None:
    """Raise the first refusal unless something is left that decodes by itself."""
    decodes = any(layer.key.past for report in reports for layer in report.plan.layers)
    for error in refused.values():
        if not decodes:
            raise error


def _check_pairs(reports: Sequence[ConversionReport], folder: Path) -> None:
    """Refuse graphs for first prompts whose caches no graph beside them could go on with."""
    firsts = [r for r in reports if any(layer.key.past is None for layer in r.plan.layers)]
    continuations = [r for r in reports if r not in firsts]
    for first in firsts:
        for continuation in continuations:
            shapes = [
                [(layer.kv_num_heads, layer.value.size, layer.dtype) for layer in r.plan.layers]
                for r in (first, continuation)
            ]
            layer = first.plan.unlike(continuation.plan) if shapes[0] == shapes[1] else None
            if layer is not None:
                names = " and ".join(r.source.name for r in (first, continuation))
                raise UsageError(
                    f"the caches of layer {layer} of {names} would hold different numbers, because "
                    "scales find a place in one of them only",
                    where=str(folder),
                    fix="give `equalize=False`",
                )


class _Job:
    """A conversion that is being written, and its bytes so far."""

    def __init__(
        self,
        content: Folder,
        shown: Path,
        target: Path,
        transaction: Transaction,
        mode: ExternalData,
    ) -> None:
        self.content = content
        self.shown = shown
        self.target = target
        self.transaction = transaction
        self.mode = mode
        self.written = 0
        self.described: dict[str, str | None] = {README: ORIGINAL_README}
        converted = {model.name for model in content.models if model.role != "other"}
        models = tuple(model.name for model in content.models if model.name not in converted)
        self.carried = (*models, *content.companions)

    def check_room(self, library: Path | None) -> None:
        """Refuse what the file system has no room for, before anything is written."""
        names = [*self.carried, *(model.name for model in self.content.decoders)]
        if self.mode == "copy":
            names += self.content.data
        sizes = [(self.content.path / name).stat().st_size for name in names]
        if library is not None:
            sizes.append(library.stat().st_size)
        home = self.target
        while not home.exists():
            home = home.parent
        check_space(home, sum(sizes))

    def write_model(self, prepared: pipeline.Prepared, name: str) -> SavedFiles:
        """Stage one decoder under the name it has."""
        target = self.target / name
        occupied = {self.target / data for data in self.content.data}
        loaded = prepared.loaded
        staged = stage_model(self.transaction, loaded.model, target, occupied=occupied)
        self.written += staged.size + staged.data_size
        data = tuple(
            target.parent / file.relative_to(loaded.path.parent) for file in loaded.external_files
        )
        mode = self.mode if data else None
        return SavedFiles(target, data, mode, staged.size + staged.data_size, staged.data)

    def write_genai(
        self, config: GenaiConfig, plans: dict[str, Plan], library: Path, target: Target
    ) -> GenaiChanges:
        """Stage the configuration of onnxruntime-genai."""
        named = {name: plan for name, plan in plans.items() if name in config.decoders}
        content, changes = patch_config(config, named, library.name, target.values)
        self.written += self.transaction.write(self.target / CONFIG_FILE, [content])
        return changes

    def describe(self, reports: Sequence[ConversionReport]) -> None:
        """Stage README.md and config.json, which say what the folder is.

        A README.md of the original goes along under another name. One in the output that people
        wrote stays.
        """
        original, card = self.content.path / README, self.target / README
        before = text_of(card) if card.exists() else MARK
        if MARK in before or before == text_of(original):
            of_genai = self.content.genai is not None
            text = folder_card(self.content.path, self.target, reports, of_genai=of_genai)
            self.written += self.transaction.write(card, [text.encode()])
        config = described_config(self.content.path, reports[0].plan)
        if config is not None and CONFIGURATION in self.carried:
            self.written += self.transaction.write(self.target / CONFIGURATION, [config])
            self.described[CONFIGURATION] = None

    def copy(self, on_progress: OnProgress | None, library: Path | None) -> tuple[str, ...]:
        """Stage all files that stay as they are; return the names of those that are no data."""
        carried = tuple(
            name for name in self.carried if name != CONFIG_FILE or self.content.genai is None
        )
        root = self.content.path
        places = {name: self.described.get(name, name) for name in carried}
        copies = [(root / name, self.target / place) for name, place in places.items() if place]
        data = [(root / name, self.target / name) for name in self.content.data]
        if self.mode == "copy":
            copies += data
        if library is not None:
            if any(target.name == library.name for _, target in copies):
                raise ModelFileError(
                    f"the folder has a file {library.name}, the name of the operator library",
                    where=str(self.shown),
                    fix="remove that file from the folder",
                )
            copies.append((library, self.target / library.name))
        total, position = sum(source.stat().st_size for source, _ in copies), 0
        for source, target in copies:
            size = source.stat().st_size
            if target.exists() and same_content(target, source, position, total, on_progress):
                position += size
                continue
            position = self.transaction.copy(source, target, position, total, on_progress)
            self.written += size
        for source, target in data if self.mode == "link" else ():
            if not (target.exists() and target.samefile(source)):
                self.transaction.link(source, target)
        return carried

    def commit(self) -> None:
        """Rename everything: models after the rest, configurations at the end."""
        models = [self.target / model.name for model in self.content.models]
        last = [self.target / name for name in _CONFIGURATIONS]
        self.transaction.commit(last=[*models, *last])


def check_folder(folder: Path, output: Path, overwrite: bool) -> Path:
    """Return the output as a real path."""
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(output))
    if target == root or target.is_relative_to(root) or root.is_relative_to(target):
        raise ModelFileError(
            "the output folder overlaps with the original",
            where=str(output),
            fix="give a folder beside it as `output`",
        )
    if os.path.lexists(target) and not target.is_dir():
        raise ModelFileError(
            "the output exists and is not a folder",
            where=str(output),
            fix="give another folder as `output`",
        )
    if target.is_dir() and not overwrite and not is_empty(target):
        raise OutputExistsError(
            "the output folder exists",
            where=str(output),
            fix="give `overwrite=True` to replace what has the same names in it, or another folder",
        )
    _expect_no_mix(target, output, lambda name: os.path.lexists(root / name))
    return target


def _expect_no_mix(target: Path, shown: Path, is_written: Callable[[str], bool]) -> None:
    """Refuse an output with files that would stay, and that a runtime would read."""
    names = [name for name in read_by_name(target) if not is_written(name)]
    if names:
        raise OutputExistsError(
            "the output folder has files that this conversion does not write, and that a runtime "
            f"may read beside the new ones ({shortened(names)})",
            where=str(shown),
            fix="remove them, or give another folder as `output`",
        )
