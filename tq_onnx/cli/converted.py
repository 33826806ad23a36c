"""How the report of a conversion looks on the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from tq_onnx.cli import planned, terminal
from tq_onnx.codec.elements import ELEMENT_BITS, ELEMENTS
from tq_onnx.measure.tables import byte_size, smaller
from tq_onnx.ops.features import EXACT_WINDOW, SPARE_ROWS

if TYPE_CHECKING:
    from tq_onnx.conversion.reports import ConversionReport
    from tq_onnx.integrations.folderconversion import FolderReport
    from tq_onnx.integrations.genai import GenaiChanges


def print_model(report: ConversionReport, model: Path, output: Path) -> None:
    """Print what was done to a model.

    Args:
        report: what was done.
        model: the original, as the user named it.
        output: the converted model, likewise.
    """
    plan, files = report.plan, report.files
    before, after = report.bytes_per_token_before, report.bytes_per_token_after
    rows = [
        *planned.rows(plan, report.equalisation, report.calibration),
        *planned.key_bias(report.key_bias),
        ("cache per token", f"{before:,} -> {after:,} bytes: {_smaller(report)}"),
        ("output", f"{output} ({byte_size(files.bytes_written)} written)"),
    ]
    how = {"keep": "shared with the original", "copy": "copied", "link": "hard-linked"}
    rows += [("needs", f"{file} ({how[files.external_data or 'keep']})") for file in files.data]
    pair = f"{shlex.quote(str(model))} {shlex.quote(str(output))}"
    rows.append(("next", f"tq-onnx verify {pair} --quick"))
    terminal.print_facts(rows)
    if files.moved is not None:
        terminal.print_line(f"  {files.moved} holds weights that did not fit into the model file")
    planned.warn(plan, report.equalisation)


def print_folder(report: FolderReport, folder: Path, output: Path) -> None:
    """Print what was done to a folder.

    Args:
        report: what was done.
        folder: the original, as the user named it.
        output: the converted folder, likewise.
    """
    first = report.decoders[0]
    exact_tokens = EXACT_WINDOW if report.genai is None else SPARE_ROWS
    rows = [
        *planned.rows(first.plan, first.equalisation, first.calibration, exact_tokens),
        *planned.key_bias(first.key_bias),
        ("output", f"{output} ({byte_size(report.bytes_written)} written)"),
    ]
    for decoder in report.decoders:
        dialects = ", ".join(dict.fromkeys(layer.dialect for layer in decoder.plan.layers))
        before, after = decoder.bytes_per_token_before, decoder.bytes_per_token_after
        name = decoder.output.relative_to(report.output).as_posix()
        rows.append(
            (
                "converted",
                f"{name}: {len(decoder.plan.layers)} layers ({dialects}), {before:,} -> {after:,} "
                f"cache bytes per token, {_smaller(decoder)}",
            )
        )
        if decoder.files.moved is not None:
            moved = decoder.files.moved.relative_to(report.output).as_posix()
            rows.append(("data", f"{moved} (weights that did not fit into the model file)"))
    how = "hard-linked" if report.external_data == "link" else "copied"
    rows += [("data", f"{name} ({how})") for name in report.data]
    if report.carried:
        rows.append(("carried", ", ".join(report.carried)))
    rows += [("left out", f"{entry.name}: {entry.reason}") for entry in report.left_out]
    if report.genai is not None:
        rows += _genai_rows(report.genai)
    original_name, converted_name = shlex.quote(str(folder)), shlex.quote(str(output))
    rows.append(("next", f"tq-onnx verify {original_name} {converted_name} --quick"))
    terminal.print_facts(rows)
    for decoder in report.decoders:
        planned.warn(decoder.plan, decoder.equalisation)


def _smaller(report: ConversionReport) -> str:
    bits = ELEMENT_BITS[ELEMENTS[report.plan.layers[0].dtype]]
    before = report.bytes_per_token_before
    texts = [smaller(before, report.bytes_per_token_after, bits)] if before else []
    return "; ".join((*texts, *report.rings))


def _genai_rows(changes: GenaiChanges) -> list[tuple[str, str]]:
    """Return the changes to genai_config.json, and what to know about them."""
    patched = [f"custom_ops_library = {changes.library}"]
    if changes.head_size is not None:
        patched.append(f"head_size = {changes.head_size}, the bytes of a cache row")
    if changes.share_buffer != changes.share_buffer_before:
        patched.append("past_present_share_buffer = false: the caches of this model must grow")
    rows = [("genai", "; ".join(patched))]

    def add(text: str, name: str = "note") -> None:
        rows.append((name, text))

    engine = changes.engine
    if engine is not None:
        add(
            f"{engine.blocks:,} pages of {engine.block_size} tokens for {engine.batch} "
            f"requests, {byte_size(engine.bytes)} of caches; --num-blocks and "
            "--max-batch-size choose others",
            "engine",
        )
    if changes.padding:
        add(
            f"{changes.padding:,} bytes of each token are padding, because onnxruntime-genai "
            "wants keys and values of a layer equally wide"
        )
    if changes.several_widths:
        add(
            "layers have rows of several widths, which onnxruntime-genai takes from the graph; "
            "old releases (0.9) do not"
        )
    if changes.spare_rows:
        add(
            f"exact tokens take the last {changes.spare_rows} rows of max_length until the text "
            "needs these rows; a larger max_length keeps the quality up to the end"
        )
    if changes.may_share:
        consequence = ", and keep their exact tokens" if changes.spare_rows else ""
        add(
            "past_present_share_buffer may be set to true now: caches are then updated in "
            f"place instead of copied in every step{consequence}"
        )
    if not changes.uneven_batches:
        add(
            "onnxruntime-genai's Engine answers prompts of different lengths in one batch "
            "wrongly with this graph, converted or not, and says nothing: give it one request "
            "at a time, or use Generator",
            "warning",
        )
    if changes.providers:
        add(
            f"the configuration asks for {', '.join(changes.providers)}, and the library has "
            "kernels for the CPU only; without the entry custom_ops_library the function "
            "bodies run there"
        )
    return rows
