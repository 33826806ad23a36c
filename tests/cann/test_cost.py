"""The cost model: arithmetic by hand, what it takes for granted, and the figures of the bench."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest

import compare
import cost
from simulated_kernels import CUSTOM_OPS, Kernels, rotation_of, row_bytes
from simulator import CoreCounts, Launch, MovedCount, VectorCount
from tests.cann.bench import Measured
from tq_onnx.ascend.verification.codec_operators import timed_attentions, timed_encodes

# The bench runs these; elsewhere test_kernels.py and test_decoder_kernels.py do.
pytestmark = pytest.mark.cann

DOCUMENT = CUSTOM_OPS.parent / "docs" / "measurements" / "ascend-cost.json"
STALE = 0.1
"""How far the model may be from the document of the docs, which is written by hand."""


def test_a_report_beside_the_model(kernels: Kernels) -> None:
    """What verify-on-npu times is what is modelled, by name; long contexts take longer."""
    chip = next(chip for chip in cost.chips(cost.GIVEN) if chip.arch == kernels.arch)
    expected = dict(compare.modelled(64, kernels, chip))
    names = {name for name, *_ in (*timed_encodes(), *timed_attentions(64))}
    assert expected.keys() == names
    short, long = (
        f"attention float16 D=128 B=4 T=1 past={','.join(4 * [str(keys - 1)])} group=5"
        for keys in (64, 512)
    )
    assert expected[long] > expected[short] > 2  # of the launch alone
    of_cann = [name for name, _ in compare.modelled_cann(chip)]
    assert len(of_cann) == (4 if kernels.arch == 2201 else 0)
    timed = ["another", next(timed_encodes())[0], *of_cann]
    report = {"timings": [{"name": name, "median_ms": 1.0} for name in timed]}
    assert len(list(compare.compare(report, kernels, chip))) == len(timed)  # with its head


def _core(
    *vector: VectorCount, moved: tuple[int, int] = (0, 0), barriers: int = 0, loads: int = 0
) -> CoreCounts:
    """A core that reads ``moved``: transfers and bytes."""
    transfers, count = moved
    into, out = MovedCount(transfers, transfers, count), MovedCount(0, 0, 0)
    return CoreCounts(vector, into, out, barriers, 0, 0, 0, loads)


def test_a_launch_by_hand() -> None:
    """The slowest core of each queue counts; queues run side by side, behind the begin."""
    chip = cost.chips(cost.GIVEN)[0]
    assert (chip.cores.value, chip.clock.value, chip.bandwidth.value) == (40, 1.8, 1600)
    adds = VectorCount("Adds", 4, 4, 2, 100)
    launch = Launch("any", (_core(adds, barriers=3), _core(moved=(1, 32_000), loads=5)))
    times = cost.times_of(launch, chip)
    begin = 882.09 + 497.36 + 37.37 + 300 + 2 * 15.89
    assert times.launch == pytest.approx(2 + begin / 1800)
    assert times.vector == pytest.approx((2 * 22.0936 + 100 * 64 * 0.0141) / 1800)
    assert times.memory == pytest.approx((32_000 / (9.9 + 15.9 / 2) + 27.01) / 1800)
    assert times.scalar == pytest.approx((4 + 5 * 100) / 1800)
    assert times.whole == pytest.approx(times.launch + times.memory)
    assert times.limit == "launch"


def test_memory_is_shared() -> None:
    """40 cores at once get what the memory gives, one core what its queue takes."""
    chip = cost.chips(cost.GIVEN)[0]
    core = _core(moved=(1, 3_200_000))
    alone, together = (cost.times_of(Launch("any", (core,) * n), chip).memory for n in (1, 40))
    assert alone < 80 < together  # 80 is what the memory takes for 40 of them
    assert together == pytest.approx((3.2e6 / (9.9 + 15.9 / 40) + 27.01) / 1800)
    small = cost.times_of(Launch("any", (_core(moved=(1000, 3_200_000)),)), chip).memory
    assert small == pytest.approx((3.2e6 / (7.9 + 7.3) + 27_010) / 1800)


def test_the_attention_of_cann_on_paper() -> None:
    """What the route by CANN's attention is for: a call of 15 us at 4k tokens and 55 at 32k."""
    rows = {row.shape: row for row in cost.vendor_rows(cost.chips(cost.GIVEN))}
    for heads in (16, 40):
        for tokens, goal in (("4,096", 15), ("32,768", 55)):
            row = rows[f"{heads}/8 heads, {tokens} tokens"]
            assert row.limit_us < row.best_us <= row.worst_us <= goal
            assert row.worst_us == pytest.approx(row.launch_us + row.load_us, abs=0.02)


def test_every_figure_has_a_source_or_is_an_assumption() -> None:
    for told in cost.document((), cost.chips(cost.GIVEN))["chips"]:
        figures = {name: one for name, one in told.items() if isinstance(one, dict)}
        assumed = {name for name, one in figures.items() if one["source"] == cost.ASSUMED}
        assert assumed == set(cost.GIVEN)
        assert all(
            re.search(r"\w+\.\w+", figures[name]["source"]) for name in figures.keys() - assumed
        )


def test_one_head_stands_for_all(kernels: Kernels) -> None:
    """Heads on a multiple of as many cores: each on its share is asked for the same."""
    heads, share, keys = 2, 5, 1025
    part_tokens = cost.part_tokens(keys)
    found = []
    for count in (1, heads):
        query = np.ones((1, 2 * count, 1, 128), np.float32)
        cache = np.zeros((1, count, keys, row_bytes(128)), np.uint8)
        with kernels.counted() as launches:
            kernels.attention(
                query, cache, cache, keys - 1, (rotation_of(128), rotation_of(128)),
                scale=0.1, cores=share * count, part_tokens=part_tokens,
            )  # fmt: skip
        attention, merge = launches
        found.append(attention.cores)
        # The merge has a task for each head; other cores have none.
        tasks = [core for core in merge.cores if core.moved_out.bytes]
        assert len(tasks) == count
    one, both = (Counter(map(_asked, cores)) for cores in found)
    assert both == Counter({core: heads * count for core, count in one.items()})


def _asked(core: CoreCounts) -> tuple[object, ...]:
    """All of it, but for the order of kinds."""
    return (frozenset(core.vector), core.moved_in, core.moved_out, core.barriers, core.flags_waited)


def test_the_cut_is_that_of_the_host() -> None:
    header = (CUSTOM_OPS / "cann" / "host" / "attention_cut.h").read_text(encoding="utf-8")
    names = {"kPartTokens": cost.PART_TOKENS, "kMostParts": cost.MOST_PARTS}
    for name, value in names.items():
        assert re.search(rf"{name} = {value};", header), name
    assert [cost.part_tokens(keys) for keys in (4096, 32768, 32769)] == [512, 512, 576]


def test_the_document_has_the_figures_of_the_model() -> None:
    told = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    chips = cost.chips(cost.GIVEN)
    now = json.loads(json.dumps(cost.document((), chips)))
    given = now.keys() - {"rows"}
    for name in given:
        assert told[name] == now[name], f"write {DOCUMENT.name} anew: cost.py --json"
    asked = [
        (chip.name, one.kernel, one.shape) for chip in chips for one in cost.workloads(chip.arch)
    ]
    assert [(row["chip"], row["kernel"], row["shape"]) for row in told["rows"]] == asked


@pytest.mark.cann
def test_model(kernels: Kernels, measured: Measured) -> None:
    """Every kernel has a model; the document of the docs is of these kernels, or nearly."""
    told = {
        (row["chip"], row["kernel"], row["shape"]): row["times_the_limit"]
        for row in json.loads(DOCUMENT.read_text(encoding="utf-8"))["rows"]
    }
    (chip,) = (one for one in cost.chips(cost.GIVEN) if one.arch == kernels.arch)
    rows = [
        cost.model(one, kernels, chip) for one in cost.workloads(kernels.arch, contexts=(4096,))
    ]
    assert {row.kernel for row in rows} >= {"tq_attention", "tq_encode", "tq_rotary_embedding"}
    for row in rows:
        assert row.times_the_limit >= 1
        known = told[row.chip, row.kernel, row.shape]
        assert row.times_the_limit == pytest.approx(known, rel=STALE), (
            f"{row.kernel}, {row.shape}: write {DOCUMENT.name} anew: cost.py --json"
        )
    if kernels.arch == 2201:
        by_name = {f"{row.kernel}: {row.shape}": row for row in rows}
        measured("limit", {name: row.limit for name, row in by_name.items()})
        measured("times_the_limit", {name: row.times_the_limit for name, row in by_name.items()})
