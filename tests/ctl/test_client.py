"""What an operator reads when something else than a plane's admin port answered."""

from __future__ import annotations

import httpx

from llmgw.ctl.client import _refusal
from llmgw.errors import NotFound


def test_a_gateway_is_not_taken_for_a_plane() -> None:
    said = {"message": "Nothing is served under '/api/v1/status'.", "type": "invalid_request", "code": "not_found"}
    assert "is this the gateway, and not the admin port?" in str(_refusal(httpx.Response(404, json={"error": said})))


def test_a_planes_own_words_are_passed_on() -> None:
    said = {"code": "not-found", "message": "no node is called 'x'", "remedy": "list them"}
    error = _refusal(httpx.Response(404, json={"error": said}, headers={"Content-Security-Policy": "x"}))
    assert isinstance(error, NotFound)
    assert str(error) == "no node is called 'x': list them"
