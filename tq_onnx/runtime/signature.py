"""Describe a decoder to its callers: names, caches, and the forms of caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import onnxruntime

from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.spec import Codec, is_layout_of, layout_digest
from tq_onnx.codec.window import NO_WINDOW, Window
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.plan import Interface, LayerPlan, Plan, plan_in
from tq_onnx.runtime import arguments
from tq_onnx.runtime.cache import CacheSpec, bytes_per_token, cache_spec
from tq_onnx.runtime.session import ports

MAX_CAPACITY: Final = 2**31 - 1
"""Most tokens of a cache: the operators count them in int32."""


@dataclass(frozen=True)
class Signature:
    """The facts of a decoder that its callers need."""

    interface: Interface  #: names of the inputs and outputs apart from the caches
    caches: tuple[CacheSpec, ...]  #: all caches, keys and values alternating, in layer order
    fixed_capacity: bool  #: whether caches may be larger than the tokens they hold
    plan: Plan | None = None  #: the conversion; None for an original model

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token of one sequence, all layers."""
        return bytes_per_token(self.caches)

    def window_of(self, layer: LayerPlan) -> Window:
        """Return the exact window of a layer's caches; that of an original has no tokens."""
        return NO_WINDOW if self.plan is None else self.plan.window_of(layer)

    def coding(self, cache: int) -> tuple[Codec, str] | None:
        """Return codec and element type of a cache; None for one of an original."""
        if self.plan is None:
            return None
        layer = self.plan.layers[cache // 2]
        return layer.codecs[cache % 2], ELEMENTS[layer.dtype]

    @property
    def is_paged(self) -> bool:
        """True if caches lie in pages, and a call takes packed sequences."""
        return self.plan is not None and self.plan.block_size > 0

    @property
    def first_only(self) -> bool:
        """True if the graph takes a first prompt, and no caches."""
        return any(spec.pair.past is None for spec in self.caches)

    def capacity(self, requested: int | None) -> int | None:
        """Return the tokens that caches hold, updated in place; None where they grow."""
        slots = self.slots
        if requested is None:
            return slots
        requested = arguments.count(requested, "context", least=1, most=MAX_CAPACITY)
        if slots is not None and requested != slots:
            raise UsageError(
                f"the caches of this model hold {slots} tokens, not {requested}",
                fix="leave `context` out",
            )
        if not self.fixed_capacity:
            raise UnsupportedModelError(
                "this model counts tokens by the length of its caches, so they can only grow",
                fix="leave `context` or `capacity` out",
            )
        return requested

    @property
    def is_enlarged(self) -> bool:
        """True if callers enlarge the caches, because no call gives out more rows than it takes."""
        return (self.interface.static or self.has_spare_rows) and not self.first_only

    @property
    def has_spare_rows(self) -> bool:
        """True if buffers have rows behind those of the tokens: for exact tokens, or of a ring."""
        return any(spec.spare_rows for spec in self.caches)

    @property
    def slots(self) -> int | None:
        """Tokens that the graph gives its caches room for; None if callers choose."""
        sizes = [spec.slots for spec in self.caches if spec.slots is not None]
        return min(sizes) if sizes else None


def plan_of(session: onnxruntime.InferenceSession) -> Plan | None:
    """Return the plan in the model's metadata; None if the model was not converted."""
    plan = plan_in(session.get_modelmeta().custom_metadata_map)
    if plan is None:
        return None
    if not is_layout_of(plan.layout_digest, plan.codecs, **plan.layout_facts):
        raise UnsupportedModelError(
            f"the model's caches have layout {plan.layout_digest} (tq-onnx {plan.tool_version}), "
            f"this tq-onnx has {layout_digest(plan.codecs, **plan.layout_facts)}",
            fix="convert the original model again",
        )
    return plan


def signature_of(session: onnxruntime.InferenceSession, plan: Plan) -> Signature:
    """Return the signature of a converted model."""
    interface = plan.interface
    if plan.block_size:
        interface = replace(interface, static=True)
    inputs, outputs = ({port.name for port in side} for side in ports(session))
    named = (
        interface.tokens,
        interface.attention_mask,
        interface.position_ids,
        *(entry.name for entry in interface.fed),
    )
    missing = {name for name in named if name is not None} - inputs | {interface.logits} - outputs
    if missing:
        raise UnsupportedModelError(
            f"the model has no {min(missing)}, which its plan names",
            fix="convert the original model again",
        )
    caches = [
        cache_spec(
            session,
            pair,
            kv_num_heads=layer.kv_num_heads,
            head_size=layer.head_size,
            window=plan.window_of(layer),
            block_size=plan.block_size,
            spare_rows=plan.spare_rows,
            pages=plan.page_window if plan.window_of(layer).entries else None,
        )
        for layer in plan.layers
        for pair in layer.caches
    ]
    return Signature(interface, tuple(caches), plan.fixed_capacity, plan)
