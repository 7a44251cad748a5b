# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it. Gives ROOT (the repository), PY (the interpreter of ROOT/.venv) and setup_venv.
#
# PYTHON names the interpreter that .venv is made from; the default is python3.

# What a process has compiled of modules the others read: the tests are many processes.
unset PYTHONDONTWRITEBYTECODE

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
PY=$ROOT/.venv/bin/python

fail() {
  echo "${0##*/}: $*" >&2
  exit 1
}

has_gpu() {
  [[ $(nvidia-smi -L 2>/dev/null) == *"GPU 0"* ]]
}

# setup_venv [EXTRA]: make .venv if there is none and install this project, with one of its extras, into it. A stamp holds a
# hash of what decides the result, so a second call does nothing.
setup_venv() {
  local extra=${1:-} gpu=no have wanted key have_key='' have_extra='' stamp=$ROOT/.venv/.cute-kernels
  has_gpu && gpu=yes

  "$PY" -c '' 2>/dev/null || make_venv "$gpu"
  have=$(version "$PY")
  wanted=$(version "${PYTHON:-$PY}")
  [[ $have == "$wanted" ]] || fail "$ROOT/.venv holds Python $have and PYTHON is $wanted: remove .venv to change it"
  key=$("$PY" - "$ROOT" "$gpu" <<'END'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
content = b"".join((root / name).read_bytes() for name in ("pyproject.toml", "scripts/_setup.sh"))
print(hashlib.sha256(content + repr((sys.argv[1:], sys.version)).encode()).hexdigest())
END
  )
  if [[ -f $stamp ]]; then
    read -r have_key have_extra <"$stamp" || true
  fi
  if [[ $have_key == "$key" && (-z $extra || $have_extra == "$extra") ]]; then
    return
  fi

  echo "${0##*/}: installing into $ROOT/.venv (the first time this takes a few minutes)"
  rm -f "$stamp"
  "$PY" -m pip --version >/dev/null 2>&1 || "$PY" -m ensurepip >/dev/null 2>&1 ||
    fail "$ROOT/.venv has no pip and $PY has no ensurepip: remove .venv and set PYTHON to a complete Python"
  # Older pips cannot install a pyproject.toml project in place.
  pip_install 'pip>=23'
  if [[ $gpu == yes ]]; then
    pip_install -e "$ROOT[cu13${extra:+,$extra}]"
    "$PY" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
      fail "this machine has a GPU and the torch in $ROOT/.venv cannot use one: remove .venv and run this again"
  else
    pip_install torch==2.13.0
    pip_install -e "$ROOT${extra:+[$extra]}"
  fi
  [[ $extra != test ]] || install_oldest_dsl
  echo "$key $extra" >"$stamp"
}

# The oldest CuTe DSL and TVM-FFI that pyproject.toml allows, which engines pin, into a folder beside the newest that pip
# has installed: tests/compile/test_oldest_dsl.py.
install_oldest_dsl() {
  local folder=$ROOT/.venv/oldest-dsl name packages=() dsl ffi
  dsl=$(oldest nvidia-cutlass-dsl)
  ffi=$(oldest apache-tvm-ffi)
  for name in '' -libs-base -libs-core -libs-cu12; do
    packages+=("nvidia-cutlass-dsl$name==$dsl")
  done
  rm -rf "$folder"
  pip_install --no-deps --target "$folder" "${packages[@]}" "apache-tvm-ffi==$ffi"
}

# oldest PACKAGE: the first version of a dependency that pyproject.toml allows
oldest() {
  sed -n "s/^    \"$1>=\([^,]*\),.*/\1/p" "$ROOT/pyproject.toml"
}

make_venv() {
  local gpu=$1 base=${PYTHON:-python3} options=(--clear) found
  command -v "$base" >/dev/null || fail "no interpreter '$base': install Python 3.10 or later, or set PYTHON to one"
  found=$(version "$base")
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "Python 3.10 or later is needed and '$base' is $found: set PYTHON to a newer one"
  "$base" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "'$base' comes without venv or ensurepip (Debian, Ubuntu: apt-get install python3-venv)"
  # A GPU machine may come with a torch built for it: use that one.
  if [[ $gpu == yes ]] && "$base" -c 'import torch' 2>/dev/null; then
    options+=(--system-site-packages)
  fi
  "$base" -m venv "${options[@]}" "$ROOT/.venv" || fail "could not make $ROOT/.venv with '$base'"
}

version() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || fail "'$1' does not run"
}

pip_install() {
  # Python compiles the modules that it imports; pip would compile all there are, half a minute.
  "$PY" -m pip install --quiet --no-compile --disable-pip-version-check "$@" || fail "pip could not install: $*"
}
