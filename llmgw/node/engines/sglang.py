"""SGLang: safetensors models on GPUs of one node or several.

Facts of 0.5: the port opens once the schedulers are ready, and /health generates a token, which may take 20 s under
load. A follower answers 200 whatever happens, so only rank 0 is asked. After any exception it SIGKILLs its own
tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmgw.node.engines import Asking, Command, Objection, Seat
from llmgw.node.engines.causes import Cause, Ended, probable
from llmgw.node.engines.common import general, gpu_weights, memory, utilization
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.flags import conflicts, given, shortened
from llmgw.node.engines.known import SGLANG
from llmgw.node.engines.shape import Sizes, misfits, portless
from llmgw.node.engines.wires import NCCL_TELLS
from llmgw.wire.agent import Register
from llmgw.wire.facts import ShardSpec

_SET = "the node sets it"
_MEMBERS = "the plane decides which nodes a replica has"
_OURS = {
    **dict.fromkeys(("--model-path", "--model", "--revision"), "name the model by the profile's source"),
    "--served-model-name": "the model is served under its own name",
    **dict.fromkeys(("--host", "--port", "--nccl-port", "--enable-metrics"), _SET),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--base-gpu-id"), _MEMBERS),
    "--config": "a file could set what the node sets: give arguments",
    **dict.fromkeys(("--api-key", "--admin-api-key"), "keys are the gateway's: set them there"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), "the gateway speaks plain HTTP to engines"),
    **dict.fromkeys(("-h", "--help", "--version"), "it makes the engine print and leave"),
}
_TENSOR = ("--tp-size", "--tp", "--tensor-parallel-size")
_PIPELINE = ("--pp-size", "--pp", "--pipeline-parallel-size")
_DATA = ("--dp-size", "--dp", "--data-parallel-size")
_CONTEXT = ("--context-length",)
_MEMORY = ("--mem-fraction-static",)
_DP_ATTENTION = "--enable-dp-attention"
_EMBEDDING = "--is-embedding"
_WAIT = "--dist-timeout"
_READ = (*_OURS, *_TENSOR, *_PIPELINE, *_DATA, *_CONTEXT, *_MEMORY, _DP_ATTENTION, _EMBEDDING, _WAIT)


class Sglang:
    """The adapter of SGLang."""

    name = "sglang"

    def ports(self, spec: ShardSpec) -> tuple[str, ...]:
        # "dist+" is a block: with DP attention up to thirteen ports after it are used as well. A follower has "http".
        if len(spec.peers) < 2:
            return ("http", "nccl", "dist+") if given(spec.args, _DP_ATTENTION) else ("http", "nccl")
        return ("http",) if spec.rank else ("http", "dist+")

    def weights(self, spec: ShardSpec) -> bool:
        return True

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        return tuple(self._objections(spec, facts, contents))

    def _objections(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> list[Objection]:
        found = [*general(spec, facts, contents), *conflicts(spec.args, _OURS)]
        found += shortened(spec.args, *_READ)
        if spec.context is not None and given(spec.args, *_CONTEXT):
            found += conflicts(spec.args, dict.fromkeys(_CONTEXT, "the profile's context says it"))
        if not spec.gpus and not given(spec.args, "--device"):
            found.append(
                Objection(
                    "gpu-missing",
                    "SGLang's released builds need GPUs",
                    "ask for GPUs, or give --device cpu with a CPU build",
                )
            )
        if len(spec.peers) > 1 and (missing := portless(spec, 0, "dist+")) is not None:
            found.append(missing)
        found += _world(spec, contents)
        if contents is not None:
            if contents.kind == "unknown" and not contents.faults:
                found.append(
                    Objection("model-unsupported", f"{contents.path} is no model that SGLang can load", "give a folder")
                )
            found += gpu_weights(spec, contents) if spec.gpus else memory(spec, contents)
        return found

    def command(self, spec: ShardSpec, seat: Seat) -> Command:
        nodes = max(1, len(spec.peers))
        share = utilization(spec, seat.gpu_memory_bytes)
        argv: list[str] = [*seat.found.command, "serve", "--model-path", seat.model]
        if seat.revision:
            argv += ["--revision", seat.revision]
        argv += ["--served-model-name", spec.model, "--host", seat.listen, "--port", str(seat.ports["http"])]
        if not given(spec.args, *_TENSOR, *_PIPELINE, *_DATA) and max(1, len(spec.gpus)) * nodes > 1:
            argv += ["--tp-size", str(max(1, len(spec.gpus)) * nodes)]
        if spec.context is not None:
            argv += ["--context-length", str(spec.context)]
        if share is not None and not given(spec.args, *_MEMORY):
            argv += ["--mem-fraction-static", share]
        if nodes > 1:
            argv += ["--nnodes", str(nodes), "--node-rank", str(spec.rank)]
            argv += ["--dist-init-addr", f"{_bracketed(spec.peers[0])}:{spec.peer_ports[0]['dist+']}"]
            if not given(spec.args, _WAIT):
                argv += [_WAIT, str(max(30, int(spec.ready_within)))]
        else:
            argv += ["--nccl-port", str(seat.ports["nccl"])]
            if given(spec.args, _DP_ATTENTION):
                # Else it takes the numbers from 233 above its HTTP port on, which may be another shard's.
                argv += ["--dist-init-addr", f"127.0.0.1:{seat.ports['dist+']}"]
        argv += ["--enable-metrics"]
        env = {"OMP_NUM_THREADS": str(seat.cpu_threads if not spec.gpus else 1)}
        if seat.model.startswith("/"):
            env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if nodes > 1:
            env["SGLANG_HOST_IP"] = spec.peers[spec.rank]
            if spec.gpus:
                env |= NCCL_TELLS
        return Command((*argv, *spec.args), {**env, **seat.found.env})

    def asking(self, spec: ShardSpec) -> Asking | None:
        if spec.rank:
            return None
        return Asking(
            timeout=25.0,  # above the 20 s that its health check gives itself for a token
            token=not given(spec.args, _EMBEDDING),
            running=("sglang:num_running_reqs",),
            waiting=("sglang:num_queue_reqs",),
            # Its tokens are counted when a request ends: until then what they take of its cache shows that it works.
            made=("sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:num_used_tokens"),
        )

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        return probable(SGLANG, lines, ended)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _world(spec: ShardSpec, contents: Contents | None) -> list[Objection]:
    sizes = Sizes.of(spec, _TENSOR, _PIPELINE, _DATA)
    found = list(sizes.bad)
    attention = given(spec.args, _DP_ATTENTION)
    if sizes.data > 1 and sizes.nodes > 1 and not attention:
        found.append(
            Objection("bad-shape", "data parallelism over several nodes needs DP attention", f"add {_DP_ATTENTION}")
        )
    # With DP attention the data-parallel groups share the tensor-parallel ones' GPUs.
    world = sizes.tensor * sizes.pipeline * (1 if attention else sizes.data)
    return [*found, *misfits(spec, contents, sizes, world)]
