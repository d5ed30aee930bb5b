#!/bin/sh
# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
# On a machine with a GPU, in the root of the repository; see docs/gpu.md:
#   build/gpu-kit/run.sh A --output FOLDER              one of the parts A to E
#   build/gpu-kit/run.sh --lane gpt2 --output FOLDER    lines of the list by name
# --rehearse runs the same at tiny sizes without a GPU, in the environment of PYTHON.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
case " $* " in
  *" --rehearse "*) ;;
  *)
    site=${ORTRAIN_KIT_SITE:-/tmp/ortrain-kit}
    test -d "$site/ortrain" || "$python" -m pip install -q --no-index --no-deps --no-compile \
      --no-cache-dir --target "$site" "$kit"/wheels/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
    export ORTRAIN_CHECK_KERNELS="$kit/bin/ortrain_check_kernels"
    ;;
esac
exec "$python" -m benchmarks.gpu_all.parts "$@"
