// What every operands_i8_*.h has: four neighbouring steps of a query or of weights, as the bytes of
// one word.
#pragma once

namespace {

struct Group {
  uint8_t number[4];
};
TQ_INLINE void store_factors(const Group* groups, float* out) {
  memcpy(out, groups, kWords * sizeof *groups);
}
TQ_INLINE int32_t word_of(const Group& group) {
  int32_t operands;
  memcpy(&operands, group.number, sizeof operands);
  return operands;
}

}  // namespace
