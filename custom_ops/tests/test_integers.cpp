// Products with integers of every level against float64: queries and weights may be off by half a
// step of the largest of their row, or of the weights that share it, and by nothing else. They are
// those of the scalar level to the bit.
#include "tests/fixture.h"
#include "tests/testing.h"

#include <limits>

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kFloat = 1e-6;  // what float32 leaves of the few operations after the products

constexpr int kSizes[] = {8,   16,  24,  32,  40,  48,  56,  64,  72,  80,  88,  96,  112,
                          120, 128, 136, 160, 192, 200, 256, 264, 320, 384, 448, 504, 512};
constexpr int kCounts[] = {1,  2,  3,  4,  5,  7,  8,  9,   15,  16,    17,
                           31, 32, 33, 47, 64, 65, 96, 100, 127, kBlock};
constexpr Codec kCodecs[] = {lloyd_max(1), lloyd_max(2), lloyd_max(3),
                             lloyd_max(4), lloyd_max(5), {Kind::kU8, 4}};
// Of a codebook: two vectors of products fit in 16 bits up to 64.
constexpr int kLargest[] = {127, 61, 64, 65, 15};

// Rows that end, or begin, at an inaccessible page, and what their codes stand for.
struct Codes {
  Codes(const Kernels& level, Codec codec, int size, int count_, int more, Side side,
        Random& random, int most = kLargestInteger)
      : format(row_format(codec.kind == Kind::kU8 ? 8 : codec.bits, size, level.lanes,
                          spec::row_bytes(codec, size) + more)),
        count(count_),
        bytes(static_cast<std::size_t>(count) * format.stride, side),
        numbers(static_cast<std::size_t>(count) * size) {
    fill_rows(bytes.data(), static_cast<std::size_t>(count), codec, size, format.stride, random);
    if (random() % 2) format.end = bytes.data() + bytes.size();
    const int levels = 1 << codec.bits;
    table.unit = 0.0019f;
    table.largest = most;
    for (int i = 0; i < kTable; ++i) {
      const int number = static_cast<int>(random() % static_cast<unsigned>(2 * most + 1)) - most;
      table.entries[i] = static_cast<int8_t>(number);
    }
    table.entries[0] = static_cast<int8_t>(-most);
    table.entries[levels - 1] = static_cast<int8_t>(most);
    for (int i = levels; i < kTable; ++i) table.entries[i] = table.entries[i % levels];
    for (int t = 0; t < count; ++t) {
      const uint8_t* const row = bytes.data() + t * format.stride;
      for (int j = 0; j < size; ++j) {
        numbers[static_cast<std::size_t>(t * size + j)] =
            static_cast<double>(table.unit) * table.entries[code_of(codec, size, row, j) % kTable];
      }
    }
  }
  double number(int t, int j) const {
    return numbers[static_cast<std::size_t>(t * format.head_size + j)];
  }

  RowFormat format;
  int count;
  IntegerTable table{};
  Guarded<uint8_t> bytes;
  std::vector<double> numbers;
};

// Rows of queries, weights and sums as the kernels want them.
struct Work {
  Work(const IntegerKernels& k, const RowFormat& format, int queries)
      : query_width(k.query_floats(format)),
        sums_width(k.sums_floats(format)),
        prepared(static_cast<std::size_t>(queries) * query_width),
        scores(static_cast<std::size_t>(queries) * kBlock),
        weights(static_cast<std::size_t>(queries) * kBlock),
        numbers(static_cast<std::size_t>(queries) * kOperandFloats),
        sums(static_cast<std::size_t>(queries) * sums_width) {}
  int query_width, sums_width;
  Guarded<float> prepared, scores, weights, numbers, sums;
};

// The softmax of the first row alone.
float softmax_row(const IntegerKernels& k, Work& work, const float* key_scales,
                  const float* value_scales, float* maximum, int largest = kLargestInteger) {
  float sum = 77.0f;
  k.softmax_block(work.scores.data(), 1, key_scales, {value_scales, 1, 0, {largest}}, maximum, &sum,
                  work.numbers.data(), {});
  return sum;
}

// Requests to memory reach behind the rows, where none may be.
PrefetchRange ahead_of(const Codes& codes) {
  return {codes.bytes.data() + kRowsAhead * codes.format.stride,
          static_cast<std::ptrdiff_t>(codes.count) * codes.format.stride};
}

// body(level, integers, codes, queries, random, what)
template <class Body>
void for_each_case(Body&& body) {
  for (const Kernels* level : levels_with("8")) {
    Random random(11);
    std::size_t at = 0;
    for (const int size : kSizes) {
      for (const Codec codec : kCodecs) {
        for (int queries = 1; queries <= 12; ++queries, ++at) {
          const int count = kCounts[at % std::size(kCounts)];
          const Codes codes(*level, codec, size, count, queries % 3 == 0 ? 5 : 0,
                            queries % 4 == 0 ? Side::kBegin : Side::kEnd, random,
                            kLargest[at % std::size(kLargest)]);
          body(*level, *level->integers, codes, queries, random,
               describe(level->name, codec, size) + ", " + std::to_string(count) + " rows, " +
                   std::to_string(queries) + " queries");
        }
      }
    }
  }
}

// The scalar level with the steps of a level.
const IntegerKernels& reference_of(const IntegerKernels& k) {
  return k.has_lanes ? *scalar_lane_integers() : *scalar_integers();
}

double step_of_query(const IntegerKernels& k, const Codes& codes, const float* natural) {
  const IntegerKernels& by = reference_of(k);
  const std::size_t floats = static_cast<std::size_t>(by.query_floats(codes.format));
  std::vector<float> prepared(floats);
  by.prepare_query(codes.format, codes.table, natural, prepared.data());
  return prepared[floats - 1];
}

// steps[t] of a row of weights.
void steps_of_weights(const IntegerKernels& k, const Codes& codes, const double* weights,
                      double* steps) {
  const int step_rows = k.has_lanes ? kLaneStepRows : kByteStepRows;
  float row[kBlock] = {}, operands[kOperandFloats];
  for (int t = 0; t < codes.count; ++t) row[t] = static_cast<float>(weights[t]);
  reference_of(k).quantise_weights(row, codes.count, codes.table.largest, operands);
  for (int t = 0; t < kBlock; ++t) steps[t] = operands[kBlock / 4 + t / step_rows];
}

// NaN stays.
double larger(double a, double b) { return std::isnan(a) || b <= a ? a : b; }

// How far sum q is beyond what rounded weights allow, as a share of it: at most 1 where right.
double excess_of_sums(const IntegerKernels& k, const Codes& codes, const Work& work, int q,
                      const double* weights, double before) {
  const int size = codes.format.head_size;
  std::vector<float> natural(static_cast<std::size_t>(size));
  k.natural_sums(codes.format, work.sums.data() + q * work.sums_width, natural.data());
  double steps[kBlock], worst = 0;
  steps_of_weights(k, codes, weights, steps);
  for (int j = 0; j < size; ++j) {
    double sum = before, magnitude = 0;
    for (int t = 0; t < codes.count; ++t) {
      sum += weights[t] * codes.number(t, j);
      magnitude += std::abs(codes.number(t, j)) * steps[t];
    }
    const double allowed =
        magnitude * (0.5 + kFloat * kLargestByteWeight) + kFloat * std::abs(before) + 1e-30;
    const double off = std::abs(natural[static_cast<std::size_t>(j)] - sum) / allowed;
    worst = larger(worst, off);
  }
  return worst;
}

TEST(integer_scores_are_right) {
  for_each_case([](const Kernels&, const IntegerKernels& k, const Codes& codes, int queries,
                   Random& random, const std::string& what) {
    const RowFormat& format = codes.format;
    const int size = format.head_size;
    Work work(k, format, queries);
    Guarded<float> natural(static_cast<std::size_t>(queries * size));
    fill_normal(natural.data(), natural.size(), random, queries % 2 ? 1.0f : 3e4f);
    // One row is not finite, one is zero; neither touches the others.
    const int nonfinite = queries > 2 ? queries / 2 : -1, none = queries > 3 ? 0 : -1;
    if (nonfinite >= 0) {
      const float odd[] = {kNan, kInfinity, -kInfinity};
      natural[static_cast<std::size_t>(nonfinite * size) + random() % size] = odd[queries % 3];
    }
    if (none >= 0) std::fill_n(natural.data(), size, 0.0f);
    for (int q = 0; q < queries; ++q) {
      k.prepare_query(format, codes.table, natural.data() + q * size,
                      work.prepared.data() + q * work.query_width);
    }
    std::fill(work.scores.begin(), work.scores.end(), 77.0f);
    k.score_rows(format, codes.bytes.data(), codes.count, codes.table, work.prepared.data(),
                 work.query_width, queries, work.scores.data(), ahead_of(codes));
    double worst = 0;
    bool exact = true;
    for (int q = 0; q < queries; ++q) {
      const double step = step_of_query(k, codes, natural.data() + q * size);
      for (int t = 0; t < codes.count; ++t) {
        const float score = work.scores[static_cast<std::size_t>(q * kBlock + t)];
        if (q == nonfinite || q == none) {
          exact = exact && (q == none ? score == 0.0f : std::isnan(score));
          continue;
        }
        double sum = 0, magnitude = 0;
        for (int j = 0; j < size; ++j) {
          sum += codes.number(t, j) * natural[static_cast<std::size_t>(q * size + j)];
          magnitude += std::abs(codes.number(t, j));
        }
        const double off =
            std::abs(score - sum) / (magnitude * step * (0.5 + kFloat * kLargestByte));
        worst = larger(worst, off);
      }
    }
    CHECK(worst <= 1, what + ", " + std::to_string(worst));
    CHECK(exact, what);
  });
}

TEST(integer_sums_are_right) {
  for_each_case([](const Kernels& level, const IntegerKernels& k, const Codes& codes, int queries,
                   Random& random, const std::string& what) {
    const RowFormat& format = codes.format;
    Work work(k, format, queries);
    std::vector<double> weights(static_cast<std::size_t>(queries) * kBlock);
    UniformReal<float> uniform(0.0f, 5.0f);
    std::fill(work.weights.begin(), work.weights.end(), kNan);
    // One row is no row of weights, one is zero.
    const int nonfinite = queries > 2 ? queries / 2 : -1, none = queries > 3 ? 0 : -1;
    const float odd[] = {kNan, kInfinity, -kInfinity, -1e-9f};
    bool good = true;
    for (int q = 0; q < queries; ++q) {
      float* const row = work.weights.data() + q * kBlock;
      for (int t = 0; t < (codes.count + level.lanes - 1) / level.lanes * level.lanes; ++t) {
        row[t] = t < codes.count && q != none && random() % 5 ? uniform(random) : 0.0f;
        if (q != nonfinite) weights[static_cast<std::size_t>(q * kBlock + t)] = row[t];
      }
      if (q == nonfinite) row[random() % static_cast<unsigned>(codes.count)] = odd[queries % 4];
      good =
          good && k.quantise_weights(row, codes.count, codes.table.largest,
                                     work.numbers.data() + q * kOperandFloats) == (q != nonfinite);
    }
    CHECK(good, what);
    std::vector<float> before(static_cast<std::size_t>(format.head_size), 1.0f);
    for (int q = 0; q < queries; ++q) {
      k.ordered_sums(format, before.data(), work.sums.data() + q * work.sums_width);
    }
    k.accumulate_rows(format, codes.bytes.data(), codes.count, codes.table, work.numbers.data(),
                      queries, work.sums.data(), work.sums_width, ahead_of(codes));
    double worst = 0;
    for (int q = 0; q < queries; ++q) {
      const double off = excess_of_sums(k, codes, work, q, weights.data() + q * kBlock, 1.0);
      worst = larger(worst, off);
    }
    CHECK(worst <= 1, what + ", " + std::to_string(worst));
  });
}

TEST(integer_softmax_is_right) {
  for (const Kernels* level : levels_with("8")) {
    const IntegerKernels& k = *level->integers;
    Random random(12);
    UniformReal<float> field(0.1f, 12.0f);
    const Codes codes(*level, lloyd_max(4), 64, kBlock, 0, Side::kEnd, random);
    Work work(k, codes.format, 1);
    Guarded<float> key_scales(kBlock), value_scales(kBlock);
    for (const float spread : {0.0f, 0.1f, 3.0f, 40.0f, 1e4f}) {
      for (const float start : {-std::numeric_limits<float>::max(), -3.0f, 2.0f, 1e3f}) {
        const std::string what =
            std::string(level->name) + ", " + std::to_string(spread) + " " + std::to_string(start);
        fill_normal(work.scores.data(), kBlock, random, spread);
        for (float& x : key_scales) x = field(random);
        for (float& x : value_scales) x = random() % 7 ? field(random) : 0.0f;
        work.scores[random() % kBlock] = -kInfinity;
        float top = start;
        for (std::size_t t = 0; t < kBlock; ++t) {
          top = std::max(top, work.scores[t] * key_scales[t]);
        }
        double sum = 0;
        std::vector<double> weights(kBlock);
        for (std::size_t t = 0; t < kBlock; ++t) {
          const double weight = std::exp(static_cast<double>(work.scores[t] * key_scales[t]) - top);
          sum += weight;
          weights[t] = weight * value_scales[t];
        }
        float max = start;
        const float got = softmax_row(k, work, key_scales.data(), value_scales.data(), &max);
        CHECK(max == top, what);
        CHECK(std::abs(got - sum) <= 2e-6 * sum + 1e-36,
              what + ": " + std::to_string(got) + " for " + std::to_string(sum));
        std::fill(work.sums.begin(), work.sums.end(), 0.0f);
        k.accumulate_rows(codes.format, codes.bytes.data(), kBlock, codes.table,
                          work.numbers.data(), 1, work.sums.data(), work.sums_width, {});
        const double off = excess_of_sums(k, codes, work, 0, weights.data(), 0.0);
        CHECK(off <= 1.1, what + ", " + std::to_string(off));  // exp is float32

        // What is no weight is left to others, with nothing done.
        struct Odd {
          Guarded<float>& where;
          float what;
        };
        for (const Odd& odd :
             {Odd{work.scores, kNan}, Odd{work.scores, kInfinity}, Odd{key_scales, kNan},
              Odd{value_scales, kNan}, Odd{value_scales, kInfinity}, Odd{value_scales, -1.0f}}) {
          const std::size_t t = random() % kBlock;
          // A weight of zero hides the sign of its scale.
          if (odd.what < 0 && !(weights[t] > 1e-30)) continue;
          const float before = odd.where[t];
          odd.where[t] = odd.what;
          max = start;
          const float none = softmax_row(k, work, key_scales.data(), value_scales.data(), &max);
          CHECK(std::isnan(none) && max == start, what + ", " + std::to_string(odd.what));
          odd.where[t] = before;
        }
      }
    }
    std::fill_n(work.scores.data(), kBlock, -kInfinity);
    float max = -kInfinity;
    CHECK(std::isnan(softmax_row(k, work, key_scales.data(), value_scales.data(), &max)),
          std::string(level->name) + ", nothing but -infinity");
  }
}

// Of one part and of two: the numbers of a part are those that it has alone.
TEST(integer_softmax_of_rows_is_that_of_each) {
  constexpr int kRows = 19, kOdd = 5;
  for (const Kernels* level : levels_with("8")) {
    const IntegerKernels& k = *level->integers;
    Random random(29);
    Guarded<float> scores(kRows * kBlock), key_scales(kBlock), value_scales(kMaxParts * kBlock);
    fill_normal(scores.data(), scores.size(), random, 3.0f);
    for (int t = 0; t < kBlock; ++t) {
      key_scales[t] = value_scales[t] = 0.5f + 0.01f * (t % 7);
      value_scales[kBlock + t] = 2.0f + 0.3f * (t % 5);
    }
    scores[kOdd * kBlock + 17] = kNan;
    Guarded<float> one(kOperandFloats);
    for (const int parts : {1, 2}) {
      constexpr int kPitch = kRows * kOperandFloats;
      Guarded<float> maxima(kRows), sums(kRows), numbers(static_cast<std::size_t>(parts) * kPitch);
      std::fill(maxima.begin(), maxima.end(), -1.0f);
      std::fill(numbers.begin(), numbers.end(), 0.0f);
      k.softmax_block(scores.data(), kRows, key_scales.data(),
                      {value_scales.data(), parts, kPitch, {127, 61}}, maxima.data(), sums.data(),
                      numbers.data(), {reinterpret_cast<const uint8_t*>(scores.data()), 4096});
      for (int r = 0; r < parts * kRows; ++r) {
        const int row = r % kRows, part = r / kRows;
        const std::string what = std::string(level->name) + ", row " + std::to_string(r);
        std::fill(one.begin(), one.end(), 0.0f);
        float max = -1.0f, sum;
        k.softmax_block(scores.data() + row * kBlock, 1, key_scales.data(),
                        {value_scales.data() + part * kBlock, 1, 0, {part == 0 ? 127 : 61}}, &max,
                        &sum, one.data(), {});
        CHECK(row == kOdd ? std::isnan(sums[row]) && std::isnan(sum) : sums[row] == sum, what);
        CHECK(maxima[row] == max && (row != kOdd || max == -1.0f), what);
        CHECK(std::memcmp(one.data(), numbers.data() + r * kOperandFloats,
                          kOperandFloats * sizeof(float)) == 0,
              what);
      }
      // A weight of any part that is no number is left to others.
      value_scales[(parts - 1) * kBlock + 3] = kNan;
      float max = -1.0f, sum = 0.0f;
      k.softmax_block(scores.data(), 1, key_scales.data(),
                      {value_scales.data(), parts, kPitch, {127, 61}}, &max, &sum, numbers.data(),
                      {});
      CHECK(std::isnan(sum) && max == -1.0f, level->name);
      value_scales[(parts - 1) * kBlock + 3] = 1.0f;
    }
  }
}

TEST(integer_softmax_with_zeros_is_right) {
  for (const Kernels* level : levels_with("8")) {
    const IntegerKernels& k = *level->integers;
    Random random(13);
    UniformReal<float> field(0.1f, 12.0f);
    const Codes codes(*level, lloyd_max(3), 64, kBlock, 0, Side::kEnd, random);
    Work work(k, codes.format, 1);
    Guarded<float> key_scales(kBlock), key_zeros(kBlock), value_scales(kBlock), value_zeros(kBlock);
    for (const float start : {-std::numeric_limits<float>::max(), 2.0f, 1e3f}) {
      const std::string what = std::string(level->name) + ", " + std::to_string(start);
      fill_normal(work.scores.data(), kBlock, random, 1.0f);
      fill_normal(key_zeros.data(), kBlock, random, 3.0f);
      fill_normal(value_zeros.data(), kBlock, random, 3.0f);
      for (float& x : key_scales) x = field(random);
      for (float& x : value_scales) x = field(random);
      const float query_sum = -1.5f;
      const auto score = [&](std::size_t t) {
        return static_cast<double>(work.scores[t]) * key_scales[t] +
               static_cast<double>(query_sum) * key_zeros[t];
      };
      double top = start;
      for (std::size_t t = 0; t < kBlock; ++t) top = std::max(top, score(t));
      double sum = 0, zeros = 0, magnitude = 0;
      std::vector<double> weights(kBlock);
      for (std::size_t t = 0; t < kBlock; ++t) {
        const double weight = std::exp(score(t) - top);
        sum += weight;
        zeros += weight * value_zeros[t];
        magnitude += weight * std::abs(value_zeros[t]);
        weights[t] = weight * value_scales[t];
      }
      float max = start, got_zeros = kNan;
      const auto softmax_block = [&] {
        return k.softmax_block_zeros(work.scores.data(), key_scales.data(), key_zeros.data(),
                                     query_sum, {value_scales.data(), 1, 0, {kLargestInteger}},
                                     value_zeros.data(), &max, work.numbers.data(), &got_zeros);
      };
      const float got = softmax_block();
      CHECK(std::abs(max - top) <= 1e-6 * std::abs(top), what);
      CHECK(std::abs(got - sum) <= 1e-5 * sum + 1e-36, what);
      CHECK(std::abs(got_zeros - zeros) <= 1e-5 * magnitude + 1e-36, what);
      std::fill(work.sums.begin(), work.sums.end(), 0.0f);
      k.accumulate_rows(codes.format, codes.bytes.data(), kBlock, codes.table, work.numbers.data(),
                        1, work.sums.data(), work.sums_width, {});
      CHECK(excess_of_sums(k, codes, work, 0, weights.data(), 0.0) <= 1.1, what);

      // What is no number is left to others, with nothing done.
      for (Guarded<float>* where : {&key_zeros, &value_zeros, &key_scales, &value_scales}) {
        float& one = (*where)[random() % kBlock];
        const float before = one;
        one = kNan;
        max = start;
        got_zeros = 77.0f;
        CHECK(std::isnan(softmax_block()) && max == start && got_zeros == 77.0f, what);
        one = before;
      }
    }
  }
}

TEST(integer_sums_keep_their_order) {
  for_each_case([](const Kernels&, const IntegerKernels& k, const Codes& codes, int queries,
                   Random& random, const std::string& what) {
    if (queries > 1) return;
    const RowFormat& format = codes.format;
    Guarded<float> natural(static_cast<std::size_t>(format.head_size)), back(natural.size());
    Guarded<float> ordered(static_cast<std::size_t>(k.sums_floats(format)));
    for (float& x : natural) x = 1.0f + static_cast<float>(random() % 1000);
    std::fill(ordered.begin(), ordered.end(), kNan);
    k.ordered_sums(format, natural.data(), ordered.data());
    k.natural_sums(format, ordered.data(), back.data());
    CHECK(std::memcmp(natural.data(), back.data(), natural.size() * sizeof(float)) == 0, what);
    const auto zeros = std::count(ordered.begin(), ordered.end(), 0.0f);
    CHECK(zeros == static_cast<long>(ordered.size() - natural.size()), what);
    CHECK(ordered.size() <= kMaxIntegerWidth, what);
  });
}

TEST(integers_are_those_of_the_scalar_level) {
  for_each_case([&](const Kernels&, const IntegerKernels& k, const Codes& codes, int queries,
                    Random& random, const std::string& what) {
    const RowFormat& format = codes.format;
    const std::size_t size = static_cast<std::size_t>(format.head_size);
    std::vector<float> query(size), key_scales(kBlock, 1.0f), value_scales(kBlock, 0.0f);
    fill_normal(query.data(), size, random);
    for (int t = 0; t < codes.count; ++t) {
      value_scales[static_cast<std::size_t>(t)] = static_cast<float>(1 + random() % 1000) * 1e-3f;
    }
    const auto solve = [&](const IntegerKernels& by) {
      Work work(by, format, 1);
      by.prepare_query(format, codes.table, query.data(), work.prepared.data());
      by.score_rows(format, codes.bytes.data(), codes.count, codes.table, work.prepared.data(),
                    work.query_width, 1, work.scores.data(), {});
      std::fill(work.scores.begin() + codes.count, work.scores.end(), -kInfinity);
      float max = -3.4e38f;
      const float sum =
          softmax_row(by, work, key_scales.data(), value_scales.data(), &max, codes.table.largest);
      by.accumulate_rows(format, codes.bytes.data(), codes.count, codes.table, work.numbers.data(),
                         1, work.sums.data(), work.sums_width, {});
      std::vector<float> all(size);
      by.natural_sums(format, work.sums.data(), all.data());
      all.insert(all.end(), work.scores.begin(), work.scores.end());
      all.push_back(max);
      return std::make_pair(all, sum);
    };
    const auto got = solve(k), wanted = solve(reference_of(k));
    CHECK(got.first == wanted.first, what + ", " + std::to_string(queries));
    CHECK(std::abs(got.second - wanted.second) <= 1e-6f * wanted.second, what);
  });
}

// The largest numbers of one sign in the largest head: what 32 bits have to hold.
TEST(integer_products_do_not_overflow) {
  constexpr int kSize = 512, kQueries = 5;
  Random random(14);
  for (const Kernels* level : levels_with("8")) {
    const IntegerKernels& k = *level->integers;
    for (const Codec codec : kCodecs) {
      for (const int sign : {-1, 1}) {
        Codes codes(*level, codec, kSize, kBlock, 0, Side::kEnd, random);
        std::fill(codes.bytes.begin(), codes.bytes.end(), uint8_t(sign > 0 ? 0xff : 0));
        const std::string what = describe(level->name, codec, kSize);
        Work work(k, codes.format, kQueries);
        const std::vector<float> query(kSize, -2.0f);
        std::fill(work.weights.begin(), work.weights.end(), 3.0f);
        for (int q = 0; q < kQueries; ++q) {
          k.prepare_query(codes.format, codes.table, query.data(),
                          work.prepared.data() + q * work.query_width);
          k.quantise_weights(work.weights.data() + q * kBlock, kBlock, kLargestInteger,
                             work.numbers.data() + q * kOperandFloats);
        }
        k.score_rows(codes.format, codes.bytes.data(), kBlock, codes.table, work.prepared.data(),
                     work.query_width, kQueries, work.scores.data(), {});
        const double centroid = sign * 127.0 * codes.table.unit;
        // Steps that leave room in lanes are none of these numbers.
        const auto rounded = [](double x, double step) { return std::nearbyint(x / step) * step; };
        const double of_query = rounded(-2.0, step_of_query(k, codes, query.data()));
        const std::vector<double> ones(kBlock, 3.0);
        double steps[kBlock];
        steps_of_weights(k, codes, ones.data(), steps);
        const double of_weights = rounded(3.0, steps[0]);
        const auto is_near = [](double x, double y) {
          return std::abs(x - y) <= 1e-5 * std::abs(y);
        };
        CHECK(std::all_of(work.scores.begin(), work.scores.end(),
                          [&](float x) { return is_near(x, of_query * centroid * kSize); }),
              what);
        k.accumulate_rows(codes.format, codes.bytes.data(), kBlock, codes.table,
                          work.numbers.data(), kQueries, work.sums.data(), work.sums_width, {});
        std::vector<float> sums(kSize);
        for (int q = 0; q < kQueries; ++q) {
          k.natural_sums(codes.format, work.sums.data() + q * work.sums_width, sums.data());
          CHECK(std::all_of(sums.begin(), sums.end(),
                            [&](float x) { return is_near(x, of_weights * centroid * kBlock); }),
                what);
        }
      }
    }
  }
}

// All sums at their limits: entries are the largest of either sign, so that some of random rows have
// any of them in all places of a lane. A sum that left 16 bits would differ from that of 32.
TEST(integer_lanes_do_not_overflow) {
  for (const Kernels* level : levels_with("8")) {
    const IntegerKernels &k = *level->integers, &reference = reference_of(k);
    Random random(15);
    for (const Codec codec : kCodecs) {
      for (const int size : {16, 64, 72, 128, 200}) {
        for (int largest : kLargest) {
          Codes codes(*level, codec, size, kBlock, 0, Side::kEnd, random, largest);
          for (int i = 0; i < kTable; ++i) {
            codes.table.entries[i] = static_cast<int8_t>(i % 2 ? largest : -largest);
          }
          const std::string what =
              describe(level->name, codec, size) + ", " + std::to_string(largest);
          for (int pattern = 0; pattern < 12; ++pattern) {
            // Halves of a step are rounded up, or to even.
            std::vector<float> query(static_cast<std::size_t>(size));
            float weights[kBlock];
            const auto number = [&](unsigned steps) {
              if (pattern < 4) return 1.0f;
              if (pattern < 8) return random() % 3 ? 1.0f : 0.0f;
              return (static_cast<float>(random() % steps) + 0.5f) / static_cast<float>(steps);
            };
            for (std::size_t j = 0; j < query.size(); ++j) {
              const bool is_negative[] = {false, true, j % 2 == 1, random() % 2 == 1};
              query[j] = (is_negative[pattern % 4] ? -1.0f : 1.0f) * number(127);
            }
            for (float& x : weights) x = number(255);
            const auto solve = [&](const IntegerKernels& by) {
              Work work(by, codes.format, 1);
              by.prepare_query(codes.format, codes.table, query.data(), work.prepared.data());
              by.score_rows(codes.format, codes.bytes.data(), kBlock, codes.table,
                            work.prepared.data(), work.query_width, 1, work.scores.data(), {});
              by.quantise_weights(weights, kBlock, largest, work.numbers.data());
              by.accumulate_rows(codes.format, codes.bytes.data(), kBlock, codes.table,
                                 work.numbers.data(), 1, work.sums.data(), work.sums_width, {});
              std::vector<float> all(static_cast<std::size_t>(size));
              by.natural_sums(codes.format, work.sums.data(), all.data());
              all.insert(all.end(), work.scores.begin(), work.scores.end());
              return all;
            };
            CHECK(solve(k) == solve(reference), what + ", " + std::to_string(pattern));
          }
        }
      }
    }
  }
}

// What a step leaves free of a lane: equal weights and equal coordinates nearly fill it.
TEST(integer_lanes_are_filled) {
  Random random(16);
  const IntegerKernels& k = *scalar_lane_integers();
  const Codes codes(*scalar_kernels(), lloyd_max(4), 128, 1, 0, Side::kEnd, random);
  for (int largest = 1; largest <= kLargestInteger; ++largest) {
    const int vectors = largest <= 64 ? 2 : 1;
    IntegerTable table = codes.table;
    table.largest = largest;
    const std::vector<float> query(128, 2.0f), weights(kBlock, 3.0f);
    std::vector<float> prepared(static_cast<std::size_t>(k.query_floats(codes.format)));
    float operands[kOperandFloats];
    k.prepare_query(codes.format, table, query.data(), prepared.data());
    k.quantise_weights(weights.data(), kBlock, largest, operands);
    const int of_query = *reinterpret_cast<const int8_t*>(prepared.data());
    const int of_weights = *reinterpret_cast<const uint8_t*>(operands);
    const int key_sum = 2 * vectors * 2 * largest * of_query;
    const int value_sum = 2 * vectors * largest * of_weights;
    CHECK(key_sum <= 32767 && value_sum <= 32767, std::to_string(largest));
    CHECK(of_query == 127 || key_sum > 32767 - 4 * vectors * 2 * largest, std::to_string(largest));
    CHECK(of_weights == 255 || value_sum > 32767 - 4 * vectors * largest, std::to_string(largest));
  }
}

// Codebooks are found by the least integers that they are made of.
TEST(integers_of_codebooks_are_the_least) {
  const std::vector<std::vector<int>> books = {
      {1},
      {3, 10},
      {7, 22, 39, 62},
      {3, 9, 15, 21, 28, 36, 46, 61},
      {40, 127},
      {6, 17, 28, 40, 53, 68, 87, 127},
      {2, 5, 8, 11, 14, 18, 21, 25, 29, 34, 39, 45, 51, 59, 69, 82}};
  for (const std::vector<int>& upper : books) {
    for (const float most : {1.0f, 0.2416f, 3.7e-3f, 311.0f}) {
      const int half = static_cast<int>(upper.size()), levels = 2 * half;
      const float unit = most / static_cast<float>(upper.back());
      std::vector<float> centroids(static_cast<std::size_t>(levels));
      for (int i = 0; i < levels; ++i) {
        const int number = i < half ? -upper[static_cast<std::size_t>(half - 1 - i)]
                                    : upper[static_cast<std::size_t>(i - half)];
        centroids[static_cast<std::size_t>(i)] = static_cast<float>(number) * unit;
      }
      float table[kTable];
      fill_table(centroids.data(), levels, table);
      const std::string what = std::to_string(upper.back()) + " of " + std::to_string(levels);
      const int factor = half == 1 ? 2 : 1;  // at least the levels
      const auto integers = least_integers(table, levels), all = encoder_integers(table, levels);
      const auto is_book = [&](const std::optional<IntegerTable>& found, int by) {
        if (!found.has_value() || found->largest != by * upper.back()) return false;
        for (int i = 0; i < levels; ++i) {
          const float off = static_cast<float>(found->entries[i]) * found->unit - table[i];
          if (!(std::abs(off) <= 1e-6f * most)) return false;
        }
        return found->entries[levels - 1] == by * upper.back();
      };
      CHECK(is_book(integers, factor), what);
      CHECK(levels > 16 ? !all.has_value() : is_book(all, half == 1 ? 127 : 1), what);
      // What is no multiple by little, or is none at all.
      table[half] *= 1.0f + 3e-4f;
      for (int i = levels; i < kTable; ++i) table[i] = table[i % levels];
      CHECK(half == 1 || !least_integers(table, levels).has_value(), what);
      for (const float odd : {kNan, kInfinity}) {
        table[half] = odd;
        CHECK(!least_integers(table, levels).has_value(), what);
      }
    }
  }
  const float zeros[kTable] = {};
  CHECK(!least_integers(zeros, 16).has_value(), "zeros");
}

// The Lloyd-Max codebook of 32 levels; what its rounding adds to the squared error is its own mean.
TEST(integers_of_32_levels_are_the_nearest) {
  constexpr double kUpper[] = {0.0659, 0.1981, 0.3314, 0.4667, 0.6049, 0.7471, 0.8946, 1.0488,
                               1.2118, 1.3863, 1.5762, 1.7872, 2.0287, 2.3177, 2.6911, 3.2607};
  float table[kTable];
  for (int i = 0; i < 16; ++i) {
    table[16 + i] = static_cast<float>(kUpper[i]);
    table[15 - i] = -table[16 + i];
  }
  const auto integers = nearest_integers(table, 32);
  CHECK(integers.has_value() && integers->entries[31] == 118, "the unit");
  for (int i = 0; integers.has_value() && i < 32; ++i) {
    const float off = table[i] / integers->unit - static_cast<float>(integers->entries[i]);
    CHECK(std::abs(off) <= 0.5f, std::to_string(i));
    CHECK(integers->entries[i] == -integers->entries[31 - i], std::to_string(i));
  }
  CHECK(!least_integers(table, 32).has_value() && !encoder_integers(table, 32).has_value(),
        "of no unit");
  // Codebooks that rounding would spoil stay floats.
  const auto is_rounded = [&](int at, float number) {
    float other[kTable];
    std::copy_n(table, kTable, other);
    other[at] = number;
    return nearest_integers(other, 32).has_value();
  };
  CHECK(is_rounded(31, table[31]), "as it is");
  CHECK(!is_rounded(31, 10.0f) && !is_rounded(0, -kInfinity) && !is_rounded(7, kNan), "far away");
  CHECK(!is_rounded(16, table[15]) && !is_rounded(3, table[5]), "not apart");
  std::fill(std::begin(table), std::end(table), 0.0f);
  CHECK(!nearest_integers(table, 32).has_value(), "zeros");
}

}  // namespace
}  // namespace tq::test
