"""What a gateway answers itself: the models there are, whether it lives, whether it is ready, its counts."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from llmgw.plane.gateway.gateway import Gateway
from llmgw.plane.gateway.keys import Key
from llmgw.plane.gateway.metrics import page
from llmgw.plane.gateway.refusal import Refusal
from llmgw.plane.gateway.requests import Request
from llmgw.plane.gateway.route import ModelRoute, Routes

_encode = msgspec.json.Encoder().encode
_JSON = b"application/json"
_PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"


def models(gateway: Gateway, request: Request, key: Key | None) -> bytes:
    """`/v1/models`: those that the key allows, or the one that the path names. Raises Refusal (404, 405).

    OpenAI's shape, with two fields more: `state`, and the `reason` when it is not ready.
    """
    if request.method not in (b"GET", b"HEAD"):
        raise Refusal(405, "Models are listed with GET.", code="method_not_allowed", allow="GET, HEAD")
    cards = {
        name: _card(name, route)
        for name, route in gateway.routes.value.models.items()
        if key is None or key.allows(name)
    }
    name = unquote(request.path[len("/v1/models/") :])
    if not cards and gateway.routes.value.blind:
        raise no_plane("Which models there are is not known yet")
    if not name:
        return _encode({"object": "list", "data": list(cards.values())})
    if name not in cards:
        raise unknown_model(name, gateway.routes.value)
    return _encode(cards[name])


def _card(name: str, route: ModelRoute) -> dict[str, object]:
    card: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "llmgw", "state": route.state}
    if route.reason:
        card["reason"] = route.reason
    return card


def unknown_model(name: str, routes: Routes) -> Refusal:
    if routes.blind:
        return no_plane(f"The model {name[:200]!r} is not known here yet")
    return Refusal(
        404,
        f"The model {name[:200]!r} does not exist here; GET /v1/models lists those that do.",
        code="model_not_found",
        param="model",
    )


def no_plane(what: str) -> Refusal:
    # Not 404: a client would believe it, and drop a model that its plane serves.
    return Refusal(503, f"{what}: this gateway has not heard of its plane.", code="no_plane", retry_after=5.0)


async def own_page(gateway: Gateway, request: Request, path: bytes) -> tuple[int, bytes, bytes]:
    """Status, body and type of a page outside /v1. They need no API key. Raises Refusal (404, 405)."""
    if path not in (b"/health", b"/ready", b"/metrics") or (path == b"/metrics" and not gateway.settings.metrics):
        raise Refusal(404, f"Nothing is served under {request.path[:200]!r}.", code="not_found")
    if request.method not in (b"GET", b"HEAD"):
        raise Refusal(405, "This page is read with GET.", code="method_not_allowed", allow="GET, HEAD")
    if path == b"/health":
        return 200, b'{"status":"ok"}', _JSON
    if path == b"/ready":
        ready = any(route.endpoints for route in gateway.routes.value.models.values())
        if gateway.stopping or not ready:
            blind = gateway.routes.value.blind
            why = "stopping" if gateway.stopping else "no plane was heard of" if blind else "no model is ready"
            return 503, _encode({"status": "unavailable", "reason": why}), _JSON
        return 200, b'{"status":"ready"}', _JSON
    others = await gateway.siblings() if gateway.siblings is not None else ()
    return 200, page((gateway.counts(), *others)), _PROMETHEUS
