"""An agent's installing part, with wheels in a folder for an index."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from llmgw.backoff import Backoff
from llmgw.log import Ring
from llmgw.node.engines.installed import Installed
from llmgw.node.engines.llamacpp import LlamaCpp
from llmgw.node.engines.vllm import Vllm
from llmgw.node.installs.installer import Means
from llmgw.node.installs.keeper import Keeper
from llmgw.node.installs.packages import Where
from llmgw.node.installs.running import Running
from llmgw.node.installs.shelf import Shelf
from llmgw.node.logs import Logs
from llmgw.wire.control import Provision
from llmgw.wire.facts import EngineInstall, EnginePackage, InstallState

#: Nothing of this machine's: what is found is what was installed.
ELSEWHERE = {"llamacpp": ("/nowhere/llama-server",)}
SMALL = 1 << 20


@attrs.define
class Site:
    """A node's directory, its wheels, and what keeps its engines."""

    root: Path
    where: Where
    more: dict[str, Any] = attrs.field(factory=dict)  # of `Means`
    commands: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    shards: list[Running] = attrs.field(factory=list)
    gpus: bool = True
    keep: float = 86400.0
    backoff: Backoff = Backoff(base=3600.0, cap=3600.0)  # what failed stays as it is
    packages: dict[str, EnginePackage] = attrs.field(factory=dict)

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def shelf(self) -> Shelf:
        return Shelf(self.root / "engines")

    def agent(self) -> Agent:
        shelf = self.shelf
        installed = Installed([LlamaCpp(), Vllm()], commands=self.commands, state=self.root, shelf=shelf)
        logs = Logs(self.root / "logs", Ring())
        more: dict[str, Any] = {"reserve": 0, "try_within": 120.0} | self.more
        means = Means(
            state=self.root,
            shelf=shelf,
            trial=installed.trial,
            where=self.where,
            **more,
        )
        small = {name: EnginePackage(disk_bytes=SMALL) for name in ("llamacpp", "vllm")} | self.packages
        keeper = Keeper(
            installed,
            means,
            logs,
            gpus=lambda: self.gpus,
            packages=small,
            running=lambda: tuple(self.shards),
            keep=self.keep,
            backoff=self.backoff,
        )
        return Agent(installed, keeper, logs, means)


@attrs.define
class Agent:
    installed: Installed
    keeper: Keeper
    logs: Logs
    means: Means

    def want(self, *engines: tuple[str, str], **more: Any) -> None:
        wanted = tuple(EngineInstall(engine=engine, version=version) for engine, version in engines)
        self.keeper.order(Provision(engines=wanted, **more))

    async def until(self, holds: Callable[[EngineInstall], bool], within: float = 120.0) -> EngineInstall:
        """The first of `installs` that this holds of, as soon as it does."""
        last: Iterable[EngineInstall] = ()
        with trio.move_on_after(within):
            async for _ in self.installed.changed.values():
                last = self.keeper.installs
                for install in last:
                    if holds(install):
                        return install
        raise AssertionError(f"not within {within:g} s: {last}")

    async def installed_as(self, engine: str, version: str, within: float = 120.0) -> EngineInstall:
        def holds(install: EngineInstall) -> bool:
            if install.state is InstallState.FAILED:
                raise AssertionError(install.detail)
            return (install.engine, install.version, install.state) == (engine, version, InstallState.INSTALLED)

        return await self.until(holds, within)

    async def gone(self, engine: str, version: str, within: float = 120.0) -> None:
        """Wait until this version is not mentioned."""
        with trio.fail_after(within):
            async for _ in self.installed.changed.values():
                if (engine, version) not in [(one.engine, one.version) for one in self.installed.installs]:
                    return

    async def failed(self, engine: str, within: float = 120.0) -> str:
        found = await self.until(
            lambda install: (install.engine, install.state) == (engine, InstallState.FAILED), within
        )
        return found.detail


@asynccontextmanager
async def running(site: Site) -> AsyncIterator[Agent]:
    """An agent's installing part for the block."""
    agent = site.agent()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.keeper.run)
        yield agent
        nursery.cancel_scope.cancel()


def left(site: Site) -> list[str]:
    """What stands in the folder of engines, unseen names left out."""
    return sorted(path.name for path in site.shelf.root.iterdir() if not path.name.startswith("."))
