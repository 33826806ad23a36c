"""A decoder with its caches: prefill, decode, growing or of fixed capacity.

A ``Signature`` names the inputs, outputs and caches of a model; for a converted model
``signature_of`` reads it from the plan in the model's metadata. A ``Decoder`` feeds tokens and
keeps the caches of one batch:

- growing: every call's ``present`` outputs are the next call's ``past`` inputs;
- fixed capacity: one buffer per cache is bound as past and as present, and the kernels write the
  new rows into it. Where the function bodies run instead of the kernels, past and present are two
  buffers that change places, because standard operators may not write what they still read.

``attention_mask`` is ``[B, total]`` and ``position_ids`` count the tokens that the mask keeps, so
that left-padded batches work in models that take both; models that count positions by themselves
(onnxruntime-genai's) accept no padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime

from tq_onnx.codec.spec import layout_digest
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.graph.plan import METADATA_PLAN, Interface, Plan
from tq_onnx.runtime.cache import CacheSpec, as_array, bytes_per_token, cache_spec
from tq_onnx.runtime.session import placement, run_error

Tokens = npt.NDArray[np.int64]
Logits = npt.NDArray[np.floating[Any]]

_INTEGERS: Final = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}


@dataclass(frozen=True)
class Signature:
    """What a caller must know of a decoder to run it.

    Attributes:
        interface: names of the inputs and outputs apart from the caches.
        caches: all caches, keys and values alternating, in layer order.
        fixed_capacity: whether caches may be larger than the tokens they hold.
        plan: the conversion; None for an original model.
    """

    interface: Interface
    caches: tuple[CacheSpec, ...]
    fixed_capacity: bool
    plan: Plan | None = None

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token of one sequence, all layers."""
        return bytes_per_token(self.caches)


def plan_of(session: onnxruntime.InferenceSession) -> Plan | None:
    """The plan in the model's metadata; None if the model was not converted.

    Raises:
        ModelFileError: the metadata is damaged.
        UnsupportedModelError: the model was converted for another row layout.
    """
    text = session.get_modelmeta().custom_metadata_map.get(METADATA_PLAN)
    if text is None:
        return None
    plan = Plan.from_json(text)
    if plan.layout_digest != layout_digest():
        raise UnsupportedModelError(
            f"the model's caches have layout {plan.layout_digest} (tq-onnx {plan.tool_version}), "
            f"this tq-onnx has {layout_digest()}",
            fix="convert the original model again",
        )
    return plan


def signature_of(session: onnxruntime.InferenceSession, plan: Plan) -> Signature:
    """The signature of a converted model.

    Raises:
        UnsupportedModelError: the plan names caches that the model does not have.
    """
    caches = [
        cache_spec(session, pair, kv_num_heads=layer.kv_num_heads, head_size=layer.head_size)
        for layer in plan.layers
        for pair in (layer.key, layer.value)
    ]
    return Signature(plan.interface, tuple(caches), plan.fixed_capacity, plan)


class Decoder:
    """Runs one batch through a decoder and keeps its caches.

    Args:
        session: from ``make_session``.
        signature: the model's names and caches.
        batch: B, sequences decoded together.
        capacity: tokens that the caches hold, updated in place; None for growing caches.
        alias: whether one buffer may be past and present; None decides by what the session runs.
        watch: names of further outputs; ``watched`` holds their values after every call.
        where: what errors call the model, its path if it has one.

    Raises:
        UnsupportedModelError: the model has inputs that nothing fills, or a capacity was asked of a
            model that can only grow.
        UsageError: the capacity is not positive.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        signature: Signature,
        *,
        batch: int = 1,
        capacity: int | None = None,
        alias: bool | None = None,
        watch: Sequence[str] = (),
        where: str = "the model",
    ) -> None:
        """Allocates empty caches; see the class for arguments and errors."""
        self.session = session
        self.signature = signature
        self.batch = batch
        self.capacity = capacity
        self.watch = tuple(watch)
        self.where = where
        self.watched: dict[str, npt.NDArray[Any]] = {}
        self._types = {entry.name: entry.type for entry in session.get_inputs()}
        self._check_inputs()
        if capacity is not None:
            if capacity <= 0:
                raise UsageError(f"a cache capacity of {capacity} tokens holds nothing")
            if not signature.fixed_capacity:
                raise UnsupportedModelError(
                    "this model counts tokens by the length of its caches, so they can only grow",
                    fix="leave the capacity out",
                )
        if alias is None:
            # An original's attention is one kernel that knows the shared buffer, too.
            alias = signature.plan is None or placement(session).uses_library
        self._alias = alias
        self.reset()

    def reset(self) -> None:
        """Forgets everything: empty caches of the same kind."""
        tokens = self.capacity or 0
        specs = self.signature.caches
        self._past = [spec.allocate(self.batch, tokens) for spec in specs]
        spare = self.capacity is not None and not self._alias
        self._spare = [spec.allocate(self.batch, tokens) for spec in specs] if spare else []
        self._mask = np.ones((self.batch, 0), np.int64)

    @property
    def length(self) -> int:
        """Tokens per sequence in the caches, padding included."""
        return int(self._mask.shape[1])

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache buffers as they are now."""
        return sum(int(value.tensor_size_in_bytes()) for value in self._past)

    def cache(self, index: int) -> npt.NDArray[Any]:
        """A copy of the used part ``[B, N, length, row]`` of one cache, in signature order."""
        used: npt.NDArray[Any] = as_array(self._past[index])[:, :, : self.length].copy()
        return used

    def prefill(
        self,
        tokens: npt.ArrayLike,
        attention_mask: npt.ArrayLike | None = None,
        *,
        chunk: int | None = None,
    ) -> Logits:
        """Feeds a prompt.

        Args:
            tokens: ids ``[B, T]``.
            attention_mask: ``[B, T]``, 0 for padding on the left; None if there is none.
            chunk: tokens per call; None for all at once.

        Returns:
            Logits ``[B, T, vocabulary]`` in the model's own float type.

        Raises:
            UsageError: shapes do not fit, or the capacity is too small.
            UnsupportedModelError: padding in a model that cannot take it, or a failure to run.
        """
        tokens_BT = np.ascontiguousarray(tokens, np.int64)
        if tokens_BT.ndim != 2 or tokens_BT.shape[0] != self.batch or tokens_BT.shape[1] == 0:
            raise UsageError(
                f"tokens have shape {list(tokens_BT.shape)}, not [{self.batch}, 1 or more]"
            )
        mask_BT = np.ones_like(tokens_BT)
        if attention_mask is not None:
            mask_BT = np.ascontiguousarray(attention_mask, np.int64)
            self._check_mask(mask_BT, tokens_BT.shape)
        size = chunk or tokens_BT.shape[1]
        parts = [
            self._run(tokens_BT[:, start : start + size], mask_BT[:, start : start + size])
            for start in range(0, tokens_BT.shape[1], size)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def step(self, tokens: npt.ArrayLike) -> Logits:
        """Feeds one token per sequence, ids ``[B]``; returns logits ``[B, vocabulary]``."""
        tokens_B1 = np.asarray(tokens, np.int64).reshape(self.batch, 1)
        return self._run(tokens_B1, np.ones_like(tokens_B1))[:, -1]

    def _run(self, tokens_BT: Tokens, mask_BT: Tokens) -> Logits:
        mask_BS = np.concatenate([self._mask, mask_BT], axis=1)
        if self.capacity is not None and mask_BS.shape[1] > self.capacity:
            raise UsageError(
                f"{mask_BS.shape[1]} tokens do not fit into caches with a capacity of "
                f"{self.capacity}",
                fix="raise the capacity or feed fewer tokens",
            )
        interface = self.signature.interface
        binding = self.session.io_binding()
        self._bind_integers(binding, interface.tokens, tokens_BT)
        if interface.attention_mask is not None:
            self._bind_integers(binding, interface.attention_mask, mask_BS)
        if interface.position_ids is not None:
            positions_BS = np.maximum(np.cumsum(mask_BS, axis=1) - 1, 0)
            new = tokens_BT.shape[1]
            self._bind_integers(binding, interface.position_ids, positions_BS[:, -new:])
        binding.bind_output(interface.logits, "cpu")
        for name in self.watch:
            binding.bind_output(name, "cpu")
        targets = self._spare or self._past
        for index, spec in enumerate(self.signature.caches):
            binding.bind_ortvalue_input(spec.pair.past, self._past[index])
            if self.capacity is None:
                binding.bind_output(spec.pair.present, "cpu")
            else:
                binding.bind_ortvalue_output(spec.pair.present, targets[index])
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:
            raise run_error(error, self.where) from error
        logits, *others = binding.get_outputs()
        watched, presents = others[: len(self.watch)], others[len(self.watch) :]
        self.watched = {
            name: np.asarray(value.numpy()) for name, value in zip(self.watch, watched, strict=True)
        }
        if self.capacity is None:
            self._past = presents
        elif self._spare:
            self._past, self._spare = self._spare, self._past
        self._mask = mask_BS
        return np.asarray(logits.numpy())

    def _bind_integers(self, binding: Any, name: str, values: npt.NDArray[np.integer[Any]]) -> None:
        dtype = _INTEGERS[self._types[name]]
        binding.bind_cpu_input(name, np.ascontiguousarray(values, dtype))

    def _check_mask(self, mask_BT: Tokens, shape: Iterable[int]) -> None:
        if mask_BT.shape != tuple(shape):
            raise UsageError(f"the attention mask has shape {list(mask_BT.shape)}, the tokens not")
        padded = not mask_BT.all()
        names = self.signature.interface
        if padded and (names.attention_mask is None or names.position_ids is None):
            raise UnsupportedModelError(
                "a model without inputs for attention mask and positions takes no padded batches",
                fix="feed sequences of equal length, or one at a time",
            )
        if (np.diff(mask_BT, axis=1) < 0).any() or not mask_BT[:, -1].all():
            raise UsageError("padding must stand on the left of each sequence")

    def _check_inputs(self) -> None:
        names = self.signature.interface
        known = {names.tokens, names.attention_mask, names.position_ids}
        known |= {spec.pair.past for spec in self.signature.caches}
        unknown = [name for name in self._types if name not in known]
        if unknown:
            raise UnsupportedModelError(
                f"the model has inputs that a text decoder does not have: {', '.join(unknown)}"
            )
        for name in (names.tokens, names.attention_mask, names.position_ids):
            if name is not None and self._types.get(name) not in _INTEGERS:
                raise UnsupportedModelError(
                    f"the input has type {self._types.get(name, 'missing')}, not int64 or int32",
                    where=name,
                )
