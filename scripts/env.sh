# Sourced by the other scripts: a virtual environment under .venv with everything the project needs.
# It says what it does, does it once, and does it again when pyproject.toml changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LLMGW_VENV:-$root/.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_RETRIES=10 PIP_TIMEOUT=60

say() { printf '\033[2m%s\033[0m\n' "$*" >&2; }

# apt-get COMMAND ARG... on a machine whose network has hiccups, and where others use apt as well (unattended-upgrades).
# Of apt's locks it waits for dpkg's by itself, and is asked again here for those on the lists and on what it downloads.
apt_get() {
    local log failed=0 began=$SECONDS
    log=$(mktemp)
    until LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 -o Acquire::Retries=5 \
        -o APT::Update::Error-Mode=any "$@" >"$log" 2>&1 </dev/null; do
        if grep -q 'Could not get lock' "$log" && [ $((SECONDS - began)) -lt 600 ]; then
            say "apt-get $1 waits: $(grep -m1 'Could not get lock' "$log")"
        elif [ $((failed += 1)) -lt 3 ]; then
            # A run that was cut short leaves dpkg in the middle of its work.
            if grep -q 'dpkg --configure -a' "$log"; then DEBIAN_FRONTEND=noninteractive dpkg --configure -a >&2 || true; fi
            say "apt-get $1 failed; it is tried again"
        else
            tail -n 5 "$log" >&2
            rm -f "$log"
            return 1
        fi
        sleep 20
    done
    rm -f "$log"
}

# Debian packages that are missing: installed when we are root, named when we are not.
need_debian() {
    local missing=()
    for package in "$@"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    if ! command -v apt-get >/dev/null; then
        say "please install what your system calls: ${missing[*]}"
        return 1
    fi
    if [ "$(id -u)" -ne 0 ]; then
        say "please run:  sudo apt-get install --no-install-recommends ${missing[*]}"
        return 1
    fi
    say "installing Debian packages: ${missing[*]}"
    apt_get update || say "apt-get update failed; trying with the lists that are here"
    apt_get install -y --no-install-recommends "${missing[@]}"
}

find_python() {
    for python in "${LLMGW_PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$python" ] && command -v "$python" >/dev/null || continue
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$python"; return; }
    done
    return 1
}

# ensure_venv EXTRA... : the project, editable, with these extras.
ensure_venv() {
    local extras python made stamp
    extras=$(IFS=,; echo "$*")
    python=$(find_python) || {
        need_debian python3 python3-venv || exit 1
        python=$(find_python) || { say "llmgw needs Python 3.11 or newer; this system's python3 is older"; exit 1; }
    }
    "$python" -c 'import venv, ensurepip' 2>/dev/null || need_debian python3-venv || exit 1
    made=.llmgw-$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum | cut -c1-16)
    stamp="$venv/$made-$extras"
    # The OpenMP library that the CPU build of llama.cpp is linked with.
    case ",$extras," in *,engine,*) need_debian libgomp1 || exit 1 ;; esac
    if [ ! -e "$stamp" ]; then install_venv 9<"$root/pyproject.toml"; fi
}

# Make the environment that ensure_venv wants; one at a time, by a lock on its own file 9.
install_venv() {
    local log failed=0
    ! command -v flock >/dev/null || flock 9
    [ ! -e "$stamp" ] || return 0
    # A run that was cut short may have left a new one without anything, pip included.
    [ ! -e "$venv/.llmgw-unfinished" ] || rm -rf "$venv"
    if [ ! -e "$venv" ]; then
        say "making a virtual environment in ${venv#"$root"/}"
        mkdir -p "$venv"
        touch "$venv/.llmgw-unfinished"
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv "$venv"
    say "installing llmgw and what it needs (a minute or two the first time)"
    find "$venv" -maxdepth 1 -name '.llmgw-*' ! -name '.llmgw-unfinished' ! -name "$made-*" -delete
    log=$(mktemp)
    "$venv/bin/python" -m pip install -q --upgrade pip >"$log" 2>&1 || true
    until "$venv/bin/python" -m pip install -q -c "$root/scripts/constraints.txt" -e "$root[$extras]" >"$log" 2>&1; do
        if [ $((failed += 1)) -ge 3 ]; then
            cat "$log" >&2
            say "the installation failed; what pip said stands above"
            exit 1
        fi
        say "pip failed; it is tried again with what it has got so far"
        sleep 10
    done
    rm -f "$log" "$venv/.llmgw-unfinished"
    touch "$stamp"
}
