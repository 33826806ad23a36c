"""Kernels of two builds against each other: the same bits, and how many times as long.

    python benchmarks/kernels.py build-before build --level avx2

The builds are folders of CMake (-DTQ_LEVELS=all). They take turns, and the fewest microseconds of
a form count: good to 2 or 3 % on a busy machine. Fails where bits differ.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_suffix(".cpp")
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("builds", nargs=2, type=Path, metavar="BUILD", help="the old one, the new one")
parser.add_argument("--level", default="avx512vnni", help="one with products of integers")
parser.add_argument("--rounds", default=8, type=int)
options = parser.parse_args()

programs, fewest, digests = [], {}, {}
with tempfile.TemporaryDirectory() as folder:
    for number, build in enumerate(options.builds):
        cache = (build / "CMakeCache.txt").read_text(encoding="utf-8")
        (root,) = re.findall(r"^tq_onnx_ops_SOURCE_DIR:STATIC=(.*)$", cache, re.M)
        (kernels,) = build.glob(f"CMakeFiles/tq_core.dir/core/simd/integers_{options.level}.*")
        programs.append(f"{folder}/{number}")
        flags = ["-O2", "-std=c++17", f"-DINTEGERS={options.level}_integers", f"-I{root}"]
        flags += [f"-I{root}/include", "-o", programs[-1]]
        subprocess.run(["c++", SOURCE, kernels, *flags], check=True)
    for program in programs * options.rounds:
        for line in subprocess.check_output([program, "60"], text=True).splitlines():
            form, digest, *parts = line.split(", ")
            took = np.array(parts, dtype=float)
            fewest[form, program] = np.minimum(took, fewest.get((form, program), took))
            digests.setdefault(form, set()).add(digest)

ratios = {form: fewest[form, programs[1]] / fewest[form, programs[0]] for form in digests}
print("head size, bits, query rows: times as long in scores, sums, softmax")
for form, row in ratios.items():
    print(form, row.round(3), "other bits" if len(digests[form]) > 1 else "")
print(
    "mean", np.mean(list(ratios.values()), 0).round(3), "longest", np.max(list(ratios.values()), 0)
)
raise SystemExit(any(len(each) > 1 for each in digests.values()))
