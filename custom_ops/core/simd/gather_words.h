// Words that lie apart, for the x86 levels: vec_avx2.h and vec_avx512.h include it.
#pragma once

namespace {

// Eight 16-bit words, each `stride` bytes behind the one before.
TQ_INLINE __m128i gather_words(const uint8_t* p, ptrdiff_t stride) {
  const auto word = [p, stride](int i) TQ_INLINED {
    uint16_t one;
    memcpy(&one, p + i * stride, sizeof one);
    return static_cast<int>(one);
  };
  __m128i all = _mm_cvtsi32_si128(word(0));
  all = _mm_insert_epi16(all, word(1), 1);
  all = _mm_insert_epi16(all, word(2), 2);
  all = _mm_insert_epi16(all, word(3), 3);
  all = _mm_insert_epi16(all, word(4), 4);
  all = _mm_insert_epi16(all, word(5), 5);
  all = _mm_insert_epi16(all, word(6), 6);
  return _mm_insert_epi16(all, word(7), 7);
}

}  // namespace
