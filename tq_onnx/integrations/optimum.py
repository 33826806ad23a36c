"""Open converted models as optimum's ``ORTModelForCausalLM``: ``generate`` of transformers.

optimum-onnx 0.1 makes the first caches by itself, as floats of the size of a head; those of a
converted model are bytes. Needs ``optimum-onnx``, which nothing else here imports.
"""

from __future__ import annotations

from typing import Any

from optimum.onnxruntime import ORTModelForCausalLM

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import METADATA_PLAN
from tq_onnx.runtime.session import registered_options
from tq_onnx.runtime.signature import plan_of, signature_of


class TurboQuantForCausalLM(ORTModelForCausalLM):  # type: ignore[misc]
    """A converted model with growing caches; all methods are those of ``ORTModelForCausalLM``."""

    @classmethod
    def from_pretrained(cls, model_id: Any, **arguments: Any) -> TurboQuantForCausalLM:
        """Open a converted folder; see ``ORTModelForCausalLM.from_pretrained``.

        Raises:
            UnsupportedModelError: the model is not converted, or its caches do not grow.
            LibraryError: the operator library is missing.
        """
        arguments = {"session_options": registered_options(), "use_io_binding": False} | arguments
        model: TurboQuantForCausalLM = super().from_pretrained(model_id, **arguments)
        plan = plan_of(model.session)
        if plan is None:
            raise UnsupportedModelError(
                f"the model has no {METADATA_PLAN}: it was not converted",
                where=str(model_id),
                fix="open it with `ORTModelForCausalLM`",
            )
        model.caches = signature_of(model.session, plan).caches
        model.key_value_input_names = [cache.pair.past for cache in model.caches]
        model.key_value_output_names = [cache.pair.present for cache in model.caches]
        if model.is_merged or any(c.slots or c.spare_rows or c.block_size for c in model.caches):
            raise UnsupportedModelError(
                "optimum needs a model with one graph and caches that grow",
                where=str(model_id),
                fix='convert the .onnx file of a decoder with past, with `target="cpu"`',
            )
        return model

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_ids: Any = None,
        **arguments: Any,
    ) -> Any:
        """Compute logits; see ``ORTModelForCausalLM.forward``."""
        batch, new = input_ids.shape
        if attention_mask is None and past_key_values is None:
            attention_mask = input_ids.new_ones((batch, new))
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -new:]
        if past_key_values is None:
            empty = [input_ids.new_zeros(cache.shape(batch, 0)).byte() for cache in self.caches]
            past_key_values = tuple(zip(empty[::2], empty[1::2], strict=True))
        return super().forward(
            input_ids, attention_mask, past_key_values, position_ids, **arguments
        )
