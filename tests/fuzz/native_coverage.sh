#!/usr/bin/env bash
# The lane of the operators, guided by what the C++ code reaches, under the address and
# undefined-behaviour sanitizers:
#
#   bash tests/fuzz/native_coverage.sh FOLDER SECONDS
#
# Needs clang, cmake, ninja and, in this Python, atheris and the packages of the tests. FOLDER keeps
# the build, the corpus, and cases/: a line of JSON per case, and the bytes of one that ended it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder="$(realpath -m "$1")"
seconds="$2"
mkdir -p "$folder/runtime" "$folder/corpus" "$folder/cases"

flags="-g1 -O1 -DTQ_FEW_GROUPS -fno-sanitize-recover=all -shared-libasan"
flags+=" -fsanitize=address,undefined,fuzzer-no-link"
# Types cross the border to ONNX Runtime, which has none of this; and pointer checks take minutes.
flags+=" -fno-sanitize=vptr,function,null,alignment,object-size,pointer-overflow"
cmake -S custom_ops -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER="${CXX:-clang++}" -DCMAKE_CXX_FLAGS="$flags"
ninja -C "$folder/build" tq_onnx_ops

# atheris brings the fuzzer and the sanitizer in one library, which must be the process's first.
runtime="$(python -c "import atheris; print(atheris.path())")/asan_with_fuzzer.so"
ln -sf "$runtime" "$folder/runtime/libclang_rt.asan-$(uname -m).so"
for seed in $(seq 32); do
  head -c "$((64 << seed % 6))" /dev/urandom >"$folder/corpus/seed-$seed"
done
PYTHONPATH=".:${PYTHONPATH:-}" TQ_ONNX_LIBRARY="$folder/build/libtq_onnx_ops.so" \
  LD_LIBRARY_PATH="$folder/runtime" LD_PRELOAD="$runtime" \
  ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1 \
  exec python -m tests.fuzz.guided operators "$folder/cases/all" -max_total_time="$seconds" \
  -max_len=4096 -len_control=0 -timeout=900 -rss_limit_mb=8000 \
  -artifact_prefix="$folder/cases/" "$folder/corpus"
