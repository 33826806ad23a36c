// Attention of every level against float64 attention over the decoded caches.
#include "core/attention.h"

#include <limits>
#include <string>

#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Problem {
  Codec key = lloyd_max(4), value = lloyd_max(4);
  int head_size = 64;
  int64_t batch = 1, heads = 1, group = 1, tokens = 1, slots = 1;
  std::vector<int64_t> lengths{0};
  bool causal = true;
  int64_t window = 0;
  float softcap = 0.0f;
  std::vector<int64_t> bias_dims;  // empty: none
  bool garbage_in_hidden_rows = false;
  std::vector<float> sinks;  // taken in turn by the query heads; empty: none
  int64_t offsets = 0;
  int padding = 0;  // more bytes per row
};

std::string describe(const Problem& p, const char* level) {
  return std::string(level) + ": " + name_of(p.key) + ", " + name_of(p.value) + " D" +
         std::to_string(p.head_size) + " B" +
         std::to_string(p.batch) + " N" + std::to_string(p.heads) + " G" + std::to_string(p.group) +
         " T" + std::to_string(p.tokens) + " S" + std::to_string(p.slots) + " P" +
         std::to_string(p.offsets);
}

// Decoded rows [lanes * slots, head_size] in float64, with their offsets.
std::vector<double> decoded(const uint8_t* rows, const Problem& p, Codec codec, int width,
                            const Tables& tables, const float* offset) {
  const int size = p.head_size;
  const std::size_t count = static_cast<std::size_t>(p.batch * p.heads * p.slots);
  const std::size_t d = static_cast<std::size_t>(size);
  std::vector<double> out(count * d);
  for (std::size_t t = 0; t < count; ++t, rows += width) {
    std::vector<double> x = coordinates_of(codec, size, rows, tables.centroids.data());
    const int64_t slot = static_cast<int64_t>(t) % p.slots;
    const int64_t head = static_cast<int64_t>(t) / p.slots % p.heads;
    for (std::size_t i = 0; i < d; ++i) {
      double sum = 0;
      if (spec::is_rotated(codec.kind)) {
        for (std::size_t j = 0; j < x.size(); ++j) {
          sum += x[j] * tables.rotation[i * x.size() + j];
        }
      } else {
        sum = x[i];
      }
      if (p.offsets > 0) {
        const int64_t row = std::min(slot, p.offsets - 1) * p.heads + head;
        sum += offset[static_cast<std::size_t>(row) * d + i];
      }
      out[t * d + i] = sum;
    }
  }
  return out;
}

void solve(const Problem& p, Random& random) {
  const int size = p.head_size;
  const std::size_t d = static_cast<std::size_t>(size);
  const int64_t query_heads = p.heads * p.group;
  const std::size_t rows = static_cast<std::size_t>(p.batch * p.heads * p.slots);
  const Tables key_tables(p.key, size, random), value_tables(p.value, size, random);
  const int key_width = spec::row_bytes(p.key, size) + p.padding;
  const int value_width = spec::row_bytes(p.value, size) + p.padding;
  Guarded<uint8_t> keys(rows * static_cast<std::size_t>(key_width));
  Guarded<uint8_t> values(rows * static_cast<std::size_t>(value_width));
  fill_rows(keys.data(), rows, p.key, size, key_width, random);
  fill_rows(values.data(), rows, p.value, size, value_width, random);
  Guarded<float> key_offset(static_cast<std::size_t>(p.offsets * p.heads) * d);
  Guarded<float> value_offset(key_offset.size());
  fill_normal(key_offset.data(), key_offset.size(), random, 2.0f);
  fill_normal(value_offset.data(), value_offset.size(), random, 2.0f);
  Guarded<float> query(static_cast<std::size_t>(p.batch * query_heads * p.tokens) * d);
  fill_normal(query.data(), query.size(), random);

  const int64_t longest = *std::max_element(p.lengths.begin(), p.lengths.end());
  std::size_t bias_size = p.bias_dims.empty() ? 0 : 1;
  for (const int64_t dim : p.bias_dims) bias_size *= static_cast<std::size_t>(dim);
  Guarded<float> bias(bias_size);
  fill_normal(bias.data(), bias_size, random);
  int64_t stride[4] = {};
  if (bias_size > 0) {
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      const int64_t dim = p.bias_dims[static_cast<std::size_t>(i)];
      stride[i] = dim == 1 ? 0 : step;
      step *= dim;
    }
    if (bias_size > 8) {
      for (std::size_t i = 0; i < bias_size; i += 5) bias[i] = i % 2 ? -kInfinity : -3.4e38f;
    }
  }

  Guarded<float> sinks(p.sinks.empty() ? 0 : static_cast<std::size_t>(query_heads));
  for (std::size_t h = 0; h < sinks.size(); ++h) sinks[h] = p.sinks[h % p.sinks.size()];

  const double scale = 1.0 / std::sqrt(static_cast<double>(size));
  const auto past = [&](int64_t b) { return p.lengths[p.lengths.size() > 1 ? b : 0]; };
  std::vector<double> expected(query.size());
  std::vector<bool> seen(rows);
  const auto k = decoded(keys.data(), p, p.key, key_width, key_tables, key_offset.data());
  const auto v = decoded(values.data(), p, p.value, value_width, value_tables,
                         value_offset.data());
  double largest = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < query_heads; ++h) {
      for (int64_t t = 0; t < p.tokens; ++t) {
        const std::size_t at =
            static_cast<std::size_t>((b * query_heads + h) * p.tokens + t) * d;
        const std::size_t lane = static_cast<std::size_t>((b * p.heads + h / p.group) * p.slots);
        const int64_t position = past(b) + t;
        std::vector<double> scores;
        std::vector<std::size_t> visible;
        for (int64_t s = 0; s < past(b) + p.tokens; ++s) {
          if (p.causal && s > position) continue;
          if (p.window > 0 && position - s >= p.window) continue;
          double more = 0;
          if (bias_size > 0) {
            more = bias[static_cast<std::size_t>(b * stride[0] + h * stride[1] + t * stride[2] +
                                                 s * stride[3])];
            if (more <= -1.7e38) continue;
          }
          const std::size_t row = lane + static_cast<std::size_t>(s);
          double score = 0;
          for (std::size_t i = 0; i < d; ++i) score += query[at + i] * k[row * d + i];
          score *= scale;
          if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
          scores.push_back(score + more);
          visible.push_back(row);
          seen[row] = true;
        }
        if (visible.empty()) continue;
        const double sink = p.sinks.empty() ? -kInfinity : sinks[static_cast<std::size_t>(h)];
        const double top = std::max(sink, *std::max_element(scores.begin(), scores.end()));
        double sum = std::exp(sink - top);
        for (double& score : scores) sum += score = std::exp(score - top);
        for (std::size_t i = 0; i < d; ++i) {
          double x = 0;
          for (std::size_t s = 0; s < visible.size(); ++s) x += scores[s] * v[visible[s] * d + i];
          expected[at + i] = x / sum;
          largest = std::max(largest, std::abs(x / sum));
        }
      }
    }
  }
  if (p.garbage_in_hidden_rows) {
    for (std::size_t row = 0; row < rows; ++row) {
      if (seen[row]) continue;
      std::fill_n(keys.data() + row * static_cast<std::size_t>(key_width), key_width,
                  uint8_t{0xff});
      std::fill_n(values.data() + row * static_cast<std::size_t>(value_width), value_width,
                  uint8_t{0xff});
    }
  }

  AttentionCall call{};
  Guarded<float> output(query.size()), again(query.size());
  call.element = Element::kFloat;
  call.query = query.data();
  call.key = {keys.data(), p.key, key_width, key_tables.centroids.data()};
  call.value = {values.data(), p.value, value_width, value_tables.centroids.data()};
  call.key_rotation = key_tables.ready();
  call.value_rotation = value_tables.ready();
  call.key_rotation.transposed = call.value_rotation.matrix = nullptr;  // nobody asks for them
  if (p.offsets > 0) {
    call.key_offset = key_offset.data();
    call.value_offset = value_offset.data();
    call.offsets = p.offsets;
  }
  call.past_length = p.lengths.data();
  call.length_per_batch = p.lengths.size() > 1;
  call.batch = p.batch;
  call.query_heads = query_heads;
  call.heads = p.heads;
  call.tokens = p.tokens;
  call.slots = p.slots;
  call.head_size = size;
  call.bias = bias_size > 0 ? bias.data() : nullptr;
  std::copy_n(stride, 4, call.bias_stride);
  call.sink = p.sinks.empty() ? nullptr : sinks.data();
  call.scale = static_cast<float>(scale);
  call.softcap = p.softcap;
  call.causal = p.causal;
  call.sliding_window = p.window;
  (void)longest;
  for (const Kernels* level : supported_kernels()) {
    std::fill(output.begin(), output.end(), std::numeric_limits<float>::quiet_NaN());
    call.output = output.data();
    CHECK(attention(*level, call, serial()), describe(p, level->name));
    call.output = again.data();
    CHECK(attention(*level, call, threaded()), describe(p, level->name));
    CHECK(std::memcmp(output.data(), again.data(), output.size() * sizeof(float)) == 0,
          describe(p, level->name) + ": threads change the result");
    double worst = 0;
    bool exact_zeros = true;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      worst = std::max(worst, std::isnan(output[i]) ? 1e9 : std::abs(output[i] - expected[i]));
      if (expected[i] == 0) exact_zeros = exact_zeros && output[i] == 0.0f;
    }
    // Queries and weights of 16 bits, where products are taken with integers.
    const double tolerance = level->integers != nullptr ? 1e-4 : 2e-5;
    CHECK(worst <= tolerance * largest, describe(p, level->name) + ": relative error " +
                                            std::to_string(worst / largest * 1e6) + "e-6");
    CHECK(exact_zeros, describe(p, level->name));
  }
}

TEST(attention_of_every_codec) {
  Random random(10);
  const std::vector<Codec> codecs = float_codecs();
  for (const int size : kHeadSizes) {
    for (std::size_t i = 0; i < codecs.size(); ++i) {
      Problem p;
      p.key = codecs[i];
      p.value = codecs[(i * 5 + 2) % codecs.size()];  // every codec as values too
      p.head_size = size;
      p.heads = 2;
      p.group = 3;
      p.lengths = {69};
      p.slots = 70;
      p.padding = size == 64 ? 3 : 0;
      solve(p, random);
    }
  }
}

// As few queries and as many as there are forms of a task, and rows that nobody sees are garbage.
TEST(no_codec_lets_hidden_rows_in) {
  Random random(20);
  for (const Codec codec : float_codecs()) {
    for (const int size : {24, 64, 80, 128}) {
      for (const int64_t tokens : {1, 3, 70}) {
        Problem p;
        p.key = p.value = codec;
        p.head_size = size;
        p.heads = 2;
        p.group = 2;
        p.tokens = tokens;
        p.lengths = {69};
        p.slots = 69 + tokens + 2;
        p.window = 60;
        p.garbage_in_hidden_rows = true;
        solve(p, random);
      }
    }
    Problem p;  // many chunks
    p.key = p.value = codec;
    p.group = 3;
    p.batch = 2;
    p.lengths = {1300, 511};
    p.slots = 1301;
    p.garbage_in_hidden_rows = true;
    solve(p, random);
  }
}

TEST(attention_with_offsets) {
  Random random(22);
  for (const Codec codec : float_codecs()) {
    for (const int64_t offsets : {1, 2, 5, 64}) {
      for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{50}}) {
        Problem p;
        p.key = codec;
        p.value = offsets % 2 ? codec : lloyd_max(4);
        p.batch = 2;
        p.heads = 2;
        p.group = 2;
        p.tokens = tokens;
        p.lengths = {100, 2};
        p.slots = 100 + tokens + 7;
        p.offsets = offsets;
        p.garbage_in_hidden_rows = true;
        if (tokens == 3) {
          p.softcap = 2.5f;
          p.window = 30;
        }
        if (tokens == 50) {
          p.sinks = {0.5f, 4.0f, -kInfinity};
          p.bias_dims = {2, 4, tokens, 100 + tokens};
        }
        solve(p, random);
      }
    }
  }
  for (const int64_t window : {0, 300}) {  // many chunks
    Problem p;
    p.heads = 2;
    p.group = 2;
    p.batch = 2;
    p.lengths = {2200, 511};
    p.slots = 2304;
    p.window = window;
    p.offsets = 5;
    p.sinks = {1.0f, 9.0f, -kInfinity};
    solve(p, random);
  }
}

TEST(attention_of_every_number_of_query_rows) {
  Random random(11);
  for (int64_t group = 1; group <= 9; ++group) {
    for (const int64_t tokens : {1, 2, 5, 33}) {
      Problem p;
      p.group = group;
      p.tokens = tokens;
      p.lengths = {41};
      p.slots = 41 + tokens;
      solve(p, random);
    }
  }
}

TEST(attention_with_masks) {
  Random random(12);
  for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{50}}) {
    for (const int variant : {0, 1, 2, 3, 4, 5, 6}) {
      Problem p;
      p.batch = 2;
      p.heads = 2;
      p.group = 2;
      p.tokens = tokens;
      p.lengths = {100, 37};
      p.slots = 100 + tokens + 7;
      p.garbage_in_hidden_rows = true;
      const int64_t total = 100 + tokens;
      if (variant == 1) p.causal = false;
      if (variant == 2) p.window = 9;
      if (variant == 3) p.softcap = 2.5f;
      if (variant == 4) p.bias_dims = {2, 4, tokens, total};
      if (variant == 5) p.bias_dims = {1, 1, tokens, total + 3};
      if (variant == 6) {
        p.bias_dims = {2, 1, 1, 1};
        p.causal = false;
        p.window = 60;
        p.softcap = 30.0f;
      }
      solve(p, random);
    }
  }
}

TEST(attention_over_many_chunks) {
  Random random(13);
  Problem p;
  p.head_size = 128;
  p.heads = 2;
  p.group = 5;
  p.batch = 2;
  p.lengths = {2200, 511};
  p.slots = 2304;
  solve(p, random);
  p.lengths = {1023};
  p.batch = 1;
  p.tokens = 2;
  p.window = 513;
  solve(p, random);
}

TEST(attention_with_sinks) {
  Random random(21);
  for (const Codec codec : {lloyd_max(4), kRaw}) {
    for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{70}}) {
      for (const int variant : {0, 1, 2, 3}) {
        Problem p;
        p.key = p.value = codec;
        p.batch = 2;
        p.heads = 2;
        p.group = 3;
        p.tokens = tokens;
        p.lengths = {100, 37};
        p.slots = 100 + tokens + 7;
        p.sinks = {0.5f, -1.5f, 4.0f, 80.0f, -80.0f, -kInfinity};
        p.garbage_in_hidden_rows = true;
        if (variant == 1) p.window = 9;
        if (variant == 2) p.softcap = 2.5f;
        if (variant == 3) p.bias_dims = {2, 6, tokens, 100 + tokens};
        solve(p, random);
      }
    }
  }
  // Many chunks, of which one counts the sinks; with a window also where none of its keys is seen.
  for (const int64_t window : {0, 300}) {
    Problem p;
    p.heads = 2;
    p.group = 2;
    p.batch = 2;
    p.lengths = {2200, 511};
    p.slots = 2304;
    p.window = window;
    p.sinks = {1.0f, 9.0f, -kInfinity};
    solve(p, random);
  }
}

TEST(attention_where_nothing_is_visible_gives_zero) {
  Random random(14);
  Problem p;
  p.group = 2;
  p.tokens = 3;
  p.slots = 3;
  p.bias_dims = {1, 1, 1, 3};
  p.garbage_in_hidden_rows = true;
  // A bias of three lowest values: built by hand, since the random ones hide some keys only.
  const int size = p.head_size;
  const std::size_t d = static_cast<std::size_t>(size);
  std::vector<float> rotation(d * d), query(6 * d, 1.0f), output(6 * d, 5.0f);
  fill_rotation(rotation.data(), size, random);
  float centroids[16], boundaries[16];
  fill_codebook(4, size, centroids, boundaries);
  const int width = spec::row_bytes(lloyd_max(4), size);
  std::vector<uint8_t> rows(3 * static_cast<std::size_t>(width), 0xff);
  const float bias[3] = {-kInfinity, -3.4e38f, -1.8e38f};
  const int64_t length = 0;
  AttentionCall call{};
  call.element = Element::kFloat;
  call.query = query.data();
  call.output = output.data();
  call.key = call.value = {rows.data(), lloyd_max(4), width, centroids};
  call.key_rotation = call.value_rotation = {size, rotation.data(), rotation.data(), nullptr, 0};
  call.past_length = &length;
  call.batch = call.heads = 1;
  call.query_heads = 2;
  call.tokens = call.slots = 3;
  call.head_size = size;
  call.bias = bias;
  call.bias_stride[3] = 1;
  call.scale = 1.0f;
  const float sinks[2] = {0.0f, -kInfinity};
  for (const float* sink : {static_cast<const float*>(nullptr), sinks}) {
    call.sink = sink;
    for (const Kernels* level : supported_kernels()) {
      std::fill(output.begin(), output.end(), 5.0f);
      CHECK(attention(*level, call, serial()), level->name);
      CHECK(std::all_of(output.begin(), output.end(), [](float x) { return x == 0.0f; }),
            level->name);
    }
  }
}

TEST(long_prefill_in_tiles) {
  Random random(15);
  Problem p;
  p.group = 2;
  p.heads = 2;
  p.tokens = 150;
  p.lengths = {70};
  p.slots = 220;
  p.key = lloyd_max(3);
  p.value = lloyd_max(2);
  p.head_size = 80;
  solve(p, random);
  p.key = p.value = lloyd_max(4);
  p.head_size = 128;
  p.window = 20;
  p.garbage_in_hidden_rows = true;
  solve(p, random);
}

}  // namespace
}  // namespace tq::test
