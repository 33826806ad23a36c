// Attention of every level against float64 attention over the decoded caches.
#include "core/attention.h"

#include <limits>
#include <string>

#include "tests/attention_problem.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

TEST(attention_of_every_codec) {
  Share share;
  Random random(10);
  for (const int size : kHeadSizes) {
    const std::vector<Codec> codecs = float_codecs();
    for (std::size_t i = 0; i < codecs.size(); ++i) {
      if (share.leaves_out_next()) continue;
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
  Share share;
  Random random(20);
  for (const Codec codec : float_codecs()) {
    for (const int size : {24, 64, 80, 128}) {
      for (const int64_t tokens : {1, 3, 70}) {
        if (share.leaves_out_next()) continue;
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
    if (share.leaves_out_next()) continue;
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
  Share share;
  Random random(22);
  for (const Codec codec : float_codecs()) {
    for (const int64_t offsets : {1, 2, 5, 64}) {
      for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{50}}) {
        if (share.leaves_out_next()) continue;
        Problem p = uneven_problem(codec, offsets % 2 ? codec : lloyd_max(4), 100, tokens);
        p.offsets = offsets;
        if (tokens == 50) p.bias_dims = {2, 4, tokens, 100 + tokens};
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

// However large the zeros of keys are: they are multiplied with the sum of a query, not rounded.
TEST(uniform_keys_have_zeros_of_any_size) {
  Random random(27);
  for (const int bits : {2, 3, 4}) {
    for (const float zero : {0.5f, -8.0f, 30.0f}) {
      for (const char* products : {"float", "8"}) {
        Problem p;
        p.key = p.value = {Kind::kUniform, bits};
        p.head_size = 128;
        p.heads = 2;
        p.group = 3;
        p.slots = 403;
        p.lengths = {400};
        p.zero = zero;
        p.products = products;
        solve(p, random);
      }
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
