from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.gateway.ask import Ask, ask_of, with_model, with_usage
from llmgw.plane.gateway.refusal import Refusal
from llmgw.plane.gateway.requests import Request


def request(body: bytes, kind: bytes = b"application/json", target: bytes = b"/v1/x") -> Request:
    made = Request()
    made.pieces, made.size, made.content_type, made.target = [body], len(body), kind, target
    return made


def test_what_routing_needs_is_read_and_nothing_else() -> None:
    body = b'{"model":"a","stream":true,"stream_options":{"include_usage":true},"messages":"anything"}'
    assert ask_of(request(body)) == Ask("a", stream=True, wants_usage=True, json=True)


@pytest.mark.parametrize("kind", [b"", b"application/json; charset=utf-8", b"application/x-www-form-urlencoded"])
def test_json_is_read_under_the_types_that_people_send_it_with(kind: bytes) -> None:
    assert ask_of(request(b'{"model":"a"}', kind)).model == "a"


def test_a_body_of_another_type_is_not_looked_into() -> None:
    assert ask_of(request(b'{"model":', b"application/octet-stream", b"/v1/x?model=org%2Fbig")).model == "org/big"


@given(st.binary(max_size=200))
def test_any_body_is_an_ask_or_a_refusal(body: bytes) -> None:
    for kind in (b"application/json", b"multipart/form-data; boundary=b", b"multipart/form-data"):
        with contextlib.suppress(Refusal):
            ask_of(request(body, kind))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(max_size=9), JSON, max_size=5))
def test_changing_a_field_leaves_the_others_as_they_are(fields: dict[str, object]) -> None:
    body = json.dumps({**fields, "model": "a"}).encode()
    changed = json.loads(with_model(request(body), Ask("a", json=True), "b"))
    assert changed == {**fields, "model": "b"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False, "x": 1}, 7])
def test_usage_is_asked_for_beside_other_options(options: object) -> None:
    changed = json.loads(with_usage(json.dumps({"model": "a", "stream_options": options}).encode()))
    kept = {"x": 1} if isinstance(options, dict) and options else {}
    assert changed == {"model": "a", "stream_options": {**kept, "include_usage": True}}


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav\r\n\r\n'
    b"\r\n--b-not\x00\r\n"
    b'\r\n--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n'
)


@pytest.mark.parametrize("model", [b"whisper", b""])
def test_the_model_of_a_form_is_found_and_can_be_changed(model: bytes) -> None:
    form = request(FORM % model, b'multipart/form-data; boundary="b"')
    ask = ask_of(form)
    assert ask.model == (model.decode() or None)
    assert with_model(form, ask, "new") == FORM % b"new"
