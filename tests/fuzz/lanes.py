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
    "graphs": "random graphs of attention, compared with their conversions",
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
