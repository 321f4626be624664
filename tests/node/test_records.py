import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.errors import BadInput
from llmgw.node.records import Record, Records, argv_hash, decode, file_name, shard_name
from llmgw.wire.facts import ModelName, ReplicaId, ShardId, ShardSpec


def record(shard: str = "m/0/0", **more: object) -> Record:
    spec = ShardSpec(engine="llamacpp", model=ModelName("m"), source="/m.gguf", args=("-np", "2"), env={"A": "b"})
    return Record(
        shard=ShardId(shard),
        replica=ReplicaId("m/0"),
        model=ModelName("m"),
        generation=3,
        token="t",
        spec=spec,
        **more,  # type: ignore[arg-type]
    )


def test_a_record_is_for_its_owner_alone_and_what_a_crash_left_half_written_is_removed(tmp_path: Path) -> None:
    records = Records(tmp_path / "shards")
    umask = os.umask(0)
    try:
        records.write(record())
    finally:
        os.umask(umask)
    (path,) = (tmp_path / "shards").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "shards" / f".{path.name}.77.new").write_bytes(b"{")
    assert records.load() == ((record(),), ())
    assert list((tmp_path / "shards").iterdir()) == [path]


def test_what_was_written_is_read_and_what_was_removed_is_gone(tmp_path: Path) -> None:
    records = Records(tmp_path)
    one = record(pid=7, started=9, argv=("a", "b"), argv_hash=argv_hash(("a", "b")), ports={"http": 1})
    records.write(one)
    records.write(record("other"))
    assert records.load() == ((one, record("other")), ())
    records.remove(ShardId("other"))
    records.remove(ShardId("never"))
    assert records.load() == ((one,), ())


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\0", b"[" * 10_000, b'{"shard": 3}'])
def test_a_file_that_is_no_record_is_set_aside_and_hides_no_other(tmp_path: Path, content: bytes) -> None:
    records = Records(tmp_path)
    records.write(record())
    (tmp_path / "bad.json").write_bytes(content)
    assert records.load() == ((record(),), (tmp_path / "bad.broken",))
    assert (tmp_path / "bad.broken").read_bytes() == content
    assert records.load() == ((record(),), ())


def test_a_record_under_another_shards_name_is_not_believed(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write(record())
    (tmp_path / f"{file_name(ShardId('m/0/0'))}.json").rename(tmp_path / "x.json")
    found, broken = records.load()
    assert (found, len(broken)) == ((), 1)


def test_a_folder_that_cannot_be_one_keeps_no_agent_from_starting(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("in the way")
    records = Records(tmp_path / "shards")
    assert records.load() == ((), ())
    with pytest.raises(OSError, match="exists"):
        records.write(record())


def test_fields_of_a_newer_agent_are_ignored(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.write(record())
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": [1]}))
    assert records.load() == ((record(),), ())


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    decode(data)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_every_name_of_a_shard_is_a_name_of_a_file_in_the_folder_and_back(name: str) -> None:
    try:
        file = file_name(ShardId(name))
    except BadInput:
        assert len(name.encode()) * 3 > 180
        return
    assert "/" not in file
    assert not file.startswith(".")
    assert shard_name(file) == name
