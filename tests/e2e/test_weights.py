"""Models served from a hub, by real processes: fetched, killed midway, served from the cache, listed, removed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from llmgw.demo.processes import call, start, stop
from llmgw.node.weights.peers import Peers
from llmgw.tinymodel import write_tiny
from tests.e2e.rig import Rig, patient, rig
from tests.node.weights.hubserver import Hub, served
from tests.ports import free_ports

pytestmark = [pytest.mark.real, pytest.mark.slow]

SOURCE = "hf://org/tiny"
#: Bytes of the model after which the hub lets it come to a halt: more than an agent writes at once, less than all.
HALFWAY = 3 << 19
MODEL = """
[[models]]
name = "tiny"
replicas = {replicas}
engine = "llamacpp"
source = "{source}"
context = 2048
args = ["-np", "4"]
resources = {{ cpu_threads = 1, memory = "128MiB", disk = "8MiB" }}
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    model = write_tiny(tmp_path / "tiny.gguf").read_bytes()
    with served({"org/tiny": {"README.md": b"# tiny", "tiny.gguf": model}}) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield made


@pytest.fixture
async def fleet(tmp_path: Path, hub: Hub) -> AsyncIterator[Rig]:
    async with rig(tmp_path, 1) as made:
        yield made


async def ctl(fleet: Rig, *args: str) -> Any:
    return json.loads(await call("llmgw", "ctl", "--dir", str(fleet.directory), *args, "-o", "json", env=fleet.env))


async def words(fleet: Rig, *args: str) -> str:
    return await call("llmgw", "ctl", "--dir", str(fleet.directory), *args, env=fleet.env)


async def want(fleet: Rig, replicas: int, source: str = SOURCE) -> None:
    answer = await fleet.api.post("apply", content=MODEL.format(replicas=replicas, source=source) if replicas else "")
    assert answer.status_code == 200, answer.text


async def held(fleet: Rig) -> list[dict[str, Any]]:
    (node,) = (await ctl(fleet, "weights"))["nodes"]
    assert node["error"] == ""
    found: list[dict[str, Any]] = node["weights"]
    return found


async def progress(fleet: Rig) -> dict[str, Any] | None:
    for shard in (await fleet.shards()).values():
        if shard["state"] == "fetching" and shard["progress"] and shard["progress"]["done"]:
            found: dict[str, Any] = shard["progress"]
            return found
    return None


async def test_a_model_from_a_hub_is_served_kept_and_removed_when_nothing_needs_it(fleet: Rig, hub: Hub) -> None:
    # How far a fetch is gets told twice a second at the most: what comes before the halt takes longer.
    hub.trickle, hub.pause = HALFWAY, 0.1
    await want(fleet, 1)
    seen: list[dict[str, Any]] = []

    async def fetching() -> bool:
        if (found := await progress(fleet)) is not None:
            seen.append(found)
        return bool(seen)

    await fleet.until(fetching, what="progress of the fetch")
    total = sum(len(data) for data in hub.files["org/tiny"].values())
    assert seen[0]["what"] == "weights"
    assert 0 < seen[0]["done"] <= seen[0]["total"] == total
    assert "fetching weights" in await words(fleet, "replicas")
    hub.trickle, hub.pause = None, 0.0

    await fleet.until(lambda: fleet.ready(1), what="served from the hub")
    async with patient() as client:
        answer = await fleet.chat(client)
    assert answer.json()["choices"]

    (weights,) = await held(fleet)
    assert (weights["source"], weights["complete"], weights["in_use"]) == (SOURCE, True, True)
    assert weights["needed_by"] == "model tiny"
    assert "complete" in await words(fleet, "weights", "n1")

    plan = (await ctl(fleet, "gc", "--grace", "0"))["nodes"][0]
    assert (plan["removed"], plan["kept"]) == ([], {SOURCE: "model tiny needs it"})

    # Placement knows of it, so the disk that a fetch would need is not asked for again; nor is the hub.
    asked = len(hub.asked)
    await want(fleet, 0)

    async def stopped() -> bool:
        return not fleet.engines() and not await fleet.replicas()

    await fleet.until(stopped, what="the engine stopped")
    await want(fleet, 1)
    await fleet.until(lambda: fleet.ready(1), what="served from the cache")
    assert len(hub.asked) == asked

    await want(fleet, 0)
    await fleet.until(stopped, what="the engine stopped again")
    assert (await ctl(fleet, "gc"))["nodes"][0]["removed"] == []  # the grace
    plan = await ctl(fleet, "gc", "n1", "--grace", "0")
    assert (plan["dry_run"], plan["nodes"][0]["removed"], plan["nodes"][0]["freed_bytes"]) == (True, [SOURCE], total)
    assert len(await held(fleet)) == 1
    assert "freed." in await words(fleet, "gc", "--grace", "0", "--yes")
    assert await held(fleet) == []
    assert not list((fleet.root / "n1" / "weights").glob("models--*"))


async def test_an_agent_killed_midway_goes_on_where_it_was(fleet: Rig, hub: Hub) -> None:
    hub.trickle = HALFWAY
    await want(fleet, 1)

    async def far() -> bool:
        await trio.lowlevel.checkpoint()
        partials = (fleet.root / "n1" / "weights").glob("**/*.partial")
        with suppress(FileNotFoundError):  # a small file is whole already
            return any(path.stat().st_size >= 1 << 20 for path in partials)
        return False

    await fleet.until(far, what="half of it fetched")
    await fleet.kill(fleet.nodes["n1"])
    hub.asked.clear()
    hub.trickle = None
    await fleet.start_node("n1")
    await fleet.until(lambda: fleet.ready(1), what="served after the kill")
    ranges = [part for path, part in hub.bodies if path.endswith(".gguf")]
    assert ranges
    assert all(int(part.removeprefix("bytes=").partition("-")[0]) >= 1 << 20 for part in ranges)
    assert not any("/api/" in path for path, _ in hub.asked)


async def test_stopping_a_shard_ends_its_fetch(fleet: Rig, hub: Hub) -> None:
    hub.piece, hub.pause = 8 << 10, 0.25
    await want(fleet, 1)

    async def begun() -> bool:
        return hub.sent > 4 * hub.piece

    await fleet.until(begun, what="the fetch began")
    await want(fleet, 0)

    async def gone() -> bool:
        return not await fleet.replicas() and not (await held(fleet))[0]["fetching"]

    await fleet.until(gone, what="the fetch ended")
    (weights,) = await held(fleet)
    assert not weights["complete"]
    sent = hub.sent
    await trio.sleep(2)  # in which eight pieces would have come
    assert hub.sent - sent <= 2 * hub.piece


async def test_a_model_that_the_hub_does_not_know_is_the_shards_failure_in_words(fleet: Rig) -> None:
    await want(fleet, 1, "hf://org/nope")

    async def failed() -> bool:
        shards = (await fleet.shards()).values()
        return any(s["last_failure"] and "knows no model 'org/nope'" in str(s["last_failure"]) for s in shards)

    await fleet.until(failed, what="the failure is told")


async def test_weights_are_fetched_ahead_of_need(fleet: Rig, hub: Hub) -> None:
    assert "n1 will fetch" in await words(fleet, "fetch", SOURCE, "n1", "--rate", "100MB")

    async def there() -> bool:
        return any(weights["complete"] for weights in await held(fleet))

    await fleet.until(there, what="fetched ahead")
    hub.asked.clear()
    await want(fleet, 1)
    await fleet.until(lambda: fleet.ready(1), what="served")
    assert hub.asked == []


async def test_a_second_node_has_them_from_the_first(fleet: Rig, hub: Hub) -> None:
    (port,) = free_ports(1)
    first = fleet.root / "n1" / "node.toml"
    first.write_text(f'weights_listen = "127.0.0.1:{port}"\n' + first.read_text())
    await words(fleet, "fetch", SOURCE, "n1")

    async def there(node: str) -> bool:
        (cache,) = (await ctl(fleet, "weights", node))["nodes"]
        return any(weights["complete"] for weights in cache["weights"])

    await fleet.until(lambda: there("n1"), what="the first has them")
    share = await start("llmgw-node", "share", "--config", str(first), log=fleet.root / "share.log", env=fleet.env)
    try:

        async def shared() -> bool:
            return "weights are shared" in fleet.log("share")

        await fleet.until(shared, what="the share listens")
        await fleet.join("n2")
        second = fleet.root / "n2" / "node.toml"
        second.write_text(f'weights_peers = ["127.0.0.1:{port}"]\n' + second.read_text())
        await fleet.start_node("n2")
        await fleet.until_connected("n2")
        hub.asked.clear()
        await words(fleet, "fetch", SOURCE, "n2")
        await fleet.until(lambda: there("n2"), what="the second has them")
        assert hub.bodies == []
    finally:
        await stop(share, within=30)
    assert share.returncode == 0


async def three_that_share(fleet: Rig) -> None:
    """Two nodes more, and all of them share."""
    await fleet.kill(fleet.nodes["n1"])
    for name in ("n1", "n2", "n3"):
        if name != "n1":
            await fleet.join(name)
        (port,) = free_ports(1)
        config = fleet.root / name / "node.toml"
        config.write_text(f'share = true\nweights_listen = "127.0.0.1:{port}"\n' + config.read_text())
        await fleet.start_node(name)

    async def shared() -> bool:
        found = (await ctl(fleet, "weights"))["nodes"]
        return [bool(cache["shared_at"] and not cache["error"]) for cache in found] == [True] * 3

    await fleet.until(shared, what="all three share")


def sharers(fleet: Rig) -> list[int]:
    return [pid for pid, words in fleet.commands().items() if any(b"weights.share" in word for word in words)]


async def caches(fleet: Rig) -> dict[str, dict[str, Any]]:
    return {c["node"]: w for c in (await ctl(fleet, "weights"))["nodes"] for w in c["weights"] if w["source"] == SOURCE}


async def test_three_nodes_that_want_a_model_have_it_from_outside_once(fleet: Rig, hub: Hub) -> None:
    await three_that_share(fleet)
    hub.trickle = HALFWAY
    await want(fleet, 3)

    async def waits() -> bool:
        said = [s["progress"]["what"] for s in (await fleet.shards()).values() if s["progress"]]
        return any(words.startswith("weights, until n") for words in said)

    await fleet.until(waits, what="one waits until another has them")
    hub.trickle = None
    await fleet.until(lambda: fleet.ready(3), what="three replicas")
    assert sum(path.endswith(".gguf") for path, _ in hub.bodies) == 1
    held = await caches(fleet)
    assert len(held) == 3
    assert sorted(bool(weights["came_from"]) for weights in held.values()) == [False, True, True]
    assert "FROM" in await words(fleet, "weights")


async def test_a_fetcher_that_is_killed_midway_holds_up_neither_of_the_others(fleet: Rig, hub: Hub) -> None:
    await three_that_share(fleet)
    hub.trickle = HALFWAY
    await words(fleet, "fetch", SOURCE)

    async def far() -> bool:
        return hub.sent > 1 << 20

    await fleet.until(far, what="half of it fetched")
    await fleet.kill(fleet.nodes["n1"])
    hub.trickle = None

    async def there() -> bool:
        held = await caches(fleet)
        return all(held.get(name, {}).get("complete") for name in ("n2", "n3"))

    await fleet.until(there, what="the others have it")
    assert sum(path.endswith(".gguf") for path, _ in hub.bodies) == 2
    assert (await caches(fleet))["n3"]["came_from"] == "n2"

    async def two() -> bool:
        return len(sharers(fleet)) == 2

    await fleet.until(two, what="what the killed agent kept has ended with it")


async def test_a_branch_that_moved_is_fetched_anew_when_asked_for_and_said_to_differ_until_then(
    fleet: Rig, hub: Hub
) -> None:
    await three_that_share(fleet)
    await want(fleet, 1)
    await fleet.until(lambda: fleet.ready(1), what="served")
    old = hub.move("b" * 40, {"README.md": b"# tiny, a newer one"})
    (serving,) = await caches(fleet)
    other = "n2" if serving == "n1" else "n1"
    await words(fleet, "fetch", "tiny", other)

    async def both() -> bool:
        return [weights["complete"] for weights in (await caches(fleet)).values()] == [True, True]

    await fleet.until(both, what="another node has it")
    assert {weights["revision"] for weights in (await caches(fleet)).values()} == {old}
    assert "will fetch the newest of" in await words(fleet, "fetch", "--refresh", "tiny", serving)

    async def fresh(*names: str) -> bool:
        now = await caches(fleet)
        held = [now.get(name, {}) for name in names]
        return all(weights.get("revision") == "b" * 40 and weights.get("complete") for weights in held)

    await fleet.until(lambda: fresh(serving), what="the newer commit")
    answer = await ctl(fleet, "weights")
    assert len(answer["warnings"]) == 1
    assert "is not the same everywhere" in await words(fleet, "weights")
    assert any(w["source"] == f"{SOURCE}@{old}" for c in answer["nodes"] for w in c["weights"])
    assert await fleet.ready(1)
    await words(fleet, "fetch", "--refresh", SOURCE, other)
    await fleet.until(lambda: fresh(serving, other), what="the newer commit everywhere")
    assert (await ctl(fleet, "weights"))["warnings"] == []


async def test_a_revoked_node_gets_weights_from_nobody(fleet: Rig, hub: Hub) -> None:
    await three_that_share(fleet)
    await words(fleet, "fetch", SOURCE, "n1")

    async def there() -> bool:
        return bool((await caches(fleet)).get("n1", {}).get("complete"))

    await fleet.until(there, what="the first has it")
    shared = {cache["node"]: cache["shared_at"] for cache in (await ctl(fleet, "weights"))["nodes"]}

    async def answer(asking: str) -> int | None:
        """What n1 says to another node; None when it closes the connection."""
        async with Peers((), fleet.root / asking).client() as client:
            try:
                return (await client.get(f"https://{shared['n1']}/weights", params={"source": SOURCE})).status_code
            except httpx.TransportError:
                return None

    assert [await answer("n2"), await answer("n3")] == [200, 200]
    await words(fleet, "node", "revoke", "n3", "--yes")

    async def refused() -> bool:
        return await answer("n3") is None

    await fleet.until(refused, what="the first has heard of it")
    assert await answer("n2") == 200
