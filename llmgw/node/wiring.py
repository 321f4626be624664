"""Reading an engine's log while it is written, for what its members talk over (see `engines.wires`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import trio

from llmgw.node.engines.wires import Wires, read, telling
from llmgw.node.health import Dead
from llmgw.node.lines import clean
from llmgw.wire.facts import ShardSpec

_PERIOD = 2.0
#: Eight workers name the network within seconds of each other, and again for each group that they form.
_SETTLED = 60.0
_MOST_READ = 16 << 20
_MOST_LINES = 4000
_CHUNK = 1 << 20


@attrs.define(eq=False)
class Wiring:
    """One run's log. `told` hears of every change of what it says."""

    spec: ShardSpec
    path: Path
    told: Callable[[Wires], None]
    wires: Wires = Wires()
    _lines: list[str] = attrs.field(factory=list)
    _at: int = 0

    async def follow(self) -> None:
        """Read on until what the log says has settled, or it will never say anything."""
        if len(self.spec.peers) < 2:
            return
        until = trio.current_time() + self.spec.ready_within + _SETTLED
        while trio.current_time() < until and self._at < _MOST_READ:
            before = self.wires
            await self.look()
            if self.wires != before:
                until = min(until, trio.current_time() + _SETTLED)
            await trio.sleep(_PERIOD)

    async def complete(self) -> Dead | None:
        """Read what is there now; why a serving leader must not be used: it left out one of its peers."""
        if len(self.spec.peers) < 2:
            return None
        await self.look()
        if not self.wires.missing:
            return None
        return Dead(
            "peer-missing",
            f"it serves without {', '.join(self.wires.missing)}, which it could not reach",
            "look whether the rpc-server runs there and whether a firewall is between",
        )

    async def look(self) -> None:
        """Read what was written since, and tell what changed by it."""
        lines, at = await trio.to_thread.run_sync(self._more)
        self._at = at
        self._lines = [*self._lines, *lines][-_MOST_LINES:]
        wires = read(self.spec, self._lines)
        if wires != self.wires:
            self.wires = wires
            self.told(wires)

    def _more(self) -> tuple[list[str], int]:
        """The new whole lines that tell something, and the place behind them."""
        lines: list[str] = []
        at = self._at
        try:
            with self.path.open("rb") as file:
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
