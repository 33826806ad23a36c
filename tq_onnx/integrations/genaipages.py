"""The configuration of onnxruntime-genai for a decoder whose caches lie in pages.

Its ``Engine`` makes the caches and the table of pages by these entries:

=============================================== ===================================================
``model.decoder.inputs``                        names of the packed inputs, in place of those of
                                                the mask and of positions
``model.decoder.head_size``                     bytes of a row, in all caches
``engine.dynamic_batching.block_size``          tokens of a page, which the graph says too
``engine.dynamic_batching.num_blocks``          pages of each cache; on a CPU it finds no number
                                                itself
``engine.dynamic_batching.max_batch_size``      requests in a call at most
``engine.dynamic_batching.max_scheduled_tokens`` new tokens in a call at most
=============================================== ===================================================

It gives all caches one shape (``src/engine/paged_key_value_cache.cpp``, 0.18).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tq_onnx.conversion.ports import PACKED_DIMS
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.plan import Plan
from tq_onnx.targets.paged.target import MAX_BATCH_SIZE, USUAL_TOKENS

_SCHEDULED_TOKENS: Final = 2048
_ONE_FILE: Final = 'convert without `target="paged"`'
_GONE: Final = (
    *("attention_mask", "position_ids", "past_sequence_length", "total_sequence_length"),
    *("current_sequence_length", "cache_indirection"),
)


@dataclass(frozen=True)
class EngineSizes:
    """What the engine makes its caches of.

    Attributes:
        block_size: tokens of a page.
        blocks: pages of each cache.
        batch: requests in a call at most.
        bytes: of all caches.
    """

    block_size: int
    blocks: int
    batch: int
    bytes: int


def page_config(
    document: dict[str, Any],
    plans: Mapping[str, Plan],
    values: Mapping[str, int | None],
    where: str,
) -> EngineSizes:
    """Change a configuration for a paged decoder.

    Args:
        document: the configuration; it is changed.
        plans: the conversion of each model file of the decoder that has caches.
        values: of the target's options.
        where: names the file in errors.

    Raises:
        UnsupportedModelError: the caches of the model are none that the engine can make.
        UsageError: the pages do not hold one text.
    """
    model = document["model"]
    decoder = model["decoder"]
    if len(plans) != 1 or decoder.get("pipeline"):
        raise UnsupportedModelError(
            "the decoder is a pipeline of several models, and the engine runs one",
            where=where,
            fix=_ONE_FILE,
        )
    (plan,) = plans.values()
    _expect_alike(decoder, plan, where)
    inputs = decoder.setdefault("inputs", {})
    for name in _GONE:
        inputs.pop(name, None)
    inputs |= {name: name for name in PACKED_DIMS}
    decoder["head_size"] = plan.layers[0].key.row_bytes
    batch = values.get("max_batch_size") or MAX_BATCH_SIZE
    blocks = values.get("num_blocks") or _usual_pages(document, plan.block_size, batch)
    if not blocks:
        raise UsageError(
            "the configuration says no context_length, of which the number of pages is made",
            where=where,
            fix="give `num_blocks`",
        )
    document["engine"] = {
        "dynamic_batching": {
            "block_size": plan.block_size,
            "num_blocks": blocks,
            "max_batch_size": batch,
            "max_scheduled_tokens": _SCHEDULED_TOKENS,
        }
    }
    size = blocks * plan.block_size * plan.bytes_per_token
    return EngineSizes(plan.block_size, blocks, batch, size)


def _expect_alike(decoder: Mapping[str, Any], plan: Plan, where: str) -> None:
    """Refuse caches of several shapes, and layers without caches of their own."""
    heads = {layer.kv_num_heads for layer in plan.layers}
    said = decoder.get("num_key_value_heads", next(iter(heads)))
    if len(heads) > 1 or heads != {said}:
        raise UnsupportedModelError(
            f"the caches have {' or '.join(map(str, sorted(heads)))} heads, and the engine makes "
            f"all of them with {said}",
            where=where,
            fix=_ONE_FILE,
        )
    count = decoder.get("num_hidden_layers", len(plan.layers))
    if count != len(plan.layers):
        raise UnsupportedModelError(
            f"{len(plan.layers)} of {count} layers have caches, and the engine makes some for each",
            where=where,
            fix=_ONE_FILE,
        )


def _usual_pages(document: Mapping[str, Any], block_size: int, batch: int) -> int:
    """Return the pages of the longest text, or of a batch of usual ones if these are more.

    They are all allocated at once. Models allow contexts of which a machine rarely holds many, so
    most texts are taken to be shorter. 0 where nothing says how long a text may be.
    """
    longest = document["model"].get("context_length")
    max_length = (document.get("search") or {}).get("max_length")
    lengths = [size for size in (longest, max_length) if isinstance(size, int) and size > 0]
    most = min(lengths, default=0)
    return max(-(-most // block_size), batch * -(-min(most, USUAL_TOKENS) // block_size))
