"""The lane of cache files: loaded by the model that wrote them, and gone on with."""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

import tq_onnx
from tests.fuzz.calibration import changed
from tests.fuzz.commands import Case
from tests.runtime.models import DYNAMO, converted
from tq_onnx import LanguageModel
from tq_onnx.errors import ModelFileError, TqOnnxError, UsageError

IDS: Final = list(range(3, 23))
OTHERS: Final = ("x", "cache.9", "cache.99999", "cache.0 ", "cache.00", "state.x", "mask")


def check(draw: random.Random, folder: Path) -> Case:
    """Changes a file and loads it; a cache that is loaded goes on, goes back and is saved."""
    case = Case(folder)
    case.what, content = changed(*sound(), OTHERS, draw)
    path = folder / "cache.safetensors"
    path.write_bytes(content)
    lm = language_model(draw.choice((None, 64)))
    try:
        kept = lm.load_cache(path)
    except (ModelFileError, UsageError) as error:
        case.outcomes["load"] = "refused"
        if not str(error).startswith(str(path)) or "\n" in str(error):
            case.broken("sentence", str(error)[:200])
        return case
    case.outcomes["load"] = "loaded"
    try:
        done = lm.generate([*kept.tokens, 5], cache=kept, max_new_tokens=3)
        kept.rewind(2)
        kept.save(path)
        lm.load_cache(path)
    except TqOnnxError as error:
        case.broken("use", str(error)[:200])
        return case
    if len(done.tokens) != 3:
        case.broken("use", f"{len(done.tokens)} tokens, not 3")
    return case


def warm() -> None:
    """Makes what all cases share."""
    sound()
    language_model(None)
    language_model(64)


@cache
def language_model(context: int | None) -> LanguageModel:
    return tq_onnx.load(converted(DYNAMO), threads=1, context=context)


@cache
def sound() -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and facts of a file that the model has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cache.safetensors")
        lm = language_model(None)
        written = lm.new_cache()
        lm.generate(IDS, cache=written, max_new_tokens=2)
        written.save(path)
        with safe_open(path, "numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
