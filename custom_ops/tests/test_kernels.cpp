// The inner loops of every level against the definition of the row layout, between guard pages.
#include "tests/fixture.h"
#include "tests/testing.h"

#include <limits>

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

bool near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance; }

struct Rows {
  Rows(const Kernels& level, int bits, int size, int count_, Side side, Random& random)
      : format(row_format(bits, size, level.lanes)),
        count(count_),
        bytes(static_cast<std::size_t>(count) * format.row_bytes, side) {
    fill_rows(bytes.data(), static_cast<std::size_t>(count), bits, size, random);
    float centroids[spec::kMaxLevels], boundaries[spec::kMaxLevels];
    fill_codebook(bits, size, centroids, boundaries);
    fill_table(centroids, bits, table);
  }
  float centroid(int t, int j) const {
    return table[code_of(format.bits, format.head_size, bytes.data() + t * format.row_bytes, j)];
  }
  // Position of coordinate j in slot order.
  int at(int j) const {
    return j / format.slot_size * format.padded_slot + j % format.slot_size;
  }

  RowFormat format;
  int count;
  Guarded<uint8_t> bytes;
  float table[kTable];
};

template <class Body>
void for_each_format(Body&& body) {
  Random random(7);
  for (const Kernels* level : supported_kernels()) {
    for (const int size : kHeadSizes) {
      for (const int bits : spec::kLloydMaxBits) {
        for (const int count : {1, 3, 4, 17, kBlock}) {
          const Side side = count % 2 ? Side::kBegin : Side::kEnd;
          const Rows rows(*level, bits, size, count, side, random);
          body(*level, rows, random, describe(level->name, bits, size));
        }
      }
    }
  }
}

TEST(decoding_follows_the_layout) {
  for_each_format([](const Kernels& level, const Rows& rows, Random&, const std::string& what) {
    const RowFormat& format = rows.format;
    Guarded<float> values(static_cast<std::size_t>(rows.count) * format.padded);
    Guarded<float> keys(static_cast<std::size_t>(kBlock) * format.padded);
    Guarded<float> scales(kBlock);
    level.decode_rows(format, rows.bytes.data(), rows.count, rows.table, values.data());
    level.decode_columns(format, rows.bytes.data(), rows.count, rows.table, keys.data());
    level.row_scales(format, rows.bytes.data(), rows.count, scales.data());
    bool same = true;
    for (int t = 0; t < rows.count; ++t) {
      for (int j = 0; j < format.head_size; ++j) {
        const float expected = rows.centroid(t, j);
        same = same && values[static_cast<std::size_t>(t * format.padded + rows.at(j))] == expected;
        same = same && keys[static_cast<std::size_t>(rows.at(j) * kBlock + t)] == expected;
      }
      uint16_t half;
      std::memcpy(&half, rows.bytes.data() + t * format.row_bytes + format.scale_offset, 2);
      same = same && scales[static_cast<std::size_t>(t)] == half_to_float(half);
    }
    CHECK(same, what);
  });
}

TEST(fused_scores_and_sums_are_right) {
  for_each_format([](const Kernels& level, const Rows& rows, Random& random,
                     const std::string& what) {
    const RowFormat& format = rows.format;
    for (int queries = 1; queries <= std::min(level.max_fused, 7); ++queries) {
      const std::size_t size = static_cast<std::size_t>(queries) * format.padded;
      Guarded<float> query(size), sums(size);
      Guarded<float> scores(static_cast<std::size_t>(queries) * kBlock);
      std::vector<float> natural(static_cast<std::size_t>(format.head_size));
      std::vector<double> expected(scores.size());
      for (int q = 0; q < queries; ++q) {
        fill_normal(natural.data(), natural.size(), random);
        to_slot_order(format, natural.data(), query.data() + q * format.padded);
        for (int t = 0; t < rows.count; ++t) {
          for (int j = 0; j < format.head_size; ++j) {
            expected[static_cast<std::size_t>(q * kBlock + t)] +=
                static_cast<double>(natural[static_cast<std::size_t>(j)]) * rows.centroid(t, j);
          }
        }
      }
      level.score_rows(format, rows.bytes.data(), rows.count, rows.table, query.data(), queries,
                       scores.data());
      double worst = 0;
      for (int q = 0; q < queries; ++q) {
        for (int t = 0; t < rows.count; ++t) {
          const std::size_t i = static_cast<std::size_t>(q * kBlock + t);
          worst = std::max(worst, std::abs(scores[i] - expected[i]));
        }
      }
      CHECK(worst < 2e-5, what + ", score off by " + std::to_string(worst));

      fill_normal(scores.data(), scores.size(), random);
      std::fill(sums.begin(), sums.end(), 1.0f);
      level.accumulate_rows(format, rows.bytes.data(), rows.count, rows.table, scores.data(),
                            queries, sums.data());
      worst = 0;
      for (int q = 0; q < queries; ++q) {
        for (int j = 0; j < format.head_size; ++j) {
          double sum = 1;
          for (int t = 0; t < rows.count; ++t) {
            sum += static_cast<double>(scores[static_cast<std::size_t>(q * kBlock + t)]) *
                   rows.centroid(t, j);
          }
          const float got = sums[static_cast<std::size_t>(q * format.padded + rows.at(j))];
          worst = std::max(worst, std::abs(got - sum));
        }
      }
      CHECK(worst < 2e-4, what + ", sum off by " + std::to_string(worst));
    }
  });
}

TEST(products_and_rotations_are_right) {
  Random random(8);
  for (const Kernels* level : supported_kernels()) {
    for (const int m : {1, 2, 5, 6, 7, 13}) {
      for (const int n : {16, 64, 80, 128}) {
        for (const int k : {1, 8, 65}) {
          for (const bool accumulate : {false, true}) {
            Guarded<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n)),
                c(static_cast<std::size_t>(m * n));
            fill_normal(a.data(), a.size(), random);
            fill_normal(b.data(), b.size(), random);
            std::fill(c.begin(), c.end(), accumulate ? 2.0f : kNan);
            level->multiply(a.data(), k, b.data(), n, c.data(), n, m, n, k, accumulate);
            bool good = true;
            for (int i = 0; i < m; ++i) {
              for (int j = 0; j < n; ++j) {
                double sum = accumulate ? 2 : 0;
                for (int x = 0; x < k; ++x) {
                  sum += static_cast<double>(a[static_cast<std::size_t>(i * k + x)]) *
                         b[static_cast<std::size_t>(x * n + j)];
                }
                good = good && near(c[static_cast<std::size_t>(i * n + j)], sum, 1e-4);
              }
            }
            CHECK(good, std::string(level->name) + " " + std::to_string(m) + "x" +
                            std::to_string(n) + "x" + std::to_string(k));
          }
        }
      }
    }
    for (const int size : kHeadSizes) {  // rotations agree to the bit
      const int rows = 9;
      Guarded<float> x(static_cast<std::size_t>(rows * size)), y(x.size()), expected(x.size());
      Guarded<float> rotation(static_cast<std::size_t>(size) * size);
      fill_normal(x.data(), x.size(), random);
      fill_normal(rotation.data(), rotation.size(), random);
      scalar_kernels()->rotate(x.data(), rotation.data(), expected.data(), rows, size);
      level->rotate(x.data(), rotation.data(), y.data(), rows, size);
      CHECK(std::memcmp(y.data(), expected.data(), x.size() * sizeof(float)) == 0,
            describe(level->name, 0, size));
    }
  }
}

TEST(softmax_steps_hide_and_keep) {
  Random random(9);
  for (const Kernels* level : supported_kernels()) {
    for (const int count : {1, 5, 16, 31, kBlock}) {
      for (const bool with_bias : {false, true}) {
        for (const float softcap : {0.0f, 3.0f}) {
          Guarded<float> scores(kBlock), key_scales(kBlock), value_scales(kBlock), bias(kBlock);
          fill_normal(scores.data(), kBlock, random, 4.0f);
          std::fill(key_scales.begin(), key_scales.end(), 0.5f);
          std::fill(value_scales.begin(), value_scales.end(), 2.0f);
          fill_normal(bias.data(), kBlock, random);
          const int low = count > 8 ? 3 : 0, high = count > 8 ? count - 2 : count;
          std::vector<double> expected(kBlock, -INFINITY);
          double top = -INFINITY;
          for (int t = low; t < high; ++t) {
            if (with_bias && t % 4 == 1) {
              bias[static_cast<std::size_t>(t)] = t % 8 == 1 ? -kInfinity : -3e38f;
              continue;
            }
            const std::size_t i = static_cast<std::size_t>(t);
            double s = 0.5 * scores[i];
            if (softcap > 0) s = softcap * std::tanh(s / softcap);
            expected[i] = s + (with_bias ? bias[i] : 0.0f);
            top = std::max(top, expected[i]);
          }
          for (int t = 0; t < kBlock; ++t) {  // hidden positions are never looked at
            if (expected[static_cast<std::size_t>(t)] != -INFINITY) continue;
            key_scales[static_cast<std::size_t>(t)] = kNan;
            value_scales[static_cast<std::size_t>(t)] = kNan;
          }
          const float max = level->finish_scores(scores.data(), key_scales.data(),
                                                 with_bias ? bias.data() : nullptr, -1.7e38f,
                                                 softcap, count, low, high);
          CHECK(max == top || near(max, top, 2e-6), level->name);
          const float used = std::isinf(max) ? 0.0f : max;
          const double sum = level->weigh(scores.data(), value_scales.data(), count, used);
          double expected_sum = 0;
          bool good = true;
          for (int t = 0; t < count; ++t) {
            const double e = std::exp(expected[static_cast<std::size_t>(t)] - used);
            expected_sum += e;
            const float got = scores[static_cast<std::size_t>(t)];
            good = good && (e == 0 ? got == 0.0f : near(got, 2 * e, 1e-5));
          }
          CHECK(good && near(sum, expected_sum, 1e-5 * kBlock), level->name);
        }
      }
    }
    float scores[kBlock] = {kNan, 1.0f}, scales[kBlock];
    std::fill_n(scales, kBlock, 1.0f);
    const float max =
        level->finish_scores(scores, scales, nullptr, -1.7e38f, 0.0f, 2, 0, 2);
    CHECK(max == 1.0f, level->name);
    CHECK(std::isnan(level->weigh(scores, scales, 2, max)), level->name);
  }
}

TEST(unknown_levels_are_refused_by_name) {
  std::string reason;
  CHECK(find_kernels("mmx", reason) == nullptr, "no such level");
  CHECK(reason.find("mmx") != std::string::npos && reason.find("scalar") != std::string::npos,
        reason);
  CHECK(find_kernels("scalar", reason) == scalar_kernels(), "scalar is everywhere");
  CHECK(find_kernels("", reason) == supported_kernels().front(), "empty means the best");
  CHECK(find_kernels(nullptr, reason) == supported_kernels().front(), "unset means the best");
}

}  // namespace
}  // namespace tq::test
