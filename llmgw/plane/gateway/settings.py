"""How a gateway behaves: limits, time-outs, keys. Every default here is the documented one."""

from __future__ import annotations

import attrs

from llmgw.plane.gateway.keys import Key


@attrs.frozen
class GatewaySettings:
    """All times are seconds, all sizes bytes."""

    # --- who may ask
    #: API keys; with none, everybody who reaches the port may ask.
    keys: tuple[Key, ...] = ()

    # --- what a client may send, and how slowly
    most_head_bytes: int = 64 << 10  # past it: 431
    most_body_bytes: int = 64 << 20  # past it: 413
    most_bodies_bytes: int = 1 << 30  # all request bodies in memory together; past it: 503
    most_connections: int = 20_000  # more are answered 503 and closed
    head_within: float = 30.0  # from a request's first byte to the end of its head; past it: 408
    body_within: float = 300.0  # from the end of the head to the end of the body; past it: 408
    idle_within: float = 75.0  # between two requests on one connection; past it: closed
    send_within: float = 120.0  # a client that takes nothing for so long is given up

    # --- engines
    connect_within: float = 5.0
    first_byte_within: float = 600.0  # a long prompt on a busy engine is slow, not dead; past it: 504
    stream_idle_within: float = 300.0  # between two pieces of a response; past it the stream is cut
    pool_idle_within: float = 30.0  # an unused connection to an engine is kept so long

    # --- failure (F3)
    tries: int = 3  # engines asked for one request, the first included
    retry_within: float = 30.0  # no new try later than this after the request was read
    probe_first: float = 0.25  # an excluded replica is probed after so long, then ever less often
    probe_most: float = 5.0

    # --- nothing ready (F4)
    hold_within: float = 60.0  # a request waits so long for a model that is starting; past it: 503
    most_held: int = 256  # requests that may wait, per model; more are answered 503 at once

    # --- accounting
    #: Count prompt and completion tokens by model and key. Streams are then looked into, which costs time.
    meter: bool = False
    metrics: bool = True  # serve /metrics
    access_log: bool = False  # one line per request; failures are always logged

    # --- stopping
    stop_within: float = 30.0  # streams may finish for so long after a stop was asked for

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = 1 if field.name in ("tries", "most_connections", "most_head_bytes") else 0
                if not value >= least:
                    raise ValueError(f"{field.name} must be at least {least}, not {value}")
        if not 0 < self.probe_first <= self.probe_most:
            raise ValueError("probe_first must be above 0 and not above probe_most")
