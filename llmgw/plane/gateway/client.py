"""One client's connection: its requests one after the other, each answered here or relayed."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import structlog
import trio

from llmgw.plane.gateway.ask import Ask, ask_of
from llmgw.plane.gateway.gateway import Gateway
from llmgw.plane.gateway.keys import Key
from llmgw.plane.gateway.link import Link, Why, Woken
from llmgw.plane.gateway.pages import models, no_plane, own_page, unknown_model
from llmgw.plane.gateway.refusal import Refusal, answer
from llmgw.plane.gateway.relay import Relay
from llmgw.plane.gateway.requests import Request, Requests
from llmgw.plane.gateway.respond import ClientGone
from llmgw.plane.gateway.route import ModelRoute

log = structlog.get_logger()

#: After a refusal that ends the connection, what the client still sends is read and dropped for so long (seconds).
#: Closing at once would reset the connection, and the client would see that instead of the reason.
LINGER = 30.0


class Client:
    """A connection from a client. One task runs it; the watch and the sweep end its waits."""

    def __init__(self, gateway: Gateway, link: Link, peer: str) -> None:
        self.gateway = gateway
        self.link = link
        self.peer = peer
        self.reader = Requests(gateway.settings.most_head_bytes, gateway.settings.most_body_bytes)
        self.limit = float("inf")  # when the wait that is on has taken too long (monotonic)
        self.waits_on = link  # this connection, or the one to an engine
        self.interrupt: Callable[[], None] | None = None  # ends a wait that is on no connection
        self.gone = False
        self._served = False
        self._body_bytes = 0

    # --- from outside

    def left(self) -> None:
        """The client hung up (F2)."""
        self.gone = True
        if self.interrupt is not None:
            self.interrupt()
        elif self.waits_on is not self.link:
            self.waits_on.wake(Why.GONE)

    def expire(self) -> None:
        """The wait that is on has taken too long."""
        self.limit = float("inf")
        self.waits_on.wake(Why.LATE)

    def stop_if_idle(self) -> None:
        idle = self.waits_on is self.link and self.interrupt is None and self.reader.current is None
        if idle and self._served:
            self.link.wake(Why.STOPPING)

    # --- its task

    async def run(self) -> None:
        try:
            while (request := await self._next()) is not None:
                if not await self._answer(request):
                    break
        except (OSError, Woken):
            pass  # the client is gone, or has had its time; there is nobody to tell
        except Exception:
            # The edge of a connection: one that breaks us takes no other with it.
            log.exception("a client's connection ended in a defect", client=self.peer)
        finally:
            self._forget_bodies()

    async def _next(self) -> Request | None:
        """The next request; None when there will be none."""
        reader, settings = self.reader, self.gateway.settings
        self.waits_on = self.link
        phase = ""
        while True:
            if reader.done:
                if phase == "":
                    await trio.lowlevel.checkpoint()  # it was pipelined: others must get their turn
                self.limit = float("inf")
                self._served = True
                return reader.done.popleft()
            if reader.trouble is not None:
                await self._refuse(reader.trouble, reader.current)
                return None
            current = reader.current
            was, phase = phase, "idle" if current is None else "body" if current.head_done else "head"
            if phase == "idle":
                if self.gateway.stopping and self._served:
                    return None
                self.limit = monotonic() + settings.idle_within
            elif phase != was:
                self.limit = monotonic() + (settings.body_within if phase == "body" else settings.head_within)
                if current is not None and current.head_done and current.continues:
                    current.continues = False
                    await self.link.write(b"HTTP/1.1 100 Continue\r\n\r\n", settings.send_within)
            try:
                data = await self.link.read()
            except Woken as woken:
                if woken.why is Why.LATE and current is not None:
                    await self._refuse(_too_slow(current), current)
                return None
            if not data:
                return None
            reader.feed(data)
            if phase == "body":
                self._body_bytes += len(data)
                self.gateway.body_bytes += len(data)
                if self.gateway.body_bytes > settings.most_bodies_bytes:
                    reader.trouble = reader.trouble or _too_many_bodies()

    def _forget_bodies(self) -> None:
        self.gateway.body_bytes -= self._body_bytes
        self._body_bytes = 0

    async def _answer(self, request: Request) -> bool:
        """Answer one request. False: the connection ends with it."""
        gateway = self.gateway
        started = monotonic()
        if not request.id:
            request.id = gateway.new_id()
        relay: Relay | None = None
        status, model = 500, ""
        keep = not request.close
        try:
            path = request.target.partition(b"?")[0]
            if path.startswith(b"/v1/"):
                key = gateway.keyring.admit(request.authorization) if gateway.keyring.on else None
                if path == b"/v1/models" or path.startswith(b"/v1/models/"):
                    status = await self._say(request, 200, models(self.gateway, request, key))
                else:
                    ask, model, route = self._route(request, path, key)
                    relay = Relay(gateway, self, request, ask, model, route, key, started)
                    gateway.demand.begin(model, started)
                    status = await relay.run()
                    keep = keep and relay.whole
            else:
                status = await self._say(request, *await own_page(self.gateway, request, path))
        except Refusal as refusal:
            status = refusal.status
            keep = keep and not refusal.close
            self._log(request, model, status, started, refusal.message)
            await self._say_no(request, refusal)
        except ClientGone:
            status, keep = 499, False
            self._log(request, model, status, started, "the client went away")
        except OSError as broken:
            status, keep = 499, False
            self._log(request, model, status, started, f"the client went away: {broken.strerror or broken}")
        except trio.Cancelled:
            status = 499
            raise
        except Exception:
            status, keep = 500, False
            log.exception("a request ended in a defect", request=request.id.decode(), path=request.path)
            if relay is None or not relay.begun:
                await self._say_no(
                    request, Refusal(500, "The gateway failed; its log says why.", code="internal_error", close=True)
                )
        else:
            if gateway.settings.access_log:
                self._log(request, model, status, started, "")
        finally:
            if relay is not None:
                gateway.demand.end(model)
            gateway.metrics.finished(model, status, monotonic() - started)
            if self._body_bytes:
                self._forget_bodies()
        return keep and not gateway.stopping

    def _route(self, request: Request, path: bytes, key: Key | None) -> tuple[Ask, str, ModelRoute]:
        if b".." in path or b"%2e" in path.lower():
            raise Refusal(400, "The path has '..' in it.", code="bad_request")
        ask = ask_of(request)
        routes = self.gateway.routes.value.models
        name = ask.model
        if name is None:
            names = [name for name in routes if key is None or key.allows(name)]
            if not names and self.gateway.routes.value.blind:
                raise no_plane("Which models there are is not known yet")
            if len(names) != 1:
                known = f"This gateway serves: {', '.join(sorted(names)[:50])}." if names else "None is served here."
                raise Refusal(400, f"The request names no 'model'. {known}", code="missing_model", param="model")
            name = names[0]
        if key is not None and not key.allows(name):
            raise Refusal(
                403, f"This API key may not use the model {name[:200]!r}.", code="model_not_allowed", param="model"
            )
        route = routes.get(name)
        if route is None:
            raise unknown_model(name, self.gateway.routes.value)
        return ask, name, route

    # --- answers

    async def _say(self, request: Request, status: int, body: bytes, content_type: bytes = b"application/json") -> int:
        close = request.close or self.gateway.stopping
        await self.link.write(
            answer(
                status,
                body,
                content_type=content_type,
                request_id=request.id,
                close=close,
                keep_alive=request.old and not close,
                head_only=request.method == b"HEAD",
            ),
            self.gateway.settings.send_within,
        )
        return status

    async def _say_no(self, request: Request, refusal: Refusal) -> None:
        headers: list[tuple[bytes, bytes]] = []
        if refusal.retry_after is not None:
            headers.append((b"retry-after", b"%d" % max(1, round(refusal.retry_after))))
        if refusal.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if refusal.allow:
            headers.append((b"allow", refusal.allow.encode()))
        close = refusal.close or request.close or self.gateway.stopping
        await self.link.write(
            answer(
                refusal.status,
                refusal.body(),
                headers=tuple(headers),
                request_id=request.id,
                close=close,
                keep_alive=request.old and not close,
                head_only=request.method == b"HEAD",
            ),
            self.gateway.settings.send_within,
        )

    async def _refuse(self, refusal: Refusal, request: Request | None) -> None:
        """Say why a request is not even read, and end the connection so that the client can hear it."""
        request = request or Request()
        request.id = request.id or self.gateway.new_id()
        request.pieces.clear()
        self._forget_bodies()
        self._log(request, "", refusal.status, monotonic(), refusal.message)
        self.gateway.metrics.finished("", refusal.status, 0.0)
        await self._say_no(request, refusal)
        self.link.no_more()
        self.limit = monotonic() + LINGER
        while await self.link.read():
            pass

    def _log(self, request: Request, model: str, status: int, started: float, why: str) -> None:
        if not self.gateway.settings.access_log and status < 500 and status != 499:
            return
        log.info(
            "request" if status < 500 else "request failed",
            request=request.id.decode(),
            client=self.peer,
            method=request.method.decode(),
            path=request.path,
            model=model,
            status=status,
            seconds=round(monotonic() - started, 3),
            why=why,
        )


def _too_slow(request: Request) -> Refusal:
    part = "body" if request.head_done else "head"
    return Refusal(408, f"The request's {part} did not come in time.", code="request_timeout", close=True)


def _too_many_bodies() -> Refusal:
    return Refusal(
        503,
        "The gateway is holding as many request bodies as it may; try again in a moment.",
        code="overloaded",
        retry_after=2,
        close=True,
    )
