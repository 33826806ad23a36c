"""Say what a conversion of a known kind of model may cost, in sentences for warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tq_onnx.files.configuration import configured_type
from tq_onnx.plan import Plan
from tq_onnx.recognise.site import Site

_FRAGILE_KEYS: Final = {"gpt_oss": "gpt-oss", "gptoss": "gpt-oss"}
"""Names of models by their types in config.json and in genai_config.json."""
_ENOUGH_BITS: Final = 5
"""Of a key element, also in models with fragile keys."""


@dataclass(frozen=True)
class Rings:
    """The caches of an original that hold only the newest tokens."""

    windows: tuple[int, ...]  #: the numbers of those tokens, in increasing order
    count: int  #: layers with such caches
    layers: int
    fixed: int  #: bytes of such caches
    growing: int  #: bytes of a token in all other caches

    @classmethod
    def of(cls, sites: Sequence[Site]) -> Rings:
        """Return the rings of a model that was not rewritten yet."""
        rings = [site for site in sites if site.ring]
        return cls(
            tuple(sorted({site.sliding_window for site in rings})),
            len(rings),
            len(sites),
            sum(site.bytes_per_token * site.sliding_window for site in rings),
            sum(site.bytes_per_token for site in sites if not site.ring),
        )

    def caution(self, bytes_after: int) -> str:
        """Compare the caches with those that hold all tokens; empty without rings."""
        if not self.count:
            return ""
        if bytes_after > self.growing:
            longest = self.fixed // (bytes_after - self.growing)
            cost = f"in texts of more than {longest:,} tokens the caches are larger than"
        else:
            ratio = self.growing / bytes_after
            cost = f"in long texts the caches are {ratio:.1f} times smaller than"
        windows = " or ".join(f"{size:,}" for size in self.windows)
        return (
            f"{self.count} of {self.layers} layers of the original keep only the newest {windows} "
            f"tokens, and all converted layers keep all tokens: {cost} the original's"
        )


def cautions(path: Path, plan: Plan, rings: Rings, bytes_after: int) -> tuple[str, ...]:
    """Return sentences about a conversion; none for most."""
    sentences = (_of_keys(path, plan), rings.caution(bytes_after))
    return tuple(sentence for sentence in sentences if sentence)


def _of_keys(path: Path, plan: Plan) -> str:
    name = _FRAGILE_KEYS.get(configured_type(path) or "")
    if name is None or all(layer.key.codec.bits >= _ENOUGH_BITS for layer in plan.layers):
        return ""
    return (
        f"the keys of {name} are known to lose more by quantization than those of other models: "
        'use `preset="k8v4"`, or `preset="int5"` with `calibrate=True`, and measure the loss by '
        "tq-onnx report"
    )
