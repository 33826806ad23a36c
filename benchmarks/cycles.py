"""Cycles that the inner loops of decode take on processors that are not here, by llvm-mca.

    python benchmarks/cycles.py build/CMakeFiles/tq_core.dir/core/simd/integers_avxvnni.cpp.o

It cuts the innermost loops with products or look-ups out of a compiled level and gives llvm-mca
their instructions. A loop's tokens follow from the bytes that it multiplies or looks up. What is
around these loops (softmax, ends of rows, fields, memory) is not counted. ``bound`` is what the
ports of the processor allow; the other number has iterations wait for each other's sums, which the
next tile of keys does not.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

PRODUCTS = {"vpmaddubsw": 1.0, "vpdpbusd": 1.0, "vpdpbusds": 1.0, "sdot": 1.0, "udot": 1.0}
PRODUCTS |= {"smlal": 0.5, "smlal2": 0.5, "smull": 0.5, "smull2": 0.5, "umlal": 0.5, "umlal2": 0.5}
"""Registers full of bytes that an instruction multiplies; of 16-bit products half of one."""

LOOKUPS = {"vpshufb": 1.0, "tbl": 1.0}
KERNELS = re.compile(r"(score_tiles|add_values|accumulate_lines)<([\d, ]+)")
ITERATIONS = 200
HEAD_SIZE = 128
TRIPLES, BYTES = ("x86_64", "aarch64"), (32, 16)
"""Names for llvm-mca, and bytes of a register, without and with NEON."""


@dataclass(frozen=True)
class Loop:
    """The instructions of a loop, without jumps."""

    kernel: str
    numbers: tuple[int, ...]
    lines: tuple[str, ...]

    def registers(self, weights: dict[str, float]) -> float:
        """Return how many registers of bytes its instructions of these names take."""
        return sum(weights.get(_mnemonic(line), 0.0) for line in self.lines)


def _mnemonic(line: str) -> str:
    return line.replace("{vex}", "").split()[0].split(".")[0]


def functions(text: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the demangled name of each function, and its addresses and instructions."""
    for block in re.split(r"\n(?=[0-9a-f]+ <)", text):
        name, _, body = block.partition(">:\n")
        code = re.findall(r"^\s*([0-9a-f]+):\s+(\S.*)$", body, re.M)
        yield name, [(int(at, 16), re.sub(r"\s+(# |//|<).*", "", line)) for at, line in code]


def innermost(name: str, lines: list[tuple[int, str]]) -> Iterator[Loop]:
    """Yield the loops of a kernel with products or look-ups that contain no other one."""
    kernel = KERNELS.search(name)
    if kernel is None:
        return
    places = {at: i for i, (at, _) in enumerate(lines)}
    jump = re.compile(r"(j[a-z]+|b\.[a-z]+|cbn?z|tbn?z)\s.*?(?:0x)?([0-9a-f]+)$")
    jumps = [(i, jump.match(line)) for i, (_, line) in enumerate(lines)]
    ends = [(places.get(int(to[2], 16), i + 1), i) for i, to in jumps if to is not None]
    numbers = tuple(int(n) for n in kernel[2].split(",") if n.strip())
    loops = {}
    for first, last in ends:
        body = tuple(line for _, line in lines[first : last + 1] if jump.match(line) is None)
        loop = Loop(kernel[1], numbers, body)
        if first <= last and loop.registers(PRODUCTS | LOOKUPS):
            loops[first, last] = loop
    for (first, last), loop in loops.items():
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops):
            yield loop


def cycles(loop: Loop, cpu: str, options: argparse.Namespace) -> tuple[float, float]:
    """Return the cycles of an iteration, and what the ports allow."""
    target = f"-mtriple={TRIPLES[options.neon]}"
    command = [f"llvm-mca{options.suffix}", target, f"-mcpu={cpu}", f"-iterations={ITERATIONS}"]
    source = "\n".join(loop.lines) + "\n"
    run = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    total = re.search(r"Total Cycles:\s+(\d+)", run.stdout)
    bound = re.search(r"Block RThroughput:\s+([\d.]+)", run.stdout)
    if total is None or bound is None:
        raise SystemExit(run.stderr[:400])
    return int(total[1]) / ITERATIONS, float(bound[1])


def main() -> None:
    """Print a line for each loop of the chosen kernels."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("object")
    parser.add_argument("--bits", default="4", help="of codes, with commas")
    parser.add_argument("--queries", default="2,5", help="per KV head, with commas")
    parser.add_argument("--cpus", default="alderlake,znver3,znver4")
    parser.add_argument("--neon", action="store_true")
    parser.add_argument("--suffix", default="", help="of the names of LLVM's tools, such as -19")
    options = parser.parse_args()
    bits, queries = ([int(n) for n in text.split(",")] for text in (options.bits, options.queries))
    objdump = [f"llvm-objdump{options.suffix}", "-d", "-C", "--no-show-raw-insn", options.object]
    text = subprocess.run(objdump, capture_output=True, text=True, check=True).stdout
    print("kernel<bits, query rows, ...>, of a token; those of add_values of a single query row")
    for name, lines in functions(text):
        for loop in innermost(name, lines):
            shares = loop.kernel != "add_values"
            if loop.numbers[0] not in bits or (shares and loop.numbers[1] not in queries):
                continue
            products = loop.registers(PRODUCTS) / (loop.numbers[1] if shares else 1)
            tokens = (products or loop.registers(LOOKUPS)) * BYTES[options.neon] / HEAD_SIZE
            print(loop.kernel, loop.numbers, "products" if products else "look-ups", end=": ")
            print(f"{len(loop.lines) / tokens:.1f} instructions", end="")
            for cpu in options.cpus.split(","):
                spent, bound = cycles(loop, cpu, options)
                print(f", {cpu} {spent / tokens:.1f} (bound {bound / tokens:.1f})", end="")
            print()


if __name__ == "__main__":
    main()
