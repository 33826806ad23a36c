"""Contexts for a memory: what is counted, and that a process takes as much."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import tq_onnx
from tests.cli.run import run
from tests.conversion.test_cautions import RING
from tests.language.models import folder
from tests.runtime.models import GENAI, original
from tq_onnx.api.fitting import memory_of
from tq_onnx.codec.presets import LISTED_PRESETS
from tq_onnx.errors import UsageError
from tq_onnx.graph.activations import activation_bytes
from tq_onnx.speed.footprint import PROCESS, Footprint, Values

GROWING = Footprint(1000, 100, 10, 70, True, Values(0, 0, 0))


def test_caches_that_grow_are_there_twice_and_windows_count() -> None:
    assert GROWING.caches(100) == 2 * (70 + 1000)
    assert GROWING.caches(100, 3) == 6 * (70 + 1000)
    assert GROWING.peak(100) == PROCESS + 1000 + 2140
    assert GROWING.peak(1) == PROCESS + 1000 + 160


def test_caches_of_the_newest_tokens_do_not_grow(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", ir.load(original(GENAI))
    nodes = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    for name, value in RING.items():
        nodes[0].attributes[name] = ir.AttrInt64(name, value)
    ir.save(model, path)
    for context in (2, 100):
        whole, before = (
            tq_onnx.fit(original(GENAI), context=context),
            tq_onnx.fit(path, context=context),
        )
        size = whole.rows[0].bytes_per_token // 2
        kept = min(context, RING["local_window_size"])
        assert before.rows[0].bytes_per_token == size
        times = 2 if before.rows[0].growing else 1
        assert before.rows[0].cache_bytes == times * size * (context + kept)
        assert before.rows[1:] == whole.rows[1:]


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_largest_context_is_the_last_that_fits(sequences: int) -> None:
    memory = PROCESS + 5000
    tokens = GROWING.largest_context(memory, 10_000, sequences)
    assert 0 < tokens < 10_000
    assert GROWING.peak(tokens, sequences) <= memory < GROWING.peak(tokens + 1, sequences)
    assert GROWING.largest_context(memory, 5, sequences) == 5
    assert GROWING.largest_context(PROCESS, 5, sequences) == 0


def test_values_of_a_graph_share_buffers() -> None:
    """[x -> wide -> wide in place -> narrow], with a view that keeps the wide one."""
    shape, wide = (
        ir.tensor(np.array([-1]), name="flat"),
        ir.tensor(np.zeros((4, 8), "f"), name="weight"),
    )
    x = ir.val("x", ir.DataType.FLOAT, ["n", 4])
    weight, flat = ir.val("weight", const_value=wide), ir.val("flat", const_value=shape)
    product = ir.node("MatMul", [x, weight], name="product")
    rectified = ir.node("Relu", product.outputs, name="rectified")
    view = ir.node("Reshape", [rectified.outputs[0], flat], name="view")
    total = ir.node("ReduceSum", view.outputs, name="total")
    for node in (product, rectified, view, total):
        node.outputs[0].name = node.name
        node.outputs[0].dtype = ir.DataType.FLOAT
    graph = ir.Graph(
        [x],
        total.outputs,
        nodes=[product, rectified, view, total],
        initializers=[weight, flat],
        opset_imports={"": 20},
    )
    model = ir.Model(graph, ir_version=10)
    assert activation_bytes(model, {"x": [100, 4]}, (), 0) == 100 * 8 * 4 + 4
    assert activation_bytes(model, {"x": [100, 4]}, ("product", "rectified"), 0) == 4


def test_an_original_shows_what_every_preset_would_be() -> None:
    model = folder("original") / "model.onnx"
    found = tq_onnx.fit(model, memory="3GB")
    assert [row.preset for row in found.rows] == [None, *(preset.name for preset in LISTED_PRESETS)]
    assert (found.positions, found.memory, found.given) == (2048, 3 * 10**9, True)
    now, int4 = found.rows[:2]
    assert now.growing and not int4.growing
    assert {row.limited_by for row in found.rows} == {"model"}
    assert now.bytes_per_token == 8192 and int4.bytes_per_token == 1056
    assert now.cache_bytes == 2 * 2048 * 8192
    assert int4.cache_bytes == 2048 * 1056 + int4.window_bytes
    small = tq_onnx.fit(model, memory=now.peak_bytes - 1).rows
    assert small[0].context < 2048 == small[1].context
    assert (small[0].limited_by, small[1].limited_by) == ("memory", "model")
    nothing = tq_onnx.fit(model, memory=1000).rows
    assert not any(row.context or row.fits for row in nothing)


def test_a_conversion_is_what_was_foretold_of_it() -> None:
    asked = {"memory": "3GB", "context": 1500, "sequences": 2}
    (real,) = tq_onnx.fit(folder("window"), **asked).rows
    (plain,) = tq_onnx.fit(folder("int4"), **asked).rows
    foretold = next(r for r in tq_onnx.fit(folder("original"), **asked).rows if r.preset == "mse4")
    assert real.window_bytes > 0 == plain.window_bytes
    assert plain.cache_bytes == foretold.cache_bytes == 2 * 1500 * 1056
    assert real.cache_bytes == plain.cache_bytes + 2 * real.window_bytes
    assert abs(plain.peak_bytes / foretold.peak_bytes - 1) < 0.05
    model = tq_onnx.load(folder("window"), context=1500)
    assert 2 * model.new_cache().nbytes == real.cache_bytes


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="VmHWM is of Linux")
def test_a_process_takes_what_was_foretold() -> None:
    """Caches of 200 MB, whose memory is touched: the weights and the values are small here."""
    context = 200_000
    code = (
        "import sys, tq_onnx, tq_onnx.runtime.decoder\n"
        "model = tq_onnx.load(sys.argv[1], threads=1)\n"
        f"decoder = model.decoder(capacity={context})\n"
        "decoder.prefill([list(range(200)) * 3])\n"
        "for buffer in decoder._caches.past: buffer.numpy()[:] = 1\n"
        "print(next(line for line in open('/proc/self/status') if 'VmHWM' in line).split()[1])\n"
    )
    model = folder("int4") / "model.onnx"
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], check=True, capture_output=True, text=True
    )
    (row,) = tq_onnx.fit(model, memory="3GB", context=1000).rows
    rest = row.peak_bytes - row.cache_bytes
    assert rest + context * 1056 == pytest.approx(int(done.stdout) << 10, rel=0.05)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GB", 16 * 10**9), ("1.5 GiB", 3 << 29), ("512m", 512 * 10**6), ("77", 77), ("8kib", 8192)],
)
def test_sizes(text: str, size: int) -> None:
    assert memory_of(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "1e9", "GB", "9999999TB", "0"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError):
        tq_onnx.fit(folder("int4"), memory=text)


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(UsageError, match="takes 2,048 tokens, not 2,049"):
        tq_onnx.fit(folder("original"), memory="1GB", context=2049)
    with pytest.raises(UsageError, match="sequences must be at least 1, got 0"):
        tq_onnx.fit(folder("int4"), sequences=0)


def test_the_command() -> None:
    outcome = run("fit", folder("original"), "--memory", "1GB")
    assert outcome.code == 0
    assert "2,048 tokens" in outcome.out
    assert "caches grow: twice in a step" in outcome.out
    document = run("fit", folder("int4"), "--context", "100", "--json").document
    assert [row["preset"] for row in document["rows"]] == ["int4"]
    assert document["given"] is False and document["memory"] > 0
    assert document["positions"] is None
    fits = "int4 fits with contexts of up to 2,048 tokens; the original, 2,048\n"
    assert outcome.out.startswith(fits)
    asked = ("--context", 2000, "--memory")
    for memory, verdict in (("2GB", "fits"), ("1MB", "does not fit")):
        first = run("fit", folder("original"), *asked, memory).out.partition("\n")[0]
        assert re.fullmatch(rf"int4 {verdict}: \d+\.\d MB; the original needs \d+\.\d MB", first)
    assert run("fit", folder("int4"), *asked, "2GB").out.startswith("the model fits: ")
    assert "16 bytes (given)" in run("fit", folder("int4"), "--memory", "16").out  # GB were meant
    assert "no such file" in run("fit", "nowhere.onnx").sentence(4)
    assert run("fit", original(GENAI), "--json").document["positions"] == 128


def test_a_configuration_says_how_long_a_model_reads(tmp_path: Path) -> None:
    from tq_onnx.files.configuration import context_length

    model = tmp_path / "model.onnx"
    assert context_length(model) is None
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"context_length": 90}}))
    assert context_length(model) == 90
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 70}))
    assert context_length(model) == 70
    (tmp_path / "genai_config.json").write_text("[" * 100_000)
    assert context_length(model) == 70
