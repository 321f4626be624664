from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.plane.gateway.usage import MOST_BYTES, BodyMeter, StreamMeter, Usage, usage_in

TEXT = b'data: {"choices":[{"delta":{"content":"\xe2\x82\xac"}}],"usage":null}\n\n'
COUNTS = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
DONE = b"data: [DONE]\n\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(marks)]


@given(st.lists(st.integers(min_value=0), max_size=8), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_counts_alone_are_kept_back_however_the_stream_is_split(cuts: list[int], line: bytes) -> None:
    stream, kept = (TEXT + COUNTS + DONE).replace(b"\n", line), (TEXT + DONE).replace(b"\n", line)
    meter = StreamMeter(strip=True)
    passed = b"".join(meter.feed(piece) for piece in pieces(stream, cuts)) + meter.rest()
    assert (passed, meter.usage) == (kept, Usage(3, 4))


@given(st.binary(max_size=300), st.lists(st.integers(min_value=0), max_size=8), st.booleans())
def test_what_is_no_count_passes_as_it_is(stream: bytes, cuts: list[int], strip: bool) -> None:
    meter = StreamMeter(strip=strip)
    passed = b"".join(meter.feed(piece) for piece in pieces(stream, cuts)) + meter.rest()
    assert passed == stream


@given(st.lists(st.integers(min_value=0), max_size=8))
def test_a_client_that_asked_gets_every_piece_at_once(cuts: list[int]) -> None:
    meter = StreamMeter(strip=False)
    for piece in pieces(TEXT + COUNTS + DONE, cuts):
        assert meter.feed(piece) == piece
    assert meter.usage == Usage(3, 4)


def test_counts_beside_content_are_read_and_passed_on() -> None:
    event = b'data: {"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n'
    meter = StreamMeter(strip=True)
    assert meter.feed(event) == event
    assert meter.usage == Usage(1, 2)


@pytest.mark.parametrize("choices", ["", '"choices":[],', '"choices":null,'])
def test_counts_without_choices_or_with_none_are_counts_alone(choices: str) -> None:
    meter = StreamMeter(strip=True)
    assert meter.feed(b'data: {%b"usage":{"prompt_tokens":5}}\n\n' % choices.encode()) == b""
    assert meter.usage == Usage(5, 0)


@pytest.mark.parametrize(
    "event",
    [
        b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":1}}',
        b'data: {"choices":[],"usage":{"prompt_tokens":5}}\nid: 7',
        b': counted\ndata: {"choices":[],"usage":{"prompt_tokens":5}}',
        b'data: {"error":{"message":"no memory"},"usage":{"prompt_tokens":5}}',
    ],
    ids=["a name", "an id", "a comment", "an error"],
)
def test_an_event_that_says_more_than_counts_is_never_kept_back(event: bytes) -> None:
    meter = StreamMeter(strip=True)
    assert meter.feed(event + b"\n\n") == event + b"\n\n"


def test_counts_by_their_other_names_are_those_of_the_whole_stream() -> None:
    meter = StreamMeter(strip=False)
    meter.feed(b'event: message_start\ndata: {"message":{"usage":{"input_tokens":25,"output_tokens":1}}}\n\n')
    meter.feed(b'event: message_delta\ndata: {"delta":{},"usage":{"output_tokens":15}}\n\n')
    assert meter.usage == Usage(25, 15)
    assert usage_in(b'{"type":"response.completed","response":{"usage":{"input_tokens":3,"output_tokens":4}}}') == (
        Usage(3, 4),
        False,
    )


@pytest.mark.parametrize(
    "document",
    [b"", b"[]", b"null", b'{"usage":7}', b'{"usage":[1]}', b'{"usage":null}', b'{"usage":', b"\xff", b"[" * 200_000],
)
def test_odd_documents_have_no_usage(document: bytes) -> None:
    assert usage_in(document)[0] is None


def test_odd_numbers_count_as_nothing() -> None:
    document = b'{"usage":{"prompt_tokens":"many","completion_tokens":-4}}'
    assert usage_in(document) == (Usage(0, 0), False)


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    meter = StreamMeter(strip=True)
    passed = sum(len(meter.feed(b"x" * 65536)) for _ in range(MOST_BYTES // 65536 + 2))
    assert passed == (MOST_BYTES // 65536 + 2) * 65536


def test_a_body_is_counted_when_it_is_whole() -> None:
    meter = BodyMeter()
    body = json.dumps({"choices": [{}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}).encode()
    assert b"".join(meter.feed(body[at : at + 7]) for at in range(0, len(body), 7)) == body
    assert meter.usage == Usage(9, 1)
