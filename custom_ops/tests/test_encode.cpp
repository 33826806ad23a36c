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
  Setup(Codec codec_, int head_size_, Random& random, int more = 0)
      : codec(codec_),
        head_size(head_size_),
        width(spec::row_bytes(codec, head_size) + more),
        tables(codec, head_size, random) {}

  EncodeCall call(const float* vectors, const uint8_t* past, uint8_t* present,
                  const int64_t* length) const {
    EncodeCall c = encode_call(codec, head_size, width, tables);
    c.vectors = vectors;
    c.past = past;
    c.present = present;
    c.past_length = length;
    return c;
  }

  Codec codec;
  int head_size, width;
  Tables tables;
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
  Share share;
  Random random(3);
  for (const int size : kHeadSizes) {
    for (const Codec codec : float_codecs()) {
      const int tokens = 29;
      for (const Side side : {Side::kEnd, Side::kBegin}) {
        const Setup setup(codec, size, random, side == Side::kEnd ? 0 : 7);
        const std::size_t bytes = static_cast<std::size_t>(tokens * setup.width);
        Guarded<float> vectors(static_cast<std::size_t>(tokens) * size, side);
        Guarded<float> offset(static_cast<std::size_t>(3 * size), side);
        fill_vectors(vectors.data(), tokens, size, random);
        fill_normal(offset.data(), offset.size(), random);
        Guarded<uint8_t> expected(bytes, side), rows(bytes, side), none(0, side);
        const int64_t length = 0;
        for (const int variant : {0, 1, 2}) {
          if (share.leaves_out_next()) continue;
          EncodeCall call = setup.call(vectors.data(), none.data(), expected.data(), &length);
          call.tokens = call.present_slots = tokens;
          call.norm_correction = variant != 1;
          call.offset = variant == 2 ? offset.data() : nullptr;
          call.offsets = variant == 2 ? 3 : 0;
          encode(*scalar_kernels(), call, serial());
          for (const Kernels* level : supported_kernels()) {
            std::fill(rows.begin(), rows.end(), uint8_t{0xcd});
            call.present = rows.data();
            encode(*level, call, threaded());
            CHECK(std::memcmp(rows.data(), expected.data(), bytes) == 0,
                  describe(level->name, codec, size));
          }
        }
      }
    }
  }
}

// Decoding what was encoded comes as close as the codec can; what no codec can hold is zero.
TEST(rows_stand_for_their_vectors) {
  Random random(7);
  for (const Codec codec : float_codecs()) {
    const int size = 128, tokens = 26, rows = 3;
    const Setup setup(codec, size, random, 3);
    const std::size_t d = static_cast<std::size_t>(size);
    std::vector<float> vectors(tokens * d), offset(rows * d);
    fill_vectors(vectors.data(), tokens, size, random);
    fill_normal(offset.data(), offset.size(), random);
    std::vector<uint8_t> present(static_cast<std::size_t>(tokens * setup.width), 0xcd);
    const int64_t length = 0;
    for (const bool with_offset : {false, true}) {
      EncodeCall call = setup.call(vectors.data(), nullptr, present.data(), &length);
      call.tokens = call.present_slots = tokens;
      call.offset = with_offset ? offset.data() : nullptr;
      call.offsets = with_offset ? rows : 0;
      encode(*supported_kernels().front(), call, serial());
      for (int t = 0; t < tokens; ++t) {
        const uint8_t* const row = present.data() + t * setup.width;
        const int used = spec::row_bytes(codec, size);
        CHECK(row[used] == 0 && row[used + 1] == 0 && row[used + 2] == 0, "padding");
        if (codec.kind == Kind::kRaw) continue;  // see test_raw.cpp
        std::vector<double> x(d);
        double energy = 0, largest = 0;
        bool is_finite = true;
        for (std::size_t i = 0; i < d; ++i) {
          x[i] = vectors[static_cast<std::size_t>(t) * d + i];
          if (with_offset) x[i] -= offset[static_cast<std::size_t>(std::min(t, rows - 1)) * d + i];
          energy += x[i] * x[i];
          largest = std::max(largest, std::abs(x[i]));
          is_finite = is_finite && std::isfinite(static_cast<float>(x[i]));
        }
        const bool is_usable =
            spec::is_rotated(codec.kind)
                ? std::isfinite(static_cast<float>(energy)) && static_cast<float>(energy) > 0
                : is_finite;
        const std::vector<double> c =
            coordinates_of(codec, size, row, setup.tables.centroids.data());
        double error = 0;
        for (std::size_t i = 0; i < d; ++i) {
          double decoded = 0;
          if (spec::is_rotated(codec.kind)) {
            for (std::size_t j = 0; j < c.size(); ++j) {
              decoded += c[j] * setup.tables.rotation[i * c.size() + j];
            }
          } else {
            decoded = c[i];
          }
          const double x_i = is_usable ? x[i] : 0.0;
          error += (decoded - x_i) * (decoded - x_i);
        }
        const std::string what = name_of(codec) + ", row " + std::to_string(t);
        if (!is_usable) {
          CHECK(error == 0, what);
          continue;
        }
        // What is clamped, or rounds to zero, is no question of rounding.
        const double norm = std::sqrt(energy);
        const bool has_half = codec.kind != Kind::kFp8E4m3 && codec.kind != Kind::kU8 &&
                              codec.kind != Kind::kUniformSigned;
        if (has_half && (norm > 60000 || norm < 1e-3)) continue;
        if (codec.kind == Kind::kFp8E4m3 && (largest > 448 || norm < 1)) continue;
        double limit = 0;
        switch (codec.kind) {
          case Kind::kQ8_0:
            limit = 1e-3;
            break;
          case Kind::kFp8E4m3:
            limit = 2e-3;
            break;
          case Kind::kUniform:  // (range / (L - 1))^2 / 12, range some 5.5 deviations
            limit = 4.5 / std::pow((1 << codec.bits) - 1, 2);
            break;
          case Kind::kProd:
            limit = codec.bits == 3 ? 0.3 : 0.1;
            break;
          case Kind::kU8:
            limit = 0.05;
            break;
          case Kind::kUniformSigned:
            limit = codec.bits == 3 ? 0.09 : 0.04;
            break;
          default: {
            const double limits[] = {0, 0.5, 0.25, 0.08, 0.035, 0.012};
            limit = limits[codec.bits];
          }
        }
        CHECK(error <= limit * energy, what + ": " + std::to_string(error / energy));
      }
    }
  }
}

// A rotation that is a Hadamard matrix is applied fast; the codes are those of the product with it.
TEST(the_fast_rotation_gives_the_codes_of_the_matrix) {
  Random random(40);
  for (const int size : {8, 16, 64, 128, 256, 512}) {
    for (const Codec codec : {lloyd_max(4), lloyd_max(5), Codec{Kind::kProd, 4}}) {
      Setup setup(codec, size, random);
      const std::size_t d = static_cast<std::size_t>(size);
      const int width = setup.tables.width, tokens = 40;
      std::vector<float> signs(d), found(d);
      const float step = static_cast<float>(1.0 / std::sqrt(static_cast<double>(size)));
      for (int i = 0; i < size; ++i) {
        signs[static_cast<std::size_t>(i)] = random() % 2 ? 1.0f : -1.0f;
        for (int j = 0; j < size; ++j) {
          int parity = 0;
          for (int both = i & j; both != 0; both /= 2) parity ^= both & 1;
          setup.tables.rotation[static_cast<std::size_t>(i * width + j)] =
              (parity ? -step : step) * signs[static_cast<std::size_t>(i)];
        }
      }
      float* const matrix = setup.tables.rotation.data();
      transpose(matrix, size, width, setup.tables.transposed.data());
      float found_step = 0;
      CHECK(read_hadamard(matrix, size, width, found.data(), &found_step) && found == signs &&
                found_step == step,
            std::to_string(size));
      std::vector<float> vectors(tokens * d);
      fill_normal(vectors.data(), vectors.size(), random);
      std::vector<uint8_t> slow(static_cast<std::size_t>(tokens * setup.width)), fast(slow);
      const int64_t length = 0;
      EncodeCall call = setup.call(vectors.data(), nullptr, slow.data(), &length);
      call.tokens = call.present_slots = tokens;
      encode(*supported_kernels().front(), call, serial());
      call.rotation.signs = signs.data();
      call.rotation.step = step;
      call.present = fast.data();
      encode(*scalar_kernels(), call, serial());
      int unlike = 0;
      for (int t = 0; t < tokens; ++t) {
        for (int j = 0; j < size; ++j) {
          unlike += code_of(codec, size, slow.data() + t * setup.width, j) !=
                    code_of(codec, size, fast.data() + t * setup.width, j);
        }
      }
      CHECK(unlike <= 2, std::to_string(unlike) + " codes differ, " + name_of(codec));
      for (const Kernels* level : supported_kernels()) {
        std::vector<uint8_t> own(fast.size());
        call.present = own.data();
        encode(*level, call, serial());
        CHECK(own == fast, describe(level->name, codec, size));
      }
      // The twin: one entry that is off by the least, and none is.
      matrix[width + 1] = std::nextafter(matrix[width + 1], 1.0f);
      CHECK(!read_hadamard(matrix, size, width, found.data(), &found_step), "off by one");
    }
  }
}

// Growing, fixed capacity and in place, with a length per sequence.
TEST(slots_that_are_not_written_are_copied_or_zero) {
  Random random(5);
  const Codec codec = lloyd_max(4);
  const int size = 128;
  const Setup setup(codec, size, random, 6);
  const int width = setup.width;
  const int64_t batch = 3, heads = 2, tokens = 2, lengths[] = {5, 0, 7};
  std::vector<float> vectors(static_cast<std::size_t>(batch * heads * tokens * size));
  fill_normal(vectors.data(), vectors.size(), random);
  for (const int64_t past_slots : {int64_t{7}, int64_t{8}, int64_t{9}, int64_t{5000}}) {
    const int64_t slots = std::max<int64_t>(past_slots, 9);
    Guarded<uint8_t> past(static_cast<std::size_t>(batch * heads * past_slots * width));
    Guarded<uint8_t> present(static_cast<std::size_t>(batch * heads * slots * width));
    const std::size_t past_rows = static_cast<std::size_t>(batch * heads * past_slots);
    fill_rows(past.data(), past_rows, codec, size, width, random);
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

// Growing, fixed capacity and in place, with entries and without: the bytes of rows, elsewhere.
TEST(planes_are_the_rows_apart) {
  Random random(8);
  const int64_t batch = 2, heads = 3, tokens = 70, lengths[] = {5, 0};
  for (const Codec codec : float_codecs()) {
    if (!spec::is_rotated(codec.kind)) continue;
    const int size = 64, width = spec::row_bytes(codec, size);
    const Tables tables(codec, size, random);
    std::vector<float> vectors(static_cast<std::size_t>(batch * heads * tokens * size));
    fill_normal(vectors.data(), vectors.size(), random);
    for (const int64_t past_slots : {int64_t{5}, int64_t{75}, int64_t{90}}) {
      Window window{};
      if (past_slots != 75) {
        window = {4, 2, 6 * spec::rows_per_entry(size, width) + (past_slots == 90)};
      }
      const int64_t in = past_slots + window.overlay_rows;
      const int64_t out = std::max<int64_t>(past_slots, 75) + window.overlay_rows;
      Guarded<uint8_t> past(static_cast<std::size_t>(batch * heads * in * width));
      Guarded<uint8_t> present(static_cast<std::size_t>(batch * heads * out * width));
      fill_rows(past.data(), static_cast<std::size_t>(batch * heads * in), codec, size, width,
                random);
      EncodeCall call = encode_call(codec, size, width, tables);
      call.vectors = vectors.data();
      call.past = past.data();
      call.present = present.data();
      call.past_length = lengths;
      call.length_per_batch = true;
      call.batch = batch;
      call.heads = heads;
      call.tokens = tokens;
      call.past_slots = in;
      call.present_slots = out;
      call.window = window;
      Guarded<uint8_t> past_planes(past.size()), planes(present.size()), expected(present.size());
      lay_out_planes(call.planes(in), batch, past.data(), past_planes.data());
      encode(*supported_kernels().back(), call, threaded());
      lay_out_planes(call.planes(out), batch, present.data(), expected.data());
      call.window.has_planes = true;
      call.past = past_planes.data();
      call.present = planes.data();
      encode(*supported_kernels().back(), call, threaded());
      const std::string what = name_of(codec) + ", " + std::to_string(past_slots);
      CHECK(std::memcmp(planes.data(), expected.data(), planes.size()) == 0, what);
      if (in != out) continue;
      call.present = past_planes.data();
      encode(*supported_kernels().back(), call, serial());
      CHECK(std::memcmp(past_planes.data(), expected.data(), planes.size()) == 0,
            what + " in place");
    }
  }
}

TEST(encode_without_elements_writes_nothing) {
  Random random(6);
  const Setup setup(lloyd_max(4), 16, random);
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
