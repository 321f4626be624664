"""One request's way to an engine and its answer's way back (F2, F3, F4)."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import attrs
import trio

from llmgw.plane.gateway.ask import Ask, with_model, with_usage
from llmgw.plane.gateway.gateway import Gateway
from llmgw.plane.gateway.heads import request_head, response_head
from llmgw.plane.gateway.keys import Key
from llmgw.plane.gateway.link import Why, Woken
from llmgw.plane.gateway.refusal import Refusal
from llmgw.plane.gateway.requests import Request
from llmgw.plane.gateway.respond import ClientGone, pass_on, send
from llmgw.plane.gateway.responses import BrokenResponse
from llmgw.plane.gateway.route import Endpoint, ModelRoute, ModelState
from llmgw.plane.gateway.upstream import Unreachable, Upstream, place_of

if TYPE_CHECKING:
    from llmgw.plane.gateway.client import Client

#: Up to this size head and body of a request leave in one write.
_ONE_WRITE = 128 << 10
#: The largest 503 answer that is kept while another replica is tried.
_MOST_KEPT = 256 << 10


class Stale(Exception):
    """A kept connection turned out closed before any byte of an answer: no failure of the engine."""


@attrs.frozen
class Failure:
    """A try that came to nothing before the client got a byte. `kept`: the engine's own answer, a 503."""

    kind: str  # "connect", "closed", "broken", "timeout", "unavailable"
    reason: str
    kept: bytes = b""


class Relay:
    """One request being relayed.

    `begun`: the client has got a byte. `whole`: it got all of them, and its connection is good for another request.
    """

    def __init__(
        self,
        gateway: Gateway,
        client: Client,
        request: Request,
        ask: Ask,
        model: str,
        route: ModelRoute,
        key: Key | None,
        started: float,
    ) -> None:
        self.gateway = gateway
        self.client = client
        self.request = request
        self.ask = ask
        self.model = model
        self.route = route
        self.key = key
        self.started = started
        self.begun = False
        self.whole = False
        self.status = 502
        #: The client did not ask for the counts of its stream, so we do. Only completions know that question.
        self.counting = (
            gateway.settings.meter
            and ask.stream
            and not ask.wants_usage
            and request.path.rstrip("/").endswith("/completions")
        )

    async def run(self) -> int:
        """Relay it; the status that it ended with. Raises Refusal (nothing was sent) or ClientGone."""
        gateway, settings = self.gateway, self.gateway.settings
        tries, failure = 0, None
        retry_until = self.started + settings.retry_within
        while True:
            endpoint = gateway.pick(self.route.endpoints)
            if endpoint is None:
                endpoint = await self._hold(failure, retry_until)
            if endpoint is None:
                return await self._give_up(failure, tries)
            tries += 1
            gateway.in_flight.begin(endpoint.replica)
            try:
                failure = await self._try(endpoint)
            finally:
                gateway.in_flight.end(endpoint.replica)
            if failure is None:
                return self.status
            gateway.failed(endpoint, failure.kind, failure.reason)
            if tries >= settings.tries or monotonic() >= retry_until:
                return await self._give_up(failure, tries)
            gateway.metrics.retried(self.model)
            self.route = gateway.routes.value.models.get(self.model, self.route)

    async def _give_up(self, failure: Failure | None, tries: int) -> int:
        if failure is None:
            raise self._unready(self._why(), 30.0 if self.route.state is ModelState.UNPLACED else 5.0)
        if failure.kept:
            await send(self.client, failure.kept)
            self.whole = True
            return 503
        times = f"; {tries} tries failed" if tries > 1 else ""
        if failure.kind == "timeout":
            raise Refusal(504, f"The engine of {self.model!r} {failure.reason}{times}.", code="upstream_timeout")
        raise Refusal(502, f"The engine of {self.model!r} {failure.reason}{times}.", code="upstream_failed")

    # --- no replica ready (F4)

    async def _hold(self, failure: Failure | None, retry_until: float) -> Endpoint | None:
        """Wait for an endpoint; None when there is no sense in waiting or it took too long.

        Raises Refusal when too many wait already.
        """
        gateway, settings, client = self.gateway, self.gateway.settings, self.client
        held = gateway.metrics.held
        until = min(self.started + settings.hold_within, retry_until if failure else float("inf"))
        if self.route.state is not ModelState.UNPLACED and held.get(self.model, 0) >= settings.most_held:
            raise self._unready(f"{settings.most_held} requests wait for it already; {self._why()}", 5.0)
        held[self.model] = held.get(self.model, 0) + 1
        try:
            with trio.CancelScope(deadline=trio.current_time() + until - monotonic()) as scope:
                client.interrupt = scope.cancel
                while not client.gone:
                    version = gateway.bell.version
                    route = gateway.routes.value.models.get(self.model)
                    if route is not None:
                        self.route = route
                        endpoint = gateway.pick(route.endpoints)
                        if endpoint is not None:
                            return endpoint
                    if route is None or route.state is ModelState.UNPLACED or gateway.stopping:
                        break
                    await gateway.bell.next(version)
        finally:
            client.interrupt = None
            held[self.model] -= 1
            if not held[self.model]:
                del held[self.model]
        if client.gone:
            raise ClientGone
        return None

    def _why(self) -> str:
        if self.route.endpoints:
            return "all of its replicas fail at the moment"
        return self.route.reason or "no replica is ready"

    def _unready(self, why: str, retry_after: float) -> Refusal:
        return Refusal(
            503, f"The model {self.model!r} is not ready: {why}.", code="model_not_ready", retry_after=retry_after
        )

    # --- one try

    async def _try(self, endpoint: Endpoint) -> Failure | None:
        """Ask one replica. None: the client has its answer, whole or cut."""
        client, pool = self.client, self.gateway.pool
        place = place_of(endpoint)
        upstream = pool.take(place)
        while True:
            if upstream is None:
                scope = trio.CancelScope(deadline=trio.current_time() + self.gateway.settings.connect_within)
                client.interrupt = scope.cancel
                try:
                    with scope:
                        upstream = await pool.connect(place)
                except Unreachable as why:
                    return Failure("connect", f"cannot be reached ({why})")
                finally:
                    client.interrupt = None
                if scope.cancelled_caught or upstream is None:
                    if client.gone:
                        raise ClientGone
                    return Failure("connect", "cannot be reached (no answer to the connection in time)")
            client.waits_on = upstream.link
            if client.gone:  # it left between two of our steps
                upstream.link.close()
                raise ClientGone
            good = False
            try:
                failure = await self._exchange(upstream, endpoint)
                good = failure is None and upstream.responses.complete and upstream.responses.reusable
                return failure
            except Stale:
                pass
            except Woken as woken:
                if woken.why is Why.GONE:
                    raise ClientGone from None
                return Failure("timeout", f"sent nothing for {self.gateway.settings.first_byte_within:g} s")
            finally:
                client.waits_on = client.link
                client.limit = float("inf")
                if good and upstream.link.woken is None:
                    pool.give(upstream)
                else:
                    upstream.link.close()
            upstream = None

    async def _exchange(self, upstream: Upstream, endpoint: Endpoint) -> Failure | None:
        """Send the request and read until there is something for the client."""
        settings, request = self.gateway.settings, self.request
        link, responses = upstream.link, upstream.responses
        responses.expect(request.method == b"HEAD")
        # Time runs from here, for an engine that does not even take the request is late as well.
        self.client.limit = monotonic() + settings.first_byte_within
        body = self._body(endpoint)
        head = request_head(request, endpoint, len(body), keys=self.key is not None, metered=settings.meter)
        refused = ""
        try:
            if len(body) <= _ONE_WRITE:
                head += body
                if (sent := link.write_now(head)) != len(head):
                    await link.write(head[sent:], settings.first_byte_within)
            else:
                await link.write(head, settings.first_byte_within)
                await link.write(body, settings.first_byte_within)
        except OSError as broken:
            # It may have answered before it had read all of the body, as for one that it finds too large.
            refused = broken.strerror or str(broken)
        while not self._presentable(upstream):
            try:
                data = await link.read()
            except OSError as broken:
                data, refused = b"", broken.strerror or str(broken)
            if not data:
                if responses.end():
                    break
                if upstream.used and not responses.begun:
                    raise Stale
                return Failure("closed", f"closed the connection before it answered ({refused or 'end of stream'})")
            try:
                responses.feed(data)
            except BrokenResponse as broken_response:
                return Failure("broken", f"cannot be understood: {broken_response}")
        if responses.status == 503:
            return await self._unavailable(upstream)
        await pass_on(self, upstream, endpoint, sent_all=not refused)
        return None

    def _presentable(self, upstream: Upstream) -> bool:
        """Whether there is enough of a response to begin the client's.

        Of an answer with a length the head waits for the first of the body: that is one write in place of two,
        and a failure in between can still be retried. A stream's head never waits.
        """
        responses = upstream.responses
        if not responses.head_done:
            return False
        return responses.length is None or responses.complete or bool(responses.pieces) or responses.event_stream

    async def _unavailable(self, upstream: Upstream) -> Failure | None:
        """The engine said 503, as one does that is loading or dying: kept, and another replica is asked."""
        responses = upstream.responses
        size = 0
        while not responses.complete:
            size = sum(map(len, responses.pieces))
            if size > _MOST_KEPT:
                break
            try:
                data = await upstream.link.read()
                if not data:
                    responses.end()
                    break
                responses.feed(data)
            except (OSError, BrokenResponse):
                break
        if not responses.complete:
            return Failure("unavailable", "answered 503 and broke off")
        body = b"".join(responses.pieces)
        responses.length = len(body)
        head = response_head(responses, self.request, close=self.request.close or self.gateway.stopping)
        if self.request.method == b"HEAD":
            body = b""
        return Failure("unavailable", "answered 503", kept=head.data + body)

    def _body(self, endpoint: Endpoint) -> bytes:
        body = self.request.body
        if endpoint.upstream_model and endpoint.upstream_model != self.ask.model:
            body = with_model(self.request, self.ask, endpoint.upstream_model)
        if self.counting:
            body = with_usage(body)
        return body
