"""README.md of a converted model: its card, with the fields that model hubs read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tq_onnx.errors import ModelFileError, OutputExistsError, UsageError
from tq_onnx.files.configuration import configured_name
from tq_onnx.files.regular import read_text
from tq_onnx.measure.tables import HALF_BITS, model_name, small
from tq_onnx.quality.figures import ComparisonReport, ModelFigures
from tq_onnx.quality.page import check_page, to_page
from tq_onnx.version import __version__

README: Final = "README.md"

_MARK: Final = "<!-- the card of a conversion by tq-onnx -->"
_LICENSE: Final = re.compile(r"\A---\n(?:.*\n)*?license: *([\w.-]+) *\n(?:.*\n)*?---\n")


def card_path(card: Path | None, converted: Sequence[Path], *, overwrite: bool) -> Path:
    """Return the file of a card, before any work is done.

    Args:
        card: the file; None for README.md in the folder of the converted models.
        converted: the converted models.
        overwrite: whether another file there is replaced; an earlier card always is.

    Raises:
        UsageError: its name does not end with .md, or the models lie in several folders.
        ModelFileError: its folder does not exist, or it would replace what is no card.
    """
    if card is None:
        folders = {path.resolve().parent for path in converted}
        if len(folders) > 1:
            raise UsageError(
                f"the converted models lie in {len(folders)} folders",
                fix="name one file with `card`",
            )
        card = folders.pop() / README
    check_page(card)
    if card.exists() and not overwrite and _MARK not in _text(card):
        raise OutputExistsError(
            "the file exists, and is no card of an earlier report",
            where=str(card),
            fix="name another file with `card`, or replace it with `overwrite=True`",
        )
    return card


def write_card(report: ComparisonReport, path: Path) -> None:
    """Write a card; see ``to_card``.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(to_card(report), encoding="utf-8")


def to_card(report: ComparisonReport) -> str:
    """Write README.md: fields for model hubs, what the models are, and all tables."""
    files = [model.path.name for model in report.models if model.path is not None]
    lines = [
        "---",
        *(f"{name}: {json.dumps(value)}" for name, value in _fields(report).items()),
        "---",
        "",
        _MARK,
        "",
        f"# {report.original.resolve().parent.name} with a TurboQuant KV cache",
        "",
        f"tq-onnx {__version__} converted `{model_name(report.original)}`. The weights are the "
        "original's. The KV cache holds codes of a few bits in the place of floats.",
        "",
        f"```python\nimport tq_onnx\n\nmodel = tq_onnx.load({json.dumps(files[0])})\n"
        'print(model.generate("The").text)\n```',
        "",
        "## What the conversion costs",
        "",
        f"Measured on {report.positions:,} predictions in windows of {report.context:,} tokens. "
        "Every figure compares a converted model with its original, which reads the same tokens. "
        "± is a standard error, as if tokens were independent; they are not, so that the true one "
        "is larger.",
        "",
        *(f"- {_summary(model)}." for model in report.models),
        "",
        to_page(report, heading="###"),
    ]
    return "\n".join(lines)


def _summary(model: ModelFigures) -> str:
    """Say in one sentence what a conversion saves and costs."""
    quality = model.quality
    times = HALF_BITS * model.bytes_per_token / model.bits_per_value / model.bytes_at[-1]
    parts = [
        f"**{model.name}**: a cache {times:.2f} times smaller than float16 "
        f"({model.bytes_at[1]:,.0f} bytes per token at 8,192 tokens)",
        f"perplexity {100 * quality.perplexity_change:+.2f} ± "
        f"{100 * quality.perplexity_change_error:.2f} %",
        f"KL {small(quality.kl_mean)} nats",
    ]
    card = model.card
    if card is not None and card.needles:
        last = card.needles[-1]
        parts.append(f"{last.same_answer} of {last.needles} answers to needles as the original's")
    if card is not None and card.tool_calls is not None and card.tool_calls.calls:
        calls = card.tool_calls
        parts.append(f"{calls.same_arguments} of {calls.calls} tool calls with the same arguments")
    if card is not None and card.greedy is not None:
        parts.append(f"{100 * card.greedy.same_token:.1f} % of the tokens of greedy texts the same")
    return "; ".join(parts)


def _fields(report: ComparisonReport) -> dict[str, Any]:
    base, licence = configured_name(report.original), _licence(report.original.parent)
    return {
        **({} if base is None else {"base_model": base, "base_model_relation": "quantized"}),
        **({} if licence is None else {"license": licence}),
        "library_name": "onnx",
        "pipeline_tag": "text-generation",
        "tags": ["onnx", "kv-cache", "turboquant"],
        "metrics": ["perplexity"],
        "model-index": [
            {
                "name": model.name,
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"type": "text", "name": report.source},
                        "metrics": [
                            {"type": kind, "name": name, "value": round(value, 6)}
                            for kind, name, value in (
                                ("perplexity", "perplexity", model.quality.converted_perplexity),
                                ("kl_divergence", "KL from the original", model.quality.kl_mean),
                                ("accuracy", "same top token", model.quality.top1_agreement),
                            )
                        ],
                    }
                ],
            }
            for model in report.models
        ],
    }


def _licence(folder: Path) -> str | None:
    """Return the licence that the original's own README.md names."""
    match = _LICENSE.match(_text(folder / README))
    return None if match is None else match[1]


def _text(path: Path) -> str:
    """Return the text of a file; nothing if it cannot be read as one."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError, ModelFileError):
        return ""
