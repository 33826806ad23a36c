"""Make the bundled exports: run both exporters, then write their graphs without the weights.

For each route the real export is made, and every weight is looked up by its values among the
tensors of ``model.safetensors``: as it is, transposed, or as several joined along an axis (the
genai builder packs q, k and v). What was found becomes a recipe in the skeleton's metadata; what is
not in the safetensors (tables of cosines, small constants) stays in the skeleton. Nothing is
guessed: a weight that matches two tensors stops the script, and so does a large float constant that
matches none, unless it is named in ``TABLES``.

Before a skeleton is written, the model is rebuilt from it by ``tq_onnx.integrations.bundled`` and
compared with the export: the two must serialise to the same bytes.

Example::

    python models/make_skeletons.py models/qwen3-tiny            # needs torch: export, prove, write
    python models/make_skeletons.py models/qwen3-tiny --check    # the same, comparing, not writing
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tq_onnx.integrations.bundled import (
    DATA_FILE,
    METADATA_WEIGHTS,
    MODEL_FILE,
    ROUTES,
    WEIGHTS_FILE,
    WeightRecipe,
    build_bundled,
    recipes_to_json,
)
from tq_onnx.integrations.weights import FloatArray, read_safetensors

#: Constants larger than this must be found among the weights or be one of ``TABLES``.
LARGE_ELEMENTS = 64
TABLES = frozenset({"cos_cache", "sin_cache"})
#: Weights begin at multiples of this in the data file.
ALIGNMENT = 64


def export(route: str, model_dir: Path, directory: Path) -> Path:
    """Make the real export of a route; return its ``model.onnx``."""
    import export_dynamo
    import export_genai

    path = directory / MODEL_FILE
    directory.mkdir(parents=True)
    if route == "dynamo":
        export_dynamo.export(model_dir, path, opset=18, attention="sdpa", dtype="float32")
    else:
        export_genai.export(model_dir, directory, precision="fp32", ep="cpu")
    return path


def find(values: npt.NDArray[Any], tensors: Mapping[str, FloatArray]) -> list[WeightRecipe]:
    """Return every way to make ``values`` from the tensors."""
    if values.ndim == 1:
        return [
            WeightRecipe(0, ((name, False),))
            for name, tensor in tensors.items()
            if np.array_equal(tensor, values)
        ]
    whole = [WeightRecipe(0, parts) for parts in _joins(values, tensors) if len(parts) == 1]
    joined = [
        WeightRecipe(axis, parts)
        for axis in (0, 1)
        for parts in _joins(values if axis == 0 else values.T, tensors, turned=axis == 1)
        if len(parts) > 1
    ]
    return whole + joined


def _joins(
    rows: npt.NDArray[Any], tensors: Mapping[str, FloatArray], *, turned: bool = False
) -> Iterator[tuple[tuple[str, bool], ...]]:
    """Yield each sequence of parts that, one below the other, gives ``rows``.

    ``turned`` says that the caller transposed the values, so that a part used as it is counts as
    transposed.
    """
    if rows.shape[0] == 0:
        yield ()
        return
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            continue
        for transposed in (False, True):
            part = tensor.T if transposed else tensor
            head = rows[: part.shape[0]]
            if part.shape == head.shape and np.array_equal(part, head):
                for following in _joins(rows[part.shape[0] :], tensors, turned=turned):
                    yield ((name, transposed != turned), *following)


def make_skeleton(
    model: ir.Model, tensors: Mapping[str, FloatArray]
) -> tuple[ir.Model, dict[str, WeightRecipe]]:
    """Replace the weights of ``model``, in place, by references to a data file to be rebuilt."""
    recipes: dict[str, WeightRecipe] = {}
    end = 0
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None:
            raise SystemExit(f"{name}: no value")
        if tensor.size <= LARGE_ELEMENTS or not tensor.dtype.is_floating_point():
            continue
        recipes_found = find(tensor.numpy(), tensors)
        if not recipes_found and name in TABLES:
            continue
        if len(recipes_found) != 1:
            raise SystemExit(
                f"{name} {tensor.shape}: {len(recipes_found)} ways to make it: {recipes_found}"
            )
        recipes[name] = recipes_found[0]
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        end = offset + tensor.nbytes
        value.const_value = ir.ExternalTensor(
            DATA_FILE,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=name,
        )
    model.metadata_props[METADATA_WEIGHTS] = recipes_to_json(recipes)
    return model, recipes


def content(path: Path) -> bytes:
    """Return a model, weights inside, as one string of bytes."""
    model = ir.load(path)
    ir.external_data.load_to_model(model)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        # One class of tensor for all, so that all are written alike.
        value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="folder of the checkpoint and the skeletons")
    parser.add_argument(
        "--check", action="store_true", help="fail if a skeleton would change; write nothing"
    )
    options = parser.parse_args()
    model_dir: Path = options.model_dir
    tensors = read_safetensors(model_dir / WEIGHTS_FILE)
    with tempfile.TemporaryDirectory() as temporary:
        for route in ROUTES:
            work = Path(temporary) / route
            exported = export(route, model_dir, work / "exported")
            model = ir.load(exported)
            ir.external_data.load_to_model(model)
            model, recipes = make_skeleton(model, tensors)
            source = work / "source"
            source.mkdir()
            shutil.copy(model_dir / WEIGHTS_FILE, source)
            skeleton = source / f"{route}.skeleton.onnx"
            ir.save(model, skeleton)
            rebuilt = build_bundled(route, work / "rebuilt", source=source)
            if content(rebuilt) != content(exported):
                raise SystemExit(f"{route}: the rebuilt model is not the export")
            target = model_dir / skeleton.name
            is_unchanged = target.exists() and target.read_bytes() == skeleton.read_bytes()
            if options.check and not is_unchanged:
                raise SystemExit(f"{target} differs from what the exporter gives now")
            if not is_unchanged:
                shutil.copy(skeleton, target)
            print(
                f"{target}: {target.stat().st_size:,} bytes, {len(recipes)} weights, "
                f"{'unchanged' if is_unchanged else 'written'}; equal to the export when rebuilt",
                flush=True,
            )


if __name__ == "__main__":
    main()
