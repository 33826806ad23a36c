"""Choose the number of positions in the rotary tables of a model for CANN."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tq_onnx.errors import UsageError
from tq_onnx.files.configuration import configured_positions

DEFAULT_POSITIONS: Final = 32_768
MOST_POSITIONS: Final = 1 << 20
"""The tables of a head size of 128 are 512 MiB then."""


def positions_of(model: Path, chosen: int | None) -> int:
    """Return positions for a model file.

    Args:
        model: the file; ``config.json`` beside it is Hugging Face's.
        chosen: what the user asked for; None for ``max_position_embeddings`` of the configuration,
            and ``DEFAULT_POSITIONS`` where there is none.

    Raises:
        UsageError: more than ``MOST_POSITIONS``, or less than one, were asked for.
    """
    if chosen is not None:
        if not 1 <= chosen <= MOST_POSITIONS:
            raise UsageError(
                f"{chosen} positions are not between 1 and {MOST_POSITIONS:,}",
                fix="give the longest context that the model is to be used with",
            )
        return chosen
    told = configured_positions(model)
    return DEFAULT_POSITIONS if told is None else min(told, MOST_POSITIONS)
