#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv and run every check this machine can run. Arguments go to pytest (tests that need a GPU skip without one).
# --quick, as the first one, leaves out what takes long: some files, and tests that are marked full or slow. Either way
# it first says what it runs, what it leaves out and about how long that takes, and at the end what was skipped, by
# reason, and what it took.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

left_out=()
selected=()
core_minutes=15
if [[ ${1-} == --quick ]]; then
  shift
  core_minutes=3
  left_out=(
    tests/compile tests/contract tests/gpu tests/model tests/scripts tests/test_packaging.py
    tests/layers/test_{compile,exactness,indexer,meaning,parallel,step_operations,v41_keys}.py
    tests/perf/test_{layer,peer_layer}.py tests/runtime/test_verify.py
  )
  selected=(-m 'not full and not slow')
fi

setup_venv test
cd "$ROOT"

# One process per core with one thread each: the tests are many and small.
workers=$(nproc)
workers=$((workers < 8 ? workers : 8))
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# What is freed stays with the process: tensors of megabytes come and go, and the system would clear each one's memory.
export MALLOC_MMAP_THRESHOLD_=$((256 << 20)) MALLOC_TRIM_THRESHOLD_=$((512 << 20))

echo "lint, format, types and tests, with $workers processes"
if (($# == 0)); then
  echo "about $(((core_minutes + workers - 1) / workers)) minutes, longer where kernels are compiled for the first time"
fi
if ((${#left_out[@]})); then
  echo "left out (--quick): ${left_out[*]}"
  echo "and of the others what is marked full or slow: calls under torch.compile, processes, examples, steps of any size"
fi
has_gpu || echo "skipped: what needs an NVIDIA GPU, there is none"

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$PY" -m "$@" || failed+=("$name")
}

check lint ruff check .
check format ruff format --check .
# beside the tests, whose processes have nothing to do at their beginning and their end
types_log=$(mktemp)
"$PY" -m mypy >"$types_log" 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true; rm -f "$types_log"' EXIT
check tests pytest -n "$workers" --dist worksteal "${left_out[@]/#/--ignore=}" "${selected[@]}" "$@"
echo "== types"
wait "$types" || failed+=(types)
cat "$types_log"
times >"$types_log" # the second line is of the processes that have ended
echo "took $((SECONDS / 60)) min $((SECONDS % 60)) s, $(awk -F'[ms ]+' 'NR == 2 {
  printf "%.1f", $1 + $3 + ($2 + $4) / 60}' "$types_log") minutes of cores"

if ((${#failed[@]})); then
  fail "failed: ${failed[*]}"
fi
