// Products with rows of bytes and floats, and with signs, that keep what they decode in registers:
// every level against float64, between guard pages.
#include <limits>
#include <string>

#include "core/attention.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

constexpr Coordinate kKinds[] = {Coordinate::kFp8, Coordinate::kInt8, Coordinate::kFloat,
                                 Coordinate::kHalf, Coordinate::kBfloat};
constexpr const char* kNames[] = {"fp8", "int8", "float", "half", "bfloat"};

int bytes_of(Coordinate kind) {
  return kind == Coordinate::kFloat                                 ? 4
         : kind == Coordinate::kHalf || kind == Coordinate::kBfloat ? 2
                                                                    : 1;
}

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

struct Rows {
  Rows(const Kernels& level, Coordinate kind, int size, int count_, int more, Side side,
       Random& random)
      : format{kind,
               bytes_of(kind),
               size,
               round_up(size, level.lanes),
               size * bytes_of(kind),
               size * bytes_of(kind) +
                   (kind == Coordinate::kInt8 ? 2 * ((size + kScaleBlock - 1) / kScaleBlock) : 0) +
                   more},
        count(count_),
        bytes(static_cast<std::size_t>(count) * format.stride, side),
        numbers(static_cast<std::size_t>(count) * size) {
    UniformInt<int> byte(0, 255);
    for (uint8_t& x : bytes) x = static_cast<uint8_t>(byte(random));
    std::vector<float> vector(static_cast<std::size_t>(size));
    for (int t = 0; t < count; ++t) {
      fill_normal(vector.data(), vector.size(), random);
      for (int j = 0; j < size; ++j) put(t, j, vector[static_cast<std::size_t>(j)], random);
    }
  }
  uint8_t* row(int t) { return bytes.data() + static_cast<std::size_t>(t) * format.stride; }
  double& number(int t, int j) {
    return numbers[static_cast<std::size_t>(t) * format.head_size + j];
  }

  void put(int t, int j, float x, Random& random) {
    uint8_t* const at = row(t) + j * format.bytes;
    uint16_t half = float_to_half(x), bfloat = float_to_bfloat(x);
    switch (format.kind) {
      case Coordinate::kFp8:
        // Up to 16, of either sign, subnormals and what nobody writes.
        *at = static_cast<uint8_t>(random() % 16 == 0 ? 0x7f + (random() % 2) * 0x80
                                                      : (random() & 0x80) | random() % 0x58);
        number(t, j) = fp8_value(*at);
        break;
      case Coordinate::kInt8: {
        uint8_t* const scale = row(t) + format.scales + j / kScaleBlock * 2;
        if (j % kScaleBlock == 0) store_half(0.002f * static_cast<float>(1 + random() % 9), scale);
        number(t, j) = static_cast<double>(half_at(scale)) * static_cast<int8_t>(*at);
        break;
      }
      case Coordinate::kFloat:
        std::memcpy(at, &x, sizeof x);
        number(t, j) = x;
        break;
      case Coordinate::kHalf:
        std::memcpy(at, &half, sizeof half);
        number(t, j) = half_to_float(half);
        break;
      default:
        std::memcpy(at, &bfloat, sizeof bfloat);
        number(t, j) = bfloat_to_float(bfloat);
    }
  }

  ByteFormat format;
  int count;
  Guarded<uint8_t> bytes;
  std::vector<double> numbers;
};

// Queries and sums as the kernels want them: zeros behind the head size.
void fill_padded(Guarded<float>& out, int padded, int size, float deviation, Random& random) {
  std::fill(out.begin(), out.end(), 0.0f);
  for (std::size_t at = 0; at < out.size(); at += static_cast<std::size_t>(padded)) {
    fill_normal(out.data() + at, static_cast<std::size_t>(size), random, deviation);
  }
}

TEST(products_with_bytes_are_right) {
  Random random(41);
  for (const Kernels* level : supported_kernels()) {
    for (std::size_t k = 0; k < std::size(kKinds); ++k) {
      for (const int size : kHeadSizes) {
        for (const int count : {1, 3, 4, 17, kBlock}) {
          const Side side = count % 2 ? Side::kBegin : Side::kEnd;
          Rows rows(*level, kKinds[k], size, count, count == 17 ? 5 : 0, side, random);
          const int padded = rows.format.padded;
          const int queries = 1 + static_cast<int>(random() % 9);
          const std::string what = std::string(level->name) + ", " + kNames[k] + ", head size " +
                                   std::to_string(size) + ", " + std::to_string(count) + " rows, " +
                                   std::to_string(queries) + " queries";
          Guarded<float> query(static_cast<std::size_t>(queries) * padded), sums(query.size());
          Guarded<float> scores(static_cast<std::size_t>(queries) * kBlock);
          fill_padded(query, padded, size, 1.0f / std::sqrt(static_cast<float>(size)), random);
          level->score_bytes(rows.format, rows.bytes.data(), count, query.data(), queries,
                             scores.data());
          double worst = 0;
          for (int q = 0; q < queries; ++q) {
            for (int t = 0; t < count; ++t) {
              double expected = 0, magnitude = 1;
              for (int j = 0; j < size; ++j) {
                const double product =
                    rows.number(t, j) * query[static_cast<std::size_t>(q * padded + j)];
                expected += product;
                magnitude += std::abs(product);
              }
              const float got = scores[static_cast<std::size_t>(q * kBlock + t)];
              worst = std::max(worst, std::isnan(got) ? 1e9 : std::abs(got - expected) / magnitude);
            }
          }
          CHECK(worst < 1e-6, what + ", score off by " + std::to_string(worst));

          // Random weights, some of them zero; zeros up to the lanes.
          std::fill(scores.begin(), scores.end(), 0.0f);
          for (int q = 0; q < queries; ++q) {
            fill_normal(scores.data() + q * kBlock, static_cast<std::size_t>(count), random);
            if (count > 3) scores[static_cast<std::size_t>(q * kBlock + 2)] = 0.0f;
          }
          fill_padded(sums, padded, size, 1.0f, random);
          const std::vector<float> before(sums.begin(), sums.end());
          level->accumulate_bytes(rows.format, rows.bytes.data(), count, scores.data(), queries,
                                  sums.data());
          worst = 0;
          for (int q = 0; q < queries; ++q) {
            for (int j = 0; j < size; ++j) {
              const std::size_t at = static_cast<std::size_t>(q * padded + j);
              double expected = before[at], magnitude = 1 + std::abs(expected);
              for (int t = 0; t < count; ++t) {
                const double product =
                    rows.number(t, j) * scores[static_cast<std::size_t>(q * kBlock + t)];
                expected += product;
                magnitude += std::abs(product);
              }
              const float got = sums[at];
              worst = std::max(worst, std::isnan(got) ? 1e9 : std::abs(got - expected) / magnitude);
            }
          }
          CHECK(worst < 2e-6, what + ", sum off by " + std::to_string(worst));
        }
      }
    }
  }
}

// How many query rows are asked at once does not show in the bits.
TEST(products_with_bytes_do_not_depend_on_the_group) {
  Random random(42);
  const int queries = 8, count = 61;
  for (const Kernels* level : supported_kernels()) {
    for (std::size_t k = 0; k < std::size(kKinds); ++k) {
      for (const int size : {24, 80, 128}) {
        Rows rows(*level, kKinds[k], size, count, 0, Side::kEnd, random);
        const int padded = rows.format.padded;
        Guarded<float> query(static_cast<std::size_t>(queries) * padded);
        Guarded<float> scores(queries * kBlock), sums(query.size());
        Guarded<float> one_score(kBlock), one_sum(static_cast<std::size_t>(padded));
        fill_padded(query, padded, size, 1.0f, random);
        std::fill(scores.begin(), scores.end(), 0.0f);
        std::fill(sums.begin(), sums.end(), 0.0f);
        level->score_bytes(rows.format, rows.bytes.data(), count, query.data(), queries,
                           scores.data());
        for (int q = 0; q < queries; ++q) {
          std::fill_n(scores.data() + q * kBlock + count, kBlock - count, 0.0f);
        }
        level->accumulate_bytes(rows.format, rows.bytes.data(), count, scores.data(), queries,
                                sums.data());
        bool same = true;
        for (int q = 0; q < queries; ++q) {
          level->score_bytes(rows.format, rows.bytes.data(), count, query.data() + q * padded, 1,
                             one_score.data());
          same = same && std::memcmp(one_score.data(), scores.data() + q * kBlock,
                                     count * sizeof(float)) == 0;
          std::fill(one_sum.begin(), one_sum.end(), 0.0f);
          level->accumulate_bytes(rows.format, rows.bytes.data(), count, scores.data() + q * kBlock,
                                  1, one_sum.data());
          same = same && std::memcmp(one_sum.data(), sums.data() + q * padded,
                                     static_cast<std::size_t>(size) * sizeof(float)) == 0;
        }
        CHECK(same, std::string(level->name) + ", " + kNames[k] + ", " + std::to_string(size));
      }
    }
  }
}

// Row 3 is not finite; only query 1 gives it a weight.
TEST(a_row_that_is_not_finite_spoils_who_sees_it) {
  Random random(43);
  const int size = 72, count = 9, queries = 3;
  for (const Kernels* level : supported_kernels()) {
    for (const float bad : {kNan, kInfinity}) {
      for (const Coordinate kind :
           {Coordinate::kInt8, Coordinate::kFloat, Coordinate::kHalf, Coordinate::kBfloat}) {
        Rows rows(*level, kind, size, count, 0, Side::kEnd, random);
        const int padded = rows.format.padded;
        Guarded<float> weights(queries * kBlock), sums(static_cast<std::size_t>(queries * padded));
        Guarded<float> expected(sums.size());
        std::fill(weights.begin(), weights.end(), 0.0f);
        for (int q = 0; q < queries; ++q) {
          fill_normal(weights.data() + q * kBlock, count, random);
          if (q != 1) weights[static_cast<std::size_t>(q * kBlock + 3)] = 0.0f;
        }
        std::fill(sums.begin(), sums.end(), 0.5f);
        std::fill(expected.begin(), expected.end(), 0.5f);
        level->accumulate_bytes(rows.format, rows.bytes.data(), count, weights.data(), queries,
                                expected.data());
        const bool is_scale = kind == Coordinate::kInt8;  // of coordinates 32 .. 63
        if (is_scale) {
          store_half(bad, rows.row(3) + rows.format.scales + 2);
        } else {
          rows.put(3, 33, bad, random);
        }
        level->accumulate_bytes(rows.format, rows.bytes.data(), count, weights.data(), queries,
                                sums.data());
        bool good = true;
        for (int q = 0; q < queries; ++q) {
          for (int j = 0; j < size; ++j) {
            const std::size_t at = static_cast<std::size_t>(q * padded + j);
            const bool is_spoilt = q == 1 && (is_scale ? j / kScaleBlock == 1 : j == 33);
            // A code of zero times an infinite scale is spoilt as well.
            good = good && (is_spoilt ? !std::isfinite(sums[at]) : sums[at] == expected[at]);
          }
        }
        CHECK(good, std::string(level->name) + ", " + kNames[static_cast<int>(kind)]);
      }
    }
  }
}

// The signs of prod: products with a table of +-1.
TEST(products_with_signs_are_right) {
  Random random(44);
  float signs[kTable];
  for (int i = 0; i < kTable; ++i) signs[i] = i % 2 ? 1.0f : -1.0f;
  for (const Kernels* level : supported_kernels()) {
    for (const int size : kHeadSizes) {
      for (const int count : {1, 5, kBlock}) {
        const RowFormat format = row_format(1, size, level->lanes, size / 8 + 3);
        Guarded<uint8_t> rows(static_cast<std::size_t>(count * format.stride));
        for (uint8_t& x : rows) x = static_cast<uint8_t>(random());
        const int queries = 1 + static_cast<int>(random() % 7);
        std::vector<float> natural(static_cast<std::size_t>(queries * size));
        Guarded<float> query(static_cast<std::size_t>(queries * format.padded));
        Guarded<float> sums(query.size()), scores(static_cast<std::size_t>(queries) * kBlock);
        fill_normal(natural.data(), natural.size(), random);
        for (int q = 0; q < queries; ++q) {
          to_slot_order(format, natural.data() + q * size, query.data() + q * format.padded);
        }
        const auto sign = [&](int t, int j) {
          const uint8_t byte =
              rows[static_cast<std::size_t>(t * format.stride + j % format.slot_size)];
          return byte >> (j / format.slot_size) & 1 ? 1.0 : -1.0;
        };
        level->score_rows(format, rows.data(), count, signs, query.data(), queries, scores.data());
        double worst = 0;
        for (int q = 0; q < queries; ++q) {
          for (int t = 0; t < count; ++t) {
            double expected = 0;
            for (int j = 0; j < size; ++j) {
              expected += sign(t, j) * natural[static_cast<std::size_t>(q * size + j)];
            }
            worst = std::max(worst,
                             std::abs(scores[static_cast<std::size_t>(q * kBlock + t)] - expected));
          }
        }
        CHECK(worst < 5e-4, std::string(level->name) + ", " + std::to_string(size));
        fill_normal(scores.data(), scores.size(), random);
        std::fill(sums.begin(), sums.end(), 1.0f);
        level->accumulate_rows(format, rows.data(), count, signs, scores.data(), queries,
                               sums.data());
        worst = 0;
        for (int q = 0; q < queries; ++q) {
          for (int j = 0; j < size; ++j) {
            double expected = 1;
            for (int t = 0; t < count; ++t) {
              expected += sign(t, j) * scores[static_cast<std::size_t>(q * kBlock + t)];
            }
            const int at = q * format.padded + j / format.slot_size * format.padded_slot +
                           j % format.slot_size;
            worst = std::max(worst, std::abs(sums[static_cast<std::size_t>(at)] - expected));
          }
        }
        CHECK(worst < 2e-4, std::string(level->name) + ", " + std::to_string(size));
      }
    }
  }
}

TEST(fields_of_hidden_rows_are_never_used) {
  Random random(45);
  for (const Kernels* level : supported_kernels()) {
    for (const int count : {1, 5, 16, 31, kBlock}) {
      Guarded<float> weights(kBlock), scales(kBlock), zeros(kBlock), out(kBlock);
      std::fill(weights.begin(), weights.end(), 0.0f);
      fill_normal(weights.data(), static_cast<std::size_t>(count), random);
      fill_normal(scales.data(), kBlock, random);
      fill_normal(zeros.data(), kBlock, random);
      double expected = 0;
      for (int t = 0; t < kBlock; ++t) {
        const std::size_t at = static_cast<std::size_t>(t);
        if (t % 4 == 2) weights[at] = 0.0f;
        if (weights[at] == 0.0f) scales[at] = zeros[at] = t % 8 < 4 ? kNan : kInfinity;
        if (weights[at] != 0.0f) expected += static_cast<double>(weights[at]) * zeros[at];
      }
      const float sum =
          level->apply_fields(weights.data(), scales.data(), zeros.data(), count, out.data());
      bool good = std::abs(sum - expected) < 1e-4;
      for (int t = 0; t < count; ++t) {
        const std::size_t at = static_cast<std::size_t>(t);
        good = good && out[at] == (weights[at] == 0.0f ? 0.0f : weights[at] * scales[at]);
      }
      CHECK(good, level->name);
      // In place, without zeros.
      const float none =
          level->apply_fields(weights.data(), scales.data(), nullptr, count, weights.data());
      CHECK(none == 0.0f && std::memcmp(weights.data(), out.data(),
                                        static_cast<std::size_t>(count) * sizeof(float)) == 0,
            level->name);
    }
  }
}

// Both parts of prod, with centroids that are integers and others, against the scalar level, which
// has float products only. The last row is hidden from the first token, whatever its fields say.
TEST(prod_agrees_with_the_scalar_level) {
  Random random(46);
  const int64_t tokens = 2, group = 3, count = 141;
  for (const int bits : {3, 4}) {
    for (const bool has_integers : {true, false}) {
      for (const int size : {8, 40, 64, 80, 128, 512}) {
        const Codec codec{Kind::kProd, bits};
        Tables tables(codec, size, random);
        const float unit = tables.centroids[tables.centroids.size() - 1] / 127.0f;
        for (float& centroid : tables.centroids) {
          if (has_integers) centroid = std::nearbyint(centroid / unit) * unit;
        }
        const int width = spec::row_bytes(codec, size);
        const std::size_t bytes = static_cast<std::size_t>(count * width);
        Guarded<uint8_t> keys(bytes), values(bytes);
        fill_rows(keys.data(), static_cast<std::size_t>(count), codec, size, width, random);
        fill_rows(values.data(), static_cast<std::size_t>(count), codec, size, width, random);
        Guarded<float> query(static_cast<std::size_t>(group * tokens * size));
        Guarded<float> output(query.size());
        fill_normal(query.data(), query.size(), random);
        const int64_t length = count - tokens;
        AttentionCall call{};
        call.element = Element::kFloat;
        call.query = query.data();
        call.output = output.data();
        call.key = {keys.data(), codec, width, tables.centroids.data()};
        call.value = {values.data(), codec, width, tables.centroids.data()};
        call.key_rotation = call.value_rotation = tables.ready();
        call.past_length = &length;
        call.batch = call.heads = 1;
        call.query_heads = group;
        call.tokens = tokens;
        call.slots = count;
        call.head_size = size;
        call.scale = 0.01f;
        call.causal = true;
        CHECK(attention(*scalar_kernels(), call, serial()), "scalar");
        const std::vector<float> expected(output.begin(), output.end());
        double largest = 0;
        for (const float x : expected) largest = std::max<double>(largest, std::abs(x));
        const std::vector<uint8_t> sound(values.begin(), values.end());
        for (const Kernels* const level : levels_with(nullptr)) {
          CHECK(attention(*level, call, serial()), level->name);
          double worst = 0;
          for (std::size_t i = 0; i < output.size(); ++i) {
            worst = std::max<double>(
                worst, std::isnan(output[i]) ? 1e9 : std::abs(output[i] - expected[i]));
          }
          const bool rounds = has_integers && level->integers != nullptr;
          CHECK(worst <= (rounds ? 1e-2 : 2e-5) * largest,
                describe(level->name, codec, size) + ", off by " + std::to_string(worst / largest));

          const std::vector<float> before(output.begin(), output.end());
          uint8_t* const last = values.data() + bytes - width + spec::code_bytes(codec, size);
          store_half(kNan, last);
          store_half(kInfinity, last + 2);
          CHECK(attention(*level, call, serial()), level->name);
          bool good = true;
          for (int64_t i = 0; i < group * tokens * size; ++i) {
            const std::size_t at = static_cast<std::size_t>(i);
            const bool sees = i / size % tokens == 1;
            good = good && (sees ? !std::isfinite(output[at])
                                 : std::abs(output[at] - before[at]) <= 1e-4 * largest);
          }
          CHECK(good, describe(level->name, codec, size) + ", nonfinite fields");
          std::copy(sound.begin(), sound.end(), values.begin());
        }
      }
    }
  }
}

}  // namespace
}  // namespace tq::test
