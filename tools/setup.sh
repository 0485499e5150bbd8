#!/bin/sh
# Makes the virtual environment and installs costlab into it, editable.
#
# A torch that is already there is used as it is: with CUDA through --system-site-packages, so that a GPU box keeps
# its own build. Without an NVIDIA GPU the constraints file keeps pip from fetching a CUDA build of several GB.
set -eu
venv=${1:-.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "costlab needs Python 3.11 or newer; set PYTHON=..." >&2
    exit 1
}
own_cuda=$("$python" -c 'import torch; print(int(torch.version.cuda is not None))' 2>/dev/null || echo 0)
options=""
[ "$own_cuda" = 1 ] && options="--system-site-packages"
[ -x "$venv/bin/python" ] || "$python" -m venv $options "$venv"

constraint=""
if [ "$own_cuda" != 1 ] && ! ls /dev/nvidia[0-9]* >/dev/null 2>&1 && [ ! -e /proc/driver/nvidia/version ]; then
    constraint="-c constraints-cpu.txt"
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install -q $constraint -e '.[dev]'
