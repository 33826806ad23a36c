"""The lanes by name: what each fuzzes, and the module that does it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.commands import Case

LANES: Final = {
    "model": "files of models, with inspect and convert",
    "external": "references to external data, and the data",
    "calibration": "calibration files, with convert --calibration",
    "tokenizer": "tokenizers and end-of-text files, with generate",
    "folder": "genai_config.json and model folders, with inspect, convert and generate",
    "operators": "one operator with any inputs and attributes, through ONNX Runtime",
    "server": "requests of any form to the server, on loopback",
}
"""``tests/fuzz/NAME.py`` has ``check(draw, folder) -> Case`` and ``warm()``."""


@dataclass(frozen=True)
class Lane:
    """One lane.

    Attributes:
        check: makes one input of choices, in an empty folder, and judges what came of it.
        warm: makes what all inputs share.
    """

    name: str
    check: Callable[[random.Random, Path], Case]
    warm: Callable[[], None]


def lane(name: str) -> Lane:
    """Imports one lane."""
    module = importlib.import_module(f"tests.fuzz.{name}")
    return Lane(name, module.check, module.warm)
