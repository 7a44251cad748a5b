#!/usr/bin/env bash
# Set up .venv and run every check this machine can run. Arguments go to pytest (tests that need a GPU skip without one).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

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
check tests pytest -n "$((workers < 8 ? workers : 8))" --dist worksteal "$@"

if ((${#failed[@]})); then
  fail "failed: ${failed[*]}"
fi
