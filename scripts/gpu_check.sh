#!/bin/sh
# What a single GPU can show: the tests that need one, once more under torch's stream sanitizer, and weft beside torch
# FSDP2. Writes docs/results/gpu.md, also when something fails, then with the failure. Each part has a time limit, and
# all of them together end within 30 minutes.
#
#     scripts/gpu_check.sh                        # PYTHON=python3.12 scripts/gpu_check.sh for another one
#     scripts/gpu_check.sh --rehearse OUTPUT.md   # without a GPU: the same parts on the CPU, with checked streams
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 # what a part that is ended has printed is in the report

target=docs/results/gpu.md
sanitizer=TORCH_CUDA_SANITIZER=1
workers="--numprocesses 4"
some=
where='import platform, torch
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}")'
if [ "${1:-}" = --rehearse ]; then
    target=$2
    export WEFT_REHEARSE=1
    sanitizer=WEFT_REHEARSE=1 # that of torch wants CUDA
    workers=
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
    cat "$output" "$output".? 2>/dev/null >"$target" || true
    rm -f "$output" "$output".?
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
    elif [ "$code" -ne 0 ]; then
        echo "**Failed: exit status $code.**"
        echo
    fi
}

# tests TITLE FILES...: they measure no time, so those of all parts run at once.
tests() {
    title=$1
    shift
    part "$title" 480 "$PYTHON" -m pytest --disable-warnings $workers "$@"
}

{
    echo "# On a GPU"
    echo
    echo "Written by \`scripts/gpu_check.sh\` on $(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
    echo
    "$PYTHON" -c "$where"
    echo
} >"$output"
tests "Tests" tests/gpu --ignore tests/gpu/test_graphs.py >"$output.1" &
tests "Tests of graphs" tests/gpu/test_graphs.py >"$output.2" &
(
    export $sanitizer
    tests "Tests under torch's stream sanitizer" tests/gpu/test_engine.py $some
) >"$output.3" &
wait
cat "$output".[123] >>"$output"
rm "$output".[123]
part "Beside torch FSDP2" 600 "$PYTHON" -m weft bench gpu --ranks 1 >>"$output"
part "Beside torch FSDP2, two ranks on one card" 480 "$PYTHON" -m weft bench gpu --ranks 2 >>"$output"
if grep -q '^\*\*Failed' "$output"; then
    status=1
fi
cat "$output"
exit "$status"
