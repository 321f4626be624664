"""What all gateways of a plane have counted since they started, for whoever asks the plane and not Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs
import msgspec
import structlog
import trio

from llmgw.plane.gateway import feed
from llmgw.plane.gateway.metrics import CLIENT_GONE, Metrics

log = structlog.get_logger()

#: How often the plane asks gateway processes, in seconds.
EVERY = 5.0
_WITHIN = 1.0


@attrs.frozen
class Served:
    """What became of one model's requests: all of them, those that failed, those whose client went away; its tokens.

    `held` wait now for the model to be ready.
    """

    requests: int = 0
    failed: int = 0
    left: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    held: int = 0


def by_model(all_metrics: Iterable[Metrics]) -> dict[str, Served]:
    """The same of every model that was asked for."""
    found: dict[str, Served] = {}

    def add(model: str, **counts: int) -> None:
        known = found.get(model, Served())
        found[model] = attrs.evolve(known, **{name: getattr(known, name) + count for name, count in counts.items()})

    for metrics in all_metrics:
        for (model, status), count in metrics.requests.items():
            add(model, requests=count, failed=count * (status >= 500), left=count * (status == CLIENT_GONE))
        for (model, _, kind), count in metrics.tokens.items():
            add(model, **{f"{kind}_tokens": count})
        for model, count in metrics.held.items():
            add(model, held=count)
    return found


def totals(all_metrics: Iterable[Metrics]) -> dict[str, int]:
    """All models together. Tokens are in it only where a gateway counts any (`meter`)."""
    known = tuple(all_metrics)
    models = tuple(by_model(known).values())
    found = {
        "requests": sum(served.requests for served in models),
        "failed": sum(served.failed for served in models),
        "left": sum(served.left for served in models),
        "retries": sum(count for metrics in known for count in metrics.retries.values()),
        "held": sum(served.held for served in models),
    }
    if any(metrics.tokens for metrics in known):
        found["prompt_tokens"] = sum(served.prompt_tokens for served in models)
        found["completion_tokens"] = sum(served.completion_tokens for served in models)
    return found


class Counts:
    """The newest counts of every gateway: of the one in this process, and of those that are processes of their own."""

    def __init__(self, directory: Path) -> None:
        self.own = Metrics()
        self._directory = directory / "gateway"
        self._others: tuple[Metrics, ...] = ()

    def all(self) -> tuple[Metrics, ...]:
        return (self.own, *self._others)

    async def run(self) -> None:
        """Ask the gateway processes now and then, until cancelled. One that does not answer counts nothing."""
        while True:
            self._others = tuple(await ask(sockets(self._directory)))
            await trio.sleep(EVERY)


def sockets(directory: Path) -> list[Path]:
    """Where the gateway processes that work in this directory tell their counts."""
    return sorted(directory.glob("counts-*.sock"))


async def ask(paths: Iterable[Path]) -> list[Metrics]:
    """What the gateway processes behind these sockets count, by name; one that does not answer in time is left out."""
    found: list[Metrics] = []
    async with trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(_ask, path, found)
    return sorted(found, key=lambda metrics: metrics.worker)


async def _ask(path: Path, found: list[Metrics]) -> None:
    data = b""
    with trio.move_on_after(_WITHIN) as scope:
        try:
            async with feed.connected(path) as stream:
                async for piece in stream:
                    data += piece
            found.append(msgspec.msgpack.decode(data, type=Metrics))
        except (OSError, trio.BrokenResourceError, msgspec.DecodeError) as error:
            log.debug("a gateway process did not tell its counts", socket=str(path), why=str(error))
    if scope.cancelled_caught:
        log.warning("a gateway process did not tell its counts in time", socket=str(path))
