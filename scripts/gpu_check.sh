#!/bin/sh
# What a single GPU can show: the tests that need one, and weft beside torch FSDP2. Writes docs/results/gpu.md.
#
#     scripts/gpu_check.sh                        # PYTHON=python3.12 scripts/gpu_check.sh for another one
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"

"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "gpu_check: torch sees no GPU; run this on a machine that has one" >&2
    exit 1
}

output=$(mktemp)
trap 'rm -f "$output"' EXIT
status=0
{
    echo "# On a GPU"
    echo
    echo "Written by \`scripts/gpu_check.sh\` on $(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
    echo
    "$PYTHON" -c 'import platform, torch
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")'
    echo
    echo "## Tests"
    echo
    echo '```'
    "$PYTHON" -m pytest -q tests/gpu 2>&1 | tail -n 40
    echo '```'
    echo
    echo "## Beside torch FSDP2"
    echo
    echo '```'
    "$PYTHON" -m weft bench gpu --ranks 1 2>&1
    echo '```'
} >"$output" || status=$?
cat "$output"
mkdir -p docs/results
cp "$output" docs/results/gpu.md
# A pipe hides the exit code of pytest: its last line says what it was.
if grep -qE '^[0-9]+ failed|[0-9]+ error' "$output"; then status=1; fi
exit "$status"
