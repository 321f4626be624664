"""The list of certificates that are honoured no more, as a node keeps it."""

from __future__ import annotations

from pathlib import Path

from llmgw.node.weights.revoked import Revocations


def test_what_one_process_notes_another_one_reads(tmp_path: Path) -> None:
    agent, share = Revocations(tmp_path), Revocations(tmp_path)
    assert "a1" not in share
    agent.take(["a1", "b2"])
    assert ("a1" in share, "b2" in share, "c3" in share) == (True, True, False)
    agent.take(["c3"])
    assert ("a1" in share, "c3" in share) == (False, True)
    agent.take([])
    assert "c3" not in share


def test_the_same_list_is_written_once(tmp_path: Path) -> None:
    agent = Revocations(tmp_path)
    agent.take(["a1"])
    before = (tmp_path / "revoked.json").stat().st_ino
    agent.take(["a1"])
    assert (tmp_path / "revoked.json").stat().st_ino == before


def test_a_broken_file_leaves_what_was_known(tmp_path: Path) -> None:
    share = Revocations(tmp_path)
    Revocations(tmp_path).take(["a1"])
    assert "a1" in share
    (tmp_path / "revoked.json").write_bytes(b"{")
    assert "a1" in share
    assert "a1" not in Revocations(tmp_path)


def test_a_disk_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    Revocations(tmp_path / "nowhere").take(["a1"])
