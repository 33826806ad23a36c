// The encoder that searches: every level gives the scalar level's bytes, and its codes are the best.
#include <limits>

#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr int kHeads = 3, kTokens = 9;

// Gains around one in no order, and moments of queries as tq_onnx/codec/feedback.py has them; what
// is above the diagonal is not read.
struct Search {
  Search(int count, int size, Side side, Random& random)
      : gains(static_cast<std::size_t>(count), side),
        feedback(static_cast<std::size_t>(kHeads * size * size), side) {
    std::uniform_real_distribution<float> gain(0.7f, 1.5f), weight(0.01f, 4.0f);
    for (float& one : gains) one = gain(random);
    fill_normal(feedback.data(), feedback.size(), random, 0.7f / std::sqrt(static_cast<float>(size)));
    for (int n = 0; n < kHeads; ++n) {
      for (int i = 0; i < size; ++i) {
        float* const row = feedback.data() + (n * size + i) * size;
        row[i] = weight(random);
        std::fill(row + i + 1, row + size, std::numeric_limits<float>::quiet_NaN());
      }
    }
  }

  void give(EncodeCall& call, bool feeds) const {
    call.gains = gains.data();
    call.gain_count = static_cast<int>(gains.size());
    call.feedback = feeds ? feedback.data() : nullptr;
  }

  Guarded<float> gains, feedback;
};

// Random vectors among which some are none.
void fill_vectors(Guarded<float>& vectors, int size, Random& random) {
  fill_normal(vectors.data(), vectors.size(), random, 3.0f);
  float* const x = vectors.data();
  std::fill_n(x, size, 0.0f);
  x[2 * size + 1] = std::numeric_limits<float>::quiet_NaN();
  x[4 * size] = std::numeric_limits<float>::infinity();
  std::fill_n(x + 6 * size, size, 3e38f);
  std::fill_n(x + 8 * size, size, 1e-25f);
}

EncodeCall call_of(Codec codec, int size, const Tables& tables, const float* vectors,
                   const int64_t* length) {
  EncodeCall call = encode_call(codec, size, spec::row_bytes(codec, size), tables);
  call.vectors = vectors;
  call.past_length = length;
  call.heads = kHeads;
  call.tokens = call.present_slots = kTokens;
  return call;
}

TEST(searching_gives_the_same_bytes_at_every_level) {
  Random random(60);
  const int64_t length = 0;
  for (const int size : kHeadSizes) {
    for (const int bits : {2, 3, 4, 5}) {
      const Codec codec = lloyd_max(bits);
      const Side side = bits % 2 ? Side::kEnd : Side::kBegin;
      Tables tables(codec, size, random);
      // Codes of boundaries that do not rise are found in another way.
      if (size == 24) std::swap(tables.boundaries[0], tables.boundaries[1]);
      Guarded<float> vectors(static_cast<std::size_t>(kHeads * kTokens * size), side);
      fill_vectors(vectors, size, random);
      const std::size_t bytes =
          static_cast<std::size_t>(kHeads * kTokens * spec::row_bytes(codec, size));
      Guarded<uint8_t> expected(bytes, side), rows(bytes, side);
      for (const int count : {1, 5, 8, 16}) {
        const Search search(count, size, side, random);
        for (const bool feeds : {false, true}) {
          EncodeCall call = call_of(codec, size, tables, vectors.data(), &length);
          search.give(call, feeds);
          call.norm_correction = count % 3;
          call.present = expected.data();
          encode(*scalar_kernels(), call, serial());
          for (const Kernels* level : supported_kernels()) {
            std::fill(rows.begin(), rows.end(), uint8_t{0xcd});
            call.present = rows.data();
            encode(*level, call, threaded());
            CHECK(std::memcmp(rows.data(), expected.data(), bytes) == 0,
                  describe(level->name, codec, size) + ", " + std::to_string(count) + " gains" +
                      (feeds ? ", feedback" : ""));
          }
        }
      }
    }
  }
}

// <a, b> in the moments of the queries, or plainly.
double product(const float* lower, int size, const std::vector<double>& a,
               const std::vector<double>& b) {
  double sum = 0;
  for (int j = 0; j < size; ++j) {
    double left = a[static_cast<std::size_t>(j)], right = b[static_cast<std::size_t>(j)];
    for (int i = j + 1; lower != nullptr && i < size; ++i) {
      left += a[static_cast<std::size_t>(i)] * lower[i * size + j];
      right += b[static_cast<std::size_t>(i)] * lower[i * size + j];
    }
    sum += (lower == nullptr ? 1.0 : lower[j * size + j]) * left * right;
  }
  return sum;
}

// No gain leaves less of the error than that of the row; alone, each gives the codes it is worth.
TEST(the_best_gain_stays) {
  Random random(61);
  const int size = 40, vectors = 60;
  for (const int bits : {2, 3, 4, 5}) {
    const Codec codec = lloyd_max(bits);
    const Tables tables(codec, size, random);
    const Search search(16, size, Side::kEnd, random);
    float table[kTable];
    fill_table(tables.centroids.data(), spec::levels(codec), table);
    for (const float* lower : {static_cast<const float*>(nullptr), search.feedback.data()}) {
      for (int t = 0; t < vectors; ++t) {
        std::vector<float> y(size);
        fill_normal(y.data(), y.size(), random, 1.0f / std::sqrt(static_cast<float>(size)));
        const std::vector<double> u(y.begin(), y.end());
        std::vector<uint8_t> codes(size);
        const auto worth = [&](const float* gains, int count) {
          const SearchTables given{gains, count, tables.boundaries.data(), spec::levels(codec),
                                   table};
          Found found;
          supported_kernels().front()->search(given, lower == nullptr ? nullptr : &lower, y.data(),
                                              1, size, codes.data(), &found);
          std::vector<double> c(size);
          for (int j = 0; j < size; ++j) {
            c[static_cast<std::size_t>(j)] = table[codes[static_cast<std::size_t>(j)]];
          }
          const double along = product(lower, size, u, c), square = product(lower, size, c, c);
          CHECK(std::abs(found.product - along) <= 1e-4 * std::abs(along) + 1e-5, "product");
          CHECK(std::abs(found.square - square) <= 1e-4 * square, "square");
          const double own = lower == nullptr ? 1.0 : product(lower, size, u, u);
          CHECK(std::abs(found.own - own) <= 1e-4 * own, "own");
          return std::pow(std::max(along, 0.0), 2) / square;
        };
        const double best = worth(search.gains.data(), 16);
        double most = 0;
        for (int k = 0; k < 16; ++k) most = std::max(most, worth(search.gains.data() + k, 1));
        CHECK(std::abs(best - most) <= 1e-4 * most, name_of(codec));
      }
    }
  }
}

}  // namespace
}  // namespace tq::test
