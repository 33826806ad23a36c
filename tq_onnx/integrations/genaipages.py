"""The configuration of onnxruntime-genai for a decoder whose caches lie in pages.

Its ``Engine`` makes the caches and the table of pages by these entries:

=============================================== ===================================================
``model.decoder.inputs``                        names of the packed inputs, in place of those of
                                                the mask and of positions
``model.decoder.head_size``                     bytes of a row, in all caches
``model.decoder.state_groups``                  where not every layer has a cache: the layers with
                                                caches, with states of convolutions, and with those
                                                of linear attention
``model.type``                                  ``qwen3_5_text`` for ``lfm2``
``search.chunk_size``                           tokens of a page, where layers have states: it
                                                keeps prefixes of prompts that calls end with
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
_NAMES: Final = {
    "paged_kv": ("past_key_names", "present_key_names"),
    "fixed_conv": ("past_conv_names", "present_conv_names"),
    "fixed_recurrent": ("past_recurrent_names", "present_recurrent_names"),
}
"""The entries with the names of what layers keep, by the kind of their group."""
_DEFAULTS: Final = {
    "past_key_names": "past_key_values.%d.key",
    "present_key_names": "present.%d.key",
    "past_conv_names": "past_key_values.%d.conv_state",
    "present_conv_names": "present.%d.conv_state",
    "past_recurrent_names": "past_key_values.%d.recurrent_state",
    "present_recurrent_names": "present.%d.recurrent_state",
}
"""What onnxruntime-genai takes where a configuration does not say."""
_TYPES: Final = {"lfm2": "qwen3_5_text"}
"""Types of decoders that the engine does not take, and one that runs with the same states."""
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
    model["type"] = _TYPES.get(str(model.get("type")), model.get("type"))
    groups = _state_groups(decoder, plan, where)
    if groups:
        decoder["state_groups"] = groups
    if plan.interface.states:
        # A prefix is kept where a call ends at the end of a page: states between are not kept.
        document.setdefault("search", {})["chunk_size"] = plan.block_size
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
    """Refuse caches of several shapes."""
    heads = {layer.kv_num_heads for layer in plan.layers}
    said = decoder.get("num_key_value_heads", next(iter(heads)))
    if len(heads) > 1 or heads != {said}:
        raise UnsupportedModelError(
            f"the caches have {' or '.join(map(str, sorted(heads)))} heads, and the engine makes "
            f"all of them with {said}",
            where=where,
            fix=_ONE_FILE,
        )


def _state_groups(
    decoder: dict[str, Any], plan: Plan, where: str
) -> list[dict[str, str | list[int]]]:
    """Return what the layers keep of earlier tokens; nothing if each has a cache and no state.

    The engine finds a layer's caches and states by names with its number, which are written down.
    """
    keys = [layer.key.past or "" for layer in plan.layers]
    remaining = {pair.past or "" for pair in plan.interface.states} | set(keys)
    count = decoder.get("num_hidden_layers", len(keys))
    if len(remaining) == count == len(keys):
        return []
    inputs, outputs = decoder["inputs"], decoder.setdefault("outputs", {})
    groups: list[dict[str, str | list[int]]] = []
    for group, (past, present) in _NAMES.items():
        template = inputs.get(past, _DEFAULTS[past])
        layers = [layer for layer in range(count) if template % layer in remaining]
        remaining -= {template % layer for layer in layers}
        if layers:
            inputs[past] = template
            outputs.setdefault(present, _DEFAULTS[present])
            groups.append({"kind": group, "layer_ids": layers})
    if remaining:
        raise UnsupportedModelError(
            f"{sorted(remaining)[0]} is the input of no layer by the names in the configuration",
            where=where,
            fix=f"name it under model.decoder.inputs, or {_ONE_FILE}",
        )
    return groups


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
