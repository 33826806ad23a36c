"""Read what the configuration beside a model says of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from tq_onnx.files.regular import read_text

CONFIGURATION: Final = "config.json"
GENAI_CONFIGURATION: Final = "genai_config.json"
GENERATION_CONFIGURATION: Final = "generation_config.json"
_SAMPLING: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_POSITIONS: Final = "max_position_embeddings"
_GENAI_TYPE: Final = ("model", "type")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def context_length(model: Path) -> int | None:
    """Return the tokens that a model takes, by Hugging Face's or onnxruntime-genai's configuration.

    ``max_position_embeddings`` of ``config.json`` and ``context_length`` of ``genai_config.json``
    beside the model file count, the least of both; None if neither tells.
    """
    values = [configured_positions(model)]
    try:
        document = json.loads(read_text(model.parent / GENAI_CONFIGURATION))
        values.append(document["model"]["context_length"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    sizes = [size for size in values if type(size) is int and size > 0]
    return min(sizes, default=None)


def configured_positions(model: Path) -> int | None:
    """Return ``max_position_embeddings`` of Hugging Face's ``config.json`` beside a model file.

    None if there is no such file, or no positive number in it.
    """
    try:
        positions = json.loads(read_text(model.parent / CONFIGURATION))[_POSITIONS]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return positions if isinstance(positions, int) and positions > 0 else None


def configured_name(model: Path) -> str | None:
    """Return the name on a model hub, OWNER/NAME, that ``config.json`` beside a model file has."""
    try:
        name = json.loads(read_text(model.parent / CONFIGURATION))["_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else None


def configured_type(model: Path) -> str | None:
    """Return the type of a model by the configuration beside its file, or in the folder above.

    That is ``model_type`` of Hugging Face's ``config.json``, else ``model.type`` of
    ``genai_config.json``, which spells some types otherwise; None if neither tells.
    """
    for folder in (model.parent, model.parent.parent):
        for file, keys in ((CONFIGURATION, ("model_type",)), (GENAI_CONFIGURATION, _GENAI_TYPE)):
            try:
                value = json.loads(read_text(folder / file))
                for key in keys:
                    value = value[key]
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            if isinstance(value, str):
                return value
    return None


def recommended_sampling(model: Path) -> dict[str, int | float]:
    """Return the sampling that ``generation_config.json`` beside a model file recommends.

    Returns:
        Values by the names of the fields of ``Sampling``; empty if there is no such file, or if it
        does not say ``do_sample``.
    """
    try:
        document = json.loads((model.parent / GENERATION_CONFIGURATION).read_text("utf-8"))
        if document.get("do_sample") is not True:
            return {}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return {name: document[name] for name in _SAMPLING if type(document.get(name)) in (int, float)}
