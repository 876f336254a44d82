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
report= # of the part that runs in this shell

# What is done so far is the report, also of a check that is interrupted.
finish() {
    touch "$output.stop"
    for pid in "$output".?.pid; do # of parts that run
        if [ -e "$pid" ]; then
            kill "$(cat "$pid")" || true
        fi
    done
    wait # those in the background report themselves
    if [ -n "$report" ]; then
        fence "$report.text" >>"$report"
        echo "**Failed: interrupted.**" >>"$report"
    fi
    mkdir -p "$(dirname "$target")"
    cat "$output" "$output".? 2>/dev/null >"$target" || true
    rm -f "$output" "$output".*
}
trap finish EXIT
trap 'exit 130' INT TERM

fence() {
    printf '\n```\n%s\n```\n\n' "$(tail -n 200 "$1")"
}

# part NUMBER TITLE SECONDS COMMAND...: its last lines, and how it ended. WEFT_PART_SECONDS: a shorter limit, for tests.
part() {
    report=$output.$1
    echo "## $2" >"$report"
    seconds=${WEFT_PART_SECONDS:-$3}
    shift 3
    code=0
    # In the background, because a shell handles a signal only when the command in the foreground has ended.
    timeout -k 10 "$seconds" "$@" >"$report.text" 2>&1 &
    echo $! >"$report.pid"
    wait $! || code=$?
    rm "$report.pid"
    fence "$report.text" >>"$report"
    if [ -e "$output.stop" ]; then
        echo "**Failed: interrupted.**" >>"$report"
    elif [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        printf '**Failed: not done after %s seconds.**\n\n' "$seconds" >>"$report"
    elif [ "$code" -ne 0 ]; then
        printf '**Failed: exit status %s.**\n\n' "$code" >>"$report"
    else
        touch "$report.passed"
    fi
    report=
}

# tests NUMBER TITLE FILES...: they measure no time, so those of all parts run at once.
tests() {
    number=$1 title=$2
    shift 2
    part "$number" "$title" 480 "$PYTHON" -m pytest -p no:benchmark --disable-warnings $workers "$@"
}

{
    echo "# On a GPU"
    echo
    echo "Written by \`scripts/gpu_check.sh\` on $(date -u +%Y-%m-%d), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)."
    echo
    "$PYTHON" -c "$where"
    echo
} >"$output"
tests 1 "Tests" tests/gpu --ignore tests/gpu/test_graphs.py &
tests 2 "Tests of graphs" tests/gpu/test_graphs.py &
(
    export $sanitizer
    tests 3 "Tests under torch's stream sanitizer" tests/gpu/test_engine.py $some
) &
wait
part 4 "Compared with torch FSDP2" 600 "$PYTHON" -m weft bench gpu --ranks 1
part 5 "Compared with torch FSDP2, two ranks on one card" 480 "$PYTHON" -m weft bench gpu --ranks 2
cat "$output" "$output".?
for number in 1 2 3 4 5; do
    [ -e "$output.$number.passed" ] || exit 1
done
