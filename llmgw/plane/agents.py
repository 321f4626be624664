"""The streams that are open now, by node: where commands and requests go in (A6, A9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import structlog

from llmgw.errors import AgentGone
from llmgw.plane.stream import AgentStream, Ear
from llmgw.wire.agent import Listening
from llmgw.wire.control import ControlMessage, Goodbye, Request
from llmgw.wire.facts import NodeId

log = structlog.get_logger("llmgw.hub")

R = TypeVar("R")

#: What a displaced agent waits before it comes again: two machines with one identity must not fight at full speed.
DISPLACED_RETRY = 10.0


class Attachments(Ear, Protocol):
    """Who is told which stream speaks for a node."""

    def attach(self, node: NodeId, stream: int, address: str) -> None: ...
    def detach(self, node: NodeId, stream: int) -> None: ...


class Hub:
    """One stream per node, the newest one."""

    def __init__(self, fleet: Attachments) -> None:
        self._fleet = fleet
        self._streams: dict[NodeId, AgentStream] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._streams)

    def number(self) -> int:
        """A number for a new stream, above all earlier ones."""
        self._last += 1
        return self._last

    @contextmanager
    def attached(self, stream: AgentStream) -> Iterator[None]:
        """While the block runs this stream speaks for its node; an older one is ended and changes nothing any more."""
        older = self._streams.get(stream.node)
        self._streams[stream.node] = stream
        self._fleet.attach(stream.node, stream.number, stream.address)
        if older is not None:
            log.warning("stream superseded", node=stream.node, older=older.address, newer=stream.address)
            older.end(
                Goodbye(
                    code="superseded",
                    reason=f"a newer stream of {stream.node} came from {stream.address}",
                    retry_after=DISPLACED_RETRY,
                )
            )
        try:
            yield
        finally:
            if self._streams.get(stream.node) is stream:
                del self._streams[stream.node]
                self._fleet.detach(stream.node, stream.number)

    def tell(self, node: NodeId, command: ControlMessage) -> None:
        """Queue a command. Raises AgentGone when no agent is connected, NotKeepingUp when its queue is full."""
        self._stream(node).tell(command)

    async def ask(
        self,
        node: NodeId,
        request: Request[R],
        *,
        within: float,
        listening: Callable[[Listening], None] | None = None,
    ) -> R:
        """A request's reply; see `AgentStream.ask` for what it raises."""
        return await self._stream(node).ask(request, within=within, listening=listening)

    def disconnect(self, node: NodeId, code: str, reason: str) -> bool:
        """End a node's stream with a reason. False when it has none."""
        stream = self._streams.get(node)
        if stream is not None:
            stream.end(Goodbye(code=code, reason=reason))
        return stream is not None

    def disconnect_all(self, code: str, reason: str, *, retry_after: float = 0.0) -> None:
        for stream in list(self._streams.values()):
            stream.end(Goodbye(code=code, reason=reason, retry_after=retry_after))

    def _stream(self, node: NodeId) -> AgentStream:
        stream = self._streams.get(node)
        if stream is None:
            raise AgentGone(
                f"no agent is connected for {node}",
                remedy="see that llmgw-node runs there and what it logs (`journalctl -u llmgw-node`)",
            )
        return stream
