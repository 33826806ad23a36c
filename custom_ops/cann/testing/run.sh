#!/usr/bin/env bash
# The CANN bench: the real onnxruntime-cann wheel on a simulated device. Makes its environment
# where there is none yet, builds the fake ACL runtime, runs the tests of tests/cann and prints as
# its last line one JSON object; what nothing measured is null there. Fails if a test fails.
#
#   bash custom_ops/cann/testing/run.sh [pytest arguments]
#   bash custom_ops/cann/testing/run.sh --only-environment
#
# The second form makes the environment and the fake runtime and runs nothing.
# Needs Python 3.11 and a C++17 compiler on Linux.
#   TQ_CANN_ENV      folder of the environment, kept between runs; by default in the user's cache
#   TQ_ONNX_LIBRARY  the operators' library to test; by default it is built, which takes minutes once
#   TQ_CANN_PYTHON   the interpreter it is made with; by default python3.11
#   TQ_CANN_SANITIZE where it is 1, the operators' library and the fake runtime are built with the
#                    address and undefined-behaviour sanitizers of g++, apart from the others
set -euo pipefail
testing="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$testing/../../.." && pwd)"
environment="${TQ_CANN_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/tq-onnx/cann}"
python="${TQ_CANN_PYTHON:-python3.11}"

say() { echo "== $*" >&2; }

mkdir -p "$environment"
environment="$(cd "$environment" && pwd)"
# Two runs do not make it at the same time.
exec 9>"$environment/lock"
flock 9

# What the environment was made from; the file is written last, so that one that was not finished
# is made again.
made_from="$(cat "$testing/requirements.txt" "$testing/acl_headers.txt" | sha256sum | cut -c1-16)"
if [ "$(cat "$environment/made_from" 2>/dev/null || true)" != "$made_from" ] ||
  ! "$environment/venv/bin/python" -c "" 2>/dev/null; then
  say "making the environment in $environment"
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ||
    { echo "$python does not run; name a Python 3.11 in TQ_CANN_PYTHON" >&2; exit 2; }
  [ "$version" = 3.11 ] || { echo "$python is Python $version; the bench needs 3.11" >&2; exit 2; }
  rm -rf "$environment"/{made_from,venv,include,wheel}
  "$python" -m venv "$environment/venv"
  "$environment/venv/bin/pip" install --quiet --disable-pip-version-check \
    -r "$testing/requirements.txt"
  "$environment/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps \
    --only-binary :all: -d "$environment/wheel" -r "$testing/acl_headers.txt"
  "$environment/venv/bin/python" "$testing/unpack_headers.py" "$environment/wheel" \
    "$environment/include"
  rm -rf "$environment/wheel"
  echo "$made_from" >"$environment/made_from"
fi
export PATH="$environment/venv/bin:$PATH"

# One build folder per checkout: CMake ties it to its sources.
build="$environment/build-$(printf %s "$testing" | sha256sum | cut -c1-12)"
runtime_options=() operators_options=() preload=""
if [ "${TQ_CANN_SANITIZE:-}" = 1 ]; then
  build="$build-sanitized"
  # It is a C interface, whose numbers for kinds and types may be any; it refuses the others.
  flags="-g1 -fsanitize=address,undefined -fno-sanitize=enum -fno-sanitize-recover=all"
  runtime_options=(-DCMAKE_CXX_COMPILER=g++ "-DCMAKE_CXX_FLAGS=$flags")
  operators_options=(-DCMAKE_CXX_COMPILER=g++ -DTQ_SANITIZE=ON)
  # Python is not built with them; what it opens is.
  preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)"
  # Python keeps memory to its end. That device memory cannot be read is a signal that tests expect.
  export ASAN_OPTIONS="detect_leaks=0:handle_segv=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
fi
say "building the fake ACL runtime"
{
  cmake -S "$testing/fake_acl" -B "$build" -G Ninja -DACL_INCLUDE="$environment/include" \
    "${runtime_options[@]}"
  cmake --build "$build"
} >"$environment/build.log" 2>&1 || { tail -30 "$environment/build.log" >&2; exit 1; }
[ "${1:-}" != --only-environment ] || exit 0

# The library that ships, built without anything of CANN.
library="${TQ_ONNX_LIBRARY:-}"
if [ -z "$library" ]; then
  say "building the operators' library"
  library="$build-operators/libtq_onnx_ops.so"
  {
    cmake -S "$repository/custom_ops" -B "$build-operators" -G Ninja "${operators_options[@]}"
    cmake --build "$build-operators"
  } >"$environment/operators.log" 2>&1 || { tail -30 "$environment/operators.log" >&2; exit 1; }
fi

flock -u 9

results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT

# The provider finds the fake runtime by the names of the three libraries, as it would find CANN.
status=0
cd "$repository"
TQ_CANN_RESULTS="$results" TQ_ONNX_LIBRARY="$library" \
  LD_LIBRARY_PATH="$build${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
  LD_PRELOAD="$preload${LD_PRELOAD:+${preload:+ }$LD_PRELOAD}" \
  python -m pytest -n 2 --dist loadfile -m "cann or not cann" -p no:cacheprovider tests/cann "$@" ||
  status=$?
python "$testing/summary.py" "$results"
exit "$status"
