import os
import signal
import socket
import sys

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node import processes
from llmgw.node.processes import Handle, Seen, members, parse_stat


def seen(pid: int, parent: int = 1, group: int = 0, session: int = 0, started: int = 10, state: str = "S") -> Seen:
    return Seen(pid, f"p{pid}", state, parent, group or pid, session or pid, started)


def everybody(*all_of_them: Seen) -> dict[int, Seen]:
    return {one.pid: one for one in all_of_them}


def test_a_name_may_hold_anything() -> None:
    rest = "S 1 2 3 0 -1 4194560 1 0 0 0 1 2 0 0 20 0 1 0 777 1 1"
    assert parse_stat(f"42 (a) b (c) {rest}") == Seen(42, "a) b (c", "S", 1, 2, 3, 777)


@given(st.text(max_size=200))
def test_no_line_crashes_the_reader(line: str) -> None:
    parse_stat(line)


def test_members_are_the_session_the_group_and_all_descendants() -> None:
    there = everybody(
        seen(100, session=100), seen(101, 100, group=100, session=100), seen(102, 101), seen(103, 102), seen(200)
    )
    assert set(members(100, 10, there)) == {100, 101, 102, 103}


def test_a_worker_that_lost_its_parent_still_belongs() -> None:
    assert set(members(100, 10, everybody(seen(101, 1, group=100, session=100)))) == {101}


def test_what_is_marked_belongs_with_its_children_wherever_it_went() -> None:
    assert set(members(100, 10, everybody(seen(300), seen(301, 300), seen(400)), marked=[300])) == {300, 301}


def test_a_number_that_belongs_to_another_by_now_proves_nothing() -> None:
    there = everybody(seen(100, started=99), seen(101, 100, group=100, session=100, started=99))
    assert members(100, 10, there) == {}


def test_the_dead_do_not_count() -> None:
    assert members(100, 10, everybody(seen(100, state="Z"))) == {}


@pytest.mark.real
async def test_the_end_of_a_child_is_noticed_and_its_signal_known() -> None:
    child = await trio.lowlevel.open_process([sys.executable, "-c", "import time; time.sleep(100)"])
    with Handle(child.pid) as handle:
        assert handle.send(signal.SIGTERM)
        with trio.fail_after(60):
            await handle.ended()
    assert await child.wait() == -signal.SIGTERM


@pytest.mark.real
def test_who_listens_on_a_port_is_found_among_its_owners_sockets() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        listening = processes.listeners(one.getsockname()[1])
        mine = processes.sockets(os.getpid())
        assert listening is not None
        assert mine is not None
        assert listening <= mine
        assert len(listening) == 1


@pytest.mark.real
def test_this_process_is_seen_as_it_is() -> None:
    me = processes.look(os.getpid())
    assert me is not None
    assert (me.parent, me.session, me.alive) == (os.getppid(), os.getsid(0), True)
    assert processes.age(me) > 0
    assert processes.boot_id() != ""
    assert processes.environment(os.getpid()) is not None
    assert processes.look(1 << 30) is None
