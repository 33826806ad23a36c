// Blocks of rows of lloyd_max and uniform_signed for a prefill; the contract is in plain_rows.h.
#include "core/plain_rows.h"

#include <algorithm>

namespace tq {

PlainRows::PlainRows(const Kernels& kernels, const CacheView& cache, int head_size)
    : kernels_(kernels),
      cache_(cache),
      format_(row_format(cache.codec.bits, head_size, kernels.lanes, cache.stride)),
      fields_(spec::code_bytes(cache.codec, head_size)) {
  const int levels = spec::levels(cache.codec);
  fill_code_table(cache, table_);
  if (kernels.pairs != nullptr && kernels.multiply_pairs != nullptr) {
    integers_ = encoder_integers(table_, levels);
  }
}

template <class Body>
void PlainRows::for_each_block(const uint8_t* rows, int count, const Body& body) const {
  for (int from = 0; from < count; from += kBlock) {
    body(rows + static_cast<std::ptrdiff_t>(from) * cache_.stride, std::min(kBlock, count - from),
         from);
  }
}

void PlainRows::decode_keys(const uint8_t* rows, int count, float* out) const {
  for_each_block(rows, count, [&](const uint8_t* at, int some, int from) {
    kernels_.decode_columns(format_, at, some, table_, out + from * width());
  });
}

void PlainRows::decode_keys(const uint8_t* rows, int count, int32_t* out) const {
  for_each_block(rows, count, [&](const uint8_t* at, int some, int from) {
    kernels_.pairs->decode_columns(format_, at, some, *integers_, out + from * (width() / 2));
  });
}

void PlainRows::decode_values(const uint8_t* rows, int count, float* out) const {
  kernels_.decode_rows(format_, rows, count, table_, out);
}

void PlainRows::decode_values(const uint8_t* rows, int count, int32_t* out) const {
  kernels_.pairs->decode_rows(format_, rows, count, *integers_, out);
}

void PlainRows::scales(const uint8_t* rows, int count, float* out) const {
  for_each_block(rows, count, [&](const uint8_t* at, int some, int from) {
    load_scales(kernels_, cache_.codec, at + fields_, cache_.stride, some, out + from);
  });
}

}  // namespace tq
