"""Weights much larger than memory: never opened, never mapped, never copied beside the original."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.files.models import external, point

GIB = 1 << 30

# The address space is limited to less than the data file, so that neither reading it nor mapping it
# is possible; and the file's opening by Python would be seen.
CONVERT = """
import json, resource, sys, time
import onnx, onnx_ir, onnxscript
from pathlib import Path
from tq_onnx.conversion.inspect import inspect
from tq_onnx.conversion.pipeline import convert

opened = []
sys.addaudithook(
    lambda event, arguments: opened.append(str(arguments[0]))
    if event == "open" and str(arguments[0]).endswith(".data") else None
)
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
path = Path(sys.argv[1])
started = time.process_time()
inspect(path)
report = convert(path, path.with_name("new.onnx"))
inspect(report.output)
seconds = time.process_time() - started
# Not ru_maxrss, which begins with what the process had that started this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0]) * 1024
files = report.files
print(json.dumps([opened, files.bytes_written, files.external_data, seconds, peak]))
"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A real export with 30 GiB of sparse weights beside it."""
    path = external(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    data = tmp_path / "model.onnx.data"
    with data.open("r+b") as file:
        file.truncate(31 * GIB)
    for index in range(15):
        tensor = proto.graph.initializer.add()
        tensor.name = f"large.{index}"
        tensor.data_type = onnx.TensorProto.FLOAT16
        tensor.dims.extend([1 << 15, 1 << 15])
        point(tensor, data.name, GIB + 2 * GIB * index, 2 * GIB)
    path.write_bytes(proto.SerializeToString())
    return path


def watched(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script under the watch."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_conversion_beside_the_original(large: Path) -> None:
    before = (large.parent / "model.onnx.data").stat()
    done = watched(CONVERT, large)
    assert done.returncode == 0, done.stderr
    opened, written, mode, seconds, peak = json.loads(done.stdout)
    assert opened == []
    assert mode == "keep"
    assert written < 1 << 20
    assert seconds < 10
    assert peak < GIB
    after = (large.parent / "model.onnx.data").stat()
    assert (after.st_mtime_ns, after.st_size, after.st_blocks) == (
        before.st_mtime_ns,
        before.st_size,
        before.st_blocks,
    )
    assert sorted(p.name for p in large.parent.iterdir()) == [
        "model.onnx",
        "model.onnx.data",
        "new.onnx",
    ]


def test_a_folder_with_hard_links(large: Path) -> None:
    """The data is neither read nor copied where a link will do."""
    (large.parent / "config.json").write_text("{}")
    script = CONVERT.replace(
        'report = convert(path, path.with_name("new.onnx"))',
        "from tq_onnx.integrations.folderconversion import convert_folder\n"
        "whole = convert_folder(path.parent, Path(sys.argv[2]), external_data='link')\n"
        "report = whole.decoders[0]",
    )
    done = watched(script, large, large.parent.with_name("out"))
    assert done.returncode == 0, done.stderr
    opened, written, mode, seconds, peak = json.loads(done.stdout)
    assert (opened, mode) == ([], "link")
    assert written < 1 << 20
    assert seconds < 10
    assert peak < GIB
    assert (large.parent.with_name("out") / large.name).exists()


def test_the_watch_notices_a_reader(large: Path) -> None:
    """The negative twin: reading a weight under the same watch fails."""
    script = CONVERT.replace(
        "inspect(path)\n",
        "from tq_onnx.files.load import load\n"
        "load(path).model.graph.initializers['large.3'].const_value.numpy()\n",
        1,
    )
    done = watched(script, large)
    assert done.returncode != 0
    assert "Cannot allocate memory" in done.stderr or "MemoryError" in done.stderr
