"""What the admin API needs of the rest of the plane, and no more.

The plane's own objects (fleet, hub) satisfy these as they are; they are written down
here so that what the API may reach is seen in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import attrs
from immutables import Map

from llmgw.cell import Cell
from llmgw.plane.events import Events
from llmgw.plane.world import World
from llmgw.wire.control import Request
from llmgw.wire.facts import NodeId

R = TypeVar("R")


class Applied(Protocol):
    """What applying a models.toml changed, by model name."""

    @property
    def added(self) -> Sequence[str]: ...
    @property
    def changed(self) -> Sequence[str]: ...
    @property
    def removed(self) -> Sequence[str]: ...
    @property
    def unchanged(self) -> Sequence[str]: ...


class Steers(Protocol):
    """The fleet as operators steer it. What changes is stored before a call returns."""

    @property
    def world(self) -> Cell[World]: ...
    @property
    def events(self) -> Events: ...
    async def apply(self, text: str, *, dry_run: bool = False) -> Applied: ...
    async def cordon(self, node: NodeId, on: bool) -> None: ...
    async def drain(self, node: NodeId, on: bool) -> None: ...
    async def label(self, node: NodeId, labels: Mapping[str, str | None]) -> None: ...
    async def acknowledge(self, node: NodeId, subject: str, code: str, seconds: float) -> None: ...
    async def forget(self, node: NodeId) -> None: ...


class Asks(Protocol):
    """Where requests to nodes go in (A10). Cancelling `ask` withdraws the request on the node."""

    async def ask(self, node: NodeId, request: Request[R], *, within: float) -> R: ...

    def disconnect(self, node: NodeId, code: str, reason: str) -> bool: ...


@attrs.frozen
class Traffic:
    """What the gateway does now: requests in flight by replica, and totals by name for `status`."""

    in_flight: Mapping[str, int] = Map()
    totals: Mapping[str, float | int | str | None] = Map()
