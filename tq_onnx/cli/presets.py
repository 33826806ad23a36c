"""``tq-onnx presets``: list the presets, their codecs, sizes and sources."""

from __future__ import annotations

import click

from tq_onnx.cli import flags, terminal
from tq_onnx.codec.presetfacts import preset_facts
from tq_onnx.codec.presets import LISTED_PRESETS
from tq_onnx.measure.tables import TextTable


@click.command()
@click.option(
    "--head-size",
    type=flags.Whole(8, 512),
    default=128,
    show_default=True,
    help="Show bytes for heads of this size.",
)
@flags.as_json
def presets(head_size: int, as_json: bool) -> None:
    """List the presets with their codecs, bytes per token and origin.

    Reads no files. Bytes are for the key and the value of one KV head, metadata included. `tq-onnx
    inspect` shows the bytes of a whole model.

    \b
    Example:
      tq-onnx presets
      tq-onnx presets --head-size 64 --json
    """
    facts = [preset_facts(preset, head_size) for preset in LISTED_PRESETS]
    if as_json:
        terminal.print_json(facts)
        return
    rows = []
    for entry in facts:
        slot = "" if entry.vllm_slot is None else f" (its slot: {entry.vllm_slot} bytes)"
        rows.append(
            (
                entry.preset + (" (default)" if entry.default else ""),
                entry.key,
                entry.value,
                entry.rotation,
                entry.bytes_per_token,
                f"{entry.bytes_at[1]:.0f}",
                f"{entry.bits_per_value:.2f}",
                f"{entry.ratio:.2f}",
                f"{entry.source}{slot}{'; experimental' if entry.experimental else ''}",
            )
        )
    columns = (
        "preset",
        "keys",
        "values",
        "rotation",
        ">bytes",
        ">at 8k",
        ">bits",
        ">smaller",
        "from",
    )
    brief = ("preset", "keys", "values", ">bytes", ">at 8k", ">smaller")
    terminal.print_table(TextTable.of(columns, rows, brief=brief))
    terminal.print_line(
        f"bytes: key and value of one token and KV head of size {head_size}; at 8k: the same with "
        "its share of the exact tokens, in a cache of 8,192 tokens; bits: of one value; smaller: "
        "than float16, times, without exact tokens"
    )
