from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmgw.errors import BadInput, LlmgwError
from llmgw.plane.bearers import Bearers, new_bearer


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_token_belongs_to_who_it_was_given_to(tmp_path: Path) -> None:
    one, two = new_bearer(), new_bearer()
    bearers = Bearers.load(write(tmp_path / "t", f"# tokens\n{one}\n\nanna {two} # of the night shift\n"))
    assert (bearers(one), bearers(two)) == ("admin", "anna")
    assert [bearers(wrong) for wrong in ("", "x", one[:-1], one + "x", f"anna {two}", "ä\udce4")] == [None] * 6


def test_a_token_that_was_taken_out_of_the_file_opens_nothing_any_more(tmp_path: Path) -> None:
    one, two = new_bearer(), new_bearer()
    path = write(tmp_path / "t", one)
    bearers = Bearers.load(path)
    write(path, two)
    os.utime(path, ns=(1, 1))
    assert (bearers(one), bearers(two)) == (None, "admin")


def test_a_file_that_became_unreadable_opens_nothing(tmp_path: Path) -> None:
    one = new_bearer()
    path = write(tmp_path / "t", one)
    bearers = Bearers.load(path)
    path.unlink()
    assert bearers(one) is None
    write(path, "short")
    assert bearers(one) is None
    write(path, one).chmod(0o644)
    assert bearers(one) is None
    write(path, one)
    assert bearers(one) == "admin"


def test_a_file_that_was_opened_to_others_opens_nothing_though_nothing_in_it_changed(tmp_path: Path) -> None:
    one = new_bearer()
    path = write(tmp_path / "t", one)
    bearers = Bearers.load(path)
    path.chmod(0o644)
    assert bearers(one) is None
    path.chmod(0o600)
    assert bearers(one) == "admin"


@pytest.mark.parametrize("text", ["short", "two words here", "name sh\u00f6rt-token-that-is-long", "a b c d"])
def test_a_line_that_is_no_token_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInput, match="t, line 2: neither TOKEN nor NAME TOKEN"):
        Bearers.load(write(tmp_path / "t", f"{new_bearer()}\n{text}\n"))


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t", new_bearer())
    path.chmod(0o644)
    with pytest.raises(LlmgwError, match="can be read by others"):
        Bearers.load(path)


def test_no_token_is_shown_with_the_object(tmp_path: Path) -> None:
    one = new_bearer()
    assert one not in repr(Bearers.load(write(tmp_path / "t", one)))
