#!/usr/bin/env bash
# On a machine with an Ascend NPU: makes the environment, builds and installs the kernel library, and
# checks the operators. The environment is not made twice.
#
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh
#   bash custom_ops/cann/on_npu.sh
#
# Needs CANN 8 with its driver, Python 3.11 with its venv module, a C++17 compiler, and a package
# index for the first run.
#
# NEVER RUN ON AN NPU: no machine with CANN was at hand.
#   TQ_CANN_PYTHON   the interpreter of the environment; by default python3.11
set -euo pipefail
cann="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$cann/../.." && pwd)"
environment="$repository/.venv-cann"
say() { echo "== $*" >&2; }

[ -n "${ASCEND_HOME_PATH:-}" ] ||
  { echo "ASCEND_HOME_PATH is not set: source set_env.sh of CANN first" >&2; exit 2; }

if [ ! -e "$environment/made" ]; then
  say "making the environment in $environment"
  "${TQ_CANN_PYTHON:-python3.11}" -m venv --clear "$environment"
  "$environment/bin/pip" install --quiet -r "$cann/testing/requirements.txt"
  "$environment/bin/pip" install --quiet --no-deps "$repository"
  touch "$environment/made"
fi
export PATH="$environment/bin:$PATH"

# The name by which CANN knows the device is the one that its compiler takes.
soc="$(python - <<'PYTHON'
import ctypes
acl = ctypes.CDLL("libascendcl.so")
acl.aclInit(None)
acl.aclrtGetSocName.restype = ctypes.c_char_p
print((acl.aclrtGetSocName() or b"").decode())
PYTHON
)"
[ -n "$soc" ] || { echo "CANN finds no device: see npu-smi info" >&2; exit 1; }

cd / # where no folder hides the installed package
library="$(python -c "import tq_onnx; print(tq_onnx.library_path())")"
say "building the kernel library for $soc"
bash "$cann/kernels/build.sh" "$soc" "$(dirname "$library")"

say "checking the operators"
python "$cann/testing/check_operators.py"
