"""What a guest boots: Debian's kernel, unpacked and not installed, and a RAM disk with the modules it needs.

Made once and kept; made anew when its recipe changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from subprocess import DEVNULL

import attrs

from tests.rigs.roce.cpio import archive

HERE = Path(__file__).parent / "inside"
#: What the scripts use apt with, on a network with hiccups and beside others that use it.
ENV = Path(__file__).parents[3] / "scripts" / "env.sh"

#: Loaded by hand in the guest: the disk is the host's files over 9p, the adapters are rxe on virtio. rxe checks its
#: packets with crc32, which it does not load by itself.
MODULES = (
    "virtio_pci", "virtio_net", "virtio-rng", "9p", "9pnet_virtio", "overlay", "crc32_generic", "crc32c_generic",
    "rdma_rxe", "ib_uverbs", "rdma_ucm", "8021q", "sch_netem",
)  # fmt: skip
_FOLDERS = (
    "arch/x86/crypto", "crypto", "drivers/char/hw_random", "drivers/infiniband", "drivers/net", "drivers/virtio",
    "fs", "lib", "net",
)  # fmt: skip
#: The commands that making and running guests takes, and the Debian packages they come from.
NEEDS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "depmod": "kmod",
    "dpkg-deb": "dpkg",
    "rdma": "iproute2",
    "ib_write_bw": "perftest",
    "ibv_devices": "ibverbs-utils",
    "timeout": "coreutils",
}


class CannotBuild(Exception):
    """The rig cannot be had on this machine, and why."""


@attrs.frozen
class Image:
    kernel: Path
    initrd: Path


def folder() -> Path:
    """Where images are kept: LLMGW_RIG_CACHE, else below the temporary folder."""
    return Path(os.environ.get("LLMGW_RIG_CACHE") or Path(tempfile.gettempdir()) / "llmgw-rigs") / "roce"


def missing() -> list[str]:
    """Debian packages that are not there."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return sorted({package for program, package in NEEDS.items() if shutil.which(program, path=path) is None})


def install() -> None:
    """Install what is missing. Raises CannotBuild."""
    if packages := missing():
        done = _setup("need_debian", *packages)
        if missing():
            raise CannotBuild(f"{' '.join(packages)} cannot be installed: {done.stderr.strip()[-300:]}")


def image() -> Image:
    """The kernel and the RAM disk, made when they are not there yet. Raises CannotBuild."""
    install()
    recipe = hashlib.sha256()
    for part in (*sorted(HERE.iterdir()), Path(__file__), Path(__file__).with_name("cpio.py")):
        if part.is_file():
            recipe.update(part.read_bytes())
    home = folder()
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = home / recipe.hexdigest()[:12]
        # Whoever tidies the temporary folder looks at files one by one.
        if not all((made / name).exists() for name in ("kernel", "initrd")):
            with tempfile.TemporaryDirectory(dir=home) as temporary:
                _build(_package(home), Path(temporary), made)
    return Image(made / "kernel", made / "initrd")


def _package(home: Path) -> Path:
    """Debian's kernel package: whole, or it is not there."""
    for kept in home.glob("linux-image-*.deb"):
        if subprocess.run(["dpkg-deb", "--fsys-tarfile", kept], stdout=DEVNULL, stderr=DEVNULL).returncode == 0:
            return kept
        kept.unlink()
    with tempfile.TemporaryDirectory(dir=home) as place:
        said = _setup("apt_get", "download", *_kernel_package(), cwd=place)
        if said.returncode:
            # Lists that are missing know no kernel, and old ones one that the mirror does not have any more.
            _setup("apt_get", "update")
            said = _setup("apt_get", "download", *_kernel_package(), cwd=place)
        if said.returncode or not (found := list(Path(place).glob("linux-image-*.deb"))):
            raise CannotBuild(f"Debian's kernel cannot be downloaded: {said.stderr.strip()[-300:]}")
        return found[0].rename(home / found[0].name)


def _kernel_package() -> tuple[str, ...]:
    """What to ask of apt-get for the newest kernel that the lists know."""
    shown = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"],
        capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    names = [line.split()[-1] for line in shown.stdout.splitlines() if "Depends: linux-image-" in line]
    # apt drops to a user of its own, which may not write into a folder of root's.
    return "-o", "APT::Sandbox::User=root", *(names[:1] or ["linux-image-amd64"])


def _setup(function: str, *words: str, cwd: str | Path = HERE) -> subprocess.CompletedProcess[str]:
    """Call what the scripts use, too."""
    command = ["bash", "-c", 'source "$0" && "$@"', str(ENV), function, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def _build(package: Path, work: Path, made: Path) -> None:
    tree = work / "tree"
    tree.mkdir()
    wanted = ["./boot/vmlinuz-*", "./lib/modules/*/modules.*"]
    wanted += [f"./lib/modules/*/kernel/{folder}/*" for folder in _FOLDERS]
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpacking:
        # A pattern that this package has no file for is no error.
        subprocess.run(
            ["tar", "-x", "-C", tree, "--wildcards", *wanted],
            stdin=unpacking.stdout,
            check=False,
            stderr=subprocess.DEVNULL,
        )
    (release,) = (path.name for path in (tree / "lib/modules").iterdir())
    _run("depmod", "-b", tree, release)
    disk = work / "disk"
    for name in ("bin", "sbin", "proc", "sys", "dev", "host", "memory", "root"):
        (disk / name).mkdir(parents=True)
    _modules(tree, disk, release)
    shutil.copy(shutil.which("busybox") or "/bin/busybox", disk / "bin/busybox")
    # The kernel starts this one by name when it wants a module (tc's netem).
    (disk / "sbin/modprobe").symlink_to("/bin/busybox")
    for name, target in (("init.sh", "init"), ("up.sh", "up.sh"), ("execd.py", "execd.py")):
        shutil.copy(HERE / name, disk / target)
        (disk / target).chmod(0o755)
    out = work / "out"
    out.mkdir()
    (out / "kernel").write_bytes(_kernel(next((tree / "boot").glob("vmlinuz-*")).read_bytes()))
    (out / "initrd").write_bytes(archive(disk))
    shutil.rmtree(made, ignore_errors=True)
    out.rename(made)


def _modules(tree: Path, disk: Path, release: str) -> None:
    """Copy the modules and whatever they depend on, without their debugging symbols."""
    files: set[Path] = set()
    for module in MODULES:
        shown = _run("modprobe", "-d", tree, "-S", release, "--show-depends", "--ignore-install", module)
        files |= {Path(line.split()[1]) for line in shown.splitlines() if line.startswith("insmod ")}
    for file in sorted(files):
        target = disk / file.relative_to(tree)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
        if shutil.which("strip"):
            _run("strip", "--strip-debug", target)
    for name in ("modules.builtin", "modules.order", "modules.builtin.modinfo"):
        shutil.copy(tree / "lib/modules" / release / name, disk / "lib/modules" / release / name)
    _run("depmod", "-b", disk, release)


def _kernel(packed: bytes) -> bytes:
    """The kernel unpacked here, which is quick, instead of by itself in an emulated CPU, which is not.

    Offsets are those of the x86 boot protocol: the payload's place and length are at 0x248 and 0x24c, relative to
    the end of the set-up sectors. A payload that is not xz is left to the kernel.
    """
    start = ((packed[0x1F1] or 4) + 1) * 512 + int.from_bytes(packed[0x248:0x24C], "little")
    payload = packed[start : start + int.from_bytes(packed[0x24C:0x250], "little")]
    return lzma.LZMADecompressor().decompress(payload) if payload[:6] == b"\xfd7zXZ\0" else packed


def _run(*command: str | Path) -> str:
    environ = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(map(str, command[:3]))} failed: {done.stderr.strip()[-300:]}")
    return done.stdout
