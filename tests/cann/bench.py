"""Fixtures of the CANN bench, which runs in the environment that run.sh makes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cann.fake_acl import FakeAcl

#: Notes a field of the object that run.sh prints; outside run.sh nowhere.
Measured = Callable[[str, object], None]


@pytest.fixture(scope="session")
def fake_library() -> FakeAcl:
    try:
        return FakeAcl.load()
    except OSError as error:
        # Not a skip: whoever names the lane wants it to run.
        pytest.fail(f"{error}; run custom_ops/cann/testing/run.sh", pytrace=False)


@pytest.fixture
def fake(fake_library: FakeAcl) -> Iterator[FakeAcl]:
    """The fake runtime with its counts at zero; no rule may be broken by the end of the test."""
    fake_library.set_delay(0)
    fake_library.reset()
    yield fake_library
    fake_library.set_delay(0)
    assert fake_library.violations() == 0, fake_library.last_violation()


@pytest.fixture
def measured() -> Measured:
    folder = os.environ.get("TQ_CANN_RESULTS")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")

    def note(field: str, value: object) -> None:
        if folder:
            (Path(folder) / f"{field}.{worker}.json").write_text(json.dumps(value))

    return note
