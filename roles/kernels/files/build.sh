#!/bin/sh
# Builds the kernel libraries: build.sh [8x|2x|all] [--arch auto|sm_90a|sm_120a|both] [--out DIR] [--python PY]
# Any Python from 3.10 on runs it; --python names the one whose torch headers are built against.
exec "${PYTHON:-python3}" "$(dirname "$0")/ds41k/build.py" "$@"
