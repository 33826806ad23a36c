// Encode on every platform, with every compiler: the same bytes from the same vectors.
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

// Of the rows below, as they were when this was written: rows of models in use do not change. A
// change of the layout changes it.
constexpr uint64_t kDigest = 0x57d9fe6297539c4b;
constexpr uint64_t kSignedDigest = 0xc7ec4e8fc363c434;  // of signed integers, which came later

// FNV-1a.
uint64_t digest_of(const uint8_t* bytes, std::size_t count, uint64_t digest) {
  for (std::size_t i = 0; i < count; ++i) digest = (digest ^ bytes[i]) * 0x100000001b3u;
  return digest;
}

// About normal, and exact: sums of integers, which no library of mathematics has a say in.
void fill_exactly(float* out, std::size_t count, Random& random) {
  for (std::size_t i = 0; i < count; ++i) {
    int sum = 0;
    for (int k = 0; k < 6; ++k) sum += static_cast<int>(random() >> 19);
    out[i] = static_cast<float>(sum - 3 * 8192) / 8192.0f;
  }
}

// A Hadamard matrix with random signs, then whatever else the codec has.
void fill_rotation_exactly(Tables& tables, int size, Random& random) {
  fill_exactly(tables.rotation.data(), tables.rotation.size(), random);
  const float step = 1.0f / std::sqrt(static_cast<float>(size));
  for (int j = 0; j < size; ++j) {
    const float sign = random() % 2 ? step : -step;
    for (int i = 0; i < size; ++i) {
      int parity = 0;
      for (int both = i & j; both != 0; both &= both - 1) parity ^= 1;
      tables.rotation[static_cast<std::size_t>(i * tables.width + j)] = parity ? -sign : sign;
    }
  }
  transpose(tables.rotation.data(), size, tables.width, tables.transposed.data());
}

// Of vectors of the codecs of signed integers, or of the others; with a search where there is one.
uint64_t digest_of_rows(const Kernels& level, bool is_signed) {
  const float gains[] = {1.0f, 0.9375f, 1.0625f};
  Random random(11);
  uint64_t digest = 0xcbf29ce484222325u;
  for (const int size : {64, 128, 256}) {
    for (const Codec codec : float_codecs()) {
      if (spec::is_signed(codec.kind) != is_signed) continue;
      const int tokens = 64, width = spec::row_bytes(codec, size);
      Tables tables(codec, size, random);
      if (spec::is_rotated(codec.kind)) fill_rotation_exactly(tables, size, random);
      std::vector<float> vectors(static_cast<std::size_t>(tokens * size));
      std::vector<uint8_t> rows(static_cast<std::size_t>(tokens * width));
      fill_exactly(vectors.data(), vectors.size(), random);
      const int64_t length = 0;
      for (const bool searches : {false, true}) {
        if (searches && !spec::searches(codec.kind)) continue;
        EncodeCall call = encode_call(codec, size, width, tables);
        call.vectors = vectors.data();
        call.present = rows.data();
        call.past_length = &length;
        call.tokens = call.present_slots = tokens;
        call.gains = searches ? gains : nullptr;
        call.gain_count = searches ? 3 : 0;
        encode(level, call, serial());
        digest = digest_of(rows.data(), rows.size(), digest);
      }
    }
  }
  return digest;
}

TEST(rows_are_the_same_everywhere) {
  for (const Kernels* level : supported_kernels()) {
    for (const bool is_signed : {false, true}) {
      const uint64_t digest = digest_of_rows(*level, is_signed);
      std::printf("%s rows: %016llx at %s\n", is_signed ? "signed" : "other",
                  static_cast<unsigned long long>(digest), level->name);
      CHECK(digest == (is_signed ? kSignedDigest : kDigest), level->name);
    }
  }
}

}  // namespace
}  // namespace tq::test
