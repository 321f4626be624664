from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.gateway.responses import BrokenResponse, Responses

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nhel\r\n2\r\nlo\r\n0\r\nX-T: 1\r\n\r\n"


def body(responses: Responses) -> bytes:
    return b"".join(responses.pieces)


@given(st.lists(st.integers(min_value=1, max_value=100), max_size=10), st.sampled_from([LENGTH, CHUNKED]))
def test_a_response_is_the_same_however_it_is_split(cuts: list[int], data: bytes) -> None:
    responses = Responses()
    for _ in range(2):  # the second on the same connection
        responses.expect(False)
        assert not responses.begun
        marks = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        for a, b in pairwise(marks):
            assert not responses.complete
            responses.feed(data[a:b])
        assert (responses.status, body(responses), responses.complete, responses.reusable) == (
            200,
            b"hello",
            True,
            True,
        )


@given(st.lists(st.binary(max_size=80), max_size=5), st.booleans())
def test_garbage_is_a_broken_response_and_nothing_else(data: list[bytes], head: bool) -> None:
    responses = Responses()
    responses.expect(head)
    with contextlib.suppress(BrokenResponse):
        for piece in data:
            responses.feed(piece)
    responses.end()


def test_a_response_until_the_end_is_whole_at_the_end() -> None:
    responses = Responses()
    responses.feed(b"HTTP/1.1 200 OK\r\n\r\nsome")
    responses.feed(b"thing")
    assert not responses.complete
    assert responses.end()
    assert body(responses) == b"something"
    assert not responses.reusable


def test_a_response_with_a_length_is_not_whole_at_an_early_end() -> None:
    responses = Responses()
    responses.feed(LENGTH[:-1])
    assert not responses.end()


def test_connection_close_is_heeded() -> None:
    responses = Responses()
    responses.feed(LENGTH.replace(b"Content-Type", b"Connection: close\r\nContent-Type"))
    assert responses.complete
    assert not responses.reusable


def test_interim_responses_are_skipped() -> None:
    responses = Responses()
    responses.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH)
    assert (responses.status, body(responses), responses.complete) == (200, b"hello", True)
    assert responses.passed_on() == [b"Content-Type: text/plain\r\n"]


def test_a_response_to_head_is_whole_after_its_head() -> None:
    responses = Responses()
    responses.expect(True)
    responses.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
    assert (responses.complete, responses.length, responses.reusable) == (True, 5, False)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 3\n\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 400,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000,
        b"SSH-2.0\r\n",
    ],
)
def test_what_cannot_be_passed_on_safely_is_broken(data: bytes) -> None:
    responses = Responses()
    with pytest.raises(BrokenResponse):
        responses.feed(data)


def test_more_than_was_asked_for_is_kept_out_and_ends_the_connections_use() -> None:
    responses = Responses()
    responses.feed(LENGTH + LENGTH.replace(b"hello", b"evil!"))
    assert (body(responses), responses.complete, responses.reusable) == (b"hello", True, False)
