// Sessions that threads share: one set of tables, one cache that all read, calls at the same time.
// Under ThreadSanitizer (-DTQ_SANITIZE_THREADS=ON) a race is a failure.
#include <thread>

#include "core/attention.h"
#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr int kThreads = 4;

template <class Task>
void at_once(Task task) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back([=] { task(i); });
  for (std::thread& thread : threads) thread.join();
}

void share(Codec codec, int size, int64_t tokens) {
  Random random(static_cast<unsigned>(size));
  const std::size_t d = static_cast<std::size_t>(size);
  const Tables tables(codec, size, random);
  const int width = spec::row_bytes(codec, size);
  const int64_t past = 70, slots = past + tokens, heads = 2;
  Guarded<uint8_t> cache(static_cast<std::size_t>(heads * slots * width));
  fill_rows(cache.data(), static_cast<std::size_t>(heads * slots), codec, size, width, random);
  Guarded<float> vectors(static_cast<std::size_t>(heads * tokens) * d);
  fill_normal(vectors.data(), vectors.size(), random);

  EncodeCall encoding = encode_call(codec, size, width, tables);
  encoding.heads = heads;
  encoding.tokens = tokens;
  encoding.vectors = vectors.data();
  encoding.past = cache.data();
  encoding.past_length = &past;
  encoding.past_slots = encoding.present_slots = slots;
  AttentionCall reading{};
  reading.element = Element::kFloat;
  reading.query = vectors.data();
  reading.key = reading.value = {cache.data(), codec, width, tables.centroids.data()};
  reading.key_rotation = reading.value_rotation = tables.ready();
  reading.past_length = &past;
  reading.batch = 1;
  reading.query_heads = reading.heads = heads;
  reading.tokens = tokens;
  reading.slots = slots;
  reading.head_size = size;
  reading.scale = 0.1f;
  reading.causal = true;
  for (const Kernels* level : supported_kernels()) {
    std::vector<std::vector<uint8_t>> rows(kThreads, std::vector<uint8_t>(cache.size()));
    std::vector<std::vector<float>> results(kThreads, std::vector<float>(vectors.size()));
    bool done[kThreads] = {};
    at_once([&, level](int i) {
      const std::size_t own = static_cast<std::size_t>(i);
      EncodeCall one = encoding;
      one.present = rows[own].data();
      encode(*level, one, threaded());
      AttentionCall other = reading;
      other.output = results[own].data();
      done[i] = attention(*level, other, threaded());
    });
    for (std::size_t i = 0; i < kThreads; ++i) {
      CHECK(done[i] && rows[i] == rows[0] && results[i] == results[0],
            describe(level->name, codec, size));
    }
  }
}

// The table of levels is made by whoever asks first.
TEST(threads_choose_a_level) {
  const Kernels* found[kThreads] = {};
  at_once([&](int i) { found[i] = supported_kernels().front(); });
  for (const Kernels* one : found) CHECK(one == found[0], "a level");
}

// Tables of frequencies are made by whoever asks first, and gone with the last who has them.
TEST(threads_share_tables_of_frequencies) {
  const std::vector<float> frequencies(8, 0.25f), offset(16, 1.0f);
  float angles[kThreads][16];
  at_once([&](int i) {
    for (int round = 0; round < 20; ++round) {
      const RotaryOffset own(frequencies.data(), offset.data(), 2, 1, 8);
      own.angles(round, angles[i], angles[i] + 8);
    }
  });
  for (const auto& found : angles) {
    CHECK(std::equal(found, found + 16, angles[0]), "angles of one slot");
  }
}

TEST(threads_share_tables_and_caches) {
  for (const Codec codec : float_codecs()) {
    for (const int64_t tokens : {1, 3, 40}) share(codec, 32, tokens);
  }
}

}  // namespace
}  // namespace tq::test
