from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.gateway.requests import Request, Requests

POST = b"POST /v1/x?a=b HTTP/1.1\r\nHost: a\r\nX-One: 1\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /v1/y HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;ext=1\r\nhel\r\n2\r\nlo\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"


def read(*data: bytes, head: int = 65536, body: int = 1000) -> Requests:
    reader = Requests(head, body)
    for piece in data:
        reader.feed(piece)
    return reader


def seen(request: Request) -> tuple[bytes, bytes, list[bytes], bytes, bool]:
    return request.method, request.target, request.passed_on(), request.body, request.close


def trouble(*data: bytes) -> int:
    reader = read(*data)
    assert reader.trouble is not None
    assert reader.trouble.close
    return reader.trouble.status


@given(st.lists(st.integers(min_value=1, max_value=400), max_size=12))
def test_requests_are_the_same_however_they_are_split(cuts: list[int]) -> None:
    stream = POST + CHUNKED + GET + POST
    marks = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reader = read(*(stream[a:b] for a, b in pairwise(marks)))
    assert reader.trouble is None
    post = (b"POST", b"/v1/x?a=b", [b"X-One: 1\r\n"], b"hello", False)
    assert [seen(request) for request in reader.done] == [
        post,
        (b"POST", b"/v1/y", [], b"hello", False),
        (b"GET", b"/v1/models", [], b"", False),
        post,
    ]
    assert reader.current is None


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_garbage_is_trouble_and_never_an_exception(data: list[bytes]) -> None:
    reader = read(*data)
    assert reader.trouble is None or reader.trouble.status in (400, 405, 408, 413, 431, 501, 505)


@given(st.binary(max_size=60), st.integers(min_value=0, max_value=len(POST)), st.integers(min_value=0, max_value=9))
def test_a_request_with_garbage_in_it_is_never_an_exception(junk: bytes, at: int, less: int) -> None:
    read(POST[:at] + junk + POST[at + less :], GET)


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (400, b"Content-Length: 3\r\nTransfer-Encoding: chunked"),
        (400, b"Transfer-Encoding: chunked\r\nContent-Length: 3"),
        (400, b"Content-Length: 3\r\nContent-Length: 4"),
        (400, b"Content-Length: 3, 3"),
        (400, b"Content-Length: +3"),
        (400, b"Content-Length: 0x3"),
        (400, b"Content-Length: 99999999999999999999999"),
        (501, b"Transfer-Encoding: gzip, chunked"),
        (501, b"Transfer-Encoding: chunked, chunked"),
        (501, b"Transfer-Encoding: identity"),
        (501, b"Transfer-Encoding: xchunked"),
        (400, b"Content-Length : 3"),
        (400, b"X: a\r\n folded"),
        (400, b"X: a\nY: b"),
        (400, b"X: a\rb"),
        (400, b"X: a\x00b"),
        (400, b"Host: b"),
    ],
)
def test_what_two_servers_could_read_in_two_ways_is_refused(status: int, head: bytes) -> None:
    assert trouble(b"POST /v1/x HTTP/1.1\r\nHost: a\r\n" + head + b"\r\n\r\n0\r\n\r\n") in {status, 400}


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (400, b"GET / HTTP/1.1\nHost: a\n\n"),
        (400, b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"FETCH / HTTP/1.1\r\nHost: a\r\n\r\n"),
        (400, b"GET / HTTP/1.1\r\n\r\n"),
        (400, b"OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n"),
        (405, b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"),
        (505, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
        (505, b"GET /\r\n\r\n"),
        (501, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (501, b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"),
        (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    ],
)
def test_what_is_not_spoken_here_is_refused(status: int, line: bytes) -> None:
    assert trouble(line) == status


def test_a_request_before_the_trouble_is_still_there() -> None:
    reader = read(POST + b"garbage\r\n\r\n")
    assert [request.body for request in reader.done] == [b"hello"]
    assert reader.trouble is not None


def test_what_follows_connection_close_is_ignored() -> None:
    reader = read(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [(request.target, request.close) for request in reader.done] == [(b"/", True)]
    assert reader.trouble is None


def test_a_body_is_refused_by_its_length_before_it_comes() -> None:
    reader = read(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1001\r\n\r\n")
    assert reader.trouble is not None
    assert (reader.trouble.status, reader.trouble.code) == (413, "request_too_large")


def test_a_body_of_chunks_is_refused_when_it_has_become_too_large_and_forgotten() -> None:
    reader = read(
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", *[b"64\r\n%b\r\n" % (b"x" * 100)] * 11
    )
    assert reader.trouble is not None
    assert reader.trouble.status == 413
    assert reader.current is not None
    assert not reader.current.pieces


def test_a_head_without_end_is_refused() -> None:
    reader = read(b"GET / HTTP/1.1\r\nHost: a\r\n", *[b"X-%d: %b\r\n" % (n, b"y" * 90) for n in range(20)], head=1000)
    assert reader.trouble is not None
    assert reader.trouble.status == 431


def test_many_small_headers_are_refused_too() -> None:
    assert trouble(b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 300 + b"\r\n") == 431


def test_h2c_is_declined_by_going_on_with_the_same_request() -> None:
    """Java's HttpClient asks for it with its first request, body included."""
    h2c = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    reader = read(POST.replace(b"X-One", h2c + b"X-One") + GET)
    assert reader.trouble is None
    assert [(request.target, request.body, request.passed_on()) for request in reader.done] == [
        (b"/v1/x?a=b", b"hello", [b"X-One: 1\r\n"]),
        (b"/v1/models", b"", []),
    ]


def test_an_absolute_target_is_taken_by_its_path() -> None:
    assert read(b"GET http://a:80/v1/models?x HTTP/1.1\r\nHost: a\r\n\r\n").done[0].target == b"/v1/models?x"


def test_a_request_id_that_could_forge_a_log_is_not_kept() -> None:
    for value in (b"a b", b"x" * 129, b"\xc3\xa9", b""):
        assert read(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: " + value + b"\r\n\r\n").done[0].id == b""
    assert read(b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: ok-1\r\n\r\n").done[0].id == b"ok-1"
