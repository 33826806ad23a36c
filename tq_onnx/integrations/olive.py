"""A pass for Olive: convert the model that the passes before it have made.

Olive finds it by the package configuration that ``tq-onnx olive-config`` writes; this module is
imported by Olive only, whose classes it needs.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from olive.model import ONNXModelHandler
from olive.passes import Pass
from olive.passes.pass_config import ParamCategory, PassConfigParam

from tq_onnx.codec.presets import DEFAULT_PRESET
from tq_onnx.conversion.target import CPU
from tq_onnx.integrations.genai import CONFIG_FILE


class TurboQuantKVCache(Pass):  # type: ignore[misc]
    """Convert an ONNX decoder to a TurboQuant KV cache, as ``tq-onnx convert`` does."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        del accelerator_spec
        return {
            "preset": PassConfigParam(
                type_=str, default_value=DEFAULT_PRESET, description="A preset of tq-onnx."
            ),
            "residual_length": PassConfigParam(
                type_=int | None,
                default_value=None,
                description="Newest tokens that are kept in float16, too; the preset's by default.",
            ),
            "sink_tokens": PassConfigParam(
                type_=int | None,
                default_value=None,
                description="First tokens that are kept in float16, too; the preset's by default.",
            ),
            "calibration": PassConfigParam(
                type_=str | None,
                category=ParamCategory.PATH,
                default_value=None,
                description="A file that `tq-onnx calibrate` made of the model.",
            ),
            "calibrate": PassConfigParam(
                type_=bool,
                default_value=False,
                description="Gather the statistics of the model first, which runs it.",
            ),
            "target": PassConfigParam(
                type_=str, default_value=CPU.name, description="A target of tq-onnx."
            ),
            "arguments": PassConfigParam(
                type_=dict[str, Any] | None,
                default_value=None,
                description="Further arguments of tq_onnx.convert, by name.",
            ),
        }

    def _run_for_config(
        self, model: ONNXModelHandler, config: Any, output_model_path: str
    ) -> ONNXModelHandler:
        # The public function is of a room above this one.
        convert = import_module("tq_onnx").convert
        source = Path(model.model_path)
        output = Path(output_model_path).with_suffix("")
        chosen = {
            name: getattr(config, name)
            for name in self._default_config(None)
            if name != "arguments"
        }
        of_genai = (source.parent / CONFIG_FILE).is_file()
        convert(
            source.parent if of_genai else source,
            output if of_genai else output / source.name,
            **{"external_data": "copy", "overwrite": True} | chosen | (config.arguments or {}),
        )
        attributes = dict(model.model_attributes or {})
        if of_genai:
            attributes["additional_files"] = sorted(
                str(file) for file in output.iterdir() if file.name != source.name
            )
        return ONNXModelHandler(output, source.name, model_attributes=attributes)
