"""README.md of a converted model: its card, with the fields that model hubs read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tq_onnx.errors import OutputExistsError, UsageError
from tq_onnx.files.save import all_or_nothing
from tq_onnx.integrations.modelcard import MARK, README, hub_fields, opening, text_of
from tq_onnx.measure.tables import HALF_BITS, model_name, small
from tq_onnx.quality.figures import ComparisonReport, ModelFigures
from tq_onnx.quality.page import check_page, to_page


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
    if card.exists() and not overwrite and MARK not in text_of(card):
        raise OutputExistsError(
            "the file exists, and is no card of an earlier report",
            where=str(card),
            fix="name another file with `card`, or replace it with `overwrite=True`",
        )
    return card


def write_card(report: ComparisonReport, path: Path) -> None:
    """Write a card; see ``to_card``.

    Raises:
        ModelFileError: the file cannot be written.
    """
    with all_or_nothing(path) as transaction:
        transaction.write(path, [to_card(report).encode()])


def to_card(report: ComparisonReport) -> str:
    """Write README.md: fields for model hubs, what the models are, and all tables."""
    files = [model.path.name for model in report.models if model.path is not None]
    lines = [
        *opening(report.original, model_name(report.original), _fields(report)),
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
    return {
        **hub_fields(report.original),
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
