"""An original: a model that was read and recognised, and is still as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tq_onnx.conversion.branches import split
from tq_onnx.conversion.cautions import Rings
from tq_onnx.conversion.check import snapshot_interface
from tq_onnx.conversion.ports import InterfaceSnapshot
from tq_onnx.conversion.wellformed import broken_node
from tq_onnx.errors import ModelFileError, TqOnnxError, UnsupportedModelError, located
from tq_onnx.files.load import LoadedModel
from tq_onnx.recognise.match import Recognition, recognise

_MOST_DETAIL: Final = 200
_SEE_INSPECT: Final = "`tq-onnx inspect` shows every layer and what stands in the way of each"


@dataclass(frozen=True, eq=False)
class Original:
    """A model that was read and recognised, completely or not."""

    loaded: LoadedModel  #: the model, and where it came from
    interface: InterfaceSnapshot  #: what a conversion must not change
    recognition: Recognition  #: what was found in it
    #: the file, if the model is the part of a merged one that takes caches
    merged: Merged | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all caches that hold all tokens, from their own element types."""
        return Rings.of(self.recognition.sites).growing

    def expect_complete(self, path: Path) -> None:
        """Refuse a model that was not recognised completely."""
        if self.merged is not None:
            self.merged.first.expect_complete(path)
        misses = self.recognition.misses
        if self.recognition.sites and not misses:
            return
        what = str(misses[0]) if misses else "no attention layer was found"
        if len(misses) > 1:
            what += f" (and {len(misses) - 1} more)"
        raise UnsupportedModelError(what, where=str(path), fix=_SEE_INSPECT)


@dataclass(frozen=True, eq=False)
class Merged:
    """A file that holds a decoder in two branches of an If."""

    loaded: LoadedModel  #: the whole model
    interface: InterfaceSnapshot  #: what a conversion must not change of it
    first: Original  #: the part that takes no caches


def recognise_original(
    loaded: LoadedModel, path: Path, *, recognition: Recognition | None = None
) -> Original:
    """Look for attention in a model; of a merged one in both parts."""
    try:
        interface = snapshot_interface(loaded.model)
    except Exception as error:  # what cannot be written cannot be converted either
        detail = " ".join(str(error).split())[:_MOST_DETAIL]
        raise invalid(f"{type(error).__name__}: {detail}", path) from error
    broken = broken_node(loaded.model, standard=bool(interface.complaint))
    if broken:
        raise invalid(broken, path)
    parts = split(loaded) if recognition is None and not loaded.branch else None
    if parts is not None:
        first, following = (
            recognise_original(part, path) for part in (parts.first, parts.following)
        )
        return replace(following, merged=Merged(loaded, interface, first))
    with blaming(interface, path), located(path):
        recognition = recognition or recognise(loaded.model)
    return Original(loaded, interface, recognition)


@contextmanager
def blaming(interface: InterfaceSnapshot, path: Path) -> Iterator[None]:
    """Tell a defect of tq-onnx from a model that was broken before."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        refused = isinstance(error, TqOnnxError) and error.exit_code != TqOnnxError.exit_code
        if refused or not interface.complaint:
            raise
        raise invalid(interface.complaint, path) from error


def invalid(text: str, path: Path) -> ModelFileError:
    """Make the error for a graph that was broken before the conversion."""
    return ModelFileError(
        f"the file is not a valid model ({text})",
        where=str(path),
        fix="export it again",
    )
