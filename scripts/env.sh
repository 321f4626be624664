# Sourced by the other scripts: a virtual environment under .venv with everything the project needs.
# It says what it does, does it once, and does it again when pyproject.toml changed.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${LLMGW_VENV:-$root/.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '\033[2m%s\033[0m\n' "$*" >&2; }

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
    apt-get update -qq >/dev/null 2>&1 || say "apt-get update failed; trying with the lists that are here"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
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
    local extras python stamp
    extras=$(IFS=,; echo "$*")
    python=$(find_python) || {
        need_debian python3 python3-venv || exit 1
        python=$(find_python) || { say "llmgw needs Python 3.11 or newer; this system's python3 is older"; exit 1; }
    }
    "$python" -c 'import venv, ensurepip' 2>/dev/null || need_debian python3-venv || exit 1
    stamp="$venv/.llmgw-$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | sha256sum | cut -c1-16)-$extras"
    # The OpenMP library that the CPU build of llama.cpp is linked with.
    case ",$extras," in *,engine,*) need_debian libgomp1 || exit 1 ;; esac
    [ -e "$stamp" ] && return 0
    if [ ! -x "$venv/bin/python" ]; then
        say "making a virtual environment in ${venv#"$root"/}"
        "$python" -m venv "$venv"
    fi
    say "installing llmgw and what it needs (a minute or two the first time)"
    local log
    log=$(mktemp)
    "$venv/bin/pip" install -q --upgrade pip >"$log" 2>&1 || true
    if ! "$venv/bin/pip" install -q -c "$root/scripts/constraints.txt" -e "$root[$extras]" >"$log" 2>&1; then
        cat "$log" >&2
        say "the installation failed; what pip said stands above"
        exit 1
    fi
    rm -f "$log"
    touch "$stamp"
}
