"""The lane of external data: references of weights, and the files that they lead to."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

import onnx

from tests.files.models import external
from tests.fuzz.commands import Case
from tq_onnx.errors import TqOnnxError
from tq_onnx.files.load import load

EXPORTS: Final = ("dynamo-op23-sdpa", "genai-cpu-int4", "hf-ortcpu-prefill", "genai-dml-fp16")
DATA: Final = ("model.onnx.data", "sub/more.data")
LOCATIONS: Final = (
    *("", ".", "..", "model.onnx", "model.onnx.data", "sub/more.data", "sub", "sub/..", "nowhere"),
    *("./model.onnx.data", "sub/../model.onnx.data", "../secret", "a/../../secret", "/etc/passwd"),
    *("C:\\secret", "\\\\host\\share", "sub\\more.data", "link", "linked/secret", "pipe", "~", "*"),
    *("a\0b", "\x1b[31m", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")),
    *(
        "n" * 300,
        "n/" * 3000,
        "MODEL.ONNX.DATA",
        "model.onnx.data ",
        "MODEL~1.DAT",
        "converted.onnx",
    ),
)
NUMBERS: Final = (
    *(
        "0",
        "1",
        "-1",
        "64",
        "4096",
        "00",
        "+1",
        " 1",
        "1 ",
        "1_0",
        "0x10",
        "1e3",
        "",
        "x",
        "\u0661",
    ),
    *(str(1 << 31), str((1 << 63) - 1), str(1 << 64), "9" * 30, "9" * 5000, "-0", "1.0", "null"),
)
KEYS: Final = ("location", "offset", "length", "checksum", "basepath", "", "Location", "x")


def check(draw: random.Random, folder: Path) -> Case:
    """Changes references and files, inspects and converts the model."""
    case = Case(folder / "given")
    name = draw.choice(EXPORTS)
    _files(case.folder, name, draw)
    proto = onnx.load_from_string(exported(name)["model.onnx"])
    tensors = [each for each in proto.graph.initializer if each.external_data]
    edits = []
    for _ in range(draw.choice((1, 1, 2, 8))):
        edits.append(_edit(draw.choice(tensors), draw))
    case.what = f"{name}: {', '.join(edits)}"
    path = case.folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    case.convert(path)
    try:
        files = load(path).external_files
    except TqOnnxError:
        return case
    for file in files:
        if not file.resolve().is_relative_to(case.folder.resolve()):
            case.broken("outside", f"{file} would be read")
    return case


def warm() -> None:
    """Makes what all cases share."""
    for name in EXPORTS:
        exported(name)


@cache
def exported(name: str) -> dict[str, bytes]:
    """An export with data in two files."""
    with tempfile.TemporaryDirectory() as folder:
        external(Path(folder), name, data=DATA)
        return {each: Path(folder, each).read_bytes() for each in ("model.onnx", *DATA)}


def _files(folder: Path, name: str, draw: random.Random) -> None:
    """Writes the data, whole or not, and what references should not lead to."""
    (folder / "sub").mkdir(parents=True)
    (folder.parent / "secret").write_bytes(bytes(1 << 16))
    (folder / "link").symlink_to("../secret")
    (folder / "linked").symlink_to("..")
    for each in DATA:
        content = exported(name)[each]
        if draw.random() < 0.1:
            content = content[: draw.randrange(len(content) + 1)]
        kind = draw.randrange(20)
        if kind == 0:
            continue
        if kind == 1:
            (folder / each).mkdir()
        elif kind == 2:
            (folder / each).symlink_to(draw.choice(("model.onnx", "sub/more.data", "/dev/zero")))
        else:
            (folder / each).write_bytes(content)


def _edit(tensor: onnx.TensorProto, draw: random.Random) -> str:
    """Changes the reference of one tensor, or the tensor; tells which."""
    entries = {each.key: each for each in tensor.external_data}
    kind = draw.randrange(8)
    if kind <= 1 and "location" in entries:
        entries["location"].value = draw.choice(LOCATIONS)
    elif kind <= 4 and entries:
        draw.choice(list(entries.values())).value = draw.choice(NUMBERS)
    elif kind == 5 and entries:
        del tensor.external_data[draw.randrange(len(tensor.external_data))]
    elif kind == 6:
        values = (*LOCATIONS, *NUMBERS, "0" * 40)
        tensor.external_data.add(key=draw.choice(KEYS), value=draw.choice(values))
    elif draw.random() < 0.3:
        tensor.data_location = draw.choice((0, 1))
        tensor.raw_data = bytes(draw.choice((0, 1, 64)))
    elif tensor.dims and draw.random() < 0.7:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice((0, 1, -1, 7, 1 << 40, 1 << 62))
    else:
        tensor.data_type = draw.choice((0, 1, 2, 7, 8, 10, 16, 17, 21, 22, 23, 99))
    return f"{tensor.name} edited by {kind}"
