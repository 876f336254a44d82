#!/bin/sh
# What a single GPU can show: the tests that need one, once more under torch's stream sanitizer, and weft beside torch
# FSDP2. Writes docs/results/gpu.md, also when something fails, then with the failure. Each part has a time limit, and
# all of them together end within 40 minutes.
#
#     scripts/gpu_check.sh                        # PYTHON=python3.12 scripts/gpu_check.sh for another one
#     scripts/gpu_check.sh --rehearse OUTPUT.md   # without a GPU: the same parts on the CPU, with checked streams
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"

target=docs/results/gpu.md
sanitizer=TORCH_CUDA_SANITIZER=1
some=
where='import platform, torch
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")'
if [ "${1:-}" = --rehearse ]; then
    target=$2
    export WEFT_REHEARSE=1
    sanitizer=WEFT_REHEARSE=1 # that of torch wants CUDA
    some="-k two_axes"        # without it they are the tests of the part before
    where='import platform, torch; print(f"no GPU: a rehearsal; torch {torch.__version__}, Python {platform.python_version()}")'
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: torch sees no GPU; run this on a machine that has one, or --rehearse OUTPUT.md here" >&2
    exit 1
fi

output=$(mktemp)
status=0

# What is done so far is the report, also of a check that is interrupted.
finish() {
    mkdir -p "$(dirname "$target")"
    cp "$output" "$target"
    rm -f "$output"
}
trap finish EXIT
trap 'exit 130' INT TERM

# part TITLE SECONDS COMMAND...: its last lines, and how it ended. WEFT_PART_SECONDS: a shorter limit, for tests.
part() {
    echo "## $1"
    seconds=${WEFT_PART_SECONDS:-$2}
    shift 2
    code=0
    text=$(timeout -k 10 "$seconds" "$@" 2>&1) || code=$?
    printf '\n```\n%s\n```\n\n' "$(printf '%s\n' "$text" | tail -n 200)"
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        echo "**Failed: not done after $seconds seconds.**"
        echo
        status=1
    elif [ "$code" -ne 0 ]; then
        echo "**Failed: exit status $code.**"
        echo
        status=1
    fi
}

{
    echo "# On a GPU"
    echo
    echo "Written by \`scripts/gpu_check.sh\` on $(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
    echo
    "$PYTHON" -c "$where"
    echo
    part "Tests" 480 "$PYTHON" -m pytest -q tests/gpu --ignore tests/gpu/test_graphs.py
    part "Tests of graphs" 300 "$PYTHON" -m pytest -q tests/gpu/test_graphs.py
    part "Tests under torch's stream sanitizer" 420 env $sanitizer "$PYTHON" -m pytest -q tests/gpu/test_engine.py $some
    part "Beside torch FSDP2" 600 "$PYTHON" -m weft bench gpu --ranks 1
    part "Beside torch FSDP2, two ranks on one card" 480 "$PYTHON" -m weft bench gpu --ranks 2
} >"$output"
cat "$output"
exit "$status"
