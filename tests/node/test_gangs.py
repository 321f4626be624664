"""Replicas of several nodes with real processes: a leader and its followers, each under an agent of its own."""

import json
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from llmgw.node import processes, tend
from llmgw.node.engines import Asking
from llmgw.node.health import Patience
from llmgw.wire.control import StartShard, StopShard
from llmgw.wire.facts import ShardState
from tests.engines import SHARD, Watching, order, running, shards, until
from tests.gangs import agents, orders, shard
from tests.leftovers import alive, end_marked, marked
from tests.ports import free_ports, of_an_agent
from tests.supervisor import agent

pytestmark = pytest.mark.real

READY, FAILED, STOPPED = ShardState.READY, ShardState.FAILED, ShardState.STOPPED
QUICK = Patience(period=0.2, probe=0.5, token=60.0)


async def started(
    nodes: list[Watching], generation: int = 1, ports: list[int] | None = None, args: Sequence[str] = ()
) -> list[int]:
    """Start as the plane does: the followers first, the leader when they are ready. Everybody's process, by rank."""
    given = orders(len(nodes), generation, ports=ports, args=args)
    pids: list[int] = []
    for node, start in reversed(list(zip(nodes, given, strict=True))):
        node.shards.start(start)
        status = await node.until(lambda s: s.state is READY and s.generation == generation)
        assert status.pid is not None
        pids.append(status.pid)
    return pids[::-1]


async def chat(port: int) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": "six", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("members", [2, 3])
async def test_a_replica_of_several_nodes_answers_with_every_member_at_work(tmp_path: Path, members: int) -> None:
    ports = free_ports(members - 1)
    async with agents(tmp_path, members) as nodes:
        pids = await started(nodes, ports=ports)
        leader = nodes[0].seen[-1]
        assert leader.network == "RPC: " + ", ".join(f"127.0.0.1:{port}" for port in ports)
        assert leader.warning == ""
        assert await chat(leader.port) != ""
        follower = nodes[1].seen[-1]
        assert follower.port == 0
        assert follower.command[1:] == ("-H", "127.0.0.1", "-p", str(ports[0]), "-t", "1", "-d", "CPU")

        for rank, node in enumerate(nodes):
            node.shards.stop(StopShard(shard=shard(rank), generation=1))
            await node.until(STOPPED)
        assert all(processes.look(pid) is None for pid in pids)


async def test_the_layers_are_shared_evenly_and_the_leader_has_its_part(tmp_path: Path) -> None:
    async with agents(tmp_path, 3) as nodes:
        await started(nodes, args=["-lv", "4"])
        (output,) = (tmp_path / "node-0/logs").glob("*/*.log")
        text = output.read_text()
        assert "offloading 4 repeating layers" in text, "of 6: the leader keeps two"
        assert len([line for line in text.splitlines() if "model buffer size" in line]) == 3


async def test_when_a_follower_is_killed_the_leader_fails_as_it_is_asked_for_a_token_and_says_why(
    tmp_path: Path,
) -> None:
    async with agents(tmp_path, patience=QUICK) as nodes:
        _, follower = await started(nodes)
        os.kill(follower, signal.SIGKILL)
        assert (await nodes[1].until(FAILED)).signal == "SIGKILL"
        failed = await nodes[0].until(FAILED)
        assert failed.cause_code == "peer-lost"
        assert "went away" in failed.cause
        assert nodes[0].shards.pids() == {}


async def test_a_leader_whose_peer_is_not_there_is_refused_before_it_loads_and_the_peer_is_named(
    tmp_path: Path,
) -> None:
    here, absent = free_ports(2)
    async with agents(tmp_path, 3) as nodes:
        given = orders(3, ports=[here, absent])
        nodes[1].shards.start(given[1])
        await nodes[1].until(READY)
        nodes[0].shards.start(given[0])
        failed = await nodes[0].until(FAILED)
        assert failed.cause_code == "peer-missing"
        assert f"127.0.0.1:{absent}" in failed.detail
        assert f"127.0.0.1:{here}" not in failed.detail
        assert "1 of 2 peers answered" in failed.detail
        assert failed.command == ()
        assert nodes[0].shards.pids() == {}


async def test_a_port_that_the_plane_gave_and_somebody_has_fails_the_member_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        async with agents(tmp_path) as nodes:
            nodes[1].shards.start(orders(ports=[port])[1])
            failed = await nodes[1].until(FAILED)
            assert failed.cause_code == "port-in-use"
            assert f"port {port} (rpc) is in use" in failed.detail
            assert failed.command == (), "nothing was started"


async def test_a_stop_while_a_leader_waits_for_its_peers_answer_leaves_nothing(tmp_path: Path) -> None:
    # Somebody who accepts and never says a word: the rehearsal would wait for its whole time.
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = int(mute.getsockname()[1])
        async with agents(tmp_path) as nodes:
            nodes[0].shards.start(orders(ports=[port])[0])
            await until(lambda: bool(marked(tmp_path / "node-0")))
            nodes[0].shards.stop(StopShard(shard=shard(0), generation=1))
            await nodes[0].until(STOPPED)
            assert nodes[0].shards._means.ports._reserved == {}
            assert not marked(tmp_path / "node-0")


@pytest.fixture
def states(tmp_path: Path) -> Iterator[list[Path]]:
    """State directories of two nodes; whatever still carries their marks afterwards is killed."""
    found = [tmp_path / "node-0", tmp_path / "node-1"]
    yield found
    for state in found:
        end_marked(state)


async def test_leader_and_follower_outlive_their_killed_agents_and_are_adopted_still_serving(
    states: list[Path],
) -> None:
    lead, follow = orders()
    beside = of_an_agent(1)
    async with agent(states[1], ports=beside) as follower, agent(states[0]) as leader:
        assert await follower.adopted() == await leader.adopted() == ()
        await follower.give(follow)
        lent = await follower.told("ready")
        await leader.give(lead)
        ready = await leader.told("ready")
        assert await chat(ready.port) != ""
        await follower.kill()
        await leader.kill()
    async with agent(states[1], ports=beside) as follower, agent(states[0]) as leader:
        ((lent_again,), (again,)) = await follower.adopted(), await leader.adopted()
        assert (lent_again.state, lent_again.pid, lent_again.port) == ("ready", lent.pid, 0)
        assert (again.state, again.pid, again.port) == ("ready", ready.pid, ready.port)
        # What the members talk over is read again from the log of the one that is adopted.
        assert (await leader.told("ready")).network == ready.network != ""
        assert await chat(again.port) != ""
        # Of an adopted follower the end is told as of any other.
        assert lent.pid is not None
        os.kill(lent.pid, signal.SIGKILL)
        await follower.told("failed")
        await leader.give(StopShard(shard=shard(0), generation=1))
        await leader.told("stopped")
        assert ready.pid is not None
        assert not alive(ready.pid)


LEADING = """
import http.server, json, os, sys
print(os.environ.get("SAYS", ""), flush=True)
reads = posts = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global reads
        if self.path == "/metrics":
            reads += 1
            made = reads if os.path.exists(os.environ["BUSY"]) else 7
            return self.answer(200, f"running 0\\nmade {made}\\n".encode())
        self.answer(200, json.dumps({"data": [{"id": "tiny"}]}).encode())
    def do_POST(self):
        global posts
        posts += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        json.dump([reads, posts], open(os.environ["COUNT"], "w"))
        self.answer(500 if os.path.exists(os.environ["BROKEN"]) else 200, b"{}")
    def answer(self, code, body):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        if reads % 5 == 0:
            print("reads", reads, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ASKING = Asking(running=("running",), made=("made",))


def leading(folder: Path, says: str = "", rdma: tuple[str, ...] = ()) -> StartShard:
    """A leader of two that does as files say."""
    files = {name: str(folder / name.lower()) for name in ("BROKEN", "BUSY", "COUNT")}
    start = order(engine="python", env={"PROGRAM": LEADING, "SAYS": says, **files})
    spec = structs.replace(start.spec, peers=("127.0.0.1", "127.0.0.2"), peer_ports=({}, {}), rdma=rdma)
    return structs.replace(start, spec=spec)


async def test_a_leader_that_is_well_and_makes_no_tokens_has_failed(tmp_path: Path) -> None:
    async with running(shards(tmp_path, asking=ASKING, patience=QUICK)) as told:
        told.shards.start(leading(tmp_path))
        await told.until(READY)
        (tmp_path / "broken").touch()
        failed = await told.until(FAILED)
        assert failed.cause_code == "token-failed"
        assert "2 times in a row" in failed.cause


async def test_the_cause_that_the_log_names_says_more_than_the_missing_token(tmp_path: Path) -> None:
    says = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Gloo Connection closed by peer [10.0.0.2]:5"
    async with running(shards(tmp_path, asking=ASKING, patience=QUICK)) as told:
        told.shards.start(leading(tmp_path, says))
        await told.until(READY)
        (tmp_path / "broken").touch()
        failed = await told.until(FAILED)
        assert failed.cause_code == "peer-lost"
        assert "makes no tokens any more" in failed.cause
        assert "another member of the replica went away" in failed.cause


async def test_while_others_have_tokens_made_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "busy").touch()
    async with running(shards(tmp_path, asking=ASKING, patience=QUICK)) as told:
        told.shards.start(leading(tmp_path))
        await told.until(READY)
        (tmp_path / "broken").touch()  # one asked for now would be its end
        (log,) = (tmp_path / "logs").glob("*/*.log")
        await until(lambda: "reads 30" in log.read_text(), within=120)
        assert json.loads((tmp_path / "count").read_text())[1] == 1, "only that of its readiness"


SOCKETS = """h:1:1 [0] NCCL INFO NET/IB : No device found.
h:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
h:1:1 [0] NCCL INFO Using network Socket"""


async def test_sockets_where_rdma_was_meant_are_told_as_a_warning_and_a_problem_and_it_serves_on(
    tmp_path: Path,
) -> None:
    async with running(shards(tmp_path, asking=ASKING)) as told:
        told.shards.start(leading(tmp_path, SOCKETS, ("mlx5_0:1",)))
        ready = await told.until(READY)
        assert ready.network == "Socket: eth0"
        assert ready.warning.startswith("NCCL uses sockets on eth0 and not mlx5_0:1, so it is slow")
        (problem,) = told.shards.problems
        assert (problem.code, ready.warning in problem.text) == (f"wires:{SHARD}", True)
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        stopped = await told.until(STOPPED)
        assert (stopped.network, stopped.warning, told.shards.problems) == ("", "", ())


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(1000)
"""


async def test_a_follower_that_does_not_heed_sigterm_is_not_waited_for_as_a_leader_with_streams_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tend, "FOLLOWER_GRACE", 0.3)
    start = order(engine="python", env={"PROGRAM": STUBBORN}, grace=600.0)
    spec = structs.replace(start.spec, rank=1, peers=("127.0.0.1", "127.0.0.1"), peer_ports=({}, {}))
    async with running(shards(tmp_path)) as told:
        told.shards.start(structs.replace(start, spec=spec))
        ready = await told.until(READY)
        (log,) = (tmp_path / "logs").glob("*/*.log")
        await until(lambda: "deaf" in log.read_text())
        told.shards.stop(StopShard(shard=SHARD, generation=1))
        await told.until(STOPPED)
        assert ready.pid is not None
        assert processes.look(ready.pid) is None
