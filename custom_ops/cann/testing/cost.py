"""The cost model of the Ascend C kernels: what the shim counts, set against published figures.

Nothing here was measured on a card. The shim runs the kernels on a simulated device and counts what
each core is asked to do; this multiplies the counts by what public sources say an instruction, a
byte and a launch cost. Figures without a public source are assumptions, named so, and can be given.

A launch takes what it costs to begin, and then the longest of what goes on side by side on its
slowest core:

    memory   bytes of both transfer queues, at the rate of a core; or of all cores, at that of the
             chip's memory; and what each transfer costs to begin
    vector   for each instruction what it costs to begin, and its repeats of 256 bytes
    scalar   what the scalar unit issues, and its own accesses of UB and of global memory

``limit`` names the largest of these, or ``launch``. ``times_the_limit`` is the modelled time over
the least time in which the chip's memory could bring what any kernel must read and write: the rows
of both caches, queries and outputs, each once. ``products_times_the_limit`` is that of the
multiplications alone that scores and sums need on vector units in float32: no kernel for them is
faster, however it unpacks rows.

    python custom_ops/cann/testing/cost.py                   a table
    python custom_ops/cann/testing/cost.py --json            one JSON document, with all figures
    python custom_ops/cann/testing/cost.py --launch-us 5     another figure; --help names them

Needs g++ and the environment of the tests, no CANN and no NPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from simulated_kernels import ARCHITECTURES, Kernels, Middle, build, rotation_of, row_bytes
from simulator import CoreCounts, Launch
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.search import gain_table
from tq_onnx.codec.window import window_of, write_entries

ASSUMED: Final = "assumption"
PLATFORM: Final = "github.com/hicann/runtime, src/platform/platform_config/cann/{}.ini, {}"
PERFORMANCE: Final = (
    "github.com/hicann/ge, compiler/graph/optimize/autofuse/att/gen_model_info/"
    "api_perf_register/v1/perf_param_v1.cpp"
)
"""The linear cost functions of vector instructions by which CANN's own graph compiler chooses
tilings. That version 1 of them is the 910B is read off the bandwidths beside them."""


@dataclass(frozen=True)
class Figure:
    """A number, and where it is from: a public source, or ``ASSUMED``."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Chip:
    """What the model knows of a chip, and what it takes for granted.

    Attributes:
        name: of the SoC.
        arch: of its kernels.
        cores: that a launch uses, which the host chooses.
        clock: of a core.
        bandwidth: of the chip's memory.
        core_read: bytes a cycle from memory to a core, in transfers of 25 KB or more.
        core_read_shared: more of them, divided by the cores of the launch.
        piece_read: as ``core_read``, in smaller transfers.
        piece_read_shared: as ``core_read_shared``, likewise.
        core_write: bytes a cycle from a core to memory.
        launch: until the first instruction runs, once per launch.
        begin: of the transfer and vector queues, once per launch, in cycles.
        begin_per_core: more of them for each core of the launch.
        transfer: that a transfer costs besides its bytes.
        issue: of the scalar unit for an instruction of another queue.
        scalar: of an access to UB.
        load: of a read from global memory by the scalar unit.
    """

    name: str
    arch: int
    cores: Figure
    clock: Figure
    bandwidth: Figure
    core_read: Figure
    core_read_shared: Figure
    piece_read: Figure
    piece_read_shared: Figure
    core_write: Figure
    launch: Figure
    begin: Figure
    begin_per_core: Figure
    transfer: Figure
    issue: Figure
    scalar: Figure
    load: Figure


# What CANN's table has for pipes and the operator: MTE2 with small data, MTE3, vector, operator.
_BEGIN: Final = 882.09 + 497.36 + 37.37 + 300.0

GIVEN: Final = {
    "launch": Figure(2.0, "us", ASSUMED),
    "issue": Figure(4.0, "cycles", ASSUMED),
    "scalar": Figure(8.0, "cycles", ASSUMED),
    "load": Figure(100.0, "cycles", ASSUMED),
}
"""Figures that no public source has; the command takes others."""


def chips(given: dict[str, Figure]) -> tuple[Chip, ...]:
    """Return the chips, with the figures that are assumed."""
    shared = {
        "begin": Figure(_BEGIN, "cycles", PERFORMANCE),
        "begin_per_core": Figure(15.89, "cycles", PERFORMANCE),
        "transfer": Figure(27.01, "cycles", PERFORMANCE),
        **given,
    }
    b3, p3 = "Ascend910B3", "Ascend310P3"
    return (
        Chip(
            name=b3,
            arch=2201,
            cores=Figure(40, "cores", PLATFORM.format(b3, "vector_core_cnt")),
            clock=Figure(1.8, "GHz", PLATFORM.format(b3, "cube_freq")),
            bandwidth=Figure(
                1600,
                "GB/s",
                "half of the 3,200 GB/s of the 910C, which is two 910B "
                "(techpowerup.com/335749); others say 1,200 to 1,800",
            ),
            core_read=Figure(9.9, "B/cycle", PERFORMANCE),
            core_read_shared=Figure(15.9, "B/cycle", PERFORMANCE),
            piece_read=Figure(7.9, "B/cycle", PERFORMANCE),
            piece_read_shared=Figure(7.3, "B/cycle", PERFORMANCE),
            core_write=Figure(10, "B/cycle", PERFORMANCE),
            **shared,
        ),
        Chip(
            name=p3,
            arch=2002,
            cores=Figure(8, "cores", PLATFORM.format(p3, "ai_core_cnt")),
            clock=Figure(1.06, "GHz", PLATFORM.format(p3, "cube_freq")),
            bandwidth=Figure(
                204,
                "GB/s",
                "half of the 408 GB/s of an Atlas 300I Duo, which has two "
                "(elektronikpraxis.de, Huawei Atlas 300i Duo)",
            ),
            core_read=Figure(17, "B/cycle", PLATFORM.format(p3, "ddr_read_rate")),
            core_read_shared=Figure(0, "B/cycle", PLATFORM.format(p3, "ddr_read_rate")),
            piece_read=Figure(17, "B/cycle", PLATFORM.format(p3, "ddr_read_rate")),
            piece_read_shared=Figure(0, "B/cycle", PLATFORM.format(p3, "ddr_read_rate")),
            core_write=Figure(17, "B/cycle", PLATFORM.format(p3, "ddr_write_rate")),
            **shared,
        ),
    )


@dataclass(frozen=True)
class Instruction:
    """Cycles of a vector instruction: to begin, and for a repeat of 256 bytes."""

    begin: float
    repeat: float
    source: str = PERFORMANCE


def _linear(per_element: float, begin: float, lanes: int = 64) -> Instruction:
    """Of the cycles for an element that CANN's table has, of as many lanes as a repeat has."""
    return Instruction(begin, per_element * lanes)


_SUMS: Final = "assumption: as that of the maximum, which the table has"
_FLOAT_TO_INT: Final = "assumption: as from half to float, which the table has"
_OF_SELECT: Final = "assumption: in what `Select` costs"

INSTRUCTIONS: Final[dict[tuple[str, int, int], Instruction]] = {
    ("Add", 4, 4): _linear(0.0206, 23.2225),
    ("Sub", 4, 4): _linear(0.0213, 22.1254),
    ("Mul", 4, 4): _linear(0.0206, 23.2291),
    ("Div", 4, 4): _linear(0.0454, 29.0892),
    ("Max", 4, 4): _linear(0.0215, 20.1333),
    ("Adds", 4, 4): _linear(0.0141, 22.0936),
    ("Muls", 4, 4): _linear(0.0142, 23.0966),
    ("Muls", 2, 2): _linear(0.0071, 23.1006, lanes=128),
    ("Maxs", 4, 4): _linear(0.0141, 20.0887),
    ("Mins", 4, 4): _linear(0.0142, 20.0876),
    ("Exp", 4, 4): _linear(0.0307, 28.0376),
    ("Sqrt", 4, 4): _linear(0.0313, 28.9961),
    ("Duplicate", 4, 4): _linear(0.0156, 16.9965),
    ("Duplicate", 2, 2): _linear(0.0078, 16.9993, lanes=128),
    ("Gather", 4, 4): _linear(0.1875, 15.0),
    ("Gather", 2, 2): _linear(0.1873, 17.0248, lanes=128),
    ("Cast", 1, 2): _linear(0.0102, 46.512, lanes=128),
    ("Cast", 2, 1): _linear(0.0083, 19.9408, lanes=128),
    ("Cast", 2, 4): _linear(0.0147, 20.1204),
    ("Cast", 4, 2): _linear(0.0087, 20.4393),
    ("Cast", 4, 4): dataclasses.replace(_linear(0.0147, 20.1204), source=_FLOAT_TO_INT),
    ("CompareScalar", 4, 4): _linear(0.0161, 22.986),
    ("Select", 4, 4): _linear(0.0229, 43.9906),
    ("Select's scalar", 4, 4): dataclasses.replace(_linear(0.0, 0.0), source=_OF_SELECT),
    ("Brcb", 4, 4): _linear(0.0146, 13.0732),
    ("BlockReduceMax", 4, 4): _linear(0.0198, 16.7401),
    ("BlockReduceSum", 4, 4): dataclasses.replace(_linear(0.0198, 16.7401), source=_SUMS),
}
"""By name and bytes of an element read and written; the 310P is assumed to take as many cycles."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one launch or of several, one behind the other."""

    launch: float = 0.0
    memory: float = 0.0
    vector: float = 0.0
    scalar: float = 0.0
    whole: float = 0.0

    def then(self, other: Times) -> Times:
        """Return the times of both together."""
        return Times(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @property
    def limit(self) -> str:
        """The name of the largest part."""
        parts = ("memory", "vector", "scalar", "launch")
        return max(parts, key=lambda part: float(getattr(self, part)))


def _values(times: Times) -> tuple[float, ...]:
    return (times.launch, times.memory, times.vector, times.scalar, times.whole)


def _vector_cycles(core: CoreCounts) -> float:
    total = 0.0
    for one in core.vector:
        cost = INSTRUCTIONS[one.name, one.from_bytes, one.to_bytes]
        total += one.instructions * cost.begin + one.repeats * cost.repeat
    return total


def _scalar_cycles(core: CoreCounts, chip: Chip) -> float:
    issued = sum(one.instructions for one in core.vector)
    issued += core.moved_in.transfers + core.moved_out.transfers
    issued += core.barriers + 2 * core.flags_waited  # each is set, too
    accesses = core.scalar_reads + core.scalar_writes
    return (
        issued * chip.issue.value
        + accesses * chip.scalar.value
        + core.scalar_loads * chip.load.value
    )


LARGE_TRANSFER: Final = 25_000
"""Bytes from which CANN's table has a rate of its own."""


def read_rate(chip: Chip, cores: int, transfer: float) -> float:
    """Bytes a cycle to a core while so many read, in transfers of so many bytes."""
    if transfer >= LARGE_TRANSFER:
        return chip.core_read.value + chip.core_read_shared.value / cores
    return chip.piece_read.value + chip.piece_read_shared.value / cores


def _moving_cycles(core: CoreCounts, chip: Chip, cores: int) -> float:
    """Of the busier of both queues."""
    moved = core.moved_in
    into = moved.bytes / read_rate(chip, cores, moved.bytes / max(1, moved.transfers))
    out = core.moved_out.bytes / chip.core_write.value
    return max(
        into + core.moved_in.transfers * chip.transfer.value,
        out + core.moved_out.transfers * chip.transfer.value,
    )


def times_of(launch: Launch, chip: Chip) -> Times:
    """Model one launch."""
    cycle = 1e-3 / chip.clock.value  # microseconds
    cores = launch.cores
    moved = sum(core.moved_in.bytes + core.moved_out.bytes for core in cores)
    begin = chip.begin.value + chip.begin_per_core.value * len(cores)
    times = Times(
        launch=chip.launch.value + begin * cycle,
        memory=max(
            moved * 1e-3 / chip.bandwidth.value,
            max(_moving_cycles(core, chip, len(cores)) for core in cores) * cycle,
        ),
        vector=max(_vector_cycles(core) for core in cores) * cycle,
        scalar=max(_scalar_cycles(core, chip) for core in cores) * cycle,
    )
    return dataclasses.replace(
        times, whole=times.launch + max(times.memory, times.vector, times.scalar)
    )


@dataclass(frozen=True)
class Workload:
    """A call of a kernel, and what any kernel in its place must move.

    Attributes:
        kernel: name without the element type.
        shape: in words.
        tokens: new ones.
        least_bytes: of the whole chip.
        run: launches it, on as many cores.
        alike: in how many equal groups heads and cores fall, of which one is run.
        products: multiplications of the attention, by all cores.
    """

    kernel: str
    shape: str
    tokens: int
    least_bytes: int
    run: Callable[[Kernels, int], object]
    alike: int = 1
    products: int = 0


HEAD_SIZE: Final = 128
CODE_ROW: Final = HEAD_SIZE // 2 + 4
"""Bytes of a vector in planes: codes of 4 bits, and a float32 scale."""

KV_HEADS: Final = 8
PART_TOKENS: Final = 512
MOST_PARTS: Final = 64
HALF: Final = 2
LANES: Final = 64
"""Floats of a repeat."""


def part_tokens(keys: int) -> int:
    """Of the host's cut of a decode step (``host/attention_cut.h``)."""
    tiles = -(-keys // (MOST_PARTS * 64))
    return max(PART_TOKENS, tiles * 64)


def decode(query_heads: int, keys: int) -> Workload:
    """Return a decode step over caches of so many tokens.

    Parts go to the cores in the order of heads, so that one head on its share of the cores is as
    all of them: both chips have a multiple of eight cores.
    """
    group = query_heads // KV_HEADS
    query = np.ones((1, group, 1, HEAD_SIZE), np.float16)
    cache = np.zeros((1, 1, keys, row_bytes(HEAD_SIZE)), np.uint8)

    def run(kernels: Kernels, cores: int) -> object:
        return kernels.attention(
            query, cache, cache, keys - 1, _rotations(), scale=0.1,
            cores=cores, part_tokens=part_tokens(keys),
        )  # fmt: skip

    least = KV_HEADS * (2 * cache.nbytes + 2 * query.nbytes)
    shape = f"decode, {query_heads}/{KV_HEADS} heads, {keys:,} tokens"
    products = 2 * query_heads * keys * HEAD_SIZE
    return Workload("tq_attention", shape, 1, least, run, KV_HEADS, products)


def joined(query_heads: int) -> Workload:
    """Return what our kernel does of a decode step beside CANN's attention: 68 exact tokens.

    It reads none of the codes, however many there are.
    """
    query = np.ones((1, query_heads // KV_HEADS, 1, HEAD_SIZE), np.float16)
    window = window_of(64, 4, [(HEAD_SIZE, CODE_ROW)])
    cache = np.zeros((1, 1, window.overlay_rows + 128, CODE_ROW), np.uint8)
    new = np.ones((1, 1, 1, HEAD_SIZE), np.float16)
    write_entries(cache, np.repeat(new, 127, axis=2), np.zeros(1, np.int64), window)
    logs = np.zeros(query.shape[:2], np.float32)
    middle = Middle(4, 64, query[:, :, 0], logs)

    def run(kernels: Kernels, cores: int) -> object:
        kernels.in_planes = True
        output = kernels.attention(
            query, cache, cache, 127, _rotations(), scale=0.1, window=window, new=(new, new),
            middle=middle, cores=cores,
        )  # fmt: skip
        kernels.in_planes = False
        return output

    least = KV_HEADS * (68 * 2 * HALF * HEAD_SIZE + 3 * query.nbytes)
    shape = f"beside CANN's attention, {query_heads}/{KV_HEADS} heads, 68 exact tokens"
    return Workload("tq_attention", shape, 1, least, run, KV_HEADS)


def prefill(query_heads: int, tokens: int) -> Workload:
    """Return the attention of a prompt."""
    query = np.ones((1, query_heads, tokens, HEAD_SIZE), np.float16)
    cache = np.zeros((1, KV_HEADS, tokens, row_bytes(HEAD_SIZE)), np.uint8)

    def run(kernels: Kernels, cores: int) -> object:
        return kernels.attention(query, cache, cache, 0, _rotations(), scale=0.1, cores=cores)

    least = 2 * cache.nbytes + 2 * query.nbytes
    shape = f"prompt, {query_heads}/{KV_HEADS} heads, {tokens:,} tokens"
    return Workload("tq_attention", shape, tokens, least, run)


def encode(tokens: int) -> Workload:
    """Return the encoding of new keys or values as ``--preset int4`` does it."""
    vectors = np.ones((1, KV_HEADS, tokens, HEAD_SIZE), np.float16)
    cache = np.zeros((1, KV_HEADS, tokens + 1, row_bytes(HEAD_SIZE)), np.uint8)
    least = vectors.nbytes + KV_HEADS * tokens * row_bytes(HEAD_SIZE)

    def run(kernels: Kernels, cores: int) -> object:
        return kernels.encode(
            vectors, cache, 0, rotation_of(HEAD_SIZE),
            gains=gain_table(), norm_correction=UNBIASED, cores=cores,
        )  # fmt: skip

    shape = f"{KV_HEADS} heads, {tokens:,} token{'s' if tokens > 1 else ''}"
    return Workload("tq_encode", shape, tokens, least, run)


def turn() -> Workload:
    """Return the rotary embedding of a decode step with 40 heads."""
    heads = np.ones((40, 1, HEAD_SIZE), np.float16)
    table = np.ones((1, HEAD_SIZE // 2), np.float32)
    return Workload(
        "tq_rotary_embedding", "40 heads, 1 token", 1, 2 * heads.nbytes + 2 * table.nbytes,
        lambda kernels, cores: kernels.rotary_embedding(heads, (table, table), 0, cores=cores),
    )  # fmt: skip


def _rotations() -> tuple[np.ndarray, np.ndarray]:
    return rotation_of(HEAD_SIZE), rotation_of(HEAD_SIZE, 1)


def workloads(arch: int, contexts: Sequence[int] = (4096, 32768)) -> list[Workload]:
    """Return what the model is asked of on a chip: decode steps over these contexts first."""
    # A 310P has no attention of CANN over codes.
    beside = [joined(heads) for heads in (16, 40)] if arch == 2201 else []
    return [
        *(decode(heads, keys) for heads in (16, 40) for keys in contexts),
        *(prefill(heads, 128) for heads in (16, 40)),
        encode(1),
        encode(128),
        turn(),
        *beside,
    ]


@dataclass(frozen=True)
class Row:
    """A kernel and shape on a chip: modelled, never measured."""

    chip: str
    kernel: str
    shape: str
    cores: int
    launches: int
    vector_instructions: int
    moved_bytes: int
    least_bytes: int
    us_per_token: float
    launch_us: float
    memory_us: float
    vector_us: float
    scalar_us: float
    limit: str
    times_the_limit: float
    products_times_the_limit: float | None


def model(workload: Workload, kernels: Kernels, chip: Chip) -> Row:
    """Run a workload in the shim, and model it."""
    cores = int(chip.cores.value) // workload.alike
    with kernels.counted() as launches:
        workload.run(kernels, cores)
    assert not kernels.hazards, kernels.messages()
    times = Times()
    for launch in launches:
        whole = Launch(launch.kernel, launch.cores * workload.alike)
        times = times.then(times_of(whole, chip))
    asked = [core for launch in launches for core in launch.cores]
    least_us = workload.least_bytes * 1e-3 / chip.bandwidth.value
    moved = sum(core.moved_in.bytes + core.moved_out.bytes for core in asked)
    instructions = sum(one.instructions for core in asked for one in core.vector)
    repeats = workload.products / LANES / chip.cores.value
    products_us = repeats * INSTRUCTIONS["Mul", 4, 4].repeat * 1e-3 / chip.clock.value
    return Row(
        chip=chip.name,
        kernel=workload.kernel,
        shape=workload.shape,
        cores=cores * workload.alike,
        launches=len(launches),
        vector_instructions=instructions * workload.alike,
        moved_bytes=moved * workload.alike,
        least_bytes=workload.least_bytes,
        us_per_token=round(times.whole / workload.tokens, 3),
        launch_us=round(times.launch, 3),
        memory_us=round(times.memory, 3),
        vector_us=round(times.vector, 3),
        scalar_us=round(times.scalar, 3),
        limit=times.limit,
        times_the_limit=round(times.whole / least_us, 2),
        products_times_the_limit=round(products_us / least_us, 2) if repeats else None,
    )


INT4_TO_HALF: Final = Instruction(
    46.512, 0.0102 * 128, "assumption: as from uint8 to half, which the table has"
)
ALIGNED_SHARE: Final = Figure(
    0.7,
    "of the bandwidth",
    "github.com/mirror-cann/asc-devkit, docs: GM aligned to 32 B beside 512 B",
)
L2_READ: Final = Figure(110, "B/cycle", PLATFORM.format("Ascend910B3", "l2_read_rate"))
L2_WRITE: Final = Figure(86, "B/cycle", PLATFORM.format("Ascend910B3", "l2_write_rate"))
CUBE_CORES: Final = Figure(20, "cores", PLATFORM.format("Ascend910B3", "cube_core_cnt"))
VENDOR_LAUNCHES: Final = {"with our encode": 5, "without a library of ours": 11, "our kernels": 4}
"""Of a layer and decode step, float16: to encode keys and values, and to attend. CANN's attention
is one, and a product with a rotation before and behind it; encoding by CANN's operators is a
product, a quantisation and two copies, twice. Our kernels encode twice, attend and merge."""


@dataclass(frozen=True)
class VendorRow:
    """CANN's own attention over INT4 keys and values in planes: modelled, never measured.

    The parts go on side by side. At worst the call takes its launch and the longest of them; at
    best all cores get what the memory gives to data aligned to 32 bytes.

    Attributes:
        chip: of the model.
        shape: in words.
        limit_us: of the memory, for the codes and scales.
        load_us: codes and scales to the vector cores, at the rate of a core.
        vector_us: codes to half, times scales.
        handed_us: halves through L2 from the vector cores to the cube.
        launch_us: of the call.
        best_us: of the call.
        worst_us: of the call.
        rotations_us: the launches of the two products with rotations, which are short.
    """

    chip: str
    shape: str
    limit_us: float
    load_us: float
    vector_us: float
    handed_us: float
    launch_us: float
    best_us: float
    worst_us: float
    rotations_us: float


def vendor(query_heads: int, keys: int, chip: Chip) -> VendorRow:
    """Model a decode step by CANN's attention; the number of query heads has no part in it."""
    cycle, cores = 1e-3 / chip.clock.value, int(chip.cores.value)
    elements, moved = 2 * KV_HEADS * keys * HEAD_SIZE, 2 * KV_HEADS * keys * CODE_ROW
    limit = moved * 1e-3 / chip.bandwidth.value
    transfer = 16_384
    loads = moved / cores / read_rate(chip, cores, LARGE_TRANSFER)
    loads += moved / cores / transfer * chip.transfer.value
    repeats = elements / cores / 128
    vector = repeats * (INT4_TO_HALF.repeat + INSTRUCTIONS["Muls", 2, 2].repeat)
    handed = max(
        HALF * elements / cores / L2_WRITE.value,
        HALF * elements / CUBE_CORES.value / L2_READ.value,
    )

    def launch(used: int) -> float:
        begin = chip.begin.value + chip.begin_per_core.value * used
        return chip.launch.value + begin * cycle

    return VendorRow(
        chip=chip.name,
        shape=f"{query_heads}/{KV_HEADS} heads, {keys:,} tokens",
        limit_us=round(limit, 2),
        load_us=round(loads * cycle, 2),
        vector_us=round(vector * cycle, 2),
        handed_us=round(handed * cycle, 2),
        launch_us=round(launch(cores), 2),
        best_us=round(launch(cores) + limit / ALIGNED_SHARE.value, 2),
        worst_us=round(launch(cores) + max(loads, vector, handed) * cycle, 2),
        rotations_us=round(2 * launch(1), 2),
    )


def vendor_rows(told: Iterable[Chip]) -> list[VendorRow]:
    """Model the decode steps of the tables; the 310P does not have that attention."""
    (chip,) = (one for one in told if one.arch == 2201)
    return [vendor(heads, keys, chip) for heads in (16, 40) for keys in (4096, 32768)]


def planes_memory_us(chip: Chip, keys: int) -> float:
    """Return what loading codes and scales of all heads takes, of planes with aligned cells."""
    moved = 2 * KV_HEADS * keys * CODE_ROW / chip.cores.value
    cycles = moved / read_rate(chip, int(chip.cores.value), LARGE_TRANSFER)
    cycles += moved / (64 * CODE_ROW) * 2 * chip.transfer.value  # two transfers for 64 tokens
    return round(max(cycles * 1e-3 / chip.clock.value, moved * 8e-3 / chip.bandwidth.value), 1)


def document(rows: Iterable[Row], told: Sequence[Chip]) -> dict[str, Any]:
    """Return everything that the model used and found, for JSON."""
    return {
        "measured_on_a_card": False,
        "chips": [dataclasses.asdict(chip) for chip in told],
        "instructions": [
            {"name": name, "from_bytes": read, "to_bytes": written, **dataclasses.asdict(cost)}
            for (name, read, written), cost in INSTRUCTIONS.items()
        ],
        "vendor": [dataclasses.asdict(row) for row in vendor_rows(told)],
        "vendor_figures": [
            {"name": name, **dataclasses.asdict(figure)}
            for name, figure in (
                ("aligned share", ALIGNED_SHARE),
                ("L2 read", L2_READ),
                ("L2 write", L2_WRITE),
                ("cube cores", CUBE_CORES),
            )
        ],
        "vendor_launches": VENDOR_LAUNCHES,
        "planes": [
            {"chip": chip.name, "tokens": keys, "memory_us": planes_memory_us(chip, keys)}
            for chip in told
            for keys in (4096, 32768)
        ],
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield f"{'chip':12} {'kernel':21} {'shape':34} {'us/token':>9}  limit   times the limit"
    for row in rows:
        yield (
            f"{row.chip:12} {row.kernel:21} {row.shape:34} {row.us_per_token:9.2f}  "
            f"{row.limit:7} {row.times_the_limit:.2f}"
        )


def main() -> None:
    """Model all workloads on both chips."""
    parser = argparse.ArgumentParser(description="Modelled times; nothing is measured on a card.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--build", type=Path, help="keep the compiled shim here")
    for name, figure in GIVEN.items():
        told = f"{name}, {figure.unit}; an assumption, by default {figure.value:g}"
        parser.add_argument(
            f"--{name}-{figure.unit}", dest=name, type=float, default=figure.value, help=told
        )
    options = parser.parse_args()
    given = {
        name: dataclasses.replace(figure, value=getattr(options, name))
        for name, figure in GIVEN.items()
    }
    told = chips(given)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.build or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        libraries = {arch: Kernels(build(arch, folder)) for arch in ARCHITECTURES}
        rows = [
            model(one, libraries[chip.arch], chip) for chip in told for one in workloads(chip.arch)
        ]
    if options.json:
        print(json.dumps(document(rows, told), indent=1))
        return
    for line in _table(rows):
        print(line)
    print("Modelled from what the shim counts; nothing was measured on a card.")


if __name__ == "__main__":
    main()
