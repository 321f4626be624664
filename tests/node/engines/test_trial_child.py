"""The trial itself, with engines and drivers that answer as the real ones do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmgw.node.engines import trial_child

GIB = 1 << 30


class Llm:
    """Takes what vLLM's LLM takes, and makes one token."""

    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        Llm.given = given
        assert (Path(given["model"]) / "config.json").exists()

    def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> Any:
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])])]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the trial imports, by name."""
    monkeypatch.chdir(tmp_path)
    vllm = SimpleNamespace(__version__="1.0", LLM=Llm, SamplingParams=lambda **_: None)
    ones = SimpleNamespace(sum=lambda: 512.0)
    matrix = type("Matrix", (), {"__matmul__": lambda self, other: ones})()
    torch = SimpleNamespace(cuda=SimpleNamespace(device_count=lambda: 2), ones=lambda *_, device: matrix)
    found: dict[str, Any] = {
        "vllm": vllm,
        "vllm.platforms": SimpleNamespace(current_platform=SimpleNamespace(device_type="cuda")),
        "torch": torch,
        "sglang": SimpleNamespace(__version__="0.5"),
        "sglang.srt.entrypoints.engine": SimpleNamespace(),
    }

    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def nvml(*free: int) -> SimpleNamespace:
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(free),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(free=free[index], total=80 * GIB),
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
    )


def test_the_gpu_with_the_most_room_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(3 * GIB, 70 * GIB, 10 * GIB))
    assert trial_child.roomiest() == ("GPU-1", 70 * GIB, 80 * GIB)
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert trial_child.roomiest() is None


def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("NVML: Driver/library version mismatch")

    driver = nvml(GIB)
    driver.nvmlInit = broken
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    assert trial_child.roomiest() is None


def test_a_model_is_loaded_where_a_gpu_has_room_and_takes_little_of_it(modules: dict[str, Any]) -> None:
    words = trial_child.vllm(("GPU-1", 70 * GIB, 80 * GIB))
    assert words == "it imports (vLLM 1.0, cuda), loaded a tiny model and made a token with it"
    assert Llm.given["gpu_memory_utilization"] == pytest.approx(4 / 80)


def test_gpus_that_are_full_of_engines_are_not_disturbed(modules: dict[str, Any]) -> None:
    modules["vllm"].LLM = None
    words = trial_child.vllm(("GPU-1", GIB, 80 * GIB))
    assert words.endswith("and sees its GPUs; no model was loaded, for no GPU has 6 GiB free")


def test_a_build_that_sees_no_gpu_fails(modules: dict[str, Any]) -> None:
    modules["torch"].cuda.device_count = lambda: 0
    with pytest.raises(RuntimeError, match="PyTorch sees no GPU"):
        trial_child.vllm(("GPU-1", 70 * GIB, 80 * GIB))
    with pytest.raises(RuntimeError, match="PyTorch sees no GPU"):
        trial_child.sglang(None)


def test_without_gpus_memory_decides(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    modules["vllm.platforms"].current_platform.device_type = "cpu"
    monkeypatch.setattr(trial_child, "available", lambda: 8 * GIB)
    assert "made a token" in trial_child.vllm(None)
    assert "gpu_memory_utilization" not in Llm.given
    monkeypatch.setattr(trial_child, "available", lambda: GIB)
    assert trial_child.vllm(None).endswith("no model was loaded, for 3 GiB of memory are not free")


def test_sglang_computes_on_a_gpu(modules: dict[str, Any]) -> None:
    assert trial_child.sglang(None) == "it imports (SGLang 0.5) and computes on 2 GPUs"


def test_this_machines_memory_is_read() -> None:
    assert trial_child.available() > 0
