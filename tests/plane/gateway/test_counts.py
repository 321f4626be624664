"""What all gateways counted, together: by model, and of processes that answer, lie or say nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from llmgw.plane.gateway import counts, feed
from llmgw.plane.gateway.counts import Counts, Served
from llmgw.plane.gateway.metrics import Metrics
from tests.plane.gateway.parts import until


def counted(worker: str = "") -> Metrics:
    metrics = Metrics(worker=worker)
    for status in (200, 200, 404, 499, 503):
        metrics.finished("a", status, 0.1)
    metrics.finished("b", 200, 0.1)
    metrics.used("a", "key-1", 10, 20)
    metrics.used("a", "key-2", 1, 2)
    metrics.retried("a")
    metrics.held["c"] = 3
    return metrics


def test_a_models_requests_are_counted_by_what_became_of_them() -> None:
    assert counts.by_model([counted(), counted("w2")]) == {
        "a": Served(requests=10, failed=2, left=2, prompt_tokens=22, completion_tokens=44),
        "b": Served(requests=2),
        "c": Served(held=6),
    }


def test_totals_are_of_all_models_and_gateways() -> None:
    assert counts.totals([counted(), counted("w2")]) == {
        "requests": 12,
        "failed": 2,
        "left": 2,
        "retries": 2,
        "held": 6,
        "prompt_tokens": 22,
        "completion_tokens": 44,
    }


def test_tokens_that_nobody_counts_are_not_called_none() -> None:
    assert counts.totals([Metrics()]) == {"requests": 0, "failed": 0, "left": 0, "retries": 0, "held": 0}


@pytest.mark.real
async def test_gateway_processes_are_asked_and_those_that_do_not_answer_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "_WITHIN", 3.0)  # so long it waits for the one that hangs
    folder = tmp_path / "gateway"
    folder.mkdir()

    async def tell(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(msgspec.msgpack.encode(counted("w1")))

    async def lie(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(b"\xc1 no counts")

    async def hang(stream: trio.SocketStream) -> None:
        async with stream:
            await trio.sleep_forever()

    (folder / "counts-dead.sock").touch()  # what a killed process leaves behind
    async with trio.open_nursery() as nursery:
        for name, answer in (("w1", tell), ("liar", lie), ("hung", hang)):
            listener = await feed.listen(folder / f"counts-{name}.sock")
            nursery.start_soon(trio.serve_listeners, answer, [listener])
        found = await counts.ask(counts.sockets(folder))
        nursery.cancel_scope.cancel()
    assert [(metrics.worker, metrics.requests["a", 200]) for metrics in found] == [("w1", 2)]


@pytest.mark.real
async def test_the_plane_has_its_own_counts_at_once_and_those_of_others_when_they_tell(tmp_path: Path) -> None:
    folder = tmp_path / "gateway"
    folder.mkdir()
    known = Counts(tmp_path)
    known.own.finished("a", 200, 0.1)
    assert counts.totals(known.all())["requests"] == 1

    async def tell(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.send_all(msgspec.msgpack.encode(counted("w1")))

    async with trio.open_nursery() as nursery:
        listener = await feed.listen(folder / "counts-w1.sock")
        nursery.start_soon(trio.serve_listeners, tell, [listener])
        nursery.start_soon(known.run)
        await until(lambda: counts.totals(known.all())["requests"] == 7)
        nursery.cancel_scope.cancel()
