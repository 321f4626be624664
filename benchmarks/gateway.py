"""What relaying costs: our gateway beside nginx, a uvicorn + httpx proxy and LiteLLM, in one run.

    python -m benchmarks.gateway [--requests 4000] [--streams 32] [--chunks 100] [--rounds 3] [--only ours,nginx]

Every contender is one process that relays to the same stub of an engine, driven by the same client, in turns, so that
a busy machine disturbs all alike. Printed are CPU time (user and system) of the proxy's process per request (a small
JSON chat, 8 connections) and per streamed chunk (one event each 10 ms in each stream), the median time of a request
with one connection above that of asking the stub itself, and ratios to nginx. Trust ratios within a run, not figures.

nginx comes from Debian's `nginx-light`; uvicorn, httpx and LiteLLM from PyPI. What is not installed is left out, with
a line that says so. LiteLLM may lie in another virtual environment: name its program with --litellm PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs
import psutil

from benchmarks.gateway_parts import KEY, ask, stream

NGINX = """
worker_processes 1; daemon off; pid {directory}/nginx.pid; error_log {directory}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off; client_body_temp_path {directory}/body; proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/f; uwsgi_temp_path {directory}/u; scgi_temp_path {directory}/s;
    upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }}
    server {{
        listen 127.0.0.1:{port}; keepalive_requests 1000000;
        location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
                      proxy_buffering off; }}
    }}
}}
"""


@attrs.define
class Cost:
    """One contender's figures, a value per round: microseconds of CPU, milliseconds of time."""

    request: list[float] = attrs.field(factory=list)
    chunk: list[float] = attrs.field(factory=list)
    latency: list[float] = attrs.field(factory=list)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(*command: str, port: int, within: float = 60.0) -> Iterator[psutil.Process]:
    """A server process, once its port answers; ended with the block."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + within
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit(f"{command[0]} did not start (exit code {process.poll()})") from None
                    time.sleep(0.05)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def cpu(process: psutil.Process) -> float:
    """Seconds of CPU that a process and its children have used."""
    used = 0.0
    for one in (process, *process.children(recursive=True)):
        times = one.cpu_times()
        used += times.user + times.system
    return used


Start = Callable[[int, int, Path], tuple[str, ...]]


def contenders(litellm: str) -> dict[str, Start]:
    """What can be run here, and the command that runs it on a port before an engine's port."""
    here: dict[str, Start] = {}
    if nginx := shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin"):

        def start_nginx(port: int, engine: int, directory: Path) -> tuple[str, ...]:
            conf = directory / "nginx.conf"
            conf.write_text(NGINX.format(port=port, engine=engine, directory=directory))
            return nginx, "-c", str(conf), "-e", str(directory / "error.log")

        here["nginx proxy_pass"] = start_nginx
    else:
        print("nginx is not installed (apt install nginx-light): left out")

    def start_part(part: str) -> Start:
        return lambda port, engine, _: (sys.executable, "-m", "benchmarks.gateway_parts", part, str(port), str(engine))

    here["llmgw gateway"] = start_part("ours")
    here["llmgw gateway, metered"] = start_part("metered")
    here["llmgw gateway, idle model"] = start_part("idle")
    if importlib.util.find_spec("uvicorn") and importlib.util.find_spec("httpx"):
        here["uvicorn + httpx"] = start_part("uvicorn")
    else:
        print("uvicorn or httpx is not installed (pip install 'llmgw[benchmarks]'): left out")
    program = litellm or shutil.which("litellm")
    if program:

        def start_litellm(port: int, engine: int, directory: Path) -> tuple[str, ...]:
            params = {"model": "openai/tiny", "api_base": f"http://127.0.0.1:{engine}/v1", "api_key": "none"}
            conf = directory / "litellm.yaml"
            models = [{"model_name": "tiny", "litellm_params": params}]
            conf.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
            return program, "--config", str(conf), "--host", "127.0.0.1", "--port", str(port)

        here["LiteLLM proxy"] = start_litellm
    else:
        print("LiteLLM is not installed (pip install 'litellm[proxy]', or --litellm PATH): left out")
    return here


def measure(port: int, process: psutil.Process | None, cost: Cost, options: argparse.Namespace) -> None:
    """One round with one contender."""
    slow = options.slow if cost is not None else 1
    requests = max(50, options.requests // slow)
    asyncio.run(ask(port, 20, 1))  # connections and caches warm
    times = asyncio.run(ask(port, max(50, requests // 8), 1))
    cost.latency.append(statistics.median(times) * 1e3)
    if process is None:
        return
    before = cpu(process)
    asyncio.run(ask(port, requests, 8))
    cost.request.append((cpu(process) - before) / requests * 1e6)
    before = cpu(process)
    chunks = asyncio.run(stream(port, max(4, options.streams // slow), options.chunks))
    cost.chunk.append((cpu(process) - before) / chunks * 1e6)


def table(costs: dict[str, Cost], direct: Cost) -> str:
    base = costs.get("nginx proxy_pass")
    lines = [
        f"{'':26}{'us/request':>11}{'x nginx':>9}{'us/chunk':>10}{'x nginx':>9}{'added ms':>10}",
    ]
    for name, cost in costs.items():
        request, chunk = statistics.median(cost.request), statistics.median(cost.chunk)
        ratios = ["", ""]
        if base:
            ratios[0] = f"{request / statistics.median(base.request):.2f}"
            ratios[1] = f"{chunk / statistics.median(base.chunk):.2f}"
        added = statistics.median(cost.latency) - statistics.median(direct.latency)
        lines.append(f"{name:26}{request:11.0f}{ratios[0]:>9}{chunk:10.0f}{ratios[1]:>9}{added:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="some contenders, by the beginnings of their names")
    parser.add_argument("--litellm", default="", help="LiteLLM's program, if it is not on PATH")
    options = parser.parse_args()
    only = tuple(name.strip() for name in options.only.split(",") if name.strip())
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = free_port()
        stack.enter_context(
            running(sys.executable, "-m", "benchmarks.gateway_parts", "engine", str(engine), port=engine)
        )
        processes: dict[str, tuple[int, psutil.Process]] = {}
        for name, start in contenders(options.litellm).items():
            if only and not name.lower().startswith(only):
                continue
            port = free_port()
            processes[name] = port, stack.enter_context(running(*start(port, engine, directory), port=port))
        costs = {name: Cost() for name in processes}
        direct = Cost()
        for _ in range(options.rounds):
            options.slow = 1
            measure(engine, None, direct, options)
            for name, (port, process) in processes.items():
                # The slow ones do a share of the work; the figures are per request.
                options.slow = 20 if name.startswith("LiteLLM") else 4 if name.startswith("uvicorn") else 1
                measure(port, process, costs[name], options)
    print(table(costs, direct))


if __name__ == "__main__":
    main()
