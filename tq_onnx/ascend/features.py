"""Define what the kernels for CANN can do, for the converter, the host bridge and the docs.

The converter refuses plans by ``CAPABILITIES``, the host bridge nodes (``device_features.h``, which
``tq_onnx.ascend.featureheader`` renders), and docs/ascend.md shows ``TABLE``.
"""

from __future__ import annotations

from typing import Final

from tq_onnx.codec.rotated import LLOYD_MAX, UNIFORM_SIGNED
from tq_onnx.codec.search import MAX_GAINS
from tq_onnx.codec.spec import CODECS as ALL_CODECS
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.window import MAX_ENTRIES
from tq_onnx.conversion.capabilities import Capabilities, words
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    COMMON,
    EXACT_WINDOW,
    FEEDBACK,
    FIRST_PROMPT,
    GAINS,
    HEAD_SINK,
    LEFT_PADDING,
    OFFSETS,
    PLANES,
    ROW_WIDTH,
    SHARED_CACHES,
    SLIDING_WINDOW,
    SOFTCAP,
    Feature,
)

CODECS: Final = tuple(codec for codec in ALL_CODECS if codec.kind in {LLOYD_MAX, UNIFORM_SIGNED})
"""The codecs of keys and of values that our kernels have, in any pair."""

IN_PLANES: Final = (Codec(UNIFORM_SIGNED, 4),)
"""Those of them that our kernels and CANN's own attention have in planes."""

HEAD_SIZES: Final = (64, 128)

SOFTCAPS: Final = (1, 100)
"""The least and the most: the error of a capped score is a few 1e-8 of its softcap."""

LEAST_ROW_BYTES: Final = {"Ascend910B": 1, "Ascend910_93": 1, "Ascend310P": 32}
"""The shortest rows that a device can move, by the beginning of its name."""

CAPABILITIES: Final = Capabilities(
    features=COMMON | {GAINS, OFFSETS, EXACT_WINDOW, LEFT_PADDING, PLANES},
    codecs=CODECS,
    in_planes=IN_PLANES,
    elements=("FLOAT", "FLOAT16"),
    head_sizes=HEAD_SIZES,
    ranges={SOFTCAP: SOFTCAPS},
    notes={
        # What is causal needs none; lowering refuses other masks.
        ATTENTION_BIAS: "none",
        PLANES: f"none, or {words(f'{each.kind} with {each.bits} bits' for each in IN_PLANES)}",
        GAINS: f"none, or 1 to {MAX_GAINS}",
        OFFSETS: "none, or 1 to 64 rows",
        EXACT_WINDOW: f"none, or up to {MAX_ENTRIES:,} recent tokens and sinks together",
        SLIDING_WINDOW: "none, or any; keys before it are not read",
        LEFT_PADDING: "none, one number for all sequences, or one for each",
    },
)

_ROWS: Final[tuple[Feature | tuple[str, str], ...]] = (
    ("elements", words(each.lower() for each in CAPABILITIES.elements)),
    *(FIRST_PROMPT, SHARED_CACHES),
    ("head size", words(HEAD_SIZES)),
    ("codec", CAPABILITIES.codec_names),
    ROW_WIDTH,
    (
        "shortest row",
        "910B and 910C: any; 310P: "
        f"{LEAST_ROW_BYTES['Ascend310P']} bytes (4 bits, 5 bits; with head size 128 also 2 and 3)",
    ),
    GAINS,
    ("norm correction", "0, 1 or 2"),
    *(PLANES, FEEDBACK, OFFSETS, EXACT_WINDOW, SLIDING_WINDOW, SOFTCAP, HEAD_SINK),
    *(ATTENTION_BIAS, LEFT_PADDING),
    ("masks", "causal, with or without a sliding window"),
    ("lengths", "one for all sequences, or one for each"),
)

TABLE: Final = tuple(
    (row.name, CAPABILITIES.note(row)) if isinstance(row, Feature) else row for row in _ROWS
)
"""What there is, by what it is about."""
