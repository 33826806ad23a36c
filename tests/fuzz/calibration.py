"""The lane of calibration files: their headers and numbers, with ``convert --calibration``."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import save

from tests.conversion.test_calibrationfile import FACTS
from tests.conversion.test_calibrationfile import tensors as statistics
from tests.fuzz import json_edits, model
from tests.fuzz.commands import Case
from tq_onnx.codec.rotaryangles import Pairing
from tq_onnx.conversion.calibrationfile import content_digest, read_calibration
from tq_onnx.errors import ModelFileError
from tq_onnx.runtime.fingerprint import read_fingerprint
from tq_onnx.runtime.opening import open_original

EXPORT: Final = "dynamo-op23-sdpa"
LAYERS, D = 2, 16
ODD: Final = (
    *(0.0, -0.0, -1.0, np.nan, np.inf, 1e-45, 1e-30, 1e-10, 1e-3, 2.0, 100.0, 1e6, 1e18, 1e30),
    *(9e35, 3e38),
)
OTHERS: Final = ("x", "layers.2.k_mean", "layers.99999.k_mean", "layers.0.k_mean ", "layers.00.x")
PAIRS: Final = Pairing("interleaved", 0, D)
TOKENS: Final = (5, 3, 8, 1, 9)
PRESETS: Final = ("int4", "int2", "k8v4", "raw")
CODES: Final = (0, 2, 3, 4)
"""That a file is of another model shows in the command, so it is a matter of usage."""


def check(draw: random.Random, folder: Path) -> Case:
    """Changes a file, reads it, and converts with what can be read."""
    case = Case(folder)
    preset = draw.choice(PRESETS)
    path = folder / "calibration.safetensors"
    write = draw.choice((sealed, sealed, sealed, save))
    case.what, content = changed(*sound(), draw, write)
    path.write_bytes(content)
    try:
        read_calibration(path)
    except ModelFileError as error:
        case.outcomes["read"] = "refused"
        if draw.randrange(16) or not str(error).startswith(str(path)):
            return case
    original = folder / "model.onnx"
    original.write_bytes(model.export(EXPORT))
    output = folder / "out" / "converted.onnx"
    given = ("--calibration", path, "--preset", preset, "-o", output)
    before = case.files
    done = case.run("convert", original, *given, codes=CODES)
    case.written(output, done, before)
    if done.code == 0:
        _check_numbers(case, output)
    return case


def warm() -> None:
    """Makes what all cases share."""
    sound()


@cache
def sound() -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and facts of a file that fits the export."""
    frequencies = np.repeat(np.float32([0.5**n for n in range(D // 2)]), 2)
    tensors: dict[str, Any] = statistics(LAYERS, PAIRS, frequencies)
    tensors["fingerprint_tokens"] = np.array(TOKENS)
    for index, rows in enumerate(_fingerprint()):
        tensors[f"layers.{index // 2}.{'kv'[index % 2]}_fingerprint"] = rows
    rotary = json.dumps(LAYERS * [{**PAIRS.document, "angles": "measured angles"}])
    return tensors, {**FACTS, "rotary": rotary}


def _fingerprint() -> list[Any]:
    """What the export caches for the last of the tokens."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model.export(EXPORT))
        caches = read_fingerprint(open_original(path, threads=1).decoder(), TOKENS)
    return [cache.astype(np.float32) for cache in caches]


def sealed(tensors: dict[str, Any], facts: dict[str, str]) -> bytes:
    """A file with the digest of its content, or nothing else of it would be looked at."""
    return save(tensors, {**facts, "content_digest": content_digest(tensors, facts)})


def changed(
    tensors: dict[str, Any],
    facts: dict[str, str],
    draw: random.Random,
    save: Callable[[dict[str, Any], dict[str, str]], bytes],
) -> tuple[str, bytes]:
    """What is changed in the content of the file, and the file."""
    tensors = {**tensors}
    kind = draw.randrange(8)
    if kind <= 3:
        names = draw.sample(sorted(tensors), draw.choice((1, 1, 2, 5)))
        for name in names:
            tensors[name] = _other_numbers(tensors[name], draw)
        return f"numbers of {', '.join(names)}", save(tensors, facts)
    if kind == 4:
        name = draw.choice(sorted(tensors))
        tensors[name] = _other_form(tensors[name], draw)
        return f"form of {name}", save(tensors, facts)
    if kind == 5:
        name = draw.choice(sorted(tensors))
        tensors[draw.choice(OTHERS)] = tensors[name]
        if draw.random() < 0.5:
            del tensors[name]
        return f"name of {name}", save(tensors, facts)
    content = save(tensors, facts)
    end = 8 + int.from_bytes(content[:8], "little")
    if kind == 6:
        header = json_edits.edited(content[8:end].decode(), draw)
        size = len(header)
        if draw.random() < 0.2:
            size = draw.choice((0, 1, size - 1, size + 1, 1 << 31, (1 << 64) - 1))
        return "header", size.to_bytes(8, "little") + header + content[end:]
    cut = draw.choice((0, 4, 8, end, end + 1, len(content) - 1))
    return f"cut to {cut}", content[:cut]


def _other_numbers(tensor: Any, draw: random.Random) -> Any:
    found = np.array(tensor)
    odd = draw.choice(ODD) if found.dtype.kind == "f" else draw.choice((0, -1, 1, 1 << 62, 10**15))
    with np.errstate(all="ignore"):
        odd = np.asarray(odd).astype(found.dtype)
    kind = draw.randrange(4)
    if kind == 0:
        found[...] = odd
    elif kind == 1:
        found.flat[draw.randrange(found.size)] = odd
    elif kind == 2:
        with np.errstate(all="ignore"):
            found = found * odd
    else:
        found[..., draw.randrange(found.shape[-1])] = odd
    return found


def _other_form(tensor: Any, draw: random.Random) -> Any:
    kind = draw.randrange(6)
    if kind == 0:
        types = (np.float64, np.float16, np.int32, np.uint8, np.bool_)
        return tensor.astype(draw.choice(types))
    if kind == 1:
        return tensor[None]
    if kind == 2:
        return tensor[:0]
    if kind == 3:
        return np.ascontiguousarray(tensor.T)
    if kind == 4:
        return np.concatenate([tensor, tensor])
    return tensor.reshape(-1)


def _check_numbers(case: Case, output: Path) -> None:
    """No number of a model may have become infinite or none."""
    proto = onnx.load(output)
    for tensor in proto.graph.initializer:
        if tensor.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                case.broken("numbers", f"{tensor.name} is not finite")
