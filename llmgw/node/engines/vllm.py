"""vLLM: safetensors models on GPUs of one node or several (without Ray), or on a CPU with its CPU build.

Facts of 0.32: the port is bound early but accepts only once the engine is ready, so "refused" is loading and there
is no 503 before; afterwards 503 on /health means that the engine core is dead while the API server still answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.node.engines import Asking, Command, Objection, Seat
from llmgw.node.engines.causes import Cause, Ended, probable
from llmgw.node.engines.common import general, gpu_weights, memory, utilization
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.flags import conflicts, given, shortened, taken, value
from llmgw.node.engines.known import VLLM
from llmgw.node.engines.shape import Sizes, misfits, portless
from llmgw.node.engines.wires import NCCL_TELLS
from llmgw.wire.agent import Register
from llmgw.wire.facts import ShardSpec

_SET = "the node sets it"
_MEMBERS = "the plane decides which nodes a replica has"
_OURS = {
    **dict.fromkeys(("--model", "--revision"), "name the model by the profile's source"),
    "--served-model-name": "the model is served under its own name",
    **dict.fromkeys(("--host", "--port", "--uds", "--root-path", "--headless"), _SET),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"), _MEMBERS),
    **dict.fromkeys(
        (
            "--data-parallel-address",
            "-dpa",
            "--data-parallel-rpc-port",
            "-dpp",
            "--data-parallel-start-rank",
            "-dpr",
            "--data-parallel-rank",
            "-dpn",
            "--data-parallel-size-local",
            "-dpl",
            "--data-parallel-hybrid-lb",
            "-dph",
            "--data-parallel-external-lb",
            "-dpe",
        ),
        _MEMBERS,
    ),
    "--config": "a file could set what the node sets: give arguments",
    "--api-key": "keys are the gateway's: set them there",
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), "the gateway speaks plain HTTP to engines"),
    **dict.fromkeys(("-h", "--help", "--version", "-v"), "it makes the engine print and leave"),
}
_VARIABLES = {
    "VLLM_API_KEY": _OURS["--api-key"],
    # The same for all replicas of a profile, so for two on one node.
    **dict.fromkeys(("VLLM_PORT", "VLLM_DP_MASTER_PORT"), _SET),
}
_TENSOR = ("--tensor-parallel-size", "-tp")
_PIPELINE = ("--pipeline-parallel-size", "-pp")
_DATA = ("--data-parallel-size", "-dp")
_CONTEXT = ("--max-model-len",)
#: The last of them is what vLLM itself says to give, in its log.
_MEMORY = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-memory")
_CACHE_GIB = 4  # of a CPU shard that asked for no memory: what vLLM took before it took a share of all
_EXECUTOR = ("--distributed-executor-backend",)
_WAIT = ("--distributed-timeout-seconds",)
_POOLING = ("--runner", "--task", "--convert")
_MAKES_TOKENS = (None, "auto", "generate", "none")
_READ = (*_OURS, *_TENSOR, *_PIPELINE, *_DATA, *_CONTEXT, *_MEMORY, *_EXECUTOR, *_WAIT, *_POOLING)


class Vllm:
    """The adapter of vLLM."""

    name = "vllm"

    def ports(self, spec: ShardSpec) -> tuple[str, ...]:
        # "internal+" is a block: VLLM_PORT is the first of several that vLLM counts up from, for data parallelism too.
        # (VLLM_DP_MASTER_PORT is not given: vLLM looks for ever for one outside of the ten numbers that follow it.)
        if spec.rank:
            return ("internal+",)
        return ("http", "master", "internal+") if len(spec.peers) > 1 else ("http", "internal+")

    def weights(self, spec: ShardSpec) -> bool:
        return True

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        return tuple(self._objections(spec, facts, contents))

    def _objections(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> list[Objection]:
        found = [*general(spec, facts, contents), *conflicts(spec.args, _OURS), *taken(spec.env, _VARIABLES)]
        found += shortened(spec.args, *_READ)
        if spec.context is not None and given(spec.args, *_CONTEXT):
            found += conflicts(spec.args, dict.fromkeys(_CONTEXT, "the profile's context says it"))
        if given(spec.args, *_EXECUTOR) and len(spec.peers) > 1:
            found.append(
                Objection("bad-argument", "an executor cannot be chosen for a replica of several nodes", _MEMBERS)
            )
        if len(spec.peers) > 1 and (missing := portless(spec, 0, "master")) is not None:
            found.append(missing)
        sizes = Sizes.of(spec, _TENSOR, _PIPELINE, _DATA)
        found += sizes.bad
        if sizes.data > 1 and sizes.nodes > 1:
            found.append(
                Objection(
                    "bad-shape",
                    f"{_DATA[0]} {sizes.data} over several nodes needs a server on each of them",
                    "ask for more replicas instead: the gateway spreads requests over them",
                )
            )
        found += misfits(spec, contents, sizes, sizes.tensor * sizes.pipeline * sizes.data)
        if contents is not None:
            if contents.kind == "unknown" and not contents.faults:
                found.append(
                    Objection("model-unsupported", f"{contents.path} is no model that vLLM can load", "give a folder")
                )
            found += gpu_weights(spec, contents) if spec.gpus else memory(spec, contents)
        return found

    def command(self, spec: ShardSpec, seat: Seat) -> Command:
        nodes = max(1, len(spec.peers))
        share = utilization(spec, seat.gpu_memory_bytes)
        argv: list[str] = [*seat.found.command, "serve", seat.model]
        if seat.revision:
            argv += ["--revision", seat.revision]
        argv += ["--served-model-name", spec.model]
        if spec.rank == 0:
            argv += ["--host", seat.listen, "--port", str(seat.ports["http"])]
        if not given(spec.args, *_TENSOR, *_PIPELINE, *_DATA) and max(1, len(spec.gpus)) * nodes > 1:
            argv += ["--tensor-parallel-size", str(max(1, len(spec.gpus)) * nodes)]
        if spec.context is not None:
            argv += ["--max-model-len", str(spec.context)]
        if share is not None and not given(spec.args, *_MEMORY):
            argv += ["--gpu-memory-utilization", share]
        if nodes > 1:
            argv += ["--nnodes", str(nodes), "--node-rank", str(spec.rank)]
            argv += ["--master-addr", spec.peers[0], "--master-port", str(spec.peer_ports[0]["master"])]
            if not given(spec.args, *_WAIT):
                # The default is ten minutes of silence when a member never comes.
                argv += [*_WAIT, str(max(30, int(spec.ready_within)))]
            if spec.rank:
                argv += ["--headless"]
        return Command((*argv, *spec.args), self._env(spec, seat))

    def _env(self, spec: ShardSpec, seat: Seat) -> dict[str, str]:
        env = {
            "VLLM_PORT": str(seat.ports["internal+"]),
            "VLLM_HOST_IP": spec.peers[spec.rank] if len(spec.peers) > 1 else "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(max(60, int(spec.ready_within))),
            "OMP_NUM_THREADS": str(seat.cpu_threads if not spec.gpus else 1),
        }
        if seat.model.startswith("/"):
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if not spec.gpus:
            env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
            if len(spec.peers) < 2:
                env["GLOO_SOCKET_IFNAME"] = "lo"
            if not given(spec.args, *_MEMORY):
                # Without a word each worker would take 92 % of the machine's memory. Of what was asked for, a part is
                # for the cache; the rest is for weights and three Python processes.
                sizes = Sizes.of(spec, _TENSOR, _PIPELINE, _DATA)
                here = max(1, sizes.tensor * sizes.pipeline * sizes.data // sizes.nodes)
                asked = spec.resources.memory_bytes
                env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, (asked * 2 // 5 >> 30) // here) if asked else _CACHE_GIB)
        if len(spec.peers) > 1 and spec.gpus:
            env |= NCCL_TELLS
        return {**env, **seat.found.env}

    def asking(self, spec: ShardSpec) -> Asking | None:
        if spec.rank:
            return None
        return Asking(
            dead_after=2,
            token=all(value(spec.args, name) in _MAKES_TOKENS for name in _POOLING),
            running=("vllm:num_requests_running",),
            waiting=("vllm:num_requests_waiting",),
            made=("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        )

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        return probable(VLLM, lines, ended)
