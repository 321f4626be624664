"""What IMEX says of its domain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.imex import imex, own_addresses, parse, parse_json, parse_table
from llmgw.node.view import View
from llmgw.wire.facts import Interface

LEGEND = """Connectivity Table Legend:
I - Invalid - Node wasn't reachable, no connection status available
N - Never Connected
R - Recovering - Connection was lost, but clean up has not yet been triggered.
D - Disconnected - Connection was lost, and clean up has been triggered.
A - Authenticating - If GSSAPI enabled, client has initiated mutual authentication.
!V! - Version mismatch, communication disabled.
!M! - Node map mismatch, communication disabled.
C - Connected - Ready for operation

8/12/2025 06:08:10.580
Nodes:
"""


def table(size: int = 18, cells: dict[tuple[int, int], str] | None = None, state: str = "UP") -> str:
    nodes = "".join(
        f"Node #{n:<3} - 10.0.0.{n + 1:<6} - READY                - Version: 570.172\n" for n in range(size)
    )
    head = " Nodes From\\To  " + "   ".join(str(n) for n in range(size)) + "\n"
    rows = "".join(
        f"       {row}        " + "   ".join((cells or {}).get((row, to), "C") for to in range(size)) + "\n"
        for row in range(size)
    )
    return f"{LEGEND}{nodes}\n{head}{rows}Domain State: {state}\n"


OWN = frozenset({"10.0.0.1"})


def document(connection: str = "CONNECTED", status: str = "UP") -> str:
    return json.dumps(
        {
            "nodes": {
                str(n): {
                    "status": "READY",
                    "host": f"10.0.0.{n + 1}",
                    "hostName": f"tray-{n}",
                    "connections": {
                        str(to): {
                            "host": f"10.0.0.{to + 1}",
                            "status": connection if (n, to) == (0, 2) else "CONNECTED",
                        }
                        for to in range(3)
                    },
                }
                for n in range(3)
            },
            "status": status,
            "timestamp": "8/12/2025",
        }
    )


def test_a_domain_of_eighteen_that_are_all_connected_is_up() -> None:
    found = parse(table(), OWN, channels=4)
    assert found is not None
    assert (found.state, len(found.nodes), found.disconnected, found.mismatch, found.channels) == ("UP", 18, (), (), 4)
    assert found.nodes[17] == ("10.0.0.18", "READY")


def test_a_node_list_that_differs_is_named_and_the_domain_is_not_up_for_us() -> None:
    found = parse_table(table(cells={(0, 5): "!M!"}), OWN)
    assert found is not None
    assert (found.state, found.mismatch, found.disconnected) == ("DEGRADED", ("10.0.0.6",), ())


def test_a_peer_that_our_row_does_not_reach_is_named() -> None:
    found = parse_table(table(cells={(0, 3): "N", (0, 4): "D"}), OWN)
    assert found is not None
    assert (found.state, found.disconnected) == ("DEGRADED", ("10.0.0.4", "10.0.0.5"))


def test_what_other_rows_lack_is_not_ours() -> None:
    found = parse_table(table(cells={(7, 3): "N"}), OWN)
    assert found is not None
    assert found.state == "UP"


def test_without_a_row_that_is_known_to_be_ours_every_row_counts() -> None:
    found = parse_table(table(cells={(7, 3): "N"}), frozenset())
    assert found is not None
    assert found.disconnected == ("10.0.0.4",)


@pytest.mark.parametrize("listed", ["tray-0", "TRAY-0.rack.example", "tray-0.rack.example"])
@pytest.mark.parametrize("hostname", ["tray-0", "tray-0.rack.example"])
def test_a_node_that_is_listed_by_its_name_knows_its_own_row(listed: str, hostname: str) -> None:
    """The list of nodes may have names (since 570.158); of others' connections nothing is to be told here."""
    own = own_addresses([Interface(name="eth0", addresses=("192.168.0.9/24",))], hostname)
    text = table(3, cells={(1, 2): "N", (2, 0): "!M!"}).replace("10.0.0.1 ", f"{listed} ")
    found = parse_table(text, own)
    assert found is not None
    assert (found.state, found.disconnected, found.mismatch) == ("UP", (), ())
    domain = json.loads(document("CONNECTED"))
    domain["nodes"]["0"] |= {"host": listed, "hostName": ""}
    domain["nodes"]["1"]["connections"]["2"]["status"] = "INVALID"
    found = parse_json(json.dumps(domain), own)
    assert found is not None
    assert (found.state, found.disconnected) == ("UP", ())


def test_numbers_are_no_names() -> None:
    assert own_addresses([], "10.0.0.1") == {"10.0.0.1"}


def test_a_domain_that_is_down_is_down() -> None:
    found = parse_table(table(state="DOWN"), OWN)
    assert found is not None
    assert found.state == "DOWN"


def test_json_is_read_by_number_and_address() -> None:
    found = parse_json(document(), OWN)
    assert found is not None
    assert (found.state, len(found.nodes)) == ("UP", 3)
    broken = parse(document("NODE_MAP_MISMATCH"), OWN)
    assert broken is not None
    assert (broken.state, broken.mismatch) == ("DEGRADED", ("10.0.0.3",))
    away = parse("warning: something\n" + document("DISCONNECTED"), OWN)
    assert away is not None
    assert away.disconnected == ("10.0.0.3",)


def test_words_that_are_neither_form_are_nothing() -> None:
    assert parse("Failed to connect to the daemon", OWN) is None
    assert parse("{}", OWN) is None


def test_own_addresses_lose_their_prefix_lengths() -> None:
    assert own_addresses([Interface(name="eth0", addresses=("10.0.0.1/24", "fd00::1/64"))]) == {"10.0.0.1", "fd00::1"}


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    parse(text, OWN)
    parse(table(3) + text, OWN)


def tool(folder: Path, script: str) -> View:
    path = folder / "nvidia-imex-ctl"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return View(root=folder, imex=str(path))


@pytest.mark.real
async def test_a_tool_that_knows_no_json_is_asked_for_its_table(tmp_path: Path) -> None:
    (tmp_path / "table").write_text(table(2))
    channels = tmp_path / "dev/nvidia-caps-imex-channels"
    channels.mkdir(parents=True)
    (channels / "channel0").touch()
    view = tool(tmp_path, f'[ "$2" = -j ] && {{ echo "unknown option -j"; exit 1; }}; cat {tmp_path}/table')
    found = await imex(view, OWN)
    assert found is not None
    assert (found.state, found.channels) == ("UP", 1)


@pytest.mark.real
async def test_a_daemon_that_does_not_run_is_a_reason_and_no_tool_is_no_imex(tmp_path: Path) -> None:
    found = await imex(tool(tmp_path, 'echo "Error: cannot connect to the daemon" >&2; exit 1'), OWN)
    assert found is not None
    assert found.state == "cannot be asked: Error: cannot connect to the daemon"
    assert await imex(View(root=tmp_path, imex=str(tmp_path / "absent")), OWN) is None


@pytest.mark.real
async def test_a_daemon_that_runs_and_answers_no_questions_says_so(tmp_path: Path) -> None:
    """As it comes it is not to be asked (IMEX_CMD_ENABLED=0); that is no reason to think it down."""
    for path, text in (
        ("usr/lib/systemd/system/nvidia-imex.service", ""),
        ("sys/fs/cgroup/system.slice/nvidia-imex.service/cgroup.procs", "4711\n"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    found = await imex(tool(tmp_path, 'echo "Error: cannot connect to the daemon" >&2; exit 1'), OWN)
    assert found is not None
    assert found.state == "runs, cannot be asked: Error: cannot connect to the daemon"


@pytest.mark.real
async def test_a_tool_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.node.imex.WITHIN", 0.3)
    found = await imex(tool(tmp_path, "exec sleep 60"), OWN)
    assert found is not None
    assert "no answer" in found.state
