"""Show what ``convert`` would find in a folder, or did to one. Nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tq_onnx.integrations.folder import FolderModel, LeftOut, require_decoder, survey
from tq_onnx.integrations.genai import check_config

if TYPE_CHECKING:
    from tq_onnx.progress import OnProgress


@dataclass(frozen=True)
class FolderInspection:
    """The content of a folder, and whether it can be converted.

    Attributes:
        folder: its real path.
        convertible: whether ``convert`` would convert its decoders, of which there is one or more:
            all of them in a folder of onnxruntime-genai, and one or more in others.
        models: the ONNX files, with what ``inspect`` finds in each.
        data: data files that would go along, relative to the folder.
        companions: other files that would go along, likewise.
        left_out: files that would not, and why.
        genai: whether it is a folder of onnxruntime-genai.
    """

    folder: Path
    convertible: bool
    models: tuple[FolderModel, ...]
    data: tuple[str, ...]
    companions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    genai: bool

    @property
    def is_converted(self) -> bool:
        """True if the decoders are converted ones, all of them."""
        return not self.of_role("decoder")

    def of_role(self, role: str) -> tuple[FolderModel, ...]:
        """Return the models of a role: ``decoder``, ``converted`` or ``other``."""
        return tuple(model for model in self.models if model.role == role)


def inspect_folder(folder: Path, on_progress: OnProgress | None = None) -> FolderInspection:
    """Look into a folder."""
    content = survey(folder, on_progress)
    if not any(model.role == "converted" for model in content.models):
        require_decoder(content, folder)
    decoders = content.decoders
    if decoders and content.genai is not None:
        check_config(content.genai)
    return FolderInspection(
        folder=content.path,
        convertible=bool(decoders)
        and (any if content.genai is None else all)(model.report.convertible for model in decoders),
        models=content.models,
        data=content.data,
        companions=content.companions,
        left_out=content.left_out,
        genai=content.genai is not None,
    )
