#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv and run the layers of a small model end to end. Arguments go to scripts/run_layer.py; --help lists them.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

setup_venv
exec "$PY" "$ROOT/scripts/run_layer.py" "$@"
