// Random caches of every codec, size and form. How many of them, and from where on:
//
//   TQ_RANDOM_CACHES=500000 TQ_RANDOM_SEED=1 tq_onnx_tests random_caches
#include <cstdlib>

#include "core/encode.h"
#include "core/feedback.h"
#include "tests/attention_problem.h"

namespace tq::test {
namespace {

long number_in(const char* name, long otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtol(text, nullptr, 10);
}

Problem random_problem(Random& random) {
  const auto any = [&](int64_t least, int64_t most) {
    return UniformInt<int64_t>(least, most)(random);
  };
  Problem p;
  p.head_size = static_cast<int>(8 * (any(0, 7) ? any(1, 8) : any(1, 32)));
  const std::vector<Codec> codecs = float_codecs();
  const auto codec = [&] { return codecs[static_cast<std::size_t>(any(0, 1000)) % codecs.size()]; };
  p.key = codec();
  p.value = codec();
  p.has_integers = any(0, 2) == 0;
  p.batch = any(1, 3);
  p.heads = any(1, 2);
  p.group = any(1, 3);
  p.tokens = any(0, 9) ? any(1, 3) : any(4, 40);
  p.lengths.clear();
  const int64_t most = any(0, 9) ? any(0, 40) : any(41, 600);
  for (int64_t b = any(0, 1) ? 0 : p.batch - 1; b < p.batch; ++b) p.lengths.push_back(any(0, most));
  p.slots = *std::max_element(p.lengths.begin(), p.lengths.end()) + p.tokens + any(0, 5);
  p.causal = any(0, 3) != 0;
  p.window = any(0, 2) ? 0 : any(1, 30);
  p.softcap = any(0, 4) ? 0.0f : 2.5f;
  if (any(0, 2) == 0) {
    p.bias_dims = {any(0, 1) ? 1 : p.batch, any(0, 1) ? 1 : p.heads * p.group,
                   any(0, 1) ? 1 : p.tokens,
                   *std::max_element(p.lengths.begin(), p.lengths.end()) + p.tokens};
  }
  if (any(0, 4) == 0) p.sinks = {0.5f, 4.0f, -kInfinity};
  p.offsets = any(0, 4) ? 0 : any(1, 4);
  if (any(0, 3) == 0) {
    p.fastest = UniformReal<float>(0.001f, 3.14f)(random);
    p.first_slots = any(0, 1) ? 0 : any(1, 6);
  }
  if (any(0, 3) == 0) {
    for (int64_t b = any(0, 1) ? 0 : p.batch - 1; b < p.batch; ++b) {
      p.left_padding.push_back(any(0, most));
    }
  }
  p.padding = any(0, 4) ? 0 : static_cast<int>(any(1, 9));
  if (p.key.kind != Kind::kRaw && p.value.kind != Kind::kRaw && any(0, 2) == 0) {
    p.exact = {any(0, 30), any(0, 4), 0};
  }
  p.garbage_in_hidden_rows = any(0, 1) == 0;
  p.with_threads = any(0, 63) == 0;
  return p;
}

// Rows and entries that are written, by encoders that search and others: every level gives the bytes
// of the scalar one, behind and in front of garbage, which stays.
void encode_at_every_level(const Problem& p, Random& random) {
  const std::size_t d = static_cast<std::size_t>(p.head_size);
  Tables tables(p.key, p.head_size, random);
  if (spec::is_rotated(p.key.kind) && random() % 3 > 0) round_centroids(tables);
  const int width = spec::row_bytes(p.key, p.head_size) + p.padding;
  const std::size_t lanes = static_cast<std::size_t>(p.batch * p.heads);
  Window window{};
  if (random() % 3 == 0) {
    window = {static_cast<int64_t>(random() % 40), static_cast<int64_t>(random() % 5), 0};
    window.overlay_rows = window.entries() * spec::rows_per_entry(p.head_size, width) +
                          static_cast<int64_t>(random() % 2);
  }
  const int64_t slots = window.overlay_rows + p.slots;
  const std::size_t bytes = lanes * static_cast<std::size_t>(slots * width);
  Guarded<float> vectors(lanes * static_cast<std::size_t>(p.tokens) * d);
  fill_normal(vectors.data(), vectors.size(), random,
              std::pow(10.0f, static_cast<float>(static_cast<int>(random() % 9)) - 4.0f));
  Guarded<uint8_t> garbage(bytes), expected(bytes), present(bytes);
  for (std::size_t i = 0; i < bytes; ++i) garbage[i] = static_cast<uint8_t>(random());
  EncodeCall call = encode_call(p.key, p.head_size, width, tables);
  call.norm_correction = static_cast<int>(random() % 2);
  Guarded<float> gains(spec::searches(p.key.kind) ? random() % (kMaxGains + 1) : 0);
  for (float& gain : gains) gain = 0.7f + 0.1f * static_cast<float>(random() % 9);
  Guarded<float> feedback(gains.size() % 2 ? static_cast<std::size_t>(p.heads) * d * d : 0);
  fill_normal(feedback.data(), feedback.size(), random, 0.7f / std::sqrt(static_cast<float>(d)));
  for (std::size_t row = 0; row < feedback.size() / d; ++row) {
    feedback[row * d + row % d] = 0.01f + static_cast<float>(random() % 400) / 100;
  }
  call.gains = gains.data();
  call.gain_count = static_cast<int>(gains.size());
  if (gains.size() > 0) call.norm_correction = static_cast<int>(random() % 3);
  const int64_t fed_heads = feedback.size() > 0 ? p.heads : 0;
  const FeedbackMatrices as_floats(feedback.data(), fed_heads, p.head_size, false);
  const FeedbackMatrices as_bytes(feedback.data(), fed_heads, p.head_size, true);
  const auto give_feedback = [&](const Kernels& level) {
    if (feedback.size() == 0) return;
    const bool wants_bytes = FeedbackMatrices::as_bytes(level, p.key, tables.centroids.data());
    call.feedback = (wants_bytes ? as_bytes : as_floats).heads();
  };
  call.window = window;
  call.vectors = vectors.data();
  call.past_length = p.lengths.data();
  call.length_per_batch = p.lengths.size() > 1;
  call.batch = p.batch;
  call.heads = p.heads;
  call.tokens = p.tokens;
  call.past_slots = call.present_slots = slots;
  std::memcpy(expected.data(), garbage.data(), bytes);
  call.past = call.present = expected.data();
  give_feedback(*scalar_kernels());
  encode(*scalar_kernels(), call, serial());
  for (const Kernels* level : supported_kernels()) {
    give_feedback(*level);
    std::memcpy(present.data(), garbage.data(), bytes);
    call.past = call.present = present.data();
    encode(*level, call, serial());
    CHECK(std::memcmp(present.data(), expected.data(), bytes) == 0,
          describe(p, level->name) + ": other bytes than the scalar level");
  }
  for (int64_t lane = 0; lane < p.batch * p.heads; ++lane) {
    const int64_t from = p.lengths[p.lengths.size() > 1 ? lane / p.heads : 0];
    const std::size_t begin =
        static_cast<std::size_t>((lane * slots + window.overlay_rows) * width);
    const std::size_t first = begin + static_cast<std::size_t>(from * width);
    const std::size_t last = first + static_cast<std::size_t>(p.tokens * width);
    const std::size_t end = begin + static_cast<std::size_t>(p.slots * width);
    CHECK(std::memcmp(expected.data() + begin, garbage.data() + begin, first - begin) == 0,
          describe(p, "scalar") + ": rows in front of the new ones changed");
    CHECK(std::memcmp(expected.data() + last, garbage.data() + last, end - last) == 0,
          describe(p, "scalar") + ": rows behind the new ones changed");
  }
}

// A problem has two caches, and writes a third.
TEST(random_caches) {
  const long caches = number_in("TQ_RANDOM_CACHES", 1500);
  const long seed = number_in("TQ_RANDOM_SEED", 1);
  for (long first = 0; first < caches; first += 3) {
    const unsigned long own =
        static_cast<unsigned long>(seed) * 1000000007ul + static_cast<unsigned long>(first);
    Random random(static_cast<unsigned>(own));
    const Problem p = random_problem(random);
    const long before = failures;
    solve(p, random);
    encode_at_every_level(p, random);
    if (failures > before) std::printf("TQ_RANDOM_SEED=%ld, cache %ld\n", seed, first);
  }
}

}  // namespace
}  // namespace tq::test
