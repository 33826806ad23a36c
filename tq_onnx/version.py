"""Hold the version of tq-onnx, which plans and reports name."""

from typing import Final

__version__: Final = "0.1.0"
