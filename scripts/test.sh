#!/usr/bin/env bash
# Set up .venv and run every check this machine can run. Arguments go to pytest (tests that need a GPU skip without one).
# --quick, as the first one, leaves out what takes long, and says what that is.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

left_out=()
if [[ ${1-} == --quick ]]; then
  shift
  left_out=(
    tests/compile tests/gpu tests/model tests/scripts
    tests/layers/test_{compile,exactness,meaning,parallel}.py tests/perf/test_layer.py tests/runtime/test_verify.py
  )
fi

setup_venv test
cd "$ROOT"

# One process per core with one thread each: the tests are many and small.
workers=$(nproc)
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$PY" -m "$@" || failed+=("$name")
}

check lint ruff check .
check format ruff format --check .
check types mypy
check tests pytest -n "$((workers < 8 ? workers : 8))" --dist worksteal "${left_out[@]/#/--ignore=}" "$@"
((${#left_out[@]} == 0)) || echo "left out (--quick): ${left_out[*]}"

if ((${#failed[@]})); then
  fail "failed: ${failed[*]}"
fi
