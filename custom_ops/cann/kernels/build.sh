#!/usr/bin/env bash
# Builds the kernel library of one SoC with CANN's compiler:
#
#   source /usr/local/Ascend/ascend-toolkit/set_env.sh
#   bash custom_ops/cann/kernels/build.sh Ascend910B3 FOLDER
#
# The SoC is what aclrtGetSocName says; the folder is that of the operators' library, in which a host
# looks for libtq_kernels_<soc>.so (../host/kernel_library.cpp). ../on_npu.sh does this and what comes
# before and after it.
#
# NEVER RUN WITH CANN: no machine with it was at hand.
set -euo pipefail
kernels="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

case "${1:-}" in
  Ascend910B*) soc=ascend910b arch=2201 ;;
  Ascend910_93*) soc=ascend910_93 arch=2201 ;;
  Ascend310P*) soc=ascend310p arch=2002 ;;
  *) echo "usage: build.sh SOC FOLDER; the kernels are for Ascend910B, Ascend910_93 and Ascend310P" >&2
     exit 2 ;;
esac
[ -d "${2:-}" ] || { echo "build.sh: no folder '${2:-}'" >&2; exit 2; }
command -v bisheng >/dev/null ||
  { echo "build.sh: no bisheng on PATH: source set_env.sh of CANN first" >&2; exit 2; }

bisheng -x asc -shared "$kernels/library.cpp" -o "$2/libtq_kernels_$soc.so" -fPIC -O2 -std=c++17 \
  "--npu-arch=dav-$arch" -I"$kernels/../../include" \
  ${ASCEND_HOME_PATH:+-L"$ASCEND_HOME_PATH/lib64"} -lascendcl
