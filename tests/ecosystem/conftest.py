"""`make test-ecosystem` installs all that these tests need: there, a skipped one is a failed one."""

import os
from collections.abc import Generator
from typing import Any

import pytest


def _counted(report: Any) -> Any:
    if report.skipped and os.environ.get("WEFT_ECOSYSTEM") == "1":
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    return _counted((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return _counted((yield))
