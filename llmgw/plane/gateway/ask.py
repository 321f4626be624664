"""What a request asks for: which model, streamed or not. Pure; looks into the body no further than it must."""

from __future__ import annotations

from email.message import Message
from urllib.parse import parse_qs

import msgspec

from llmgw.plane.gateway.refusal import Refusal
from llmgw.plane.gateway.requests import Request


class Ask(msgspec.Struct, frozen=True):
    """The routing facts of one request. `model` is None where the request names none."""

    model: str | None = None
    stream: bool = False
    #: The client asked for token counts at the end of its stream.
    wants_usage: bool = False
    json: bool = False


class _Body(msgspec.Struct):
    model: str | None = None
    stream: object = None
    stream_options: object = None


_body = msgspec.json.Decoder(_Body)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def ask_of(request: Request) -> Ask:
    """Read the request. Raises Refusal (400, 415) when it cannot be meant."""
    if not request.size:
        return Ask(model=_query_model(request))
    kind = request.content_type.partition(b";")[0].strip().lower()
    if request.content_encoding not in (b"", b"identity"):
        raise Refusal(
            415,
            f"A request body with Content-Encoding {request.content_encoding.decode('latin-1')!r} is not understood.",
            code="content_encoding",
        )
    if kind == b"multipart/form-data":
        part = _model_part(request)
        model = request.body[part[0] : part[1]].decode("utf-8", "replace").strip() if part else None
        return Ask(model=model or _query_model(request))
    # curl says "form" where people forgot to say JSON; engines take it, and so do we.
    if kind in (b"", b"application/json", b"application/x-www-form-urlencoded") or kind.endswith(b"+json"):
        return _json_ask(request)
    return Ask(model=_query_model(request))


def _json_ask(request: Request) -> Ask:
    try:
        body = _body.decode(request.body)
    except msgspec.ValidationError as wrong:
        if "$.model" in str(wrong):
            raise Refusal(400, "'model' must be a string.", code="invalid_type", param="model") from None
        raise Refusal(400, "The body must be a JSON object.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        raise Refusal(400, f"The body is not valid JSON: {broken}.", code="invalid_json") from None
    except RecursionError:
        raise Refusal(400, "The body's JSON is nested too deeply.", code="invalid_json") from None
    options = body.stream_options
    return Ask(
        model=body.model or _query_model(request),
        stream=body.stream is True,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        json=True,
    )


def _query_model(request: Request) -> str | None:
    if b"?" not in request.target:
        return None
    values = parse_qs(request.query, max_num_fields=100).get("model")
    return values[0] if values else None


def with_model(request: Request, ask: Ask, model: str) -> bytes:
    """The body with another model's name in it and every other byte as it was."""
    if ask.json:
        return _with_fields(request.body, model=model)
    part = _model_part(request)
    if part is None:
        return request.body
    return request.body[: part[0]] + model.encode() + request.body[part[1] :]


def with_usage(body: bytes) -> bytes:
    """The body with a request for token counts at the end of the stream."""
    fields = _fields.decode(body)
    try:
        options = msgspec.json.decode(fields["stream_options"]) if "stream_options" in fields else None
    except RecursionError:
        options = None
    return _with_fields(body, stream_options={**(options if isinstance(options, dict) else {}), "include_usage": True})


def _with_fields(body: bytes, **changed: object) -> bytes:
    fields: dict[str, object] = dict(_fields.decode(body))
    fields.update(changed)
    return _encode(fields)


def _model_part(request: Request) -> tuple[int, int] | None:
    """Where the value of the form field "model" lies in a multipart body."""
    header = Message()
    header["content-type"] = request.content_type.decode("latin-1")
    boundary = header.get_boundary()
    if not boundary:
        raise Refusal(400, "The multipart body's boundary is not given in Content-Type.", code="invalid_multipart")
    body = request.body
    mark = b"--" + boundary.encode("latin-1", "replace")
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark)
    while at >= 0:
        head_end = body.find(b"\r\n\r\n", at)
        if head_end < 0:
            return None
        end = body.find(b"\r\n" + mark, head_end + 2)
        if end < 0:
            return None
        for line in body[at:head_end].split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-disposition":
                part = Message()
                part["content-disposition"] = value.strip().decode("utf-8", "replace")
                if part.get_param("name", header="content-disposition") == "model":
                    return head_end + 4, max(end, head_end + 4)
        at = end
    return None
