"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm", metavar="PROGRAM", help="also run the tests that start a real vLLM: its `vllm` program")
    parser.addoption("--vllm-model", metavar="DIR", help="a small model for those tests, in the hub's layout")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--vllm") and config.getoption("--vllm-model"):
        return
    skip = pytest.mark.skip(reason="needs --vllm PROGRAM --vllm-model DIR")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)
