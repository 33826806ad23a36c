// Products of integers of one level alone, over rows in the second cache. A line is a form (head size,
// bits, query rows), a digest of the results, and the fewest microseconds of scores, sums and softmax.
// See kernels.py.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <vector>

#include "core/kernels.h"
#include "core/row_format.h"

namespace tq {

const IntegerKernels* INTEGERS();

constexpr int kRows = 2048, kMostQueries = 6;

template <class Work>
void time(double& fewest, Work&& work) {
  const auto start = std::chrono::steady_clock::now();
  for (int row = 0; row < kRows; row += kBlock) work(row);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
  if (took.count() < fewest) fewest = took.count();
}

float* floats(size_t count) { return new (std::align_val_t{64}) float[count + 16]; }  // stays

void mix(unsigned long long& digest, const float* values, int count) {
  const char* const bytes = reinterpret_cast<const char*>(values);
  for (int i = 0; i < 4 * count; ++i) digest = (digest ^ bytes[i]) * 1099511628211u;
}

void measure(const IntegerKernels& level, int head_size, int bits, int queries, int runs) {
  std::mt19937 random(1);
  const int stride = (bits * head_size + 7) / 8 + 2;
  std::vector<uint8_t> rows(kRows * stride + 256);
  for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random());
  const RowFormat format = row_format(bits, head_size, 16, stride, rows.data() + rows.size() - 64);
  IntegerTable table{};
  table.unit = 0.01f;
  table.largest = 60;
  for (int8_t& entry : table.entries) entry = static_cast<int8_t>(int(random() % 121) - 60);
  const int pitch = (level.query_floats(format) + 15) / 16 * 16;
  const int sums_pitch = (level.sums_floats(format) + 15) / 16 * 16;
  float *const prepared = floats(pitch * queries), *const sums = floats(sums_pitch * queries);
  float *const vector = floats(head_size), *const scores = floats(kBlock * queries + 64);
  float *const operands = floats(kOperandFloats * (queries + 1)), *const weights = floats(kBlock);
  float *const keys = floats(kBlock), *const values = floats(kBlock);
  for (int query = 0; query < queries; ++query) {
    for (int j = 0; j < head_size; ++j) vector[j] = (int(random() % 2001) - 1000) / 500.0f;
    level.prepare_query(format, table, vector, prepared + query * pitch);
  }
  for (int i = 0; i < kBlock; ++i) {
    weights[i] = (random() % 1000) / 1000.0f;
    keys[i] = 0.01f;
    values[i] = 0.5f + (random() % 100) / 100.0f;
  }
  const PartScales scales{values, 1, kBlock, {60, 60}};
  unsigned long long digest = 14695981039346656037u;
  double score_us = 1e9, sum_us = 1e9, softmax_us = 1e9;
  for (int run = 0; run < runs; ++run) {
    for (int query = 0; query < queries; ++query) {
      level.quantise_weights(weights, kBlock, table.largest, operands + query * kOperandFloats);
    }
    std::memset(sums, 0, sizeof(float) * sums_pitch * queries);
    time(score_us, [&](int row) {
      level.score_rows(format, rows.data() + row * stride, kBlock, table, prepared, pitch, queries,
                       scores, PrefetchRange{});
    });
    time(sum_us, [&](int row) {
      level.accumulate_rows(format, rows.data() + row * stride, kBlock, table, operands, queries,
                            sums, sums_pitch, PrefetchRange{});
    });
    for (int query = 0; query < queries && run == 0; ++query) {
      level.natural_sums(format, sums + query * sums_pitch, vector);
      mix(digest, vector, head_size);
      mix(digest, scores + query * kBlock, kBlock);
    }
    float largest[kMostQueries], sum[kMostQueries];
    time(softmax_us, [&](int) {
      for (float& value : largest) value = -1e30f;
      level.softmax_block(scores, queries, keys, scales, largest, sum, operands, PrefetchRange{});
    });
  }
  std::printf("%d %d %d, %llx, %f, %f, %f\n", head_size, bits, queries, digest, score_us, sum_us,
              softmax_us);
}

}  // namespace tq

int main(int, char** arguments) {
  for (int form = 0; form < 3 * 6 * tq::kMostQueries; ++form) {
    const int head_size = 128 >> form / 36, bits = "\4\3\5\2\1\10"[form / 6 % 6];
    tq::measure(*tq::INTEGERS(), head_size, bits, form % 6 + 1, std::atoi(arguments[1]));
  }
}
