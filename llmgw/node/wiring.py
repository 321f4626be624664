"""Looking after a start at what the members of a replica talk over (see `engines.wires`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import trio

from llmgw.node import processes
from llmgw.node.engines.wires import Wires, read, rpc, rpc_peers, telling
from llmgw.node.health import Dead
from llmgw.node.lines import clean
from llmgw.node.records import Record

_PERIOD = 2.0
#: Eight workers name the network within seconds of each other, and again for each group that they form.
_SETTLED = 60.0
_MOST_READ = 16 << 20
_MOST_LINES = 4000
_CHUNK = 1 << 20


@attrs.define(eq=False)
class Wiring:
    """One run. `told` hears of every change of what is seen of it."""

    record: Record
    told: Callable[[Wires], None]
    wires: Wires = Wires()
    _lines: list[str] = attrs.field(factory=list)
    _at: int = 0

    async def follow(self, *, serving: bool) -> None:
        """Look until what is seen has settled, or it will never say anything. `serving`: it did before."""
        spec = self.record.spec
        if len(spec.peers) < 2 or spec.engine == "llamacpp":
            if serving:
                await self.look()
            return
        until = trio.current_time() + spec.ready_within + _SETTLED
        while trio.current_time() < until and self._at < _MOST_READ:
            before = self.wires
            await self.look()
            if self.wires != before:
                until = min(until, trio.current_time() + _SETTLED)
            await trio.sleep(_PERIOD)

    async def complete(self) -> Dead | None:
        """Look at what is there now; why a serving leader must not be used: it left out one of its peers."""
        await self.look()
        if not self.wires.missing:
            return None
        return Dead(
            "peer-missing",
            f"it serves without {', '.join(self.wires.missing)}, which it could not reach",
            "look whether the rpc-server runs there and whether a firewall is between",
        )

    async def look(self) -> None:
        """Look at the connections, or at what was written since, and tell what changed by it."""
        spec = self.record.spec
        if len(spec.peers) < 2:
            return
        if rpc_peers(spec):
            there = await trio.to_thread.run_sync(processes.connected, self.record.pid)
            wires = rpc(spec, there) if there is not None else Wires()  # not allowed to look
        else:
            lines, self._at = await trio.to_thread.run_sync(self._more)
            self._lines = [*self._lines, *lines][-_MOST_LINES:]
            wires = read(spec, self._lines)
        if wires != self.wires:
            self.wires = wires
            self.told(wires)

    def _more(self) -> tuple[list[str], int]:
        """The new whole lines that tell something, and the place behind them."""
        lines: list[str] = []
        at = self._at
        try:
            with Path(self.record.log).open("rb") as file:
                file.seek(at)
                while at < _MOST_READ and (data := file.read(_CHUNK)):
                    whole = data.rfind(b"\n") + 1
                    if not whole:
                        if len(data) < _CHUNK:
                            break
                        whole = len(data)  # no line is that long
                    lines += filter(telling, clean(data[:whole]))
                    at += whole
                    file.seek(at)
        except OSError:
            pass  # a log that is not there says nothing
        return lines, at
