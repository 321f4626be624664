from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from llmgw.errors import BadInput, Conflict, LlmgwError, NotFound
from llmgw.files import PRIVATE, alone, make_directory, read_whole, refuse_shared, write_whole


def test_a_secret_is_never_readable_by_others_not_even_over_an_older_open_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o644)
    old_umask = os.umask(0)
    try:
        write_whole(path, b"secret", PRIVATE)
    finally:
        os.umask(old_umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"secret"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    target = tmp_path / "a-directory"
    (target / "inside").mkdir(parents=True)
    with pytest.raises(LlmgwError, match=r"cannot write .*a-directory"):
        write_whole(target, b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a-directory"]


def test_a_file_that_is_missing_says_what_it_would_be_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"none is missing \(the key\): make one"):
        read_whole(tmp_path / "none", "the key", "make one")
    with pytest.raises(BadInput, match="is a directory, where a file is due"):
        read_whole(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="file is a file, where a directory is due"):
        make_directory(tmp_path / "file")
    with pytest.raises(LlmgwError, match=r"cannot make .*file/below: Not a directory: a part of this path is a file"):
        make_directory(tmp_path / "file" / "below")
    make_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_we_may_not_write_in_names_its_owner(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(LlmgwError, match=r"cannot write in .*locked: run as "):
        make_directory(tmp_path / "locked")


@pytest.mark.real
def test_a_file_system_that_is_read_only_is_an_error_in_words() -> None:
    with pytest.raises(LlmgwError, match=r"cannot (make|write) /proc/"):
        make_directory(Path("/proc/llmgw/x"))


def test_a_secret_that_others_can_read_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("x")
    path.chmod(0o640)
    with pytest.raises(LlmgwError, match=r"key \(the key\) can be read by others .*mode 0640.*: chmod 600 "):
        refuse_shared(path, "the key")
    path.chmod(0o400)
    refuse_shared(path, "the key")


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    hold = "import sys; from pathlib import Path; from llmgw.files import alone\n"
    hold += "with alone(Path(sys.argv[1]), 'x'): print(flush=True); sys.stdin.read()"
    argv = [sys.executable, "-c", hold, str(tmp_path / "lock")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(Conflict, match=rf"another agent is running in {tmp_path} already \(pid {holder.pid}\)"):
            with alone(tmp_path / "lock", "another agent"):
                raise AssertionError("that is not alone")
        holder.kill()
        holder.wait()
    with alone(tmp_path / "lock", "another agent"):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
