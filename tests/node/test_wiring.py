import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import trio

from llmgw.node.engines.wires import Wires
from llmgw.node.records import Record
from llmgw.node.wiring import Wiring
from llmgw.wire.facts import ModelName, ReplicaId, ShardId, ShardSpec
from tests.node.engines.specs import spec

PEERS = ("127.0.0.1", "127.0.0.1", "127.0.0.1")
INFO = "h:1:1 [0] NCCL INFO "
HCA, SOCKET = INFO + "NET/IB : Using [0]mlx5_0:1/IB ; OOB eth0:10.0.0.1<0>\n", INFO + "Using network Socket\n"


def record(spec: ShardSpec, log: Path, pid: int = 0) -> Record:
    return Record(
        shard=ShardId("s"),
        replica=ReplicaId("r"),
        model=ModelName("m"),
        generation=1,
        token="t",
        spec=spec,
        pid=pid,
        log=str(log),
    )


async def test_a_log_is_read_on_from_where_it_was_and_only_by_whole_lines(tmp_path: Path) -> None:
    log, told = tmp_path / "log", list[Wires]()
    wiring = Wiring(record(spec("vllm", gpus=1, peers=PEERS), log), told.append)
    await wiring.look()
    assert told == [], "a log that is not there says nothing"
    log.write_text("noise\n" * 1000 + HCA + SOCKET[:-5])
    await wiring.look()
    await wiring.look()
    with log.open("a") as file:
        file.write(SOCKET[-5:] + "noise\n")
    await wiring.look()
    assert [wires.network for wires in told] == ["IB: mlx5_0:1", "Socket"]
    assert len(wiring._lines) == 2, "what does not tell is not kept"


@pytest.mark.parametrize("text", ["", "nothing of networks\n", "\0\xff\n" * 9])
async def test_a_log_that_does_not_tell_is_no_reason_to_end_what_serves(tmp_path: Path, text: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert await Wiring(record(spec("vllm", peers=PEERS), log), lambda wires: None).complete() is None


async def test_of_a_replica_of_one_node_nothing_is_looked_at(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(HCA)
    wiring = Wiring(record(spec("vllm", gpus=1), log), lambda wires: pytest.fail("nobody asked"))
    await wiring.follow(serving=True)
    assert await wiring.complete() is None


CONNECTED = """
import socket, sys
ends = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print("connected", flush=True)
sys.stdin.read()
"""


@pytest.mark.real
async def test_a_leader_that_is_connected_to_only_one_of_its_peers_must_not_be_used(tmp_path: Path) -> None:
    here, there = [await trio.open_tcp_listeners(0, host="127.0.0.1") for _ in range(2)]
    numbers = [int(listeners[0].socket.getsockname()[1]) for listeners in (here, there)]
    leader = spec("llamacpp", peers=PEERS, peer_ports=({}, {"rpc": numbers[0]}, {"rpc": numbers[1]}))
    async with trio.open_nursery() as nursery:
        try:
            for count, missing in ((1, True), (2, False)):
                words = [sys.executable, "-c", CONNECTED, *map(str, numbers[:count])]
                process = await trio.lowlevel.open_process(words, stdin=PIPE, stdout=PIPE)
                assert process.stdout is not None
                assert process.stdin is not None
                said = b""
                while not said.endswith(b"\n"):
                    said += await process.stdout.receive_some()
                told: list[Wires] = []
                dead = await Wiring(record(leader, tmp_path / "log", process.pid), told.append).complete()
                assert (dead is not None) is missing
                assert told[0].network == "RPC: " + ", ".join(f"127.0.0.1:{number}" for number in numbers[:count])
                if dead is not None:
                    assert (dead.code, f"without 127.0.0.1:{numbers[1]}" in dead.text) == ("peer-missing", True)
                await process.stdin.aclose()
                await process.wait()
                await process.stdout.aclose()
        finally:
            nursery.cancel_scope.cancel()
            for listener in (*here, *there):
                with trio.CancelScope(shield=True):
                    await listener.aclose()
