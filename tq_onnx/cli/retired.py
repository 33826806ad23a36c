"""Words of the command line that this version no longer has, and what to type instead.

Commands, options and their values; each is known for one version.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from tq_onnx.errors import UsageError

RETIRED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cann-graph": "give cann",
        "verify-on-npu": "compare a model with `tq-onnx verify --ep cann`, single operators with "
        "custom_ops/cann/testing/check_operators.py",
        "--expand-weights": "export the model in float16 for an Ascend NPU",
        "view": "pip install netron, and type netron FILE",
        "--speculate": "serve a folder with pages, whose Engine guesses tokens",
        "ort-gqa": "leave out --target: function bodies need no library",
        "--kv-cache-bit-width": "choose a preset, such as k8v4",
        "--window": "give --residual-length",
        "--sinks": "give --sink-tokens",
        "--capacity": "give --context",
        "--peers": "python benchmarks/end_to_end.py runs onnxruntime's own caches",
        "--no-peers": "leave it out: report measures no others",
        "--card": "run task sets by lm-eval, as docs/quality.md says",
        "--generation": "run task sets by lm-eval, as docs/quality.md says",
        "--outliers": "calibrate and report on the model itself",
        "--markdown": "take the tables from a pipe, or the figures of --json",
    }
)
"""What to do instead, as the end of a sentence, by the word that somebody types."""


def refuse_retired(word: str) -> None:
    """Refuse a word that only earlier versions have.

    Raises:
        UsageError: it is one.
    """
    if word in RETIRED:
        raise UsageError(f"{word} was removed", fix=RETIRED[word])
