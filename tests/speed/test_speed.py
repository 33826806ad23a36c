from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.models import DYNAMO, GENAI, HALF, ids, opened, original
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.progress import Progress
from tq_onnx.quality.picture import draw_speed
from tq_onnx.speed import timing
from tq_onnx.speed.bench import SpeedReport, bench
from tq_onnx.speed.tables import bench_notes, bench_table
from tq_onnx.speed.timing import check_fits, check_positions, decode_steps, measure

KINDS = ("original", "kernel", "body")
# That original can only grow.
FIXED = [(name, kind, 40) for name in (DYNAMO, GENAI) for kind in KINDS][1:]


@pytest.mark.parametrize(
    ("name", "kind", "capacity"),
    [(name, kind, None) for name in (DYNAMO, GENAI) for kind in KINDS] + FIXED,
)
def test_caches_of_copies(name: str, kind: str, capacity: int | None) -> None:
    decoder = opened(name, kind).decoder(capacity=capacity)
    decoder.prefill(ids(7))
    rows = [decoder.cache(index) for index in range(len(decoder.signature.caches))]
    decoder.repeat(23)
    assert decoder.length == 23
    for index, held in enumerate(rows):
        copies = np.concatenate([held] * 4, axis=2)[:, :, :23]
        np.testing.assert_array_equal(decoder.cache(index), copies)
    assert np.isfinite(decoder.step([3])).all()
    assert decoder.length == 24
    for index, held in enumerate(rows):
        np.testing.assert_array_equal(decoder.cache(index)[:, :, 14:21], held)


def test_copies_need_rows_and_room() -> None:
    decoder = opened(GENAI, "kernel").decoder(capacity=8)
    with pytest.raises(UsageError, match="0 tokens cannot become 4"):
        decoder.repeat(4)
    decoder.prefill(ids(5))
    for length in (4, 9):
        with pytest.raises(UsageError, match=f"5 tokens cannot become {length}"):
            decoder.repeat(length)


def test_every_model_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int]] = []
    turn = timing._Runner.take_turn

    def count(runner: timing._Runner, steps: int) -> None:
        taken.append(("k" if runner.model.plan else "o", steps))
        turn(runner, steps)

    monkeypatch.setattr(timing._Runner, "take_turn", count)
    told: list[Progress] = []
    pair = [opened(GENAI, kind) for kind in ("original", "kernel")]
    before, after = measure(
        pair,
        40,
        tokens=11,
        prompt=True,
        pause=False,
        on_progress=told.append,
    )
    assert taken == [("o", 8), ("k", 8), ("o", 3), ("k", 3)]
    assert told[0] == Progress("Measuring at 40 tokens", 0, 6)
    assert (told[-1].done, told[-1].total) == (6, 6)
    assert decode_steps(11) == 15
    for figures, one in zip((before, after), pair, strict=True):
        assert figures.fastest_step_seconds <= figures.step_seconds
        assert figures.tokens_per_second == pytest.approx(1 / figures.step_seconds)
        assert figures.first_token_seconds is not None
        assert figures.in_place
        assert figures.cache_bytes == 40 * one.signature.bytes_per_token


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = opened(DYNAMO, "kernel")
    caches = tuple(replace(cache, slots=64) for cache in one.signature.caches)
    small = replace(one, signature=replace(one.signature, caches=caches))
    check_fits([small], 54, tokens=8)
    with pytest.raises(UsageError, match="hold 64 tokens, and a context of 55 needs 65"):
        check_fits([small], 55, tokens=8)
    first = tuple(replace(c, pair=replace(c.pair, past=None)) for c in one.signature.caches)
    prompts = replace(one, signature=replace(one.signature, caches=first))
    with pytest.raises(UnsupportedModelError, match="first prompt only"):
        check_fits([prompts], 8, tokens=8)
    with pytest.raises(UsageError, match=r"context of 126 tokens and 3 after it do not run"):
        check_positions(opened(GENAI, "kernel"), 126, tokens=1)
    check_positions(opened(GENAI, "kernel"), 125, tokens=1)
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal: 9000 kB\nMemAvailable: 100 kB\n")
    monkeypatch.setattr("tq_onnx.runtime.memory._MEMINFO", memory)
    monkeypatch.setattr("tq_onnx.runtime.memory._CGROUPS", tmp_path / "none")
    check_fits([one], 300, tokens=1)
    with pytest.raises(UsageError, match=r"and 102\.4 kB of memory are free; give smaller"):
        check_fits([one], 400, tokens=1)
    # An original whose caches grow has them twice.
    with pytest.raises(UsageError, match="memory are free"):
        check_fits([opened(DYNAMO, "original")], 30, tokens=1)
    memory.unlink()
    check_fits([one], 10**9, tokens=1)


def test_a_picture_of_what_there_is(tmp_path: Path) -> None:
    report: SpeedReport = bench(
        original(HALF), preset="int3", contexts=(24, 16), tokens=1, prompt_limit=16, threads=1
    )
    assert [row.context for row in report.rows] == [16, 24]
    assert report.preset == "int3"
    assert len(bench_table(report).rows) == 2
    assert bench_table(report).rows[1][4:7] == ("", "", "")
    assert len(bench_notes(report)) == 6
    assert 0 < report.rows[0].floor_seconds_after < report.rows[0].after.step_seconds
    draw_speed(report, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert ">seconds to the first token<" in text
    assert text.count(">int3<") == 3
    draw_speed(report, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text
    unread = replace(
        report,
        rows=tuple(
            replace(
                row,
                before=replace(row.before, first_token_seconds=None),
                after=replace(row.after, first_token_seconds=None),
            )
            for row in report.rows
        ),
    )
    assert [len(row) for row in bench_table(unread).rows] == [7, 7]
    assert len(bench_table(unread).columns) == 7
    draw_speed(unread, tmp_path / "c.svg")
    assert "seconds to the first token" not in (tmp_path / "c.svg").read_text()
