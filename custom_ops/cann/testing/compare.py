"""A report of ``tq-onnx verify-on-npu`` beside the cost model: measured times over modelled ones.

    python custom_ops/cann/testing/compare.py report.json

A time of the report is what one more call of a run adds: its launches, and its work on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Container, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import cost
from simulated_kernels import Kernels, build, rotation_of, row_bytes
from tq_onnx.ascend.verification.cann_attention import QUERY_HEADS, name_of
from tq_onnx.ascend.verification.codec_operators import Case, timed_attentions, timed_encodes
from tq_onnx.ascend.verification.findings import Effort
from tq_onnx.ascend.verification.singlenodes import HEADS
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.search import gain_table

TASK_QUERIES = 8
UNCUT = 512
"""Keys of one part (``host/attention_cut.h``)."""


def modelled(
    context: int, kernels: Kernels, chip: cost.Chip, names: Container[str] | None = None
) -> Iterator[tuple[str, float]]:
    """Yield names of what verify-on-npu times, all or those of ``names``, and microseconds."""
    timed = ((timed_encodes(), _encode), (timed_attentions(context), _attend))
    for cases, run in timed:
        for name, dtype, case in cases:
            if names is None or name in names:
                with kernels.counted() as launches:
                    run(kernels, case, dtype, int(chip.cores.value))
                yield name, sum(cost.times_of(one, chip).whole for one in launches)


def modelled_cann(chip: cost.Chip) -> Iterator[tuple[str, float]]:
    """Yield the same of CANN's own attention, where the device has it: the longest it may take."""
    if chip.arch == 2201:
        for heads in QUERY_HEADS:
            for keys in (Effort().keys, 8 * Effort().keys):
                yield name_of(heads, keys), cost.vendor(heads, keys, chip).worst_us


def _encode(kernels: Kernels, case: Case, dtype: str, cores: int) -> None:
    size = case.head_size
    vectors = np.ones((case.batch, HEADS, case.new, size), dtype)
    cache = np.zeros((case.batch, HEADS, case.slots, row_bytes(size, case.coding.codec)), np.uint8)
    kernels.encode(
        vectors, cache, case.past[0], rotation_of(size), codec=case.coding.codec,
        gains=gain_table(), norm_correction=UNBIASED,
        cores=min(cores, case.batch * HEADS * case.new),
    )  # fmt: skip


def _attend(kernels: Kernels, case: Case, dtype: str, cores: int) -> None:
    size, keys = case.head_size, case.past[0] + case.new
    query = np.ones((case.batch, HEADS * case.group, case.new, size), dtype)
    cache = np.zeros((case.batch, HEADS, case.slots, row_bytes(size, case.coding.codec)), np.uint8)
    tasks = case.batch * HEADS * -(-case.group * case.new // TASK_QUERIES)
    part = None if keys <= UNCUT else cost.part_tokens(keys)
    parts = 1 if part is None else -(-keys // part)
    kernels.attention(
        query, cache, cache, case.past[0], (rotation_of(size), rotation_of(size, 1)),
        scale=size**-0.5, codecs=(case.coding.codec, case.coding.codec),
        cores=min(cores, tasks * parts), part_tokens=part,
    )  # fmt: skip


def compare(report: dict[str, Any], kernels: Kernels, chip: cost.Chip) -> Iterator[str]:
    """Yield the lines of the table."""
    measured = {one["name"]: 1000 * one["median_ms"] for one in report["timings"]}
    yield f"{'microseconds':64} {'measured':>10} {'modelled':>10} {'ratio':>8}"
    ours = modelled(Effort().keys, kernels, chip, measured)
    for name, us in chain(ours, modelled_cann(chip)):
        if name in measured:
            yield f"{name:64} {measured[name]:10.1f} {us:10.1f} {measured[name] / us:8.2f}"


def main() -> None:
    """Compare one report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", type=Path, help="from `tq-onnx verify-on-npu -o report.json`")
    path = parser.parse_args().report
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        soc, simulated = str(report["environment"]["soc"]), report["simulated"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: no report of verify-on-npu ({error})")
    known = {one.arch: one for one in cost.chips(cost.GIVEN)}
    chip = known[2002] if soc.startswith("Ascend310P") else known[2201]
    with tempfile.TemporaryDirectory() as folder:
        kernels = Kernels(build(chip.arch, Path(folder)))
        for line in compare(report, kernels, chip):
            print(line)
    print(f"Modelled for an {chip.name}; measured on {soc}.")
    if simulated:
        print("That device was simulated: its times say nothing.")


if __name__ == "__main__":
    main()
