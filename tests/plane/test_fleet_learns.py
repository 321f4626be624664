"""What bandwidth tests and engines' use of memory teach placement, over restarts."""

from __future__ import annotations

import trio

from llmgw.plane.bandwidth import history
from llmgw.plane.store.memory import MemoryStore
from llmgw.rdma.grade import Verdict
from llmgw.rdma.results import EndView, PairResult, RailResult
from llmgw.wire.agent import Heartbeat
from llmgw.wire.facts import NodeId, ShardId, ShardLoad
from tests.plane.planes import TINY, Clock, plane
from tests.plane.worlds import CLOCK


def a_test(grade: str) -> PairResult:
    rail = RailResult(
        rail="0",
        a=EndView(node="n1", device="mlx5_0"),
        b=EndView(node="n2", device="mlx5_0"),
        rate_gbps=400.0,
        gbps=12.0,
        verdict=Verdict(grade=grade),
    )
    return PairResult(a="n1", b="n2", clock=CLOCK + trio.current_time(), rails=(rail,))


async def test_a_bandwidth_test_is_known_to_placement_at_once_after_a_restart_and_until_it_is_old(
    autojump_clock: Clock,
) -> None:
    store, pair = MemoryStore(), (NodeId("n1"), NodeId("n2"))
    async with plane(store, evidence=600.0) as p:
        p.agent("n1")
        p.agent("n2")
        version = p.fleet.world.version
        bad = a_test("bad")
        await history.keep(store, bad)
        p.fleet.tested(bad)
        assert p.fleet.world.version == version + 1
        assert p.fleet.world.value.evidence[pair].bad == ("n1 mlx5_0/1", "n2 mlx5_0/1")
        await trio.sleep(60)
    async with plane(store, evidence=600.0) as p:
        known = p.fleet.world.value.evidence[pair]
        assert (known.bad, known.at) == (("n1 mlx5_0/1", "n2 mlx5_0/1"), 0.0)
        p.agent("n1")
        p.agent("n2")
        await trio.sleep(530)
        assert pair in p.fleet.world.value.evidence
        await trio.sleep(20)
        assert pair not in p.fleet.world.value.evidence


async def test_what_an_engine_took_is_learned_while_it_runs_and_known_after_a_restart(autojump_clock: Clock) -> None:
    store = MemoryStore()
    async with plane(store) as p:
        p.agent("n1")
        await p.fleet.apply(TINY)
        await trio.sleep(5)
        p.hub.agents["n1"].say(Heartbeat(shards=(ShardLoad(ShardId("tiny-0-0"), 0.0, 7 << 30),)))
        assert not p.fleet.world.value.learned
        await trio.sleep(30)
        (name,) = p.fleet.world.value.learned
        assert name == "llamacpp /models/tiny.gguf gpus=0 nodes=1"
        assert p.fleet.world.value.learned[name].memory_bytes == 7 << 30
    async with plane(store) as p:
        assert p.fleet.world.value.learned[name].memory_bytes == 7 << 30
