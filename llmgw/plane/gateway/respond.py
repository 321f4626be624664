"""An engine's answer on its way to the client: passed on as it comes, never replayed, and never silently short."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import structlog

from llmgw.plane.gateway.heads import response_head
from llmgw.plane.gateway.link import Why, Woken
from llmgw.plane.gateway.refusal import error_event
from llmgw.plane.gateway.responses import BrokenResponse, Responses
from llmgw.plane.gateway.route import Endpoint
from llmgw.plane.gateway.upstream import Upstream
from llmgw.plane.gateway.usage import BodyMeter, StreamMeter

if TYPE_CHECKING:
    from llmgw.plane.gateway.client import Client
    from llmgw.plane.gateway.relay import Relay

log = structlog.get_logger()


class ClientGone(Exception):
    """The client went away before its answer was whole."""


async def send(client: Client, data: bytes) -> None:
    """Send to the client. Raises ClientGone when it is gone or takes nothing for too long."""
    try:
        if (sent := client.link.write_now(data)) != len(data):
            client.limit = float("inf")  # a slow client is not the engine's lateness
            await client.link.write(data[sent:], client.gateway.settings.send_within)
    except (OSError, Woken):
        raise ClientGone from None


async def pass_on(relay: Relay, upstream: Upstream, endpoint: Endpoint, *, sent_all: bool) -> None:
    """Pass the answer on, from a head that has come to the end. Raises ClientGone.

    `sent_all`: the engine has taken the whole request; else its connection is not used again.
    """
    gateway, client = relay.gateway, relay.client
    link, responses = upstream.link, upstream.responses
    idle = gateway.settings.stream_idle_within
    head = response_head(responses, relay.request, close=relay.request.close or gateway.stopping)
    gateway.metrics.answered(relay.model, monotonic() - relay.started)
    meter = _meter(relay, responses) if gateway.settings.meter else None
    chunked, pieces = head.chunked, responses.pieces
    out, tail, cut = head.data, b"", ""
    relay.begun, relay.status = True, responses.status
    while True:
        if pieces:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            if meter is not None:
                body = meter.feed(body)
            if body:
                tail = body[-4:] if len(body) > 3 else (tail + body)[-4:]
                out += b"%x\r\n%b\r\n" % (len(body), body) if chunked else body
        if responses.complete:
            break
        if out:
            await send(client, out)
            out = b""
        client.limit = monotonic() + idle
        try:
            data = await link.read()
            if data:
                responses.feed(data)
                continue
            if responses.end():
                continue
            cut = "the engine closed the connection"
        except OSError as broken:
            cut = f"the connection to the engine broke: {broken.strerror or broken}"
        except BrokenResponse as broken_response:
            cut = str(broken_response)
        except Woken as woken:
            if woken.why is Why.GONE:
                raise ClientGone from None
            cut = f"the engine sent nothing for {idle:g} s"
        break
    client.limit = float("inf")
    if meter is not None and meter.usage is not None:
        usage = meter.usage
        gateway.metrics.used(relay.model, relay.key.name if relay.key else "", usage.prompt, usage.completion)
    if cut:
        gateway.failed(endpoint, "cut", cut)
        log.warning(
            "answer cut", request=relay.request.id.decode(), model=relay.model, replica=endpoint.replica, why=cut
        )
        relay.status = 502
        if responses.event_stream and chunked and not responses.encoded:
            out += _last_words(cut, tail)
        if out:
            await send(client, out)
        return
    if meter is not None and (rest := meter.rest()):
        out += b"%x\r\n%b\r\n" % (len(rest), rest) if chunked else rest
    if chunked:
        out += b"0\r\n\r\n"
    if out:
        await send(client, out)
    if not sent_all:
        responses.reusable = False
    relay.whole = head.reusable
    gateway.succeeded(endpoint)


def _last_words(why: str, tail: bytes) -> bytes:
    """The error event that ends a stream of events which was cut, as a chunk; the last chunk never follows it.

    It is the event that OpenAI's clients raise their error from. After half an event it would only make garbage, so
    there the missing end of the body is all that tells. A cut stream never gets a [DONE].
    """
    if tail and not tail.endswith((b"\n\n", b"\r\r", b"\r\n\r\n")):
        return b""
    event = error_event(f"The answer was cut: {why}.", code="upstream_failed")
    return b"%x\r\n%b\r\n" % (len(event), event)


def _meter(relay: Relay, responses: Responses) -> StreamMeter | BodyMeter | None:
    if responses.status != 200 or responses.encoded:
        return None
    if responses.event_stream:
        return StreamMeter(strip=relay.counting)
    return BodyMeter() if relay.ask.json else None
