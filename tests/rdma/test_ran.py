from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.ran import Ran, trouble, unanswered
from tests.rdma import captures


def code(ran: Ran, *, port_down: bool = False, can_read_umad: bool | None = None) -> str | None:
    why = trouble(ran, port_down=port_down, can_read_umad=can_read_umad)
    return why.code if why else None


WITHOUT = [
    name.removesuffix(".err")
    for name in captures.every("no-umad/*.err")
    if not any(other in name for other in ("opensm", "ibdiagnet", "ibping", "ibstat"))
]


@pytest.mark.parametrize("name", WITHOUT)
def test_without_ib_umad_every_tool_says_so(name: str) -> None:
    ran = captures.ran(name)
    assert code(ran) == "no-umad"


@pytest.mark.parametrize("tool", ["sminfo", "saquery-SMIR", "perfquery"])
def test_a_fabric_that_never_had_a_manager_is_told_as_that(tool: str) -> None:
    assert code(captures.ran(f"no-sm/{tool}")) == "no-sm"


@pytest.mark.parametrize("tool", ["sminfo", "saquery-SMIR", "saquery-s"])
def test_a_manager_that_died_is_silent(tool: str) -> None:
    assert code(captures.ran(f"sm-died/{tool}")) == "sm-silent"


def test_the_silent_managers_lid_is_named() -> None:
    why = trouble(captures.ran("sm-died/sminfo"))
    assert why is not None
    assert "at LID 9" in why.text


def test_with_the_own_port_down_the_port_is_to_blame_and_not_the_manager() -> None:
    assert code(captures.ran("own-port-down/sminfo"), port_down=True) == "port-down"
    assert code(captures.ran("own-port-down/saquery-SMIR"), port_down=True) == "port-down"


def test_counters_over_a_threshold_are_an_answer_and_no_trouble() -> None:
    assert captures.ran("faults/ibqueryerrors").exit == 1
    assert code(captures.ran("faults/ibqueryerrors")) is None


def test_complete_and_partial_runs_of_a_scan_end_alike_and_only_stderr_tells_them_apart() -> None:
    assert captures.ran("spine0-silent/ibnetdiscover").exit == captures.ran("healthy/ibnetdiscover").exit == 0
    assert unanswered(captures.ran("spine0-silent/ibnetdiscover"))
    assert not unanswered(captures.ran("healthy/ibnetdiscover"))


_OPEN = "ibwarn: [6424] mad_rpc_open_port: can't open UMAD port (mlx5_1:1)\n"
_FAILED = "sminfo: iberror: failed: Failed to open 'mlx5_1' port '1'\n"


def test_a_missing_right_and_a_wrong_name_look_alike_and_the_caller_knows_which() -> None:
    ran = Ran("sminfo", 255, _FAILED, _OPEN)
    assert code(ran, can_read_umad=False) == "no-permission"
    assert code(ran, can_read_umad=True) == "no-device"
    why = trouble(ran)
    assert why is not None
    assert "mlx5_1" in why.text


@pytest.mark.parametrize(
    ("out", "err"),
    [
        ("", "ibwarn: [1] mad_rpc_open_port: can't open UMAD port ((null):0)\n"),
        ("sminfo: iberror: failed: Failed to open '(null)' port '0'\n", ""),
    ],
)
def test_a_tool_that_finds_no_device_at_all_lacks_its_mad_devices_and_no_manager(out: str, err: str) -> None:
    """SY17: as much as `sminfo` says in a container that has no /dev/infiniband."""
    why = trouble(Ran("sminfo", 255, out, err))
    assert why is not None
    assert why.code == "no-umad"
    assert "modprobe ib_umad" in why.remedy
    assert "container" in why.remedy


def test_a_manager_is_silent_though_the_tool_does_not_say_where_it_asked() -> None:
    """SM03: `sminfo` with its standard error lost."""
    failed = "sminfo: iberror: failed: query\n"
    assert code(Ran("sminfo", 255, failed, "")) == "sm-silent"
    assert code(Ran("sminfo", 255, failed, ""), port_down=True) == "port-down"
    assert code(Ran("smpquery", 255, "smpquery: iberror: failed: query\n", "")) == "failed"


def test_saquery_alone_names_a_missing_right() -> None:
    err = (
        "ibwarn: [6437] sa_get_handle: umad_open_port on port (null):0 failed\n"
        "ibpanic: [6437] main: Failed to bind to the SA: Permission denied\n"
    )
    assert code(Ran("saquery", 255, "", err)) == "no-permission"


def test_a_roce_port_is_told_as_that() -> None:
    assert (
        code(Ran("ibnetdiscover", 255, "", "ibwarn: [1] mad_rpc_open_port: client_register for mgmt 1 failed\n"))
        == "roce"
    )


def test_a_missing_tool_a_crash_and_a_limit_are_told_apart() -> None:
    assert code(Ran("sminfo", None, "", "No such file or directory")) == "not-installed"
    assert code(Ran("sminfo", -11)) == "crashed"
    assert code(Ran("sminfo", -9, seconds=10.0, timed_out=True)) == "timed-out"
    assert (
        code(Ran("smpquery", 255, "smpquery: iberror: failed: operation portinfo: port info query failed")) == "failed"
    )


@given(st.sampled_from(["sminfo", "saquery", "ibnetdiscover"]), st.integers(-20, 260), st.text(), st.text())
def test_any_failed_run_has_a_trouble_in_words(tool: str, status: int, out: str, err: str) -> None:
    why = trouble(Ran(tool, status, out, err))
    assert (why is None) <= (status == 0)
    assert why is None or (why.code and why.text)
