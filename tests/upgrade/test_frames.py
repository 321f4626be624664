"""Frames between this version and those before it: each reads the other's, and ignores what it does not know (A12)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from llmgw.wire.codec import Unknown, decode_value, encode
from llmgw.wire.control import Request, reply_type, tag_of
from tests.upgrade.releases import GOLDEN, Release, releases
from tests.wire.test_golden import DIRECTIONS, nouns, sample

pytestmark = pytest.mark.real

each_release = pytest.mark.parametrize("release", releases(), ids=lambda release: release.version)

#: Run by the old code: reads frames, and values of replies, and says what it made of each.
READ = """
import json, sys
from llmgw.wire.codec import Unknown, agent_codec, control_codec, decode_value
from llmgw.wire import agent, control
codecs = {"agent": agent_codec, "control": control_codec}
told = []
for direction, kind, frame in json.load(sys.stdin):
    if direction == "reply":
        message = decode_value(bytes.fromhex(frame), getattr(control, kind)) if hasattr(control, kind) else None
        told.append(kind if message is not None else "unknown")
        continue
    message = codecs[direction].decode(bytes.fromhex(frame))
    told.append("unknown" if isinstance(message, Unknown) else str(message.__struct_config__.tag))
print(json.dumps(told))
"""


def golden(release: Release) -> Any:
    return json.loads((GOLDEN / f"wire-{release.version}.json").read_text())


def read_by(release: Release, frames: list[tuple[str, str, str]]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env=os.environ | release.env,
        input=json.dumps(frames),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: list[str] = json.loads(done.stdout)
    return told


def strange(kind: Any, value: Any) -> Any:
    """A frame as a version far ahead would send it: one field more in each Struct."""
    t = msgspec.inspect
    match msgspec.inspect.type_info(kind) if not isinstance(kind, t.Type) else kind:
        case t.StructType(fields=fields, array_like=True):
            return [*map(strange, (field.type for field in fields), value), "of the future"]
        case t.StructType(fields=fields):
            inside = {f.encode_name: strange(f.type, value[f.encode_name]) for f in fields if f.encode_name in value}
            return value | inside | {"of the future": {"deep": [1, None]}}
        case t.VarTupleType(item_type=item) | t.ListType(item_type=item):
            return [strange(item, one) for one in value]
        case t.DictType(value_type=item):
            return {key: strange(item, one) for key, one in value.items()}
        case t.UnionType(types=types) if value is not None:
            return strange(next(one for one in types if not isinstance(one, t.NoneType)), value)
    return value


@each_release
def test_every_frame_of_a_release_is_read(release: Release) -> None:
    frames = golden(release)["frames"]
    assert set(frames) == set(DIRECTIONS)
    for direction, tags in frames.items():
        for tag, sent in tags.items():
            for frame in sent:
                message = DIRECTIONS[direction][0].decode(bytes.fromhex(frame))
                assert not isinstance(message, Unknown), (direction, tag)
                assert tag_of(message) == tag


@each_release
def test_no_field_of_a_release_was_renamed_removed_moved_or_made_required(release: Release) -> None:
    now = nouns()
    for name, fields in golden(release)["nouns"].items():
        assert now[name][: len(fields)] == fields, name
        assert not any(field.endswith("!") for field in now[name][len(fields) :]), name


@each_release
def test_a_release_reads_our_frames_and_takes_those_it_does_not_know_for_unknown(release: Release) -> None:
    known = golden(release)["frames"]
    frames = []
    for direction, (_, kinds) in DIRECTIONS.items():
        for kind in kinds:
            frame = encode(sample(kind))
            frames.append((direction, tag_of(sample(kind)), frame.hex()))
            # Without what is new, and with more than is new.
            more = strange(kind, msgspec.msgpack.decode(frame))
            assert "of the future" in more
            frames.append((direction, tag_of(sample(kind)), encode(more).hex()))
    frames.append(("agent", "of the future", encode({"type": "of the future", "x": 1}).hex()))
    expected = [tag if tag in known[direction] else "unknown" for direction, tag, _ in frames]
    assert read_by(release, frames) == expected


@each_release
def test_replies_are_read_on_both_sides(release: Release) -> None:
    """A reply's value is not in the frame's own type: each request names it."""
    replies = {reply_type(sample(kind)) for kind in DIRECTIONS["control"][1] if issubclass(kind, Request)}
    values = [
        ("reply", kind.__name__, encode(sample(kind)).hex()) for kind in sorted(replies, key=lambda k: k.__name__)
    ]
    known = golden(release)["nouns"]
    assert read_by(release, values) == [name if name in known else "unknown" for _, name, _ in values]
    for kind in replies:
        # The fields that the release had, and no others: what is missing has a default.
        old = {field.removesuffix("!") for field in known.get(kind.__name__, ())}
        less = {key: value for key, value in msgspec.msgpack.decode(encode(sample(kind))).items() if key in old}
        if old:
            assert isinstance(decode_value(encode(less), kind), kind)
