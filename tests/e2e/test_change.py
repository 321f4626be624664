"""Draining, scaling and rolling back by `llmgw ctl`, over real processes with streams that go on meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trio

from llmgw.demo.processes import call
from llmgw.tinymodel import write_tiny
from tests.e2e.rig import MODEL, Rig, patient, rig, traffic
from tests.leftovers import alive

pytestmark = [pytest.mark.real, pytest.mark.slow]

#: Tokens for which even the tiny model needs seconds, so that its engine can be held before it has come to an end. One
#: request may have all of the context that it was made for.
LONG = 3600
ROOMY = MODEL.replace("context = 2048", "context = 4096").replace('"4"', '"1"')


async def ctl(fleet: Rig, *args: str) -> str:
    return await call("llmgw", "ctl", "--dir", str(fleet.directory), *args, env=fleet.env)


async def asked(fleet: Rig, *args: str) -> Any:
    return json.loads(await ctl(fleet, *args, "-o", "json"))


def write(path: Path, *, replicas: int = 1, more: str = "") -> str:
    """A models.toml with a model beside it; its path."""
    source = path.with_name("tiny.gguf")
    if not source.exists():
        write_tiny(source)
    path.write_text(ROOMY.format(name="tiny", replicas=replicas, source=source) + more)
    return str(path)


async def apply(fleet: Rig, path: Path, *, replicas: int = 1, more: str = "") -> None:
    await ctl(fleet, "apply", "-f", write(path, replicas=replicas, more=more))


@asynccontextmanager
async def slow_stream(fleet: Rig, engine: psutil.Process) -> AsyncIterator[AsyncIterator[str]]:
    """An answer that has begun and does not end before its engine is resumed."""
    body = {"model": "tiny", "max_tokens": LONG, "stream": True, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": "The node"}]
    async with patient(300) as client:
        for _ in range(20):
            async with client.stream("POST", f"{fleet.gateway}/v1/chat/completions", json=body) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                engine.suspend()
                # Gateways tell what they have in flight every quarter of a second. An answer may have ended before,
                # and a plane that stood still meanwhile knows of that only when it is asked again.
                held = []
                for _ in range(2):
                    await trio.sleep(1)
                    held.append((await fleet.get("status"))["gateway"]["in_flight"])
                if held == [1, 1]:
                    yield lines
                    return
                engine.resume()
                async for _ in lines:
                    pass
        raise AssertionError("every answer had ended before its engine could be held")


async def served(fleet: Rig, times: int) -> list[int]:
    async with patient() as client:
        return [(await fleet.chat(client)).status_code for _ in range(times)]


async def drained(fleet: Rig, name: str) -> bool:
    return bool((await fleet.node(name))["drained"])


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_drain_lets_streams_finish_and_is_over_as_soon_as_they_have(tmp_path: Path, gateways: int) -> None:
    async with rig(tmp_path, nodes=2, gateways=gateways) as fleet:
        await apply(fleet, tmp_path / "models.toml")
        await fleet.until(lambda: fleet.ready(1), what="a replica is ready")
        (before,) = (await fleet.shards()).values()
        here, other = before["node"], "n2" if before["node"] == "n1" else "n1"
        engine = psutil.Process(before["pid"])

        async def routed() -> bool:
            return await served(fleet, 1) == [200]

        await fleet.until(routed, what="the gateways have routes")
        async with slow_stream(fleet, engine) as lines:
            said = await ctl(fleet, "drain", here, "--within", "1h")
            assert "may finish requests for 1h" in said

            async def leaves() -> bool:
                left = (await asked(fleet, "node", here))["leaving"]
                return [one["want"] for one in left] == ["drain"] and left[0]["in_flight"] == 1

            await fleet.until(leaves, what="its replacement is ready, and the old one finishes")
            (left,) = (await asked(fleet, "node", here))["leaving"]
            assert re.match(r"gets no new requests; finishes 1 request, for (1h|5\dm)", left["text"]), left["text"]
            assert "gets no new requests" in await ctl(fleet, "node", here)
            assert "draining (1 left)" in await ctl(fleet, "nodes")
            # The gateways send it nothing more: an engine that stands still would not answer.
            assert await served(fleet, 8) == [200] * 8
            assert not await drained(fleet, here)
            engine.resume()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert len(rest) > 100
        await fleet.until(lambda: drained(fleet, here), what="the node is drained")
        assert [event["subject"] for event in await fleet.events("node-drained")] == [f"node:{here}"]
        assert not alive(engine.pid)
        (after,) = (await fleet.shards()).values()
        assert (after["node"], after["state"]) == (other, "ready")
        assert (await asked(fleet, "status"))["gateway"]["failed"] == 0
        await ctl(fleet, "undrain", here)
        assert not await drained(fleet, here)


async def test_a_drain_of_a_followers_node_moves_the_whole_replica_when_its_streams_have_finished(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, nodes=3) as fleet:
        source = write_tiny(tmp_path / "tiny.gguf", layers=6)
        path = tmp_path / "models.toml"
        path.write_text(ROOMY.format(name="tiny", replicas=1, source=source) + 'nodes = 2\nnetwork = "tcp"\n')
        await ctl(fleet, "apply", "-f", str(path))
        await fleet.until(lambda: fleet.ready(1), what="a replica of two nodes is ready")
        before = await asked(fleet, "replica", "tiny")
        assert before["waiting"] == []
        leader, follower = (member["shard"] for member in before["members"])
        assert before["replica"]["nodes"] == [leader["node"], follower["node"]]
        assert f"{leader['node']}+{follower['node']}" in await ctl(fleet, "replicas")
        shown = await ctl(fleet, "replica", leader["id"])
        for words in ("RPC: 127.0.0.1:", "rpc-server", "llama-server", f"rpc {before['members'][1]['ports']['rpc']}"):
            assert words in shown, shown

        engines = [psutil.Process(leader["pid"]), psutil.Process(follower["pid"])]
        async with slow_stream(fleet, engines[0]) as lines:
            await ctl(fleet, "drain", follower["node"], "--within", "5m")

            async def leaves() -> bool:
                left = (await asked(fleet, "node", follower["node"]))["leaving"]
                return [(one["want"], one["in_flight"]) for one in left] == [("drain", 1)]

            await fleet.until(leaves, what="its replacement is ready, and the old one finishes")
            assert await served(fleet, 4) == [200] * 4
            assert all(alive(engine.pid) for engine in engines)
            engines[0].resume()
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        await fleet.until(lambda: drained(fleet, follower["node"]), what="the node is drained")
        await fleet.until(lambda: fleet.ready(1), what="only the replacement is left")
        after = await asked(fleet, "replica", "tiny")
        assert follower["node"] not in after["replica"]["nodes"]
        assert not any(alive(engine.pid) for engine in engines)
        stops = [event["text"] for event in await fleet.events("shard-stopping")]
        assert [text.split()[0] for text in stops] == [leader["id"], follower["id"]]
        assert await served(fleet, 2) == [200] * 2


async def test_past_its_deadline_a_drain_cuts_what_still_streams(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=2) as fleet:
        await apply(fleet, tmp_path / "models.toml", more="grace = 1\n")
        await fleet.until(lambda: fleet.ready(1), what="a replica is ready")
        (before,) = (await fleet.shards()).values()
        async with slow_stream(fleet, psutil.Process(before["pid"])) as lines:
            await ctl(fleet, "drain", before["node"], "--within", "1s")
            rest: list[str] = []
            with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                while (line := await anext(lines, None)) is not None:
                    rest.append(line)
        assert "data: [DONE]" not in rest
        await fleet.until(lambda: drained(fleet, before["node"]), what="the node is drained")
        assert await served(fleet, 3) == [200] * 3


async def test_a_scale_outlives_the_plane_and_ends_with_the_next_apply(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    async with rig(tmp_path, nodes=1) as fleet:
        await apply(fleet, path)
        (fleet.directory / "models.toml").write_text(path.read_text())
        await fleet.until(lambda: fleet.ready(1), what="a replica is ready")
        assert "is scaled from 1 to 2 replicas" in await ctl(fleet, "scale", "tiny", "2")
        await fleet.until(lambda: fleet.ready(2), what="there are two")
        before = {shard["pid"] for shard in (await fleet.shards()).values()}
        assert fleet.plane is not None
        await fleet.kill(fleet.plane)
        await fleet.start_plane()
        await fleet.until(lambda: fleet.ready(1), what="models.toml, which this plane had not seen, was applied")
        await ctl(fleet, "scale", "tiny", "2")
        await fleet.kill(fleet.plane)
        await fleet.start_plane()
        await fleet.until(lambda: fleet.ready(2), what="models.toml has not changed: the scale holds")
        assert before & {shard["pid"] for shard in (await fleet.shards()).values()}
        await ctl(fleet, "apply", "-f", str(path))
        await fleet.until(lambda: fleet.ready(1), what="applying ends it")


@pytest.mark.parametrize("nodes", [2, 1], ids=["with room beside the old ones", "one by one"])
async def test_a_change_goes_through_all_replicas_and_no_request_fails(tmp_path: Path, nodes: int) -> None:
    # A node here has two CPU threads: one that holds both replicas has no room for a third.
    path, least = tmp_path / "models.toml", 2 if nodes == 2 else 1
    async with rig(tmp_path, nodes=nodes) as fleet:
        await apply(fleet, path, replicas=2)
        await fleet.until(lambda: fleet.ready(2), what="two replicas are ready")
        before = await fleet.shards()
        fewest = 2

        async def changed() -> bool:
            nonlocal fewest
            replicas = await fleet.replicas()
            fewest = min(fewest, sum(one["state"] == "ready" for one in replicas))
            return len(replicas) == 2 and all(one["state"] == "ready" and not one["outdated"] for one in replicas)

        async with traffic(fleet) as talk:
            await apply(fleet, path, replicas=2, more="ready_within = 60\n")
            await fleet.until(changed, what="both replicas have the new profile", every=0.02)
            good = talk.good
            await fleet.until(lambda: talk.reached(good + 10), what="requests go on")
            await ctl(fleet, "scale", "tiny", "1")
            await fleet.until(lambda: fleet.ready(1), what="one is left")
        assert talk.failures == []
        assert fewest >= least
        assert not {one["pid"] for one in before.values()} & set(fleet.engines())
        assert [event["subject"] for event in await fleet.events("rollout-done")] == ["model:tiny"]


async def test_a_profile_that_does_not_start_is_rolled_back_and_touches_nothing_that_serves(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    async with rig(tmp_path, nodes=2) as fleet:
        await apply(fleet, path, replicas=2)
        await fleet.until(lambda: fleet.ready(2), what="two replicas are ready")
        before = await fleet.shards()
        await apply(fleet, path, replicas=2, more='env = { LLAMA_ARG_THREADS = "no number" }\n')

        async def failed() -> bool:
            replicas = await fleet.replicas()
            return len(replicas) == 3 and any(one["restarts"] >= 2 for one in replicas)

        await fleet.until(failed, what="a replica of the new profile has failed twice")
        (model,) = (await asked(fleet, "models"))["models"]
        assert (model["rollout"], model["ready"]) == ("0 of 2 replicas have revision 2, 1 on the way", 2)
        assert "of revision 2 failed" in model["paused"]
        assert "paused: replica tiny-2 of revision 2 failed" in await ctl(fleet, "models")
        shown = await ctl(fleet, "replica", "tiny-2")
        assert "The first failure" in shown
        command = next(line for line in shown.splitlines() if line.startswith("whole log")).split("`")[1]
        assert "LLAMA_ARG_THREADS" in await ctl(fleet, *command.split()[2:])
        assert "LLAMA_ARG_THREADS none -> no number" in await ctl(fleet, "history", "tiny")
        assert "goes back from revision 2 to 1" in await ctl(fleet, "rollback", "tiny")
        await fleet.until(lambda: fleet.ready(2), what="the new replica is gone")
        after = await fleet.shards()
        assert {name: (one["pid"], one["generation"]) for name, one in after.items()} == {
            name: (one["pid"], one["generation"]) for name, one in before.items()
        }
        assert (await asked(fleet, "models"))["models"][0]["rollout"] == ""
