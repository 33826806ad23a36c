"""The configuration of onnxruntime-genai: which file is the decoder, and what a conversion changes.

``genai_config.json`` drives a model folder. ``read_config`` finds the models that it names;
``patch_config`` returns its text for the converted folder. Everything in it is kept, but for:

=============================================== ===================================================
``model.decoder.session_options``               ``custom_ops_library``: file name of the library,
                                                which must be a real file in the folder
                                                (onnxruntime-genai refuses links and other places)
``model.decoder.head_size``                     bytes of a cache row, if all layers have the same:
                                                old releases (0.9) size caches by it, newer
                                                ones (0.18) ask the graph, which says the same;
                                                only those run layers of several widths
``search.past_present_share_buffer``            false for a model whose caches must grow
``model.decoder.sliding_window``                gone: caches of layers with sliding windows hold all
                                                tokens, and are as long as the others
``model.type``                                  ``qwen3_5_text`` for ``qwen3_next``, which 0.18 does
                                                not know; its layers keep the same
=============================================== ===================================================

What onnxruntime-genai does with such a folder (``src/models/kv_cache.cpp``, 0.18): one element type
for all caches, from the first; one shape for key and value of a layer, from the key's input; with
``past_present_share_buffer`` (and no beams) caches of ``max_length`` that are past and present at
once; without, new ones of the total length in every step.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from tq_onnx.codec.spec import row_layout
from tq_onnx.errors import ModelFileError, UnsupportedModelError
from tq_onnx.integrations.genaipages import EngineSizes, page_config
from tq_onnx.plan import Interface, LayerPlan, Plan
from tq_onnx.runtime.platforms import LIBRARIES

CONFIG_FILE: Final = "genai_config.json"
_LIBRARY: Final = "custom_ops_library"
_SHARE: Final = "past_present_share_buffer"
_SLIDING: Final = "sliding_window"
_SAVE_AGAIN: Final = "copy it again from the original export"
_TYPES: Final = {"qwen3_next": "qwen3_5_text"}
"""Types that onnxruntime-genai does not know, and one that it runs in the same way."""
_DEEPEST: Final = 64
"""Values nested in each other; that they are written again must not depend on the stack."""


@dataclass(frozen=True, eq=False)
class GenaiConfig:
    """A configuration, as read."""

    path: Path  #: the file
    document: dict[str, Any]  #: what it holds
    #: model files of the decoder, relative to the folder: one, or a pipeline's
    decoders: tuple[str, ...]
    others: tuple[str, ...]  #: model files of everything else (vision, speech, embedding), likewise
    providers: tuple[str, ...]  #: execution providers that the decoder asks for, but for the CPU's


@dataclass(frozen=True)
class GenaiChanges:
    """The changes to a configuration.

    Attributes:
        library: the entry ``custom_ops_library``.
        head_size: the entry ``head_size``, a cache row's bytes; None if it was left as it was.
        share_buffer: whether past and present share a buffer of fixed capacity; None if the
            configuration does not say.
        share_buffer_before: what it was.
        may_share: whether it is false and could be true.
        providers: execution providers, but for the CPU's, that the decoder still asks for.
        several_widths: whether layers differ in the bytes of a row, so that no entry tells them.
        spare_rows: rows that ``max_length`` needs beyond the tokens of a text for all its exact
            tokens; 0 where there are none.
        padding: cache bytes of a token, all layers, that only make keys and values of a layer
            equally wide.
        uneven_batches: whether ``Engine`` answers prompts of different lengths in one batch
            rightly, or none of them. It pads them on the right, and takes the next token of each to
            lie behind its own. A graph that appends it behind the padding sees the padding instead,
            converted or not.
        engine: sizes of a decoder with pages, which ``Engine`` alone runs; None for others.
    """

    library: str
    head_size: int | None
    share_buffer: bool | None
    share_buffer_before: bool | None
    may_share: bool
    providers: tuple[str, ...]
    several_widths: bool = False
    padding: int = 0
    spare_rows: int = 0
    uneven_batches: bool = True
    engine: EngineSizes | None = None


def read_config(folder: Path) -> GenaiConfig | None:
    """Read the configuration of a folder; None if it has none."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
        _check_values(document)
        model = document["model"]
        decoder = model["decoder"]
        decoders = tuple(_file_names(decoder))
        components = tuple(
            name
            for key, part in model.items()
            if key != "decoder" and isinstance(part, dict)
            for name in _file_names(part)
        )
        entries = decoder.get("session_options", {}).get("provider_options", [])
        providers = tuple(name for entry in entries for name in entry.keys())  # noqa: SIM118
        for options in _session_options(copy.deepcopy(decoder), decoders):
            options.get(_LIBRARY)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(
            "the file cannot be read as JSON", where=str(path), fix=_SAVE_AGAIN
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(
            "the configuration does not describe a decoder of onnxruntime-genai",
            where=str(path),
            fix=_SAVE_AGAIN,
        ) from error
    if not decoders:
        raise ModelFileError(
            "the configuration names no file of a decoder", where=str(path), fix=_SAVE_AGAIN
        )
    for name in (*decoders, *components):
        _check_name(name, path)
    providers = tuple(name for name in providers if name.lower() not in ("cpu", ""))
    return GenaiConfig(path, document, decoders, components, providers)


def check_config(config: GenaiConfig) -> None:
    """Refuse a configuration that has no room for the library, or whose inputs slide."""
    sliding = config.document["model"]["decoder"].get(_SLIDING)
    for name in ("slide_inputs", "slide_key_value_cache") if sliding else ():
        # Both are true unless the configuration says otherwise.
        if not isinstance(sliding, dict) or sliding.get(name, True):
            raise UnsupportedModelError(
                "onnxruntime-genai cuts what it feeds to this model to a window "
                f"(model.decoder.sliding_window.{name})",
                where=str(config.path),
                fix="build the model for CPU or CUDA",
            )
    for options in _session_options(config.document["model"]["decoder"], config.decoders):
        if options.get(_LIBRARY):
            raise UnsupportedModelError(
                "the configuration names a library of custom operators already "
                f"({options[_LIBRARY]}), and onnxruntime-genai takes one",
                where=str(config.path),
                fix="remove the entry if the model does not need it",
            )


def patch_config(
    config: GenaiConfig,
    plans: dict[str, Plan],
    library: str,
    values: Mapping[str, int | None] | None = None,
) -> tuple[bytes, GenaiChanges]:
    """Make the configuration of the converted folder.

    Returns:
        The text in UTF-8, and what is different.
    """
    document = copy.deepcopy(config.document)
    decoder = document["model"]["decoder"]
    if document["model"].get("type") in _TYPES:
        document["model"]["type"] = _TYPES[document["model"]["type"]]
    decoder.pop(_SLIDING, None)
    for options in _session_options(decoder, tuple(plans)):
        options[_LIBRARY] = library
    layers = [layer for plan in plans.values() for layer in plan.layers]
    for layer in layers:
        if layer.key.row_bytes != layer.value.row_bytes:
            raise UnsupportedModelError(
                f"layer {layer.layer} has key rows of {layer.key.row_bytes} bytes and value rows "
                f"of {layer.value.row_bytes}, and onnxruntime-genai gives both one width",
                where=str(config.path),
                fix="convert with equal rows, or a preset with the same codec for both",
            )
    if len(plans) == 1 and not decoder.get("pipeline"):
        (plan,) = plans.values()
        _expect_names(decoder, plan, str(config.path))
    engine = None
    if any(plan.block_size for plan in plans.values()):
        engine = page_config(document, plans, values or {}, str(config.path))
    widths = {layer.key.row_bytes for layer in layers}
    width = next(iter(widths)) if len(widths) == 1 and "head_size" in decoder else None
    if width is not None:
        decoder["head_size"] = width
    search = document.get("search")
    before = search.get(_SHARE) if isinstance(search, dict) else None
    after = before
    fixed = all(plan.fixed_capacity for plan in plans.values())
    if before and not fixed:
        document["search"][_SHARE] = after = False
    may_share = before is False and fixed and engine is None
    changes = GenaiChanges(
        library,
        width,
        after,
        before,
        may_share,
        config.providers,
        several_widths=len(widths) > 1,
        # What pages have beside their rows holds exact tokens.
        padding=sum(_padding(layer) for layer in layers)
        if all(plan.page_window is None for plan in plans.values())
        else 0,
        spare_rows=max((plan.spare_rows for plan in plans.values()), default=0),
        uneven_batches=all(_batches_rightly(plan.interface) for plan in plans.values()),
        engine=engine,
    )
    return _text_of(document), changes


def _expect_names(decoder: Mapping[str, Any], plan: Plan, where: str) -> None:
    """Refuse a configuration that names caches or logits otherwise than the model does."""
    has = [("outputs", "logits", plan.interface.logits)]
    for layer in plan.layers:
        for kind, pair in (("key", layer.key), ("value", layer.value)):
            has.append(("inputs", f"past_{kind}_names", pair.past or ""))
            has.append(("outputs", f"present_{kind}_names", pair.present))
    for side, entry, name in has:
        names = decoder.get(side)
        template = names.get(entry) if isinstance(names, dict) else None
        if not isinstance(template, str) or not name:
            continue
        if not re.fullmatch(re.escape(template).replace("%d", "[0-9]+"), name):
            raise UnsupportedModelError(
                f"model.decoder.{side}.{entry} is {template}, and the model has {name}",
                where=where,
                fix="write the name that the model has, with %d for the number of the layer",
            )


def with_library(config: GenaiConfig, library: str) -> tuple[bytes, tuple[str, ...]]:
    """Make the configuration of a converted folder that gets another library.

    Returns:
        The text in UTF-8, and the names of libraries that are there now.
    """
    document = copy.deepcopy(config.document)
    every = _session_options(document["model"]["decoder"], config.decoders)
    named = [options for options in every if options.get(_LIBRARY)]
    before = tuple(dict.fromkeys(str(options[_LIBRARY]) for options in named))
    if not before:
        raise UnsupportedModelError(
            "the configuration names no operator library, so the folder was not converted",
            where=str(config.path),
            fix="convert it with tq-onnx convert, with `platform` if it is for another platform",
        )
    for name in before:
        if name not in LIBRARIES.values():
            raise UnsupportedModelError(
                f"the configuration names the library {name!r}, which is not that of tq-onnx",
                where=str(config.path),
                fix="give a folder that tq-onnx convert wrote",
            )
    for options in named:
        options[_LIBRARY] = library
    return _text_of(document), before


def _batches_rightly(interface: Interface) -> bool:
    """Return True if ``Engine`` answers prompts of different lengths rightly, or not at all.

    It always gives a mask, and knows no states but caches.
    """
    refused = interface.attention_mask is None or bool(interface.states)
    return interface.right_padding or refused


def _text_of(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=4, ensure_ascii=False) + "\n").encode()


def _padding(layer: LayerPlan) -> int:
    """Return the bytes of a token, behind the rows of one layer."""
    needed = sum(row_layout(codec, layer.head_size).row_bytes for codec in layer.codecs)
    return layer.kv_num_heads * (layer.key.row_bytes + layer.value.row_bytes - needed)


def _file_names(part: dict[str, Any]) -> Iterator[str]:
    """Return the model files of one part: its own, or its pipeline's."""
    if part.get("filename"):
        yield str(part["filename"])
    for _, stage in _pipeline(part):
        if stage.get("filename"):
            yield str(stage["filename"])


def _pipeline(part: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the stages of a pipeline: a list of objects, each with one name or several."""
    for entry in part.get("pipeline") or ():
        for name, stage in entry.items():
            if isinstance(stage, dict):
                yield name, stage


def _session_options(decoder: dict[str, Any], names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Return the session options that hold for models of those names; made where there are none."""
    yield decoder.setdefault("session_options", {})
    for _, stage in _pipeline(decoder):
        if stage.get("filename") in names and "session_options" in stage:
            yield stage["session_options"]


def _check_values(document: Any) -> None:
    """Refuse values that a conversion could not write again as JSON.

    Raises:
        ValueError: a number is not finite, a text is no Unicode, or values are nested too deep.
    """
    pending = [(document, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > _DEEPEST:
            raise ValueError(f"more than {_DEEPEST} values are nested")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number is not finite")
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, list):
            pending += [(each, depth + 1) for each in value]
        elif isinstance(value, dict):
            pending += [(each, depth + 1) for pair in value.items() for each in pair]


def _check_name(name: str, path: Path) -> None:
    parts = PurePosixPath(name.replace("\\", "/")).parts
    outside = ".." in parts or name[:1] in ("/", "\\") or PureWindowsPath(name).drive
    if outside or not name.isprintable():
        raise ModelFileError(
            f"the configuration names the file {name!r}, which is not in the folder",
            where=str(path),
            fix="move the model into the folder",
        )
