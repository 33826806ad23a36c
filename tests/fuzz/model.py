"""The lane of model files: edits of real exports and of their conversions."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path

import onnx

from tests.cli.run import run
from tests.files.models import FIXTURES
from tests.fuzz.commands import Case
from tests.fuzz.edits import EDITS, a_node, a_value

EXPORTS = sorted(path.stem for path in FIXTURES.glob("*.onnx"))
CONVERTED = ("dynamo-op23-sdpa", "genai-dml-fp16", "hf-decode")
"""Exports whose conversions are edited, too."""
PRESETS = ("int4", "int4", "raw", "k8v4", "int2")
MOST_EDITS = 3


def check(draw: random.Random, folder: Path) -> Case:
    """Edits a model, inspects and converts it."""
    case = Case(folder)
    preset = draw.choice(PRESETS)
    case.what, content = mutated(draw)
    path = folder / "model.onnx"
    path.write_bytes(content)
    case.convert(path, preset=preset)
    return case


def warm() -> None:
    """Makes what all cases share."""
    for name in CONVERTED:
        conversion(name)


def mutated(draw: random.Random) -> tuple[str, bytes]:
    """What is done to which model, and the file."""
    at = draw.randrange(len(EXPORTS) + len(CONVERTED))
    name = [*EXPORTS, *CONVERTED][at]
    content = export(name) if at < len(EXPORTS) else conversion(name)
    if at >= len(EXPORTS):
        name += " converted"
    if draw.random() < 0.05:  # no edit of a graph can make these
        return f"{name}: damaged", _damaged(content, draw)
    proto = onnx.load_from_string(content)
    names = []
    for _ in range(draw.choice((1, 1, 1, 2, MOST_EDITS))):
        edit = draw.choice(EDITS)
        edit(proto, draw)
        names.append(edit.__name__)
    edited = bytearray(proto.SerializeToString())
    if draw.random() < 0.1 and proto.graph.node:
        _spoil_name(edited, proto, draw)
        names.append("no_utf8")
    return f"{name}: {', '.join(names)}", bytes(edited)


def _spoil_name(content: bytearray, proto: onnx.ModelProto, draw: random.Random) -> None:
    """Puts bytes that are no UTF-8 into a name."""
    name = draw.choice([*a_node(proto, draw).output, a_value(proto, draw).name]).encode()
    at = content.find(name) if name else -1
    while at >= 0:
        content[at] = 0xFF
        at = content.find(name) if draw.random() < 0.7 else -1


def _damaged(content: bytes, draw: random.Random) -> bytes:
    """Flips, inserts and removes bytes, most of them near the beginning or the end of a graph."""
    found = bytearray(content)
    for _ in range(draw.choice((1, 2, 8))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            found[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            found[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 2:
            del found[at : at + draw.randrange(1, 9)]
        elif draw.random() < 0.2:
            del found[at:]
    return bytes(found)


@cache
def export(name: str) -> bytes:
    return (FIXTURES / f"{name}.onnx").read_bytes()


@cache
def conversion(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "model.onnx")
        done = run("convert", FIXTURES / f"{name}.onnx", "-o", output)
        assert done.code == 0, done.err
        return output.read_bytes()
