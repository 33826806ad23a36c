// float16: integer code against its definition, and every level against the integer code.
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

double value_of(uint16_t half) {
  const int exponent = (half >> 10) & 31;
  const double fraction = half & 0x3ff;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

TEST(half_to_float_is_exact) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = half_to_float(half);
    if ((half & 0x7c00) == 0x7c00) {
      CHECK(half & 0x3ff ? std::isnan(value) : std::isinf(value), std::to_string(bits));
    } else {
      CHECK(static_cast<double>(value) == value_of(half), std::to_string(bits));
      CHECK(float_to_half(value) == half, std::to_string(bits));
    }
  }
}

TEST(float_to_half_rounds_to_nearest_even) {
  Random random(1);
  UniformInt<int> any(0, 0x7bfe);
  for (int i = 0; i < 20000; ++i) {
    const uint16_t low = static_cast<uint16_t>(any(random));
    const double a = value_of(low), b = value_of(static_cast<uint16_t>(low + 1));
    const float middle = static_cast<float>((a + b) / 2);  // exact: one more bit than float16
    const uint16_t even = static_cast<uint16_t>(low & 1 ? low + 1 : low);
    CHECK(float_to_half(middle) == even, std::to_string(low));
    CHECK(float_to_half(-middle) == (even | 0x8000), std::to_string(low));
    CHECK(float_to_half(std::nextafter(middle, 0.0f)) == low, std::to_string(low));
    CHECK(float_to_half(std::nextafter(middle, 1e9f)) == low + 1, std::to_string(low));
  }
  CHECK(float_to_half(65519.99f) == 0x7bff, "largest");
  CHECK(float_to_half(65520.0f) == 0x7c00, "rounds to infinity");
}

TEST(conversions_are_the_same_at_every_level) {
  Random random(2);
  const auto any = [](Random& r) { return static_cast<uint32_t>(r()); };
  for (const Kernels* level : supported_kernels()) {
    for (std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{16},
                              std::size_t{33}, std::size_t{4096}}) {
      for (const Side side : {Side::kEnd, Side::kBegin}) {
        Guarded<float> wide(count, side), back(count, side);
        Guarded<uint16_t> narrow(count, side);
        for (std::size_t i = 0; i < count; ++i) wide[i] = bits_to_float(any(random));
        level->float_to_half(wide.data(), narrow.data(), count);
        level->half_to_float(narrow.data(), back.data(), count);
        for (std::size_t i = 0; i < count; ++i) {
          CHECK(narrow[i] == float_to_half(wide[i]), level->name);
          CHECK(float_to_bits(back[i]) == float_to_bits(half_to_float(narrow[i])), level->name);
        }
        for (float& x : wide) x = std::clamp(x, -65504.0f, 65504.0f);
        for (float& x : wide) x = std::isnan(x) ? 1.0f / 3 : x;
        CHECK(level->round_to_half(wide.data(), back.data(), count), level->name);
        for (std::size_t i = 0; i < count; ++i) {
          const float rounded = half_to_float(float_to_half(wide[i]));
          CHECK(float_to_bits(back[i]) == float_to_bits(rounded), level->name);
        }
        for (std::size_t i = 0; i < count; i += 5) {
          const float before = wide[i];
          for (const float unfit : {65505.0f, -1e9f, HUGE_VALF, std::nanf("")}) {
            wide[i] = unfit;
            CHECK(!level->round_to_half(wide.data(), back.data(), count), level->name);
          }
          wide[i] = before;
        }
      }
    }
  }
}

TEST(bfloat16_rounds_to_nearest_even) {
  CHECK(float_to_bfloat(bits_to_float(0x3f808000u)) == 0x3f80, "tie, even below");
  CHECK(float_to_bfloat(bits_to_float(0x3f818000u)) == 0x3f82, "tie, even above");
  CHECK(float_to_bfloat(bits_to_float(0x3f808001u)) == 0x3f81, "above the tie");
  CHECK(float_to_bfloat(bits_to_float(0x7f7fffffu)) == 0x7f80, "overflow");
  CHECK(std::isnan(bfloat_to_float(float_to_bfloat(bits_to_float(0x7f800001u)))), "NaN");
}

}  // namespace
}  // namespace tq::test
