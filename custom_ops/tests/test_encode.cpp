// Encode: every level gives the scalar level's bytes, and those are right.
#include "core/encode.h"

#include <limits>
#include <memory>

#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Setup {
  Setup(int bits_, int head_size_, Random& random)
      : bits(bits_),
        head_size(head_size_),
        rotation(static_cast<std::size_t>(head_size) * head_size),
        centroids(std::size_t{1} << bits),
        boundaries((std::size_t{1} << bits) - 1) {
    fill_rotation(rotation.data(), head_size, random);
    fill_codebook(bits, head_size, centroids.data(), boundaries.data());
  }

  EncodeCall call(const float* vectors, const uint8_t* past, uint8_t* present,
                  const int64_t* length) const {
    EncodeCall c{};
    c.element = Element::kFloat;
    c.vectors = vectors;
    c.past = past;
    c.present = present;
    c.past_length = length;
    c.batch = c.heads = 1;
    c.head_size = head_size;
    c.bits = bits;
    c.norm_correction = true;
    c.rotation = rotation.data();
    c.centroids = centroids.data();
    c.boundaries = boundaries.data();
    return c;
  }

  int bits, head_size;
  Guarded<float> rotation, centroids, boundaries;
};

// Rows with every oddity: zero, tiny, huge, overflowing, not finite.
void fill_vectors(float* x, int rows, int size, Random& random) {
  for (int r = 0; r < rows; ++r, x += size) {
    fill_normal(x, static_cast<std::size_t>(size), random, std::pow(10.0f, (r % 9) - 4.0f));
    switch (r % 13) {
      case 3:
        std::fill_n(x, size, 0.0f);
        break;
      case 5:
        x[size / 2] = kInfinity;
        break;
      case 7:
        x[0] = std::numeric_limits<float>::quiet_NaN();
        break;
      case 9:
        std::fill_n(x, size, 3e38f);
        break;
      case 11:
        std::fill_n(x, size, 1e-30f);
        break;
      default:
        break;
    }
  }
}

TEST(encode_gives_the_same_bytes_at_every_level) {
  Random random(3);
  for (const int size : kHeadSizes) {
    for (const int bits : spec::kLloydMaxBits) {
      const Setup setup(bits, size, random);
      const int tokens = 29;
      const std::size_t bytes =
          static_cast<std::size_t>(tokens) * static_cast<std::size_t>(spec::row_bytes(bits, size));
      for (const Side side : {Side::kEnd, Side::kBegin}) {
        Guarded<float> vectors(static_cast<std::size_t>(tokens) * size, side);
        fill_vectors(vectors.data(), tokens, size, random);
        Guarded<uint8_t> expected(bytes, side), rows(bytes, side), none(0, side);
        const int64_t length = 0;
        for (const bool norm_correction : {true, false}) {
          EncodeCall call = setup.call(vectors.data(), none.data(), expected.data(), &length);
          call.tokens = call.present_slots = tokens;
          call.norm_correction = norm_correction;
          encode(*scalar_kernels(), call, serial());
          for (const Kernels* level : supported_kernels()) {
            std::fill(rows.begin(), rows.end(), uint8_t{0xcd});
            call.present = rows.data();
            encode(*level, call, threaded());
            CHECK(std::memcmp(rows.data(), expected.data(), bytes) == 0,
                  describe(level->name, bits, size));
          }
        }
      }
    }
  }
}

TEST(rows_hold_what_the_formulas_say) {
  Random random(4);
  for (const int bits : spec::kLloydMaxBits) {
    const int size = 64, tokens = 26;
    const Setup setup(bits, size, random);
    std::vector<float> vectors(static_cast<std::size_t>(tokens) * size);
    fill_vectors(vectors.data(), tokens, size, random);
    const int width = spec::row_bytes(bits, size);
    std::vector<uint8_t> rows(static_cast<std::size_t>(tokens) * width);
    const int64_t length = 0;
    EncodeCall call = setup.call(vectors.data(), nullptr, rows.data(), &length);
    call.tokens = call.present_slots = tokens;
    encode(*scalar_kernels(), call, serial());
    int unlike = 0;
    for (int t = 0; t < tokens; ++t) {
      const float* const x = vectors.data() + t * size;
      const uint8_t* const row = rows.data() + t * width;
      double energy = 0;
      for (int i = 0; i < size; ++i) energy += static_cast<double>(x[i]) * x[i];
      const bool usable = std::isfinite(static_cast<float>(energy)) &&
                          static_cast<float>(energy) > 0;
      double chosen = 0;
      for (int j = 0; j < size; ++j) {
        double y = 0;
        for (int i = 0; usable && i < size; ++i) {
          y += x[i] / std::sqrt(energy) * setup.rotation[static_cast<std::size_t>(i * size + j)];
        }
        int code = 0;
        for (const float boundary : std::vector<float>(
                 setup.boundaries.data(), setup.boundaries.data() + setup.boundaries.size())) {
          code += y >= boundary;
        }
        unlike += code != code_of(bits, size, row, j);
        const double c = setup.centroids[static_cast<std::size_t>(code_of(bits, size, row, j))];
        chosen += c * c;
      }
      uint16_t half;
      std::memcpy(&half, row + spec::scale_offset(bits, size), sizeof half);
      const double scale = usable ? std::min(std::sqrt(energy / chosen), 65504.0) : 0.0;
      CHECK(std::abs(half_to_float(half) - scale) <= scale * 0.001 + 6e-8,
            std::to_string(t) + ": " + std::to_string(scale));
    }
    CHECK(unlike <= 1, std::to_string(unlike) + " codes differ");
  }
}

// Growing, fixed capacity and in place, with a length per sequence.
TEST(slots_that_are_not_written_are_copied_or_zero) {
  Random random(5);
  const int bits = 4, size = 128, width = spec::row_bytes(bits, size);
  const Setup setup(bits, size, random);
  const int64_t batch = 3, heads = 2, tokens = 2, lengths[] = {5, 0, 7};
  std::vector<float> vectors(static_cast<std::size_t>(batch * heads * tokens * size));
  fill_normal(vectors.data(), vectors.size(), random);
  for (const int64_t past_slots : {int64_t{7}, int64_t{8}, int64_t{9}, int64_t{5000}}) {
    const int64_t slots = std::max<int64_t>(past_slots, 9);
    Guarded<uint8_t> past(static_cast<std::size_t>(batch * heads * past_slots * width));
    Guarded<uint8_t> present(static_cast<std::size_t>(batch * heads * slots * width));
    const std::size_t past_rows = static_cast<std::size_t>(batch * heads * past_slots);
    fill_rows(past.data(), past_rows, bits, size, random);
    const std::vector<uint8_t> before(past.begin(), past.end());
    EncodeCall call = setup.call(vectors.data(), past.data(), present.data(), lengths);
    call.length_per_batch = true;
    call.batch = batch;
    call.heads = heads;
    call.tokens = tokens;
    call.past_slots = past_slots;
    call.present_slots = slots;
    encode(*supported_kernels().front(), call, threaded());
    CHECK(std::equal(before.begin(), before.end(), past.begin()), "past is an input");
    for (int64_t lane = 0; lane < batch * heads; ++lane) {
      for (int64_t s = 0; s < slots; ++s) {
        const uint8_t* const row = present.data() + (lane * slots + s) * width;
        const int64_t length = lengths[lane / heads];
        if (s >= length && s < length + tokens) continue;
        const std::vector<uint8_t> zeros(static_cast<std::size_t>(width), 0);
        const uint8_t* const expected =
            s < past_slots ? before.data() + (lane * past_slots + s) * width : zeros.data();
        CHECK(std::memcmp(row, expected, static_cast<std::size_t>(width)) == 0,
              std::to_string(lane) + ", " + std::to_string(s));
      }
    }
    if (slots == past_slots) {  // in place gives the same
      call.present = past.data();
      encode(*supported_kernels().front(), call, serial());
      CHECK(std::memcmp(past.data(), present.data(), present.size()) == 0, "in place");
    }
  }
}

TEST(encode_without_elements_writes_nothing) {
  Random random(6);
  const Setup setup(4, 16, random);
  const int64_t length = 0;
  for (const int empty : {0, 1, 2}) {
    EncodeCall call = setup.call(nullptr, nullptr, nullptr, &length);
    call.batch = empty != 0;
    call.heads = empty != 1;
    call.tokens = empty != 2;
    call.present_slots = call.tokens;
    encode(*supported_kernels().front(), call, serial());
    CHECK(true, "returned");
  }
}

}  // namespace
}  // namespace tq::test
