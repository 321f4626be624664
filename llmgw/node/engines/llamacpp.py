"""llama.cpp's server: one GGUF model, on GPUs or on a CPU.

Facts of b10068 to b11434: the port opens first and /health says 503 while the model loads; SIGTERM ends it at once, so
draining is the gateway's; `-c` is the context of all slots together; the request's model name is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmgw.node.engines import Asking, Command, Objection, Seat
from llmgw.node.engines.causes import Cause, Ended, probable
from llmgw.node.engines.common import general, memory
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.flags import conflicts, given, whole
from llmgw.node.engines.known import LLAMACPP
from llmgw.wire.agent import Register
from llmgw.wire.facts import ShardSpec

_SET = "the node sets it"
_SOURCE = "name the model by the profile's source"
_OURS = {
    **dict.fromkeys(
        (
            "-m",
            "--model",
            "-mu",
            "--model-url",
            "-hf",
            "-hfr",
            "--hf-repo",
            "-hff",
            "--hf-file",
            "-dr",
            "--docker-repo",
        ),
        _SOURCE,
    ),
    **dict.fromkeys(("--models-dir", "--models-preset", "--models-max"), "one shard serves one model"),
    **dict.fromkeys(("-a", "--alias"), "the model is served under its own name"),
    **dict.fromkeys(("--host", "--port", "--reuse-port", "--api-prefix"), _SET),
    **dict.fromkeys(("--api-key", "--api-key-file"), "keys are the gateway's: set them there"),
    **dict.fromkeys(("--ssl-key-file", "--ssl-cert-file"), "the gateway speaks plain HTTP to engines"),
    **dict.fromkeys(("--log-file", "--log-disable"), "the node keeps the output: see `llmgw ctl logs`"),
    **dict.fromkeys(("--metrics", "--ui", "--webui", "--tools", "-ag", "--agent"), _SET),
    **dict.fromkeys(
        ("-h", "--help", "--usage", "--version", "--list-devices", "-cl", "--cache-list", "--completion-bash"),
        "it makes the engine print and leave",
    ),
}
_THREADS = ("-t", "--threads")
_CONTEXT = ("-c", "--ctx-size")
_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")


class LlamaCpp:
    """The adapter of llama.cpp."""

    name = "llamacpp"
    ports: tuple[str, ...] = ("http",)

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        return tuple(self._objections(spec, facts, contents))

    def _objections(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> list[Objection]:
        found = [*general(spec, facts, contents), *conflicts(spec.args, _OURS)]
        if spec.resources.cpu_threads and given(spec.args, *_THREADS):
            found += conflicts(spec.args, dict.fromkeys(_THREADS, "the profile's cpu_threads say it"))
        if spec.context is not None and given(spec.args, *_CONTEXT):
            found += conflicts(spec.args, dict.fromkeys(_CONTEXT, "the profile's context says it"))
        if not spec.gpus and (layers := whole(spec.args, *_LAYERS)) is not None and layers > 0:
            found.append(
                Objection("bad-argument", f"{layers} layers for a GPU, but the shard has none", "ask for GPUs")
            )
        if len(spec.peers) > 1:
            found.append(
                Objection("bad-shape", "llama.cpp serves a replica from one node", "use one node, or another engine")
            )
        if contents is None:
            found.append(
                Objection(
                    "missing-weights", f"{spec.source} is not on this node", "llama.cpp needs a path to a GGUF file"
                )
            )
            return found
        if contents.kind != "gguf" and not contents.faults:
            found.append(
                Objection(
                    "model-unsupported", f"{contents.path} is not a GGUF file", "convert it, or use another engine"
                )
            )
        if not spec.gpus:
            found += memory(spec, contents)
        return found

    def command(self, spec: ShardSpec, seat: Seat) -> Command:
        threads = () if given(spec.args, *_THREADS) else ("-t", str(seat.cpu_threads))
        offload = () if spec.gpus else ("-dev", "none", "-ngl", "0")
        context = ("-c", str(spec.context)) if spec.context is not None else ()
        argv = (
            *seat.found.command,
            *("-m", seat.model),
            *("-a", spec.model),
            *("--host", seat.listen),
            *("--port", str(seat.ports["http"])),
            *threads,
            *context,
            *(() if given(spec.args, "-dev", "--device", *_LAYERS) else offload),
            *("--metrics", "--no-ui", "--offline", "--log-colors", "off"),
            *spec.args,
        )
        # An abort would otherwise start a debugger on the process and hang there.
        env = {"GGML_NO_BACKTRACE": "1", **seat.found.env}
        return Command(argv, env, cwd=str(Path(seat.model).parent))

    def asking(self, spec: ShardSpec) -> Asking | None:
        pooling = given(spec.args, "--embedding", "--embeddings", "--rerank", "--reranking")
        return Asking(
            token=not pooling,
            running=("llamacpp:requests_processing",),
            waiting=("llamacpp:requests_deferred",),
            made=("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
        )

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        return probable(LLAMACPP, lines, ended)
