"""Options of the test suite."""

from __future__ import annotations

import signal

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROCE = "tests/rigs/roce/"

# A busy machine is no fault of what is tested, and the same tree gives the same answer twice. New examples are looked
# for with `--hypothesis-profile=search`.
_UNHURRIED = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("llmgw", _UNHURRIED, derandomize=True)
hypothesis.settings.register_profile("search", _UNHURRIED, derandomize=False)
hypothesis.settings.load_profile("llmgw")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm", metavar="PROGRAM", help="also run the tests that start a real vLLM: its `vllm` program")
    parser.addoption("--vllm-model", metavar="DIR", help="a small model for those tests, in the hub's layout")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and what the tests start would inherit that: Ctrl-C is tested.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """A file's tests stay together, and so do those of the RoCE rig, which share two guests."""

    def _split_scope(self, nodeid: str) -> str:
        return ROCE if nodeid.startswith(ROCE) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # What takes longest begins first, so that no worker ends long after the others.
    items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in (ROCE, "tests/e2e/")])
    if config.getoption("--vllm") and config.getoption("--vllm-model"):
        return
    skip = pytest.mark.skip(reason="needs --vllm PROGRAM --vllm-model DIR")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)
