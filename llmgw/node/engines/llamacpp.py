"""llama.cpp's server: one GGUF model, on GPUs or on a CPU, of one node or of several by its RPC back end.

Facts of b10068 to b11434: the port opens first and /health says 503 while the model loads; SIGTERM ends it at once, so
draining is the gateway's; `-c` is the context of all slots together; the request's model name is ignored.

Over several nodes each follower runs `rpc-server`, which lends its devices to the leader's server and is sent its part
of the weights. It knows no authentication, so it listens only where the leader reaches it; it serves one client at a
time, and so belongs to one replica. A member that is not there when the server starts is left out without a word (up
to b10068), hence the rehearsal; one that goes away while nothing is asked is noticed by nobody, hence the tokens that
the node has made. The protocol must be the same on all members: the plane places them by version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv4Address
from pathlib import Path

import attrs

from llmgw.node import files
from llmgw.node.engines import Asking, Command, Listens, Objection, Seat
from llmgw.node.engines.causes import Cause, Ended, probable
from llmgw.node.engines.common import general, memory
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.flags import conflicts, given, taken, value, whole
from llmgw.node.engines.known import LLAMACPP
from llmgw.node.engines.shape import portless
from llmgw.node.engines.wires import rpc_peers
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
    "--rpc": "the plane decides which nodes a replica has",
    **dict.fromkeys(
        ("-h", "--help", "--usage", "--version", "--list-devices", "-cl", "--cache-list", "--completion-bash"),
        "it makes the engine print and leave",
    ),
}
#: Most options have a variable beside them, which counts where the option is not given.
_VARIABLES = {"LLAMA_ARG_" + name[2:].replace("-", "_").upper(): why for name, why in _OURS.items() if name[:2] == "--"}
_VARIABLES["LLAMA_API_KEY"] = _OURS["--api-key"]
_THREADS = ("-t", "--threads")
_CONTEXT = ("-c", "--ctx-size")
_LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_SPLIT = ("-ts", "--tensor-split")
_ALL = "99"  # more layers than any model has
_HTTP, _SLOTS = ("--threads-http",), ("-np", "--parallel")
#: Each request holds one of these threads from its arrival to its end. By default there are about as many as slots, and
#: when all are held nobody answers for the engine's health. They cost some kilobytes each.
_HTTP_THREADS = 128
_LISTED = re.compile(r"^\s*RPC\d+(?:\[\d+\])?\s*:\s*(?P<peer>\S+:\d+)")
_REHEARSAL_SECONDS = 30.0


@attrs.frozen
class PeersAnswer:
    """The rehearsal of a leader: each of its peers must offer a device now."""

    argv: tuple[str, ...]
    peers: tuple[str, ...]
    within: float = _REHEARSAL_SECONDS

    def objection(self, lines: Sequence[str]) -> Objection | None:
        there = {found["peer"] for line in lines if (found := _LISTED.match(line))}
        if not (absent := [peer for peer in self.peers if peer not in there]):
            return None
        said = next((line.strip() for line in reversed(lines) if any(peer in line for peer in absent)), "")
        words = f"no device of {', '.join(absent)} can be had" + (f" ({said})" if said else "")
        return Objection(
            "peer-missing",
            f"{words}; {len(self.peers) - len(absent)} of {len(self.peers)} peers answered",
            "look whether its rpc-server runs there (`llmgw ctl logs`), at the same version, "
            "and whether a firewall lets this node reach that port",
        )


class LlamaCpp:
    """The adapter of llama.cpp."""

    name = "llamacpp"

    def ports(self, spec: ShardSpec) -> tuple[str, ...]:
        return ("rpc",) if spec.rank else ("http",)

    def weights(self, spec: ShardSpec) -> bool:
        return not spec.rank

    def validate(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> tuple[Objection, ...]:
        return tuple(self._objections(spec, facts, contents))

    def _objections(self, spec: ShardSpec, facts: Register, contents: Contents | None) -> list[Objection]:
        found = [*general(spec, facts, contents), *conflicts(spec.args, _OURS), *taken(spec.env, _VARIABLES)]
        if spec.resources.cpu_threads and given(spec.args, *_THREADS):
            found += conflicts(spec.args, dict.fromkeys(_THREADS, "the profile's cpu_threads say it"))
        if spec.context is not None and given(spec.args, *_CONTEXT):
            found += conflicts(spec.args, dict.fromkeys(_CONTEXT, "the profile's context says it"))
        alone = len(spec.peers) < 2
        if alone and not spec.gpus and (layers := whole(spec.args, *_LAYERS)) is not None and layers > 0:
            found.append(
                Objection("bad-argument", f"{layers} layers for a GPU, but the shard has none", "ask for GPUs")
            )
        if not alone:
            found += _members(spec)
        if spec.rank:
            return found
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
        if contents.layers is not None and contents.layers + 1 < len(spec.peers) - 1:
            found.append(
                Objection(
                    "bad-shape",
                    f"the model's {contents.layers} layers cannot be spread over {len(spec.peers)} nodes",
                    "use fewer nodes",
                )
            )
        if not spec.gpus:
            found += memory(spec, contents)
        return found

    def command(self, spec: ShardSpec, seat: Seat) -> Command | Objection:
        if spec.rank:
            return _follower(spec, seat)
        threads = () if given(spec.args, *_THREADS) else ("-t", str(seat.cpu_threads))
        peers = rpc_peers(spec)
        context = ("-c", str(spec.context)) if spec.context is not None else ()
        argv = (
            *seat.found.command,
            *("-m", seat.model),
            *("-a", spec.model),
            *("--host", seat.listen),
            *("--port", str(seat.ports["http"])),
            *threads,
            *context,
            *_offload(spec, seat, peers),
            *("--metrics", "--no-ui", "--offline", "--log-colors", "off"),
            *_http(spec),
            *spec.args,
        )
        rehearsal = (
            PeersAnswer((*seat.found.command, "--rpc", ",".join(peers), "--list-devices"), peers) if peers else None
        )
        return Command(argv, _env(seat), cwd=str(Path(seat.model).parent), rehearsal=rehearsal)

    def asking(self, spec: ShardSpec) -> Asking | Listens:
        if spec.rank:
            return Listens("rpc")
        pooling = given(spec.args, "--embedding", "--embeddings", "--rerank", "--reranking")
        return Asking(
            token=not pooling,
            running=("llamacpp:requests_processing",),
            waiting=("llamacpp:requests_deferred",),
            # Its tokens are counted when a request ends: until then only its decoding steps show that it works.
            made=("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total"),
        )

    def cause(self, lines: Sequence[str], ended: Ended) -> Cause | None:
        found = probable(LLAMACPP, lines, ended)
        if found is None and ended.signal_name == "SIGPIPE":
            return Cause(
                "peer-lost",
                "the rpc-server died of writing to a leader that had gone before its turn",
                "look at the leader's log",
            )
        return found


def _env(seat: Seat) -> dict[str, str]:
    # An abort would otherwise start a debugger on the process and hang there.
    return {"GGML_NO_BACKTRACE": "1", **seat.found.env}


def _members(spec: ShardSpec) -> list[Objection]:
    """What keeps a replica of several nodes from being one."""
    found = [portless(spec, rank, "rpc") for rank in range(1, len(spec.peers))]
    for peer in spec.peers[1:]:
        try:
            IPv4Address(peer)
        except AddressValueError:
            found.append(
                Objection(
                    "no-interface",
                    f"llama.cpp's rpc-server listens on an IPv4 address only, and a member is at {peer!r}",
                    "give that node an IPv4 address in its settings (`address`)",
                )
            )
    return [objection for objection in found if objection is not None]


def _http(spec: ShardSpec) -> tuple[str, ...]:
    if given(spec.args, *_HTTP) or "LLAMA_ARG_THREADS_HTTP" in spec.env:
        return ()
    slots = whole(spec.args, *_SLOTS) or files.integer(spec.env.get("LLAMA_ARG_N_PARALLEL")) or 0
    return ("--threads-http", str(max(_HTTP_THREADS, 2 * slots)))


def _offload(spec: ShardSpec, seat: Seat, peers: tuple[str, ...]) -> tuple[str, ...]:
    """Where the layers go, as far as the profile does not say it.

    With GPUs all of them, over the GPUs of all members by their free memory, as the engine does it. On CPUs the leader
    keeps its share and the others get as many each.
    """
    mine = given(spec.args, "-dev", "--device", *_LAYERS)
    if not peers:
        return () if spec.gpus or mine else ("-dev", "none", "-ngl", "0")
    lent: tuple[str, ...] = ("--rpc", ",".join(peers))
    if spec.gpus or not seat.layers:
        return lent if mine else (*lent, "-ngl", _ALL)
    share = seat.layers // len(spec.peers)
    if not mine:
        lent = (*lent, "-ngl", str(seat.layers - share + 1))  # the output layer counts as one
    return lent if given(spec.args, *_SPLIT) else (*lent, "-ts", ",".join("1" for _ in peers))


def _follower(spec: ShardSpec, seat: Seat) -> Command | Objection:
    if (program := seat.found.programs.get("rpc-server")) is None:
        return Objection(
            "engine-missing",
            f"there is no rpc-server beside {seat.found.command[0]}",
            "install a build of llama.cpp with its RPC back end (GGML_RPC=ON)",
        )
    threads = value(spec.args, *_THREADS) or str(seat.cpu_threads)
    # A CPU shard must not touch a card; without a word it would take every device but the CPU.
    device = () if spec.gpus else ("-d", "CPU")
    return Command(
        (program, "-H", spec.peers[spec.rank], "-p", str(seat.ports["rpc"]), "-t", threads, *device), _env(seat)
    )
