// Values that hardly count: neither read nor multiplied, and nothing else changes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/attention.h"
#include "tests/attention_problem.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr int64_t kKeys = 5000;
constexpr int64_t kChunkKeys = 512, kBlockKeys = 128;  // of a decode step

// Whether a block is one of those that score 30, or not whole. Each range of keys begins with three:
// the maximum of the first is known when the fourth has been scored.
bool counts(int64_t key) {
  return key % kChunkKeys < 3 * kBlockKeys || key / kBlockKeys == kKeys / kBlockKeys;
}

// Every key has the same codes, so its scale is its score.
class Peaks {
 public:
  explicit Peaks(Random& random)
      : width_(spec::row_bytes(kCodec, kSize)),
        key_tables_(kCodec, kSize, random),
        tables_(kCodec, kSize, random),
        keys_(static_cast<std::size_t>(kKeys * width_)),
        values_(static_cast<std::size_t>(kKeys * width_)),
        query_(2 * kSize),
        output_(2 * kSize),
        bias_(kKeys) {
    std::fill(bias_.begin(), bias_.end(), 0.0f);
    round_centroids(tables_);
    round_centroids(key_tables_);
    std::vector<uint8_t> row(static_cast<std::size_t>(width_));
    fill_rows(row.data(), 1, kCodec, kSize, width_, random);
    const int fields = spec::code_bytes(kCodec, kSize);
    store_half(kPeak, row.data() + fields);
    const std::vector<double> key =
        coordinates_of(kCodec, kSize, row.data(), key_tables_.centroids.data());
    double square = 0;
    for (const double x : key) square += x / kPeak * (x / kPeak);
    // q = R c / |c|^2 scores the scale of a row.
    for (int i = 0; i < 2 * kSize; ++i) {
      double x = 0;
      for (int j = 0; j < kSize; ++j) {
        x += key_tables_.rotation[static_cast<std::size_t>(i % kSize * kSize + j)] *
             key[static_cast<std::size_t>(j)] / kPeak;
      }
      query_[static_cast<std::size_t>(i)] = static_cast<float>(x / square);
    }
    fill_rows(values_.data(), kKeys, kCodec, kSize, width_, random);
    for (int64_t t = 0; t < kKeys; ++t) {
      uint8_t* const at = keys_.data() + t * width_;
      std::copy(row.begin(), row.end(), at);
      store_half(counts(t) ? kPeak : 0.0f, at + fields);
    }
  }

  void spoil_what_does_not_count() {
    for (int64_t t = 0; t < kKeys; ++t) {
      if (counts(t)) continue;
      store_half(std::numeric_limits<float>::quiet_NaN(),
                 values_.data() + t * width_ + spec::code_bytes(kCodec, kSize));
    }
  }

  std::vector<float> attend(const Kernels& level, float skip_below, const Parallel& parallel,
                            bool has_bias = false) {
    AttentionCall call{};
    call.element = Element::kFloat;
    call.query = query_.data();
    call.output = output_.data();
    call.key = {keys_.data(), kCodec, width_, key_tables_.centroids.data()};
    call.value = {values_.data(), kCodec, width_, tables_.centroids.data()};
    call.key_rotation = key_tables_.ready();
    call.value_rotation = tables_.ready();
    call.past_length = &kPast;
    call.batch = call.heads = call.tokens = 1;
    call.query_heads = 2;
    call.slots = kKeys;
    call.head_size = kSize;
    call.scale = 30.0f / kPeak;
    call.causal = true;
    call.skip_below = skip_below;
    if (has_bias) {
      call.bias = bias_.data();
      call.bias_stride[3] = 1;
    }
    CHECK(attention(level, call, parallel), level.name);
    return {output_.begin(), output_.end()};
  }

 private:
  static constexpr Codec kCodec = lloyd_max(4);
  static constexpr int kSize = 64;
  static constexpr int64_t kPast = kKeys - 1;
  static constexpr float kPeak = 8.0f;  // which is a stored scale

  const int width_;
  Tables key_tables_, tables_;
  Guarded<uint8_t> keys_, values_;
  Guarded<float> query_, output_, bias_;
};

TEST(values_that_hardly_count_are_not_read) {
  Random random(71);
  Peaks peaks(random);
  const std::vector<const Kernels*> levels = levels_with("8");
  std::vector<std::vector<float>> expected;
  for (const Kernels* level : levels) expected.push_back(peaks.attend(*level, 0.0f, serial()));
  peaks.spoil_what_does_not_count();
  for (std::size_t i = 0; i < levels.size(); ++i) {
    const std::vector<float> all = peaks.attend(*levels[i], 0.0f, serial());
    CHECK(std::isnan(all[0]), levels[i]->name);
    const std::vector<float> some = peaks.attend(*levels[i], 1e-4f, serial());
    double largest = 0, worst = 0;
    for (std::size_t j = 0; j < some.size(); ++j) {
      largest = std::max(largest, std::abs(static_cast<double>(expected[i][j])));
      worst = std::max(worst, std::isnan(some[j])
                                  ? 1e9
                                  : std::abs(static_cast<double>(some[j]) - expected[i][j]));
    }
    CHECK(worst <= 1e-5 * largest, std::string(levels[i]->name) + " " + std::to_string(worst));
    CHECK(peaks.attend(*levels[i], 1e-4f, threaded()) == some,
          std::string(levels[i]->name) + ": threads change the result");
    CHECK(peaks.attend(*levels[i], 1e-4f, serial(), true) == some,
          std::string(levels[i]->name) + ": a bias of zeros changes the result");
  }
}

TEST(nothing_is_skipped_below_a_threshold_that_nothing_reaches) {
  Random random(72);
  for (const bool has_window : {false, true}) {
    Problem p;
    p.heads = 2;
    p.group = 3;
    p.batch = 2;
    p.lengths = {4700, 300};
    p.slots = 4800;
    p.has_integers = true;
    p.products = "8";
    if (has_window) {
      p.exact.recent = 32;
      p.exact.sinks = 4;
    }
    solve(p, random);
  }
}

}  // namespace
}  // namespace tq::test
