"""Frames as they were sent once: old bytes still decode, and no Struct changes without anyone noticing (A12).

`tests/golden/wire.json` holds, for each frame kind and each noun inside, its fields, and frames as hexadecimal. When a
Struct changed on purpose: append the new frame with `python -m tests.wire.test_golden` and review the difference.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.wire import agent, control, facts
from llmgw.wire.codec import Broken, Codec, Unknown, agent_codec, control_codec, encode

GOLDEN = Path(__file__).parent.parent / "golden" / "wire.json"
DIRECTIONS: dict[str, tuple[Codec[Any], tuple[type[msgspec.Struct], ...]]] = {
    "agent": (agent_codec, get_args(agent.AgentMessage)),
    "control": (control_codec, get_args(control.ControlMessage)),
}


def sample(kind: Any, depth: int = 0) -> Any:
    """A value of a type with every field filled, so that a golden frame shows each one."""
    match msgspec.inspect.type_info(kind):
        case msgspec.inspect.StructType(cls=cls):
            return cls(**{f.name: sample(f.type, depth + 1) for f in msgspec.structs.fields(cls)})
        case info:
            return _plain(info, depth)


def _plain(info: Any, depth: int) -> Any:
    t = msgspec.inspect
    match info:
        case t.StructType(cls=cls):
            return sample(cls, depth)
        case t.UnionType(types=types):
            return _plain(next(kind for kind in types if not isinstance(kind, t.NoneType)), depth)
        case t.VarTupleType(item_type=item) | t.ListType(item_type=item):
            return (_plain(item, depth + 1),)
        case t.TupleType(item_types=items):
            return tuple(_plain(item, depth + 1) for item in items)
        case t.DictType(key_type=key, value_type=value):
            return {_plain(key, depth + 1): _plain(value, depth + 1)}
        case t.EnumType(cls=cls):
            return next(iter(cls))
        case t.BoolType():
            return True
        case t.IntType():
            return 7
        case t.FloatType():
            return 1.5
        case t.BytesType():
            return b"\x01\x02"
        case t.RawType():
            return msgspec.Raw(encode({"lines": ["x"]}))
        case t.StrType():
            return "x"
    raise AssertionError(f"no sample for {info}")


def nouns() -> dict[str, list[str]]:
    """Every Struct of the wire with its fields in order, required ones marked."""
    found = {}
    for module in (facts, agent, control):
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                found[name] = [f.name + ("!" if f.required else "") for f in msgspec.structs.fields(kind)]
    return found


def current() -> dict[str, dict[str, str]]:
    return {
        direction: {control.tag_of(value): encode(value).hex() for value in map(sample, kinds)}
        for direction, (_, kinds) in DIRECTIONS.items()
    }


def kept() -> Any:
    return json.loads(GOLDEN.read_text())


def frames() -> list[tuple[str, str, str]]:
    if not GOLDEN.exists():
        return []
    return [
        (direction, tag, frame)
        for direction in DIRECTIONS
        for tag, old in kept()["frames"][direction].items()
        for frame in old
    ]


@pytest.mark.parametrize(("direction", "tag", "frame"), frames())
def test_a_frame_that_was_sent_once_still_decodes(direction: str, tag: str, frame: str) -> None:
    message = DIRECTIONS[direction][0].decode(bytes.fromhex(frame))
    assert not isinstance(message, Unknown)
    assert control.tag_of(message) == tag


def test_no_frame_changed_without_a_new_golden_one() -> None:
    golden = kept()["frames"]
    for direction, tags in current().items():
        for tag, frame in tags.items():
            assert frame in golden[direction].get(tag, []), f"{direction} {tag}: run python -m tests.wire.test_golden"


def test_no_field_was_renamed_removed_moved_or_made_required() -> None:
    now = nouns()
    for name, fields in kept()["nouns"].items():
        assert name in now, f"{name} is gone"
        assert now[name][: len(fields)] == fields, f"{name} changed other than at its end"
        assert not any(field.endswith("!") for field in now[name][len(fields) :]), (
            f"{name}: a new field needs a default"
        )


@pytest.mark.parametrize("direction", list(DIRECTIONS))
def test_every_kind_makes_the_round_trip(direction: str) -> None:
    codec, kinds = DIRECTIONS[direction]
    for kind in kinds:
        value = sample(kind)
        assert codec.decode(encode(value)) == value


def test_fields_of_a_newer_peer_are_ignored() -> None:
    data = encode({"type": "heartbeat", "load": [1.0, 2.0, 3, 4.0, "appended"], "new": {"deep": [1]}})
    assert agent_codec.decode(data) == agent.Heartbeat(load=facts.HostLoad(1.0, 2.0, 3, 4.0))


def test_words_of_a_newer_peer_read_as_unknown() -> None:
    data = encode({"type": "shard", "shard": "s", "replica": "r", "model": "m", "generation": 1, "state": "dreaming"})
    message = agent_codec.decode(data)
    assert isinstance(message, agent.ShardStatus)
    assert message.state is facts.ShardState.UNKNOWN


def test_an_absent_list_takes_no_bytes_and_an_empty_one_is_sent() -> None:
    nothing, none = encode(agent.Heartbeat()), encode(agent.Heartbeat(problems=()))
    assert len(nothing) < len(none)
    assert agent_codec.decode(none) == agent.Heartbeat(problems=())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_unknown_or_broken(data: bytes) -> None:
    for codec, _ in DIRECTIONS.values():
        with suppress(Broken):
            codec.decode(data)


@given(st.sampled_from(["agent", "control"]), st.integers(0, 30), st.data())
def test_a_damaged_frame_never_raises_anything_else(direction: str, which: int, data: st.DataObject) -> None:
    codec, kinds = DIRECTIONS[direction]
    frame = bytearray(encode(sample(kinds[which % len(kinds)])))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Broken):
        codec.decode(bytes(frame))


def test_deep_nesting_is_broken_and_not_a_crash() -> None:
    with pytest.raises(Broken):
        agent_codec.decode(b"\x91" * 100_000)


def renew() -> None:
    """Append what is new to the golden file; nothing is ever taken out."""
    golden: Any = kept() if GOLDEN.exists() else {"frames": {"agent": {}, "control": {}}, "nouns": {}}
    for direction, tags in current().items():
        for tag, frame in tags.items():
            old = golden["frames"][direction].setdefault(tag, [])
            if frame not in old:
                old.append(frame)
    golden["nouns"] |= nouns()
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    renew()
