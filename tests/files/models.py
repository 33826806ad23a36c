"""Models for tests of files: real exports, with their weights inside or beside them."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import onnx

FIXTURES = Path(__file__).parents[1] / "fixtures"
DYNAMO = "dynamo-op18-sdpa"
GENAI = "genai-cpu-int4"


def inline(folder: Path, fixture: str = DYNAMO, name: str = "model.onnx") -> Path:
    """A model with its weights inside."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(FIXTURES / f"{fixture}.onnx", folder / name))


def external(
    folder: Path,
    fixture: str = DYNAMO,
    name: str = "model.onnx",
    data: tuple[str, ...] = ("model.onnx.data",),
) -> Path:
    """A model with its larger weights in files beside it, dealt out in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    proto = onnx.load(FIXTURES / f"{fixture}.onnx")
    content = dict.fromkeys(data, b"")
    big = [tensor for tensor in proto.graph.initializer if len(tensor.raw_data) >= 1024]
    for index, tensor in enumerate(big):
        location = data[index % len(data)]
        point(tensor, location, len(content[location]), len(tensor.raw_data))
        content[location] += tensor.raw_data
        tensor.ClearField("raw_data")
    for location, raw in content.items():
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).write_bytes(raw)
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def point(tensor: onnx.TensorProto, location: str, offset: object, length: object) -> None:
    """Makes a tensor external."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones included, with a hash of what it holds."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = f"-> {path.readlink()}"
            elif path.is_file():
                found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[key] = "folder" if path.is_dir() else "special"
    return found
