// Many rows at once: attention of every level against the scalar level's, with centroids that are
// integers and with others, and the encode of a prefill to the bit.
#include <limits>

#include "core/attention.h"
#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Prefill {
  Codec key = lloyd_max(4), value = lloyd_max(4);
  bool has_integers = true;  // centroids are multiples of 1/127 of the largest
  int head_size = 64;
  int64_t heads = 2, group = 2, tokens = 200;
  std::vector<int64_t> lengths{0};  // one per sequence
  bool causal = true;
  int64_t window = 0;
  std::vector<float> sinks;
  int64_t strange_query = -1;  // row that holds an infinity
  int64_t strange_slot = -1;   // whose keys' or values' scales are infinite, or no numbers
  bool is_key = false;
  uint16_t strange_scale = 0x7e00;
};

std::string describe(const Prefill& p, const char* level) {
  return std::string(level) + ": " + name_of(p.key) + ", " + name_of(p.value) + " D" +
         std::to_string(p.head_size) + " G" + std::to_string(p.group) + " T" +
         std::to_string(p.tokens) + " P" + std::to_string(p.lengths[0]) + " W" +
         std::to_string(p.window) + (p.has_integers ? " integers" : "");
}

// ||difference|| / ||output of the scalar level||, at every level.
void compare(const Prefill& p, Random& random) {
  const std::size_t d = static_cast<std::size_t>(p.head_size);
  const int64_t batch = static_cast<int64_t>(p.lengths.size());
  const int64_t longest = *std::max_element(p.lengths.begin(), p.lengths.end());
  const int64_t slots = longest + p.tokens + 3;
  const std::size_t rows = static_cast<std::size_t>(batch * p.heads * slots);
  Tables key_tables(p.key, p.head_size, random), value_tables(p.value, p.head_size, random);
  if (p.has_integers) {
    round_centroids(key_tables);
    round_centroids(value_tables);
  }
  const int key_width = spec::row_bytes(p.key, p.head_size);
  const int value_width = spec::row_bytes(p.value, p.head_size);
  Guarded<uint8_t> keys(rows * static_cast<std::size_t>(key_width));
  Guarded<uint8_t> values(rows * static_cast<std::size_t>(value_width));
  fill_rows(keys.data(), rows, p.key, p.head_size, key_width, random);
  fill_rows(values.data(), rows, p.value, p.head_size, value_width, random);
  for (int64_t lane = 0; lane < batch * p.heads; ++lane) {  // rows that nobody sees are garbage
    const int64_t seen = p.lengths[static_cast<std::size_t>(lane / p.heads)] + p.tokens;
    for (int64_t slot = seen; slot < slots; ++slot) {
      const int64_t row = lane * slots + slot;
      std::fill_n(keys.data() + row * key_width, key_width, uint8_t{0xff});
      std::fill_n(values.data() + row * value_width, value_width, uint8_t{0xff});
    }
  }
  if (p.strange_slot >= 0) {
    uint8_t* const row = p.is_key ? keys.data() + p.strange_slot * key_width
                                  : values.data() + p.strange_slot * value_width;
    std::memcpy(row + spec::code_bytes(p.is_key ? p.key : p.value, p.head_size), &p.strange_scale,
                sizeof p.strange_scale);
  }
  Guarded<float> query(static_cast<std::size_t>(batch * p.heads * p.group * p.tokens) * d);
  fill_normal(query.data(), query.size(), random);
  if (p.strange_query >= 0) query[static_cast<std::size_t>(p.strange_query) * d + 3] = kInfinity;
  Guarded<float> sinks(p.sinks.empty() ? 0 : static_cast<std::size_t>(p.heads * p.group));
  for (std::size_t h = 0; h < sinks.size(); ++h) sinks[h] = p.sinks[h % p.sinks.size()];

  AttentionCall call{};
  call.element = Element::kFloat;
  call.query = query.data();
  call.key = {keys.data(), p.key, key_width, key_tables.centroids.data()};
  call.value = {values.data(), p.value, value_width, value_tables.centroids.data()};
  call.key_rotation = key_tables.ready();
  call.value_rotation = value_tables.ready();
  call.past_length = p.lengths.data();
  call.length_per_batch = batch > 1;
  call.batch = batch;
  call.query_heads = p.heads * p.group;
  call.heads = p.heads;
  call.tokens = p.tokens;
  call.slots = slots;
  call.head_size = p.head_size;
  call.sink = p.sinks.empty() ? nullptr : sinks.data();
  call.scale = 1.0f / std::sqrt(static_cast<float>(p.head_size));
  call.causal = p.causal;
  call.sliding_window = p.window;

  Guarded<float> expected(query.size()), output(query.size()), again(query.size());
  call.output = expected.data();
  CHECK(attention(*scalar_kernels(), call, serial()), describe(p, "scalar"));
  for (const Kernels* level : supported_kernels()) {
    std::fill(output.begin(), output.end(), kNan);
    call.output = output.data();
    CHECK(attention(*level, call, serial()), describe(p, level->name));
    call.output = again.data();
    CHECK(attention(*level, call, threaded()), describe(p, level->name));
    CHECK(std::memcmp(output.data(), again.data(), output.size() * sizeof(float)) == 0,
          describe(p, level->name) + ": threads change the result");
    double difference = 0, norm = 0;
    bool same_kinds = true;
    for (std::size_t i = 0; i < output.size(); ++i) {
      if (!std::isfinite(expected[i]) || !std::isfinite(output[i])) {
        same_kinds = same_kinds && !std::isfinite(expected[i]) && !std::isfinite(output[i]);
        continue;
      }
      const double off = static_cast<double>(output[i]) - expected[i];
      difference += off * off;
      norm += static_cast<double>(expected[i]) * expected[i];
    }
    CHECK(same_kinds, describe(p, level->name));
    // Integers: queries and weights have 16 bits (core/prefill_kernels.h).
    const bool is_rounded = p.has_integers && level->multiply_pairs != nullptr;
    const double error = std::sqrt(difference / norm);
    CHECK(error <= (is_rounded ? 1e-4 : 2e-6),
          describe(p, level->name) + ": relative error " + std::to_string(error * 1e6) + "e-6");
  }
}

TEST(prefill_agrees_with_the_scalar_level) {
  Share share;
  Random random(30);
  for (const bool has_integers : {true, false}) {
    for (const int size : {8, 24, 64, 80, 128, 256}) {
      for (const int bits : {1, 2, 3, 4, 5}) {
        if (share.leaves_out_next()) continue;
        Prefill p;
        p.has_integers = has_integers && bits < 5;
        p.key = lloyd_max(bits);
        p.value = lloyd_max(bits == 5 ? 3 : 6 - bits);
        p.head_size = size;
        p.heads = 1;
        p.tokens = size < 128 ? 133 : 70;
        p.lengths = {bits == 4 ? 0 : 150};
        compare(p, random);
      }
    }
  }
}

TEST(prefill_with_masks_and_sinks) {
  Random random(31);
  for (const bool has_integers : {true, false}) {
    for (const int64_t group : {1, 5}) {
      for (const int variant : {0, 1, 2, 3, 4}) {
        Prefill p;
        p.has_integers = has_integers;
        p.group = group;
        p.heads = group == 1 ? 2 : 1;
        p.tokens = group == 1 ? 300 : 90;
        p.lengths = {140, 3};
        if (variant == 1) p.causal = false;
        if (variant == 2) p.window = 17;
        if (variant == 3) p.sinks = {0.5f, 30.0f, -kInfinity};
        if (variant == 4) {
          p.window = 130;
          p.causal = false;
          p.sinks = {-1.0f};
        }
        compare(p, random);
      }
    }
  }
}

// A query that is not finite spoils its own output, a row the outputs of the queries that see it,
// and no other.
TEST(prefill_keeps_strange_numbers_apart) {
  Random random(32);
  for (const bool has_integers : {true, false}) {
    Prefill p;
    p.has_integers = has_integers;
    p.strange_query = 77;
    compare(p, random);
    p.strange_query = -1;
    p.strange_slot = 150;
    for (const bool is_key : {false, true}) {
      for (const uint16_t scale : {0x7e00, 0x7c00}) {
        p.is_key = is_key;
        p.strange_scale = scale;
        compare(p, random);
      }
    }
  }
}

TEST(products_of_pairs_are_exact) {
  Random random(33);
  UniformInt<int> number(-32767, 32767), code(-127, 127);
  for (const Kernels* level : supported_kernels()) {
    if (level->multiply_pairs == nullptr) continue;
    for (const int m : {1, 5, 6, 13}) {
      for (const int n : {16, 64, 80, 144}) {
        const int k = 37;
        Guarded<int32_t> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n));
        Guarded<float> c(static_cast<std::size_t>(m * n)), steps(static_cast<std::size_t>(m));
        std::vector<int> left(2 * a.size()), right(2 * b.size());
        for (std::size_t i = 0; i < left.size(); i += 2) {
          const int16_t pair[2] = {static_cast<int16_t>(number(random)),
                                   static_cast<int16_t>(number(random))};
          std::memcpy(a.data() + i / 2, pair, sizeof pair);
          left[i] = pair[0];
          left[i + 1] = pair[1];
        }
        for (std::size_t i = 0; i < right.size(); i += 2) {
          const int16_t pair[2] = {static_cast<int16_t>(code(random)),
                                   static_cast<int16_t>(code(random))};
          std::memcpy(b.data() + i / 2, pair, sizeof pair);
          right[i] = pair[0];
          right[i + 1] = pair[1];
        }
        for (float& step : steps) step = 0.5f;
        for (const bool accumulate : {false, true}) {
          std::fill(c.begin(), c.end(), accumulate ? 0.0f : kNan);
          level->multiply_pairs(a.data(), k, b.data(), n, c.data(), n, m, n, k, steps.data(),
                                accumulate);
          bool good = true;
          for (int i = 0; i < m; ++i) {
            for (int j = 0; j < n; ++j) {
              int64_t sum = 0;
              for (int x = 0; x < k; ++x) {
                for (int y = 0; y < 2; ++y) {
                  sum += static_cast<int64_t>(left[static_cast<std::size_t>(2 * (i * k + x) + y)]) *
                         right[static_cast<std::size_t>(2 * (x * n + j) + y)];
                }
              }
              good =
                  good && c[static_cast<std::size_t>(i * n + j)] == 0.5f * static_cast<float>(sum);
            }
          }
          CHECK(good, std::string(level->name) + " " + std::to_string(m) + "x" + std::to_string(n));
        }
      }
    }
  }
}

// So many rows that a task takes more of them than in a decode step.
TEST(encode_of_a_prefill_gives_the_same_bytes_at_every_level) {
  Random random(34);
  for (const int size : {64, 128}) {
    const Codec codec = lloyd_max(4);
    const Tables tables(codec, size, random);
    const int64_t tokens = 1100, length = 0;
    const int width = spec::row_bytes(codec, size);
    const std::size_t bytes = static_cast<std::size_t>(tokens * width);
    Guarded<float> vectors(static_cast<std::size_t>(tokens * size));
    fill_normal(vectors.data(), vectors.size(), random);
    Guarded<uint8_t> expected(bytes), rows(bytes), none(0);
    EncodeCall call = encode_call(codec, size, width, tables);
    call.vectors = vectors.data();
    call.past = none.data();
    call.past_length = &length;
    call.tokens = call.present_slots = tokens;
    for (int64_t t = 0; t < tokens; ++t) {  // row by row
      EncodeCall one = call;
      one.vectors = vectors.data() + t * size;
      one.present = expected.data() + t * width;
      one.tokens = one.present_slots = 1;
      encode(*scalar_kernels(), one, serial());
    }
    for (const Kernels* level : supported_kernels()) {
      std::fill(rows.begin(), rows.end(), uint8_t{0xcd});
      call.present = rows.data();
      encode(*level, call, threaded());
      CHECK(std::memcmp(rows.data(), expected.data(), bytes) == 0,
            std::string(level->name) + ", head size " + std::to_string(size));
    }
  }
}

// Boundaries may repeat, fall or be no numbers: a code is how many of them are not above.
TEST(codes_count_boundaries) {
  Random random(35);
  for (const int levels : {4, 8, 16, 32}) {
    for (const int variant : {0, 1, 2, 3}) {
      float boundaries[32], table[kTable];
      fill_normal(table, kTable, random);
      fill_normal(boundaries, 31, random);
      if (variant != 1) std::sort(boundaries, boundaries + levels - 1);
      if (variant == 2) boundaries[1] = boundaries[2];
      if (variant == 3) boundaries[levels / 2] = kNan;
      std::vector<float> y(104);
      fill_normal(y.data(), y.size(), random);
      for (int i = 0; i + 1 < levels; ++i) y[static_cast<std::size_t>(3 * i)] = boundaries[i];
      y[1] = kNan;
      y[2] = kInfinity;
      y[4] = -kInfinity;
      std::vector<uint8_t> expected(y.size()), codes(y.size());
      const int size = static_cast<int>(y.size());
      const float sum =
          scalar_kernels()->quantise(y.data(), boundaries, levels, table, expected.data(), size);
      for (const Kernels* level : supported_kernels()) {
        const float own = level->quantise(y.data(), boundaries, levels, table, codes.data(), size);
        CHECK(codes == expected && own == sum, std::string(level->name) + ", levels " +
                                                   std::to_string(levels) + ", variant " +
                                                   std::to_string(variant));
      }
    }
  }
}

TEST(eight_rows_at_once_are_rotated_to_the_bit) {
  Random random(36);
  const int size = 128;
  std::vector<float> matrix(static_cast<std::size_t>(size * size));
  fill_normal(matrix.data(), matrix.size(), random);
  for (const int rows : {8, 16, 32}) {
    std::vector<float> x(static_cast<std::size_t>(rows * size)), y(x.size()), expected(x.size());
    fill_normal(x.data(), x.size(), random);
    scalar_kernels()->rotate(x.data(), size, matrix.data(), size, expected.data(), size, rows, size,
                             size);
    for (const Kernels* level : supported_kernels()) {
      level->rotate(x.data(), size, matrix.data(), size, y.data(), size, rows, size, size);
      CHECK(y == expected, std::string(level->name) + ", " + std::to_string(rows));
    }
  }
}

}  // namespace
}  // namespace tq::test
