#!/usr/bin/env bash
# Gives a machine the Python and the versions that the tests ran with, whatever its image has. May run again.
# The cluster files call it on the head and on every worker; it lies in ~/elastic-train/cluster there.
set -euo pipefail
cd "$(dirname "$0")/.."

export PIP_BREAK_SYSTEM_PACKAGES=1
command -v ~/.local/bin/uv > /dev/null || python3 -m pip install --user --quiet uv==0.13.8
[ -x .venv/bin/python ] || ~/.local/bin/uv venv --quiet --managed-python --python 3.11 .venv
~/.local/bin/uv pip install --quiet --python .venv/bin/python --constraint constraints.txt --editable .
