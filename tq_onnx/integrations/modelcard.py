"""What a converted folder says of itself: README.md with fields for model hubs, and config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tq_onnx.conversion.reports import ConversionReport
from tq_onnx.errors import ModelFileError
from tq_onnx.files.configuration import CONFIGURATION, configured_name
from tq_onnx.files.regular import read_text
from tq_onnx.plan import Plan
from tq_onnx.version import __version__

README: Final = "README.md"
ORIGINAL_README: Final = "README.original.md"
MARK: Final = "<!-- the card of a conversion by tq-onnx -->"
CACHE_FIELD: Final = "kv_cache_quantization"
"""Of config.json. ``quantization_config`` is about weights: transformers would look for a quantiser
of that name, and refuse the folder."""

_LICENSE: Final = re.compile(r"\A---\n(?:.*\n)*?license: *([\w.-]+) *\n(?:.*\n)*?---\n")


def text_of(path: Path) -> str:
    """Return the text of a file; nothing if it cannot be read as one."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError, ModelFileError):
        return ""


def _hub_fields(original: Path) -> dict[str, Any]:
    """Return the fields that model hubs read: base model, licence, library, tags."""
    licence = _LICENSE.match(text_of(original.parent / README))
    base = configured_name(original) or _cached_name(original.parent)
    return {
        **({} if base is None else {"base_model": base, "base_model_relation": "quantized"}),
        **({} if licence is None else {"license": licence[1]}),
        "library_name": "onnx",
        "pipeline_tag": "text-generation",
        "tags": ["onnx", "kv-cache", "turboquant"],
    }


def _cached_name(folder: Path) -> str | None:
    """Return the repository of a folder in Hugging Face's cache; None elsewhere."""
    real = folder.resolve()
    kind, *name = real.parent.parent.name.split("--")
    is_cached = real.parent.name == "snapshots" and kind == "models"
    return "/".join(name) if is_cached and len(name) == 2 else None


def folder_card(
    folder: Path, output: Path, reports: Sequence[ConversionReport], *, of_genai: bool
) -> str:
    """Write README.md of a converted folder."""
    first = reports[0]
    plan, original = first.plan, folder / first.source.name
    facts = cache_facts(plan)
    size = f"{first.bytes_per_token_after:,}"
    if first.bytes_per_token_before:
        size += f", {first.ratio:.2f} times fewer than before"
    exact = facts["residual_length"] + facts["sink_tokens"]
    name = first.output.relative_to(output).as_posix()
    ways = {
        "tq-onnx": [
            "import tq_onnx",
            "",
            'print(tq_onnx.load(".").generate("The").text)',
        ],
        "onnxruntime": [
            "import onnxruntime, tq_onnx",
            "",
            f"session = onnxruntime.InferenceSession({json.dumps(name)}, "
            "tq_onnx.session_options())",
        ],
    }
    if of_genai:
        ways["onnxruntime-genai"] = [
            "import onnxruntime_genai as og",
            "",
            'model = og.Model(".")  # the operator library is in this folder',
        ]
    elif plan.target == "web":
        ways["transformers.js"] = [
            f"const model = await AutoModelForCausalLM.from_pretrained({json.dumps(output.name)}, "
            "{",
            '  dtype: "fp32", device: "wasm" });',
        ]
    lines = [
        "---",
        *(f"{field}: {json.dumps(value)}" for field, value in _hub_fields(original).items()),
        "---",
        "",
        MARK,
        "",
        f"# {original.resolve().parent.name} with a TurboQuant KV cache",
        "",
        f"tq-onnx {__version__} converted `{original.name}`. The weights are the original's. The "
        "KV cache holds codes of a few bits in the place of floats.",
        "",
        "| | |",
        "| --- | --- |",
        f"| preset | `{plan.preset}` |",
        f"| keys, values | {facts['keys']}, {facts['values']} |",
        f"| bytes per token | {'; '.join((size, *first.rings))} |",
        f"| exact tokens | {exact or 'none'} |",
        f"| target | `{plan.target}` |",
        "",
        "The loss of quality was not measured. `tq-onnx report` measures it on your text.",
        "",
        "## How to run it",
        "",
    ]
    for title, code in ways.items():
        language = "js" if title.endswith(".js") else "python"
        lines += [f"With {title}:", "", f"```{language}", *code, "```", ""]
    return "\n".join(lines)


def cache_facts(plan: Plan) -> dict[str, Any]:
    """Return what config.json says of the caches, as JSON has it."""
    coded = [layer for layer in plan.layers if not layer.key.codec.is_raw] or list(plan.layers)
    return {
        "quant_method": "turboquant",
        "tool": f"tq-onnx {plan.tool_version}",
        "preset": plan.preset,
        "target": plan.target,
        "keys": str(coded[0].key.codec),
        "values": str(coded[0].value.codec),
        "layers": [layer.layer for layer in coded],
        "residual_length": plan.recent,
        "sink_tokens": plan.sinks,
    }


def described_config(folder: Path, plan: Plan) -> bytes | None:
    """Return config.json of a folder with a block on the caches; None where there is none."""
    try:
        fields = json.loads(text_of(folder / CONFIGURATION))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    fields[CACHE_FIELD] = cache_facts(plan)
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
