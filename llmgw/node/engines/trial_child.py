"""Run by an engine's own Python, which has nothing of ours: import it, look for the devices, load a tiny model.

The last line tells what was done. An exception ends it, and its traceback is looked through for a cause as an
engine's last words are.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from typing import Any

#: A GPU must have so many bytes free for a model to be loaded: an engine that serves must not be disturbed.
NEEDED = 6 << 30
#: The least that vLLM's back end for CPUs and the model take.
NEEDED_CPU = 3 << 30
#: Seconds for an engine's own end.
ENDS_WITHIN = 5.0


def roomiest() -> tuple[str, int, int] | None:
    """The GPU with the most free memory, as (uuid, bytes free, bytes); None where no driver tells of one."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory, uuid = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetUUID(handle)
            found.append((int(memory.free), uuid if isinstance(uuid, str) else uuid.decode(), int(memory.total)))
    except Exception:  # whatever a driver may do
        return None
    free, uuid, total = max(found, default=(0, "", 0))
    return (uuid, free, total) if uuid else None


def tiny(folder: str) -> str:
    """A model's configuration; its weights are made up as they are loaded."""
    path = os.path.join(folder, "tiny")
    os.makedirs(path, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "vocab_size": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(config, file)
    return path


def available() -> int:
    """Bytes of memory that this machine could give now."""
    with open("/proc/meminfo") as file:
        words = dict(line.split(":", 1) for line in file if ":" in line)
    return int(words["MemAvailable"].split()[0]) << 10


def vllm(gpu: tuple[str, int, int] | None) -> str:
    engine: Any = importlib.import_module("vllm")
    device = str(importlib.import_module("vllm.platforms").current_platform.device_type)
    words = f"it imports (vLLM {engine.__version__}, {device})"
    if device == "cuda":
        devices(1)
    if device == "cuda" and (gpu is None or gpu[1] < NEEDED):
        return f"{words} and sees its GPUs; no model was loaded, for no GPU has {NEEDED >> 30} GiB free"
    if device != "cuda" and available() < NEEDED_CPU:
        return f"{words}; no model was loaded, for {NEEDED_CPU >> 30} GiB of memory are not free"
    more = {"gpu_memory_utilization": (4 << 30) / gpu[2]} if gpu is not None and device == "cuda" else {}
    model = engine.LLM(
        model=tiny(os.getcwd()),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=1,
        **more,
    )
    sampling = engine.SamplingParams(max_tokens=1, detokenize=False)
    made = model.generate([{"prompt_token_ids": [1, 5, 7]}], sampling, use_tqdm=False)
    if len(made[0].outputs[0].token_ids) != 1:
        raise RuntimeError("a tiny model was loaded and made no token")
    ended(model)
    return f"{words}, loaded a tiny model and made a token with it"


def ended(model: Any) -> None:
    """Let vLLM's core end by itself, if it does so soon: one that is killed leaves its shared memory in /dev/shm."""

    def shutdown() -> None:
        with contextlib.suppress(Exception):  # of another version; it is killed, then
            model.llm_engine.engine_core.shutdown(timeout=ENDS_WITHIN)

    ending = threading.Thread(target=shutdown, daemon=True)
    ending.start()
    ending.join(2 * ENDS_WITHIN)


def sglang(_gpu: tuple[str, int, int] | None) -> str:
    engine: Any = importlib.import_module("sglang")
    # What it starts as a server: the top package alone imports next to nothing.
    importlib.import_module("sglang.srt.entrypoints.engine")
    count = devices(1)
    return f"it imports (SGLang {engine.__version__}) and computes on {count} GPU{'s' if count != 1 else ''}"


def devices(least: int) -> int:
    """How many GPUs PyTorch sees; one of them is made to compute."""
    torch: Any = importlib.import_module("torch")
    count = int(torch.cuda.device_count())
    if count < least:
        raise RuntimeError("PyTorch sees no GPU: its build and the driver may not fit (torch.cuda.device_count() is 0)")
    ones = torch.ones((8, 8), device="cuda")
    if float((ones @ ones).sum()) != 512.0:
        raise RuntimeError("a GPU computed something wrong")
    return count


def main() -> None:
    gpu = roomiest()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu[0]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    did = {"vllm": vllm, "sglang": sglang}[sys.argv[1]](gpu)
    sys.stdout.flush()
    sys.stderr.flush()
    print(f"\nllmgw-trial: {json.dumps({'did': did})}", flush=True)
    # Not through the engine's own end: its workers are ended with the group, and some wait for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
