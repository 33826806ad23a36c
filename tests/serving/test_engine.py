"""onnxruntime-genai's Engine answers prompts of different lengths in one batch, or it does not.

It pads them on the right. What a graph makes of that is known before anything runs.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import run
from tests.files.models import inline
from tests.integrations.genai_folder import bundled_genai, genai_config, write_config
from tq_onnx import Engine, Sampling
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.errors import EngineError, UsageError
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.language.engine import ALONE, UNEVEN, UNKNOWN, batching_of
from tq_onnx.runtime.batching import Batching
from tq_onnx.runtime.jobs import Step

pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

from tests.serving.consumers import Consumer, begin_together
from tests.serving.running import (
    Alone,
    answered,
    assert_near_ties_only,
    batching_with,
    example,
    uneven_prompts,
)

CODES = Options(residual_length=0, sink_tokens=0)
NEW = 24


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    return convert_folder(folder, folder.with_name("int4")).output


def test_batches_are_answered_as_by_the_generator(folder: Path, tmp_path: Path) -> None:
    """Caches that lose nothing."""
    prompts = uneven_prompts(24)
    assert len({len(prompt) for prompt in prompts}) > 12
    report = convert_folder(folder, tmp_path / "raw", preset="raw")
    alone = Alone(report.output)
    answers = answered(report.output, prompts, NEW)
    assert answers == [alone.answer(prompt, NEW) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) > 12


def test_quantised_batches_part_at_near_ties_only(folder: Path, tmp_path: Path) -> None:
    """A batch rounds differently, and a value between two codes then gets the other one.

    So does a prompt whose last token is computed by itself: that measures what is near. Without
    exact tokens, of which padding costs a prompt some that it has alone.
    """
    codes = convert_folder(folder, tmp_path / "codes", options=CODES).output
    alone, prompts = Alone(codes), uneven_prompts(24)
    assert_near_ties_only(alone, prompts, answered(codes, prompts, NEW), [NEW] * len(prompts))
    # One at a time there is no other rounding.
    assert batching_of(codes, alone=True).reason == ALONE
    answers = answered(codes, prompts, NEW, together=False)
    assert answers == [alone.answer(prompt, NEW) for prompt in prompts]


@pytest.mark.parametrize(
    ("fixture", "rightly"),
    [
        ("genai-cpu-int4-hd128", True),
        ("genai-dml-fp16", True),
        ("genai09-cpu-fp32", True),
        ("genai-cpu-fp16", False),
        ("dynamo-op18-sdpa", False),
        ("dynamo-op24-sdpa", False),
        ("legacy-op17-sdpa", False),
        ("mobius-default", False),
        ("optimum", False),
    ],
)
def test_what_is_said_of_batches_is_true(fixture: str, rightly: bool, tmp_path: Path) -> None:
    """Of graphs of many exporters; by what they do, not by who made them."""
    source = tmp_path / "in"
    plan = prepare(inline(source, fixture), preset="raw").plan
    layer = plan.layers[0]
    assert plan.interface.vocabulary is not None
    config = genai_config(
        layers=len(plan.layers),
        heads=layer.num_heads,
        kv_heads=layer.kv_num_heads,
        head_size=layer.head_size,
        vocabulary=plan.interface.vocabulary,
        context=64,
        eos=3,
        pad=0,
    )
    config["search"]["past_present_share_buffer"] = False
    write_config(source, config)
    changes = convert_folder(source, tmp_path / "raw", preset="raw").genai
    assert changes is not None
    assert changes.uneven_batches is rightly
    random = np.random.default_rng(4)
    lengths = (17, 5, 11, 3)
    prompts = [random.integers(4, plan.interface.vocabulary, size).tolist() for size in lengths]
    folders = [tmp_path / "raw"]
    if fixture != "genai-cpu-fp16":  # the original of which fails in its second step
        folders.append(source)
    for folder in folders:
        alone = Alone(folder)
        expected = [alone.answer(prompt, 8) for prompt in prompts]
        assert (answered(folder, prompts, 8, together=True) == expected) is rightly
        assert answered(folder, prompts, 8, together=False) == expected


@pytest.mark.parametrize(("route", "warned"), [("genai", False), ("dynamo", True)])
def test_convert_warns_where_batches_go_wrong(route: str, warned: bool, tmp_path: Path) -> None:
    source = bundled_genai(tmp_path / "in", route)
    shown = run("convert", source, "--preset", "raw")
    assert shown.code == 0, shown.err
    text = " ".join(shown.out.split())
    assert ("Engine answers prompts of different lengths in one batch wrongly" in text) is warned
    document = run("convert", source, "-o", tmp_path / "json", "--preset", "raw", "--json").document
    assert document["genai"]["uneven_batches"] is not warned


@pytest.mark.parametrize(("route", "together"), [("genai", True), ("dynamo", False)])
def test_limits_of_a_folder(route: str, together: bool, tmp_path: Path) -> None:
    source = bundled_genai(tmp_path / "in", route)
    assert batching_of(source) == Batching(False, UNKNOWN, 2048, 0, 2048, vocabulary=260)
    made = convert_folder(
        source, tmp_path / "out", options=Options(residual_length=16, sink_tokens=4)
    )
    assert made.genai is not None
    batching = batching_of(made.output, max_length=5000)
    assert (batching.together, batching.reason) == (together, "" if together else UNEVEN)
    spare = made.genai.spare_rows
    assert (batching.tokens, batching.exact_rows) == (2048, spare)
    assert [batching.rows(count) for count in (100, 2048)] == [100 + spare, 2048]
    assert not batching.joins
    assert batching_of(made.output, max_length=100).tokens == 100


def test_ends_and_refusals(converted: Path) -> None:
    thread = Engine(converted, max_length=100)
    try:
        greedy = Sampling()
        prompt = uneven_prompts(1, 60, 61)[0]
        with pytest.raises(UsageError, match="the prompt is empty"):
            thread.submit([], print)
        with pytest.raises(UsageError, match="has 100 tokens, and this model takes 100"):
            thread.submit(prompt + prompt[:40], print)
        whole = Consumer()
        thread.submit(prompt, whole, sampling=greedy)
        whole.last()
        assert [step.finish for step in whole.steps] == [None] * 39 + ["length"]
        # One is cancelled: others go on.
        begin_together(thread, 3)
        jobs = [Consumer() for _ in range(2)]
        submitted = [thread.submit(prompt, job, sampling=greedy) for job in jobs]
        thread.cancel(submitted[0])
        assert [job.last().finish for job in jobs] == ["cancelled", "length"]
        assert jobs[1].steps == whole.steps
    finally:
        thread.close()
    with pytest.raises(EngineError, match="was closed"):
        thread.submit(prompt, print)


def test_a_failure_ends_every_answer(converted: Path) -> None:
    """Rows that are too few, which only the graph notices: its exact tokens are in front of all."""
    folder = shutil.copytree(converted, converted.with_name("windowed"))
    original = converted.with_name("qwen3") / "model.onnx"
    convert(original, folder / "model.onnx", options=Options(equal_rows=True), overwrite=True)
    thread = Engine(folder)
    batching_with(thread, exact_rows=0)

    def raise_at(step: Step) -> None:
        if step.is_last:
            raise ValueError("a consumer that raises when it is told of the end")

    jobs = [Consumer(raise_at) for _ in range(6)]
    begin_together(thread, len(jobs))
    for prompt, job in zip(uneven_prompts(6), jobs, strict=True):
        thread.submit(prompt, job, max_new_tokens=8)
    assert all(isinstance(job.last().error, EngineError) for job in jobs)
    with pytest.raises(EngineError, match="the Engine failed"):
        thread.submit([1, 2, 3], print)
    assert thread.broken is not thread.broken  # an error that is raised again keeps its frames
    thread.close()


def test_the_script_answers_lines(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    lines = ["Call me Ishmael.", "The whale", "It was the best of times, it was"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(lines))
    arguments = ["engine.py", str(converted), str(prompts), "--max-tokens", "9"]
    monkeypatch.setattr("sys.argv", arguments)
    example("engine").main()
    alone = Alone(converted)
    shown = [line + bytes(alone.answer(list(line.encode()), 9)).decode() for line in lines]
    assert capsys.readouterr().out.splitlines() == shown


def test_what_is_no_folder_and_no_text_is_refused(tmp_path: Path) -> None:
    engine = example("engine")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(argparse.ArgumentTypeError, match="it has no genai_config"):
        engine.genai_folder(str(tmp_path))
    for name in ("nothing", "bytes"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no text file"):
            engine.lines_of(str(tmp_path / name))
