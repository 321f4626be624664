"""A model that is unloaded while nobody asks for it, and loaded by whoever does, over real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
import trio

from llmgw.tinymodel import write_tiny
from tests.e2e.rig import MODEL, Rig, patient, rig

pytestmark = [pytest.mark.real, pytest.mark.slow]

#: Seconds: longer than what a busy machine lets stand still between two requests, shorter than anybody wants to wait.
IDLE = 10.0


async def apply(fleet: Rig, *, idle: float = IDLE, replicas: int = 1) -> None:
    source = fleet.root / "tiny.gguf"
    if not source.exists():
        write_tiny(source)
    text = MODEL.format(name="tiny", replicas=replicas, source=source)
    answer = await fleet.api.post("apply", content=text.replace("[models.profile]", f"idle = {idle}\n[models.profile]"))
    assert answer.status_code == 200, answer.text


async def unloaded(fleet: Rig) -> bool:
    return not await fleet.replicas() and not fleet.engines()


async def card(fleet: Rig, client: httpx.AsyncClient) -> dict[str, str]:
    answer = await client.get(f"{fleet.gateway}/v1/models/tiny")
    return answer.json() if answer.status_code == 200 else {}


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_request_loads_an_idle_model_is_served_and_the_model_goes_again(tmp_path: Path, gateways: int) -> None:
    async with rig(tmp_path, nodes=2, gateways=gateways) as fleet, patient() as client:
        await apply(fleet, replicas=2)

        async def listed() -> bool:
            return (await card(fleet, client)).get("state") == "starting"

        await fleet.until(listed, what="the model is listed, though nothing of it runs")
        assert "a request loads it" in (await card(fleet, client))["reason"]
        assert await unloaded(fleet)

        answer = await fleet.chat(client)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"]
        await fleet.until(lambda: fleet.ready(2), what="all of its replicas come")
        assert [event["subject"] for event in await fleet.events("model-asked")] == ["model:tiny"]

        # It stays while it is used, far longer than its time.
        began = time.monotonic()
        while time.monotonic() - began < 2 * IDLE:
            assert (await fleet.chat(client, max_tokens=2)).status_code == 200
            await trio.sleep(1)
        assert await fleet.ready(2)

        await fleet.until(lambda: unloaded(fleet), what="nobody asks, and it goes")
        await fleet.until(listed, what="the gateways have heard of it")
        assert (await fleet.chat(client)).status_code == 200
        assert len(await fleet.events("model-asked")) == 2


async def test_a_request_that_takes_long_keeps_its_model(tmp_path: Path) -> None:
    async with rig(tmp_path, nodes=1) as fleet, patient() as client:
        await apply(fleet, idle=600)
        assert (await fleet.chat(client)).status_code == 200
        (engine,) = fleet.engines()
        answers: list[httpx.Response] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.append(await fleet.chat(client, stream=True))

            async def asked() -> bool:
                return bool((await fleet.get("status"))["gateway"]["in_flight"] == 1)

            psutil.Process(engine).suspend()
            nursery.start_soon(ask)
            await fleet.until(asked, what="the request is at the engine")
            await apply(fleet)
            await trio.sleep(1.5 * IDLE)
            assert not answers
            assert await fleet.ready(1)
            psutil.Process(engine).resume()
        assert answers[0].text.rstrip().endswith("data: [DONE]")
        assert fleet.engines() == [engine]
        await fleet.until(lambda: unloaded(fleet), what="it goes when the answer has ended")


async def test_who_waits_at_a_gateway_is_served_although_the_plane_died_meanwhile(tmp_path: Path) -> None:
    async with rig(tmp_path, 1, gateways=1) as fleet, patient() as client:
        await apply(fleet)

        async def listed() -> bool:
            return bool(await card(fleet, client))

        await fleet.until(listed, what="the gateway has the routes")
        assert fleet.plane is not None
        await fleet.kill(fleet.plane)
        answers: list[httpx.Response] = []
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                answers.append(await fleet.chat(client))

            nursery.start_soon(ask)
            await trio.sleep(1)
            assert not answers
            await fleet.start_plane()
        assert answers[0].status_code == 200, answers[0].text


async def test_a_gateway_that_dies_while_a_request_waits_leaves_a_model_that_loads_and_goes_again(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, nodes=1, gateways=1) as fleet, patient() as client:
        await apply(fleet)

        async def listed() -> bool:
            return bool(await card(fleet, client))

        async def waits() -> bool:
            return bool(await fleet.events("model-asked"))

        await fleet.until(listed, what="the gateway has the routes")
        assert fleet.gateways is not None
        (worker,) = psutil.Process(fleet.gateways.pid).children()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(httpx.HTTPError):
                    await fleet.chat(client)

            # An agent that stands still: nothing is loaded and answered before the gateway is dead.
            fleet.nodes["n1"].send_signal(signal.SIGSTOP)
            nursery.start_soon(ask)
            await fleet.until(waits, what="the plane heard of it")
            worker.send_signal(signal.SIGKILL)
        fleet.nodes["n1"].send_signal(signal.SIGCONT)
        await fleet.until(lambda: fleet.ready(1), what="it loads all the same")
        await fleet.until(lambda: unloaded(fleet), what="it goes, for nobody asked again")
        assert (await fleet.chat(client)).status_code == 200


async def test_past_its_deadline_a_request_is_told_why_and_the_model_loads_for_the_next(tmp_path: Path) -> None:
    async with (
        rig(tmp_path, nodes=0, hold_within=1) as fleet,
        patient() as client,
    ):
        await apply(fleet, idle=600)
        answer = await fleet.chat(client)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "model_not_ready"
        await fleet.join("n1")
        await fleet.start_node("n1")

        await fleet.until(lambda: fleet.chats(client), what="it has loaded for those that come back")
