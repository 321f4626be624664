"""The environment an engine runs in: nothing of the agent's that could change what the engine does.

Every option of llama-server has an environment twin (LLAMA_ARG_*), vLLM and SGLang read dozens of variables, and a
proxy meant for downloads would catch the engine's calls to its own peers. What a profile's `env` sets is meant, so
it stays. NCCL_*, GLOO_* and UCX_* stay too: they name a node's interfaces, which differ by node and so belong to
the agent's unit. Only where the plane writes them for a replica of several nodes, from what it knows of the wires of
all of them, the agent's are left out, family by family: half of each would be a network that nobody meant. A profile's
`env` stands above both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmgw.wire.facts import Gpu, ShardId, ShardSpec

_PREFIXES = (
    "LLAMA_",
    "GGML_",
    "VLLM_",
    "SGLANG_",
    "SGL_",
    "LLMGW_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "OMP_",
    "KMP_",
    "HF_HUB_",
    "PYTHON",
    "LD_",
    "MALLOC_",
    "SPT_",
    "CUDA_",
    "RAY_",
)
_NAMES = frozenset(
    [
        "http_proxy",
        "https_proxy",
        "ftp_proxy",
        "all_proxy",
        "no_proxy",
        "glibc_tunables",
        "invocation_id",
        "journal_stream",
        "notify_socket",
        "listen_fds",
        "listen_pid",
        "listen_fdnames",
        "watchdog_pid",
        "watchdog_usec",
        "mainpid",
        "managerpid",
        "systemd_exec_pid",
        "virtual_env",
        "nvidia_visible_devices",
        "world_size",
        "rank",
        "local_rank",
        "master_addr",
        "master_port",
        "credentials_directory",
        "memory_pressure_watch",
        "memory_pressure_write",
        "oldpwd",
        "columns",
        "lines",
        "ls_colors",
        "ssh_auth_sock",
        "ssh_connection",
        "ssh_client",
        "ssh_tty",
        "display",
        "xauthority",
    ]
)
_NETWORK = ("NCCL_", "GLOO_", "UCX_")
#: Kept although a prefix above says otherwise: without it CUDA libraries of the system are not found.
_KEPT = frozenset({"LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH"})

STATE, SHARD, GENERATION, TOKEN, PROBE = "LLMGW_STATE", "LLMGW_SHARD", "LLMGW_GENERATION", "LLMGW_TOKEN", "LLMGW_PROBE"


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment without what an engine would mistake for its own settings."""
    return {
        name: value
        for name, value in env.items()
        if name in _KEPT or not (name.upper().startswith(_PREFIXES) or name.lower() in _NAMES)
    }


def visible_gpus(gpus: Iterable[str]) -> dict[str, str]:
    """Only the chosen GPUs, by uuid: numbers mean different cards to different programs.

    MIG uuids are strings as well.
    """
    chosen = ",".join(gpus)
    if chosen:
        return {"CUDA_VISIBLE_DEVICES": chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # Nothing chosen is not "all": a CPU shard must not touch a card, through CUDA or through Vulkan.
    return {"CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""}


def engine_environment(
    agent: Mapping[str, str],
    own: Mapping[str, str],
    spec: ShardSpec,
    *,
    shard: ShardId,
    generation: int,
    token: str,
    state: str,
) -> dict[str, str]:
    """The whole environment of one run: the agent's, the engine's `own` part, the plane's `network`, the profile's
    `env`; what comes later wins.
    """
    return {
        **_agreeing(scrubbed(agent), spec.network),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",
        "PYTHONNOUSERSITE": "1",
        # Several engines share a machine: threads that spin while they wait for each other slow all of them down.
        "OMP_WAIT_POLICY": "passive",
        "DO_NOT_TRACK": "1",
        # setproctitle would write over the environment that proves whose process this is.
        "SPT_NOENV": "1",
        **visible_gpus(spec.gpus),
        **own,
        **spec.network,
        **{name: value for name, value in spec.env.items() if not name.startswith("LLMGW_")},
        STATE: state,
        SHARD: shard,
        GENERATION: str(generation),
        TOKEN: token,
    }


def _agreeing(agent: Mapping[str, str], network: Mapping[str, str]) -> dict[str, str]:
    """The agent's environment without the families of names of which the plane sets any."""
    families = tuple(family for family in _NETWORK if any(name.startswith(family) for name in network))
    return {name: value for name, value in agent.items() if not name.startswith(families)}


def smallest_memory(spec: ShardSpec, gpus: Iterable[Gpu]) -> int | None:
    """The memory in bytes of the smallest GPU (or MIG slice) that the shard was given; None when it is not known."""
    sizes = {gpu.uuid: gpu.memory_bytes for gpu in gpus}
    sizes |= {mig.uuid: mig.memory_bytes for gpu in gpus for mig in gpu.mig_devices}
    known = [size for uuid in spec.gpus if (size := sizes.get(uuid)) is not None]
    return min(known) if known and len(known) == len(spec.gpus) else None
