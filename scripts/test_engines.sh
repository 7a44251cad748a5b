#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The plug-ins against the engines' own modules, without a GPU: their wheels are fetched, their sources are held to what
# tests/plugins/seams.py has, they are imported with the plug-ins over them, and layers of theirs run on the CPU.
#
# Arguments are requirements, those of tests/plugins by default: scripts/test_engines.sh vllm==0.33.1
# ENGINES_DIR (.venv/engines) keeps 2 GB of what is fetched. --torch fetches another torch, 6 GB, and runs the op tests
# with it: scripts/test_engines.sh --torch torch==2.14.0
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

setup_venv test
cd "$ROOT"
folder=${ENGINES_DIR:-$ROOT/.venv/engines}
mkdir -p "$folder"

if [[ ${1-} == --torch ]]; then
  (($# == 2)) || fail "--torch: expected one requirement, such as torch==2.14.0"
  target=$folder/${2//[^[:alnum:].]/_}
  [[ -d $target ]] || pip_install --target "$target" "$2"
  PYTHONPATH=$target:$ROOT "$PY" -c 'import torch, cute_kernels, cute_kernels.layers; print("torch", torch.__version__)'
  PYTHONPATH=$target:$ROOT "$PY" -m pytest -q -p no:xdist tests/runtime/test_ops.py tests/runtime/test_registry.py \
    tests/contract/test_opcheck.py tests/kv_cache tests/plugins
  exit
fi

(($# > 0)) || set -- vllm==0.33.0 sglang==0.5.23
if [[ ! tests/plugins/requirements.txt -ot $folder/packages/.installed ]]; then
  pip_install --upgrade --target "$folder/packages" -r tests/plugins/requirements.txt
  pip_install --upgrade --target "$folder/packages" --no-deps compressed-tensors # which would bring another torch
  touch "$folder/packages/.installed"
fi
failed=()
for wanted in "$@"; do
  engine=${wanted%%[^a-z]*}
  [[ $engine == vllm || $engine == sglang ]] || fail "expected a requirement of vllm or sglang, got $wanted"
  unpacked=$folder/${wanted//[^[:alnum:].]/_}
  if [[ ! -d $unpacked ]]; then
    wheels=$(mktemp -d -p "$folder")
    "$PY" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --dest "$wheels" "$wanted" ||
      fail "pip could not fetch $wanted"
    # without what is compiled: most of it
    "$PY" - "$wheels" "$unpacked" <<'END'
import pathlib, sys, zipfile

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
archive = zipfile.ZipFile(wheel)
archive.extractall(sys.argv[2], [name for name in archive.namelist() if not name.endswith(".so")])
END
    rm -r "$wheels"
  fi
  echo "== $wanted"
  "$PY" -m tests.plugins.seams "$engine" "$unpacked" || failed+=("$wanted: sources")
  # the engines' metadata are Triton's
  variables=(PYTHONPATH="$unpacked:$folder/packages:$ROOT" TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=)
  env "${variables[@]}" "$PY" -m "tests.plugins.real_$engine" || failed+=("$wanted: modules")
done

if ((${#failed[@]})); then
  fail "failed: ${failed[*]}"
fi
