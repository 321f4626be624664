from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw import config
from llmgw.config import Listen, LogSettings
from llmgw.errors import BadInput


@pytest.mark.parametrize(
    ("text", "listen", "shown"),
    [
        ("0.0.0.0:7443", Listen("0.0.0.0", 7443), "0.0.0.0:7443"),
        ("[::]:7443", Listen("::", 7443), "[::]:7443"),
        (":7443", Listen("0.0.0.0", 7443), "0.0.0.0:7443"),
        ("7443", Listen("127.0.0.1", 7443), "127.0.0.1:7443"),
        ("localhost:0", Listen("localhost", 0), "localhost:0"),
    ],
)
def test_an_address_to_listen_on_is_read_and_shown(text: str, listen: Listen, shown: str) -> None:
    assert Listen.parse(text) == listen
    assert str(listen) == shown


@pytest.mark.parametrize("text", ["", "a", "a:b", "a:70000", "a:-1", "::1:7443", "a:", "a:7443²"])
def test_what_is_no_address_to_listen_on_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address to listen on"):
        Listen.parse(text)


@given(st.text())
def test_any_text_is_an_address_or_a_value_error(text: str) -> None:
    try:
        found = Listen.parse(text)
    except ValueError:
        return
    assert 0 <= found.port <= 65535


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("", False),
    ],
)
def test_only_what_never_leaves_the_machine_is_loopback(host: str, loopback: bool) -> None:
    assert config.is_loopback(host) is loopback


@attrs.frozen
class Sample:
    limit: int = 1
    log: LogSettings = LogSettings()


def test_a_variable_that_is_almost_a_setting_is_refused() -> None:
    with pytest.raises(BadInput, match="unknown setting LLMGW_X_LIMITS in the environment: did you mean LLMGW_X_LIMIT"):
        config.load(Sample, None, "LLMGW_X", {"LLMGW_X_LIMITS": "3"})
    with pytest.raises(BadInput, match="did you mean LLMGW_X_LOG_LEVEL"):
        config.load(Sample, None, "LLMGW_X", {"LLMGW_X_LOGLEVEL": "debug"})


def test_variables_of_others_under_our_prefix_are_left_alone() -> None:
    """Kubernetes makes these for a service that is called llmgw-x."""
    environ = {"LLMGW_X_SERVICE_HOST": "10.0.0.1", "LLMGW_X_PORT_7443_TCP": "tcp://10.0.0.1:7443", "LLMGW_XY": "1"}
    assert config.load(Sample, None, "LLMGW_X", environ) == Sample()


def test_without_a_file_the_environment_counts() -> None:
    assert config.load(Sample, None, "LLMGW_X", {"LLMGW_X_LOG_LEVEL": "debug"}) == Sample(
        log=LogSettings(level="debug")
    )


def test_the_state_directory_is_the_given_one_else_the_files_own() -> None:
    default, etc = Path("/var/lib/x"), Path("/etc/llmgw/x.toml")
    assert config.home(Path(), Path("/srv/x.toml"), None, default, etc) == Path("/srv")
    assert config.home(Path("state"), Path("/srv/x.toml"), None, default, etc) == Path("/srv/state")
    assert config.home(Path("/other"), Path("/srv/x.toml"), None, default, etc) == Path("/other")
    assert config.home(Path(), etc, None, default, etc) == default
    assert config.home(Path("/other"), etc, None, default, etc) == Path("/other")
    assert config.home(Path(), None, None, default, etc) == default
    assert config.home(Path("/other"), Path("/srv/x.toml"), Path("/given"), default, etc) == Path("/given")
