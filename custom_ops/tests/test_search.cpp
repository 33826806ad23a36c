// The encoder that searches: every level gives the scalar level's bytes, and its codes are the best.
#include <limits>

#include "core/encode.h"
#include "core/feedback.h"
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
        feedback(static_cast<std::size_t>(kHeads * size * size), side),
        size_(size) {
    UniformReal<float> gain(0.7f, 1.5f), weight(0.01f, 4.0f);
    for (float& one : gains) one = gain(random);
    fill_normal(feedback.data(), feedback.size(), random,
                0.7f / std::sqrt(static_cast<float>(size)));
    for (int n = 0; n < kHeads; ++n) {
      for (int i = 0; i < size; ++i) {
        float* const row = feedback.data() + (n * size + i) * size;
        row[i] = weight(random);
        std::fill(row + i + 1, row + size, std::numeric_limits<float>::quiet_NaN());
      }
    }
    for (const bool as_bytes : {false, true}) {
      ready_[as_bytes] = FeedbackMatrices(feedback.data(), kHeads, size, as_bytes);
    }
  }

  // One for each head, in the form for a level and a codebook.
  const Feedback* ready(const Kernels& level, Codec codec, const float* centroids) const {
    return ready_[FeedbackMatrices::as_bytes(level, codec, centroids)].heads();
  }

  void give(EncodeCall& call, bool feeds, const Kernels& level) const {
    call.gains = gains.data();
    call.gain_count = static_cast<int>(gains.size());
    call.feedback = feeds ? ready(level, call.codec, call.centroids) : nullptr;
  }

  // A matrix as the encoder takes it: columns of L in 127ths of their largest number.
  std::vector<double> rounded(int head) const {
    const std::size_t d = static_cast<std::size_t>(size_);
    const float* const given = feedback.data() + static_cast<std::size_t>(head) * d * d;
    std::vector<double> out(d * d);
    for (std::size_t j = 0; j < d; ++j) {
      float largest = 0;
      for (std::size_t i = j + 1; i < d; ++i) {
        largest = std::max(largest, std::abs(given[i * d + j]));
      }
      out[j * d + j] = given[j * d + j];
      const float step = largest / 127;
      for (std::size_t i = j + 1; i < d; ++i) {
        out[i * d + j] = static_cast<double>(std::nearbyint(given[i * d + j] / step)) * step;
      }
    }
    return out;
  }

  Guarded<float> gains, feedback;

 private:
  const int size_;
  FeedbackMatrices ready_[2];
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
  Share share;
  Random random(60);
  const int64_t length = 0;
  for (const int size : kHeadSizes) {
    for (const int bits : {1, 2, 3, 4, 5}) {
      const Codec codec = lloyd_max(bits);
      const Side side = bits % 2 ? Side::kEnd : Side::kBegin;
      Tables tables(codec, size, random);
      // Codes of boundaries that do not rise are found in another way.
      if (size == 24 && bits > 1) std::swap(tables.boundaries[0], tables.boundaries[1]);
      if (size == 40 && bits > 1) tables.boundaries[1] = tables.boundaries[0];
      // Feedback of whole numbers is taken in another way, too.
      if (size != 16 && size != 96) round_centroids(tables);
      Guarded<float> vectors(static_cast<std::size_t>(kHeads * kTokens * size), side);
      fill_vectors(vectors, size, random);
      const std::size_t bytes =
          static_cast<std::size_t>(kHeads * kTokens * spec::row_bytes(codec, size));
      Guarded<uint8_t> expected(bytes, side), rows(bytes, side);
      for (const int count : {1, 5, 8, 16}) {
        const Search search(count, size, side, random);
        for (const bool feeds : {false, true}) {
          if (share.leaves_out_next()) continue;
          EncodeCall call = call_of(codec, size, tables, vectors.data(), &length);
          search.give(call, feeds, *scalar_kernels());
          call.norm_correction = count % 3;
          call.present = expected.data();
          encode(*scalar_kernels(), call, serial());
          for (const Kernels* level : supported_kernels()) {
            std::fill(rows.begin(), rows.end(), uint8_t{0xcd});
            call.present = rows.data();
            search.give(call, feeds, *level);
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
double product(const double* lower, int size, const std::vector<double>& a,
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
void check_best_gain(const Kernels& level, Codec codec, const Tables& tables, const Search& search,
                     int size, bool feeds, Random& random) {
  float table[kTable], numbers[kTable];
  const int levels = spec::levels(codec);
  fill_table(tables.centroids.data(), levels, table);
  const auto integers = encoder_integers(table, levels);
  for (int i = 0; i < kTable; ++i) {
    numbers[i] = integers.has_value() ? integers->entries[i % levels] : table[i];
  }
  const std::vector<double> moments = search.rounded(0);
  const double* const lower = feeds ? moments.data() : nullptr;
  const Feedback* const feedback =
      feeds ? search.ready(level, codec, tables.centroids.data()) : nullptr;
  const auto try_them = feeds && feedback->bytes != nullptr ? level.search_bytes : level.search;
  const std::string what = describe(level.name, codec, size);
  for (int t = 0; t < 40; ++t) {
    std::vector<float> y(static_cast<std::size_t>(size));
    fill_normal(y.data(), y.size(), random, 1.0f / std::sqrt(static_cast<float>(size)));
    const std::vector<double> u(y.begin(), y.end());
    std::vector<uint8_t> codes(y.size());
    const auto worth = [&](const float* gains, int count) {
      const SearchTables given{gains,
                               count,
                               tables.boundaries.data(),
                               levels,
                               table,
                               numbers,
                               integers.has_value() ? integers->unit : 1.0f};
      Found found;
      try_them(given, feedback, y.data(), 1, size, codes.data(), &found);
      std::vector<double> c(y.size());
      for (std::size_t j = 0; j < c.size(); ++j) c[j] = table[codes[j]];
      const double along = product(lower, size, u, c), square = product(lower, size, c, c);
      CHECK(std::abs(found.product - along) <= 1e-4 * std::abs(along) + 1e-5, what + ": product");
      CHECK(std::abs(found.square - square) <= 1e-4 * square, what + ": square");
      const double own = lower == nullptr ? 1.0 : product(lower, size, u, u);
      CHECK(std::abs(found.own - own) <= 1e-4 * own, what + ": own");
      return std::pow(std::max(along, 0.0), 2) / square;
    };
    const double best = worth(search.gains.data(), 16);
    double most = 0;
    for (int k = 0; k < 16; ++k) most = std::max(most, worth(search.gains.data() + k, 1));
    CHECK(std::abs(best - most) <= 1e-4 * most, what);
  }
}

TEST(the_best_gain_stays) {
  Random random(61);
  const int size = 40;
  for (const bool is_whole : {false, true}) {
    for (const int bits : {1, 2, 3, 4, 5}) {
      const Codec codec = lloyd_max(bits);
      Tables tables(codec, size, random);
      if (is_whole) round_centroids(tables);
      const Search search(16, size, Side::kEnd, random);
      for (const Kernels* level : {supported_kernels().front(), scalar_kernels()}) {
        for (const bool feeds : {false, true}) {
          check_best_gain(*level, codec, tables, search, size, feeds, random);
        }
      }
    }
  }
}

}  // namespace
}  // namespace tq::test
