"""The package configuration of Olive in which it finds our pass.

Olive reads one such file, in place of its own: the one written here has Olive's list of passes, as
the installed release has it, and ours besides.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from tq_onnx.errors import ModelFileError, UsageError

PASS: Final = "TurboQuantKVCache"
_MODULE: Final = "tq_onnx.integrations.olive"


def package_config() -> dict[str, Any]:
    """Return Olive's package configuration with our pass."""
    module = find_spec("olive")
    if module is None or module.origin is None:
        raise UsageError("Olive is not installed", fix="run `pip install olive-ai`")
    path = Path(module.origin).with_name("olive_config.json")
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        passes = dict(config["passes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFileError(
            "Olive's list of passes cannot be read",
            where=str(path),
            fix="install a release of olive-ai from 0.9 on",
        ) from error
    passes[PASS] = {
        "module_path": f"{_MODULE}.{PASS}",
        "supported_providers": ["*"],
        "supported_accelerators": ["*"],
        "supported_precisions": ["*"],
        "supported_algorithms": [],
        "supported_quantization_encodings": [],
    }
    return {**config, "passes": passes}
