"""One side of a bandwidth test with real processes: Debian's ib_write_bw where there is one, programs in its place
where a behaviour is wanted that needs a fabric (the same with a fabric is in tests/rigs/roce)."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace
from trio.testing import MockClock

from llmgw.errors import BadInput, Failed
from llmgw.node import perftest as node
from llmgw.node.perftest import Perftest, PortNow, cpu_set, grown, last_lines, look, pin_for
from llmgw.node.run import Ran
from llmgw.rdma.command import limits
from llmgw.wire.agent import Listening, Working
from llmgw.wire.control import Bandwidth, BandwidthClient, BandwidthServe, PerftestRequest
from tests.engines import until
from tests.leftovers import alive_in
from tests.ports import free_ports
from tests.rdma.recorded import sides

pytestmark = pytest.mark.real

TEST = Bandwidth(device="rxe0", seconds=2, size=4096)
Fake = Callable[[str], None]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a Python program where ib_write_bw is looked for; `--version` and `--help` answer as the real one does."""

    def install(body: str) -> None:
        program = tmp_path / "bin" / "ib_write_bw"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable} -S\nimport os, signal, socket, sys, time\n"
            "if '--version' in sys.argv: print('Version: 6.06'); sys.exit(1)\n"
            "if '--help' in sys.argv: print('  -D, --duration  seconds\\n      --report_gbits'); sys.exit(1)\n" + body
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return install


LISTEN = """
port = int(sys.argv[sys.argv.index('-p') + 1])
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('', port)); s.listen()
"""
TABLE = sides("bw-D3-s4096-t16")["server"].stdout


def nothing_said(word: object) -> None:
    raise AssertionError(f"said {word}")


@pytest.mark.skipif(
    shutil.which("ib_write_bw") is None and not os.environ.get("CI"), reason="perftest is not installed"
)
@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA devices")
async def test_the_real_program_without_a_device_fails_with_its_cause_and_at_once() -> None:
    side = Perftest()
    found = await side.describe(PerftestRequest(), nothing_said)
    assert found.version
    assert found.free_port in node.TCP_PORTS
    with trio.fail_after(30):  # before the limit of either
        serving = await side.serve(BandwidthServe(run=TEST), nothing_said)
        client = await side.client(BandwidthClient(run=TEST, server="127.0.0.1"), nothing_said)
    for reply in (serving, client):
        assert reply.exit_code == 1
        assert reply.cause_code == "no-device"
        assert reply.average_gbps is None
        assert any("Unable to find the Infiniband/RoCE device" in line for line in reply.lines)
        assert reply.version == found.version
        assert "ib_write_bw" in reply.command


async def test_the_server_is_said_to_listen_when_its_own_socket_does(fake: Fake) -> None:
    fake(LISTEN + f"c, _ = s.accept(); print('''{TABLE}''')")
    port = free_ports(1)[0]
    heard: list[Working | Listening] = []
    listening = trio.Event()

    def say(word: Working | Listening) -> None:
        heard.append(word)
        listening.set()

    replies = []

    async def serve() -> None:
        replies.append(await Perftest().serve(BandwidthServe(request_id=7, run=replace(TEST, tcp_port=port)), say))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await listening.wait()
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            await stream.aclose()
    assert heard == [Listening(request_id=7, port=port)]
    assert replies[0].average_gbps == 0.011158
    assert replies[0].error == ""


async def test_another_processes_socket_on_the_port_is_not_taken_for_the_servers(fake: Fake) -> None:
    """A busy port: the server says so itself, and Listening is never said."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        fake(
            "port = sys.argv[sys.argv.index('-p') + 1]; time.sleep(0.3)\n"
            'print("Couldn\'t listen to port", port, file=sys.stderr); sys.exit(1)'
        )
        reply = await Perftest().serve(BandwidthServe(run=replace(TEST, tcp_port=port)), nothing_said)
    assert reply.cause_code == "port-in-use"
    assert str(port) in reply.cause


async def test_withdrawing_a_side_ends_its_processes_at_once(fake: Fake, tmp_path: Path) -> None:
    group = tmp_path / "group"
    fake(f"open({str(group)!r}, 'w').write(str(os.getpgid(0)))\n" + LISTEN + "time.sleep(600)")
    listening = trio.Event()
    request = BandwidthServe(run=replace(TEST, tcp_port=free_ports(1)[0]))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Perftest().serve, request, lambda word: listening.set())
            await listening.wait()
            nursery.cancel_scope.cancel()
    await until(lambda: not alive_in(int(group.read_text())))


async def test_a_side_that_hangs_is_ended_by_its_limit(fake: Fake, tmp_path: Path, mock_clock: MockClock) -> None:
    mock_clock.rate = 1.0
    hangs = tmp_path / "hangs"
    fake(
        "print('RDMA_Write BW Test', flush=True); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(hangs)!r}, 'w'); time.sleep(600)"
    )
    replies = []

    async def client() -> None:
        replies.append(await Perftest().client(BandwidthClient(run=TEST, server="127.0.0.1"), nothing_said))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client)
        await until(hangs.exists)
        await trio.testing.wait_all_tasks_blocked(0.1)
        mock_clock.jump(limits(TEST)[0])
    (reply,) = replies
    assert reply.error == "ended by the time limit"
    assert reply.cause_code == "time-limit"
    assert reply.lines == ("RDMA_Write BW Test",)


async def test_a_low_row_of_a_failed_client_is_no_result(fake: Fake) -> None:
    recorded = sides("fault-kill9-server-midway")["client"]
    fake(f"print('''{recorded.stdout}'''); print('''{recorded.stderr}''', file=sys.stderr); sys.exit(1)")
    reply = await Perftest().client(BandwidthClient(run=TEST, server="127.0.0.1"), nothing_said)
    assert reply.average_gbps is None
    assert reply.cause_code == "peer-left"


async def test_parameters_that_cannot_be_meant_start_nothing(fake: Fake) -> None:
    fake("sys.exit('must not run')")
    with pytest.raises(BadInput, match="may not be added"):
        await Perftest().client(
            BandwidthClient(run=replace(TEST, extra=("--mmap=/dev/mem",)), server="a"), nothing_said
        )


async def test_what_was_running_meanwhile_is_told(fake: Fake) -> None:
    fake(f"print('''{TABLE}''')")
    reply = await Perftest(busy=lambda: ("tiny-0-0",)).client(BandwidthClient(run=TEST, server="a"), nothing_said)
    assert reply.busy == ("tiny-0-0",)


async def test_a_port_that_goes_down_during_the_run_is_seen(fake: Fake, tmp_path: Path) -> None:
    """A link that dies inside a timed run still exits 0 with a low figure."""
    port = adapter(tmp_path / "root")
    fake(
        f"os.chdir({str(port)!r}); open('state', 'w').write('1: DOWN'); open('phys_state', 'w').write('2: Polling')\n"
        f"open('hw_counters/link_downed', 'w').write('4'); print('''{TABLE}''')"
    )
    reply = await Perftest(root=tmp_path / "root").client(BandwidthClient(run=TEST, server="a"), nothing_said)
    assert (reply.state_before, reply.state_after) == ("ACTIVE LinkUp", "DOWN Polling")
    assert reply.counters == {"link_downed": 1}


def adapter(root: Path) -> Path:
    port = root / "sys/class/infiniband/rxe0/ports/1"
    (port / "hw_counters").mkdir(parents=True)
    for name, text in {
        "state": "4: ACTIVE\n", "phys_state": "5: LinkUp\n", "hw_counters/link_downed": "3\n",
        "hw_counters/sent_pkts": "99\n", "hw_counters/send_err": "N/A\n",
    }.items():  # fmt: skip
        (port / name).write_text(text)
    return port


def test_a_port_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    adapter(tmp_path)
    assert look(tmp_path, "rxe0", 1) == PortNow("ACTIVE LinkUp", {"link_downed": 3})
    assert look(tmp_path, "nope", 1) == PortNow()


def test_a_counter_that_was_reset_did_not_grow() -> None:
    before, after = PortNow("", {"a": 5, "b": 5, "c": 5}), PortNow("", {"a": 9, "b": 1, "d": 7})
    assert grown(before, after) == {"a": 4}


def test_a_side_is_pinned_where_it_may_run(tmp_path: Path) -> None:
    device = tmp_path / "sys/class/infiniband/m0/device"
    device.mkdir(parents=True)
    nodes = tmp_path / "sys/devices/system/node/node1"
    nodes.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    mine = sorted(os.sched_getaffinity(0))
    (nodes / "cpulist").write_text(f"{mine[0]},60000-60003\n")
    found = pin_for(tmp_path, "m0")
    assert found is not None
    assert (found.numa_node, found.cpus) == (1, str(mine[0]))
    (nodes / "cpulist").write_text("60000\n")
    assert pin_for(tmp_path, "m0") is None
    (device / "numa_node").write_text("-1\n")
    assert pin_for(tmp_path, "m0") is None


def test_cpu_lists_are_read_or_empty() -> None:
    assert cpu_set("0-2,8") == {0, 1, 2, 8}
    assert cpu_set("x-,") == frozenset()


def test_a_server_that_ends_well_without_a_table_has_not_failed() -> None:
    """Some tests' servers print none, whatever they warn of; one that failed is told by its exit code."""
    for code, stderr, word in (
        (0, "Requested mtu is higher than active mtu\n", ""),
        (1, " Did not detect devices \n", "no RDMA device rxe0 on this node"),
        (1, "", "the output shows no known cause"),
    ):
        ran = Ran(("ib_write_lat",), code, "", stderr, False, 1.0)
        reply = node.report(TEST, ran, PortNow(), PortNow(), serving=True)
        assert reply.cause == word
        assert bool(reply.error) is bool(code)
        assert node.report(TEST, ran, PortNow(), PortNow(), serving=False).error


def test_the_last_lines_are_those_that_say_something() -> None:
    recorded = sides("err-mismatch-qps")["server"]
    lines = last_lines(Ran((), 1, recorded.stdout, recorded.stderr, False, 1.0))
    assert lines[-1] == "Failed to close connection between server and client"
    assert not any(set(line) <= set("-*") for line in lines)


async def test_ports_are_not_handed_out_twice() -> None:
    side = Perftest()
    assert len({side._free_port() for _ in range(40)}) == 40


async def test_without_perftest_and_without_leave_to_install_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    reply = await Perftest(install=False).describe(PerftestRequest(), nothing_said)
    assert "apt-get install perftest" in reply.error
    assert "settings" in reply.error
    with pytest.raises(Failed, match="not installed"):
        await Perftest().client(BandwidthClient(run=TEST, server="a"), nothing_said)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may install")
async def test_perftest_is_installed_on_first_use_and_a_lost_request_does_not_cut_that_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a package manager of our own: what is shown is who waits for it, and that it is not killed half-way."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apt-get").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *install*) read x < {tmp_path}/go;'
        f" printf '#!/bin/sh\\necho Version: 6.06; exit 1\\n' > {tools}/ib_write_bw;"
        f" /bin/chmod +x {tools}/ib_write_bw;; esac\n"
    )
    (tools / "apt-get").chmod(0o755)
    os.mkfifo(tmp_path / "go")
    monkeypatch.setenv("PATH", str(tools))
    side = Perftest()
    replies = []
    working = trio.Event()
    notes: list[str] = []

    def say(word: Working | Listening) -> None:
        assert isinstance(word, Working)
        notes.append(word.note)
        working.set()

    async def ask() -> None:
        replies.append(await side.describe(PerftestRequest(), say))

    with trio.fail_after(60):
        async with trio.open_nursery() as daemon:
            daemon.start_soon(side.run)
            async with trio.open_nursery() as stream:
                stream.start_soon(ask)
                await working.wait()
                await trio.testing.wait_all_tasks_blocked()
                stream.cancel_scope.cancel()
            async with trio.open_nursery() as stream:
                stream.start_soon(ask)
                await trio.to_thread.run_sync(partial((tmp_path / "go").write_text, "on\n"))
            daemon.cancel_scope.cancel()
    assert [(reply.installed_now, reply.version, reply.error) for reply in replies] == [(True, "6.06", "")]
    assert notes == ["installing perftest"] * 2
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["update", "perftest"]
