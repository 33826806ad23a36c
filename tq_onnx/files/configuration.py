"""Read what the configuration beside a model says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

CONFIGURATION: Final = "config.json"
_POSITIONS: Final = "max_position_embeddings"


def configured_positions(model: Path) -> int | None:
    """Return ``max_position_embeddings`` of Hugging Face's ``config.json`` beside a model file.

    None if there is no such file, or no positive number in it.
    """
    try:
        told = json.loads((model.parent / CONFIGURATION).read_text("utf-8"))[_POSITIONS]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, int) and told > 0 else None
