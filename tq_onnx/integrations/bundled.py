"""The bundled model: a small trained Qwen3, rebuilt into the ONNX files that exporters make.

The package carries the weights once (``model.safetensors``, float16) and, for each export route, a
skeleton ``ROUTE.skeleton.onnx``: the real export, with each weight declared as external data at a
fixed place of ``model.onnx.data``. The skeleton's metadata entry ``METADATA_WEIGHTS`` says what
belongs there: JSON ``{initializer: {"axis": A, "parts": [[tensor, transposed], ...]}}``, the named
safetensors tensors, each transposed or not, joined along an axis and widened to the initializer's
type. ``build_bundled`` writes that data file and the model beside it, equal in every value to the
export; ``models/make_skeletons.py`` proves it before it writes a skeleton. No torch is involved.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.errors import ModelFileError, OutputExistsError, UsageError
from tq_onnx.files.save import all_or_nothing
from tq_onnx.integrations.weights import FloatArray, read_safetensors

ROUTES: Final = ("dynamo", "genai")
METADATA_WEIGHTS: Final = "tq_onnx.bundled_weights"
MODEL_FILE: Final = "model.onnx"
DATA_FILE: Final = "model.onnx.data"
WEIGHTS_FILE: Final = "model.safetensors"
HELDOUT_FILE: Final = "heldout.txt"
#: Files that users find beside an export; copied as they are.
COMPANION_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True)
class WeightRecipe:
    """The recipe that makes an initializer from the tensors of the safetensors file."""

    axis: int  #: axis along which the parts are joined
    parts: tuple[tuple[str, bool], ...]  #: tensor names, and whether each is transposed first

    def assemble(self, tensors: Mapping[str, FloatArray]) -> npt.NDArray[Any]:
        """Join the parts, in the dtype they are stored in.

        Raises:
            KeyError: a tensor is missing.
            ValueError: the parts do not fit together.
        """
        parts = [tensors[name].T if turned else tensors[name] for name, turned in self.parts]
        joined: npt.NDArray[Any] = np.concatenate(parts, axis=self.axis)
        return joined


def recipes_to_json(recipes: Mapping[str, WeightRecipe]) -> str:
    """Write recipes by initializer name as the value of ``METADATA_WEIGHTS``."""
    entries = {name: {"axis": r.axis, "parts": r.parts} for name, r in recipes.items()}
    return json.dumps(entries, separators=(",", ":"))


def recipes_from_json(text: str) -> dict[str, WeightRecipe]:
    """Read what ``recipes_to_json`` wrote.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the text is something else.
    """
    return {
        name: WeightRecipe(entry["axis"], tuple((part, turned) for part, turned in entry["parts"]))
        for name, entry in json.loads(text).items()
    }


def bundled_directory() -> Path:
    """Return the folder of the bundled model.

    In an installed package it is ``tq_onnx/bundled``; in a checkout, from which an editable
    installation also runs, ``models/qwen3-tiny``.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = [package / "bundled", package.parent / "models" / "qwen3-tiny"]
    try:
        located = importlib.metadata.distribution("tq-onnx").locate_file("tq_onnx/bundled")
        candidates.append(Path(str(located)))
    except importlib.metadata.PackageNotFoundError:
        pass
    for candidate in candidates:
        if (candidate / WEIGHTS_FILE).is_file():
            return candidate
    raise ModelFileError(
        "the bundled model is missing from this installation",
        where=str(candidates[0]),
        fix="install tq-onnx again, from a wheel or a complete checkout",
    )


def heldout_text() -> str:
    """Return the text that the bundled model was not trained on."""
    path = bundled_directory() / HELDOUT_FILE
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            "the held-out text cannot be read", where=str(path), fix="install tq-onnx again"
        ) from error


def build_bundled(route: str, directory: Path, *, source: Path | None = None) -> Path:
    """Rebuild the bundled model's export: ``model.onnx``, its data file, configs and tokenizer.

    Nothing is written unless all weights could be put together.

    Args:
        route: one of ``ROUTES``: ``dynamo`` (``torch.onnx.export``, opset 18, sdpa) or ``genai``
            (the onnxruntime-genai model builder, CPU); both float32.

    Returns:
        The path of ``model.onnx``.
    """
    if route not in ROUTES:
        raise UsageError(f"no bundled export is called {route!r}", fix=f"use {' or '.join(ROUTES)}")
    source = bundled_directory() if source is None else source
    for name in (MODEL_FILE, DATA_FILE):
        if (directory / name).exists():
            raise OutputExistsError(
                "the file exists already", where=str(directory / name), fix="use another directory"
            )
    model, recipes = _read_skeleton(source / f"{route}.skeleton.onnx")
    tensors = read_safetensors(source / WEIGHTS_FILE)
    weights = list(_assemble(model, recipes, tensors, source))
    data = BytesIO()
    for offset, array in weights:
        data.seek(offset)
        data.write(array.tobytes())
    with all_or_nothing(directory) as transaction:
        transaction.write(directory / DATA_FILE, [data.getbuffer()])
        content = ir.to_proto(model).SerializeToString()
        transaction.write(directory / MODEL_FILE, [content])
        for name in COMPANION_FILES:
            if (source / name).is_file():
                transaction.copy(source / name, directory / name, 0, 0, None)
    return directory / MODEL_FILE


def _read_skeleton(path: Path) -> tuple[ir.Model, dict[str, WeightRecipe]]:
    """Return the skeleton without its recipes, and the recipes."""
    try:
        model = ir.load(path)
        return model, recipes_from_json(model.metadata_props.pop(METADATA_WEIGHTS))
    # A damaged protobuf raises whatever its decoder chose; none of it may reach a user.
    except Exception as error:
        raise ModelFileError(
            "the bundled model's skeleton is missing or damaged",
            where=str(path),
            fix="install tq-onnx again",
        ) from error


def _assemble(
    model: ir.Model,
    recipes: Mapping[str, WeightRecipe],
    tensors: Mapping[str, FloatArray],
    source: Path,
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield the offset in the data file and the values of each external initializer."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        try:
            array = recipes[name].assemble(tensors)
        except (KeyError, ValueError) as error:
            raise _mismatch(source, name) from error
        widened = array.astype(tensor.dtype.numpy().newbyteorder("<"))
        if widened.shape != tensor.shape.numpy() or widened.nbytes != tensor.length:
            raise _mismatch(source, name)
        yield tensor.offset or 0, widened


def _mismatch(source: Path, weight: str) -> ModelFileError:
    return ModelFileError(
        f"weight {weight!r} of the export cannot be made from the tensors",
        where=str(source / WEIGHTS_FILE),
        fix="install tq-onnx again: weights and skeletons belong together",
    )
