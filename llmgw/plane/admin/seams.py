"""What the admin API is told by parts of the plane that it does not know."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from immutables import Map

from llmgw.plane.gateway.counts import Served


@attrs.frozen
class Traffic:
    """What the gateways do now: requests in flight by replica, and totals by name for `status`.

    `elsewhere` are the addresses, by model, of engines that the plane does not run; `served` what became of each
    model's requests since the gateways started.
    """

    in_flight: Mapping[str, int] = Map()
    totals: Mapping[str, float | int | str | None] = Map()
    elsewhere: Mapping[str, tuple[str, ...]] = Map()
    served: Mapping[str, Served] = Map()


NOTHING = Traffic()
