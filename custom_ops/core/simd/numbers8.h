// What numbers of 8 bits beside the words of any vec_int_*.h have in common where products are of
// bytes: four neighbours as the bytes of one word.
#pragma once

namespace {

struct Group {
  uint8_t number[4];
};
TQ_INLINE void store_factors(const Group* groups, float* out) {
  memcpy(out, groups, kWords * sizeof *groups);
}
TQ_INLINE int32_t word_of(const Group& group) {
  int32_t numbers;
  memcpy(&numbers, group.number, sizeof numbers);
  return numbers;
}

}  // namespace
