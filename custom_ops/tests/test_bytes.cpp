// Attention with products of 8 bits, at every level: what float64 gives over the same codes, within
// what the rounding of queries and weights allows; where attention is flat, peaked, or copies a value.
#include "tests/attention_problem.h"

namespace tq::test {
namespace {

Problem byte_problem(int key_bits, int value_bits, int size, int64_t group, int64_t length) {
  Problem p;
  p.key = lloyd_max(key_bits);
  p.value = lloyd_max(value_bits);
  p.head_size = size;
  p.heads = 2;
  p.group = group;
  p.slots = length + 3;
  p.lengths = {length};
  p.has_integers = true;
  p.products = "8";
  return p;
}

TEST(attention_with_products_of_8_bits_is_right) {
  Random random(31);
  for (const int bits : {5, 4, 3, 2}) {
    for (const int size : {64, 128}) {
      for (const int64_t group : {1, 2, 3, 5, 8}) {
        solve(byte_problem(bits, bits, size, group, 100 + 131 * group), random);
      }
    }
  }
  solve(byte_problem(5, 3, 128, 2, 700), random);
  solve(byte_problem(4, 2, 40, 7, 129), random);
  Problem masked = byte_problem(4, 4, 64, 2, 300);
  masked.bias_dims = {1, 1, 1, 303};
  solve(masked, random);
  Problem capped = byte_problem(4, 3, 64, 2, 300);
  capped.softcap = 20.0f;
  capped.sinks = {1.0f, -2.0f};
  capped.window = 170;
  solve(capped, random);
}

TEST(uniform_attention_with_products_of_8_bits_is_right) {
  Random random(34);
  for (const int bits : {4, 3, 2}) {
    for (const int size : {40, 64, 128}) {
      Problem p = byte_problem(bits, bits, size, 1 + size % 7, 100 + 3 * size);
      p.key.kind = p.value.kind = Kind::kUniform;
      solve(p, random);
      p.value = lloyd_max(bits);
      solve(p, random);
      std::swap(p.key, p.value);
      solve(p, random);
    }
  }
}

TEST(peaked_attention_with_products_of_8_bits_is_right) {
  Random random(32);
  for (const float peak : {4.0f, 20.0f}) {
    Problem p = byte_problem(4, 4, 128, 2, 1000);
    p.peak = peak;
    solve(p, random);
  }
}

// The query is a key, and its value has nearly all of the weight.
TEST(a_copy_with_products_of_8_bits_is_right) {
  Random random(33);
  for (const int64_t needle : {0, 63, 64, 500, 999}) {
    Problem p = byte_problem(4, 4, 128, 2, 1000);
    p.needle = needle;
    solve(p, random);
  }
}

}  // namespace
}  // namespace tq::test
