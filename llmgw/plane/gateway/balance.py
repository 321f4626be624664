"""Which replicas are out, and since which failure (F3). Pure: values in, values out."""

from __future__ import annotations

import attrs
from immutables import Map


@attrs.frozen
class Strike:
    """A replica's failures in a row. `out`: it takes no request until a probe has found it alive."""

    failures: int
    reason: str
    at: float
    out: bool = True


Strikes = Map[str, Strike]


def failed(strikes: Strikes, replica: str, reason: str, now: float) -> Strikes:
    """One failure is enough to be out. Failures before it lengthen the time between probes."""
    before = strikes.get(replica)
    return strikes.set(replica, Strike(failures=(before.failures if before else 0) + 1, reason=reason, at=now))


def alive(strikes: Strikes, replica: str) -> Strikes:
    """A probe was answered: requests may come again, but the failures are remembered until one succeeds."""
    before = strikes.get(replica)
    return strikes if before is None else strikes.set(replica, attrs.evolve(before, out=False))


def succeeded(strikes: Strikes, replica: str) -> Strikes:
    """A request went well: all is forgotten."""
    return strikes.delete(replica) if replica in strikes else strikes


def only(strikes: Strikes, replicas: frozenset[str]) -> Strikes:
    """Without the replicas that no route names any more."""
    for replica in strikes:
        if replica not in replicas:
            strikes = strikes.delete(replica)
    return strikes


def out(strikes: Strikes) -> dict[str, Strike]:
    """Those that are out."""
    return {replica: strike for replica, strike in strikes.items() if strike.out}
