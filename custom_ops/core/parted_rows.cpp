// Blocks of rows of prod; the contract is in prod_rows.h.
#include "core/prod_rows.h"

#include <algorithm>
#include <optional>

#include "core/row_format.h"

namespace tq {
namespace {

// sqrt(pi / 2)
constexpr double kRootOfHalfPi = 1.2533141373155002512;

// Query rows that are multiplied in registers at every level.
constexpr int kMaxFused = 16;

constexpr float kSigns[kTable] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1,
                                  -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
constexpr IntegerTable kIntegerSigns = {{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1},
                                        1.0f};

}  // namespace

ProdRows::ProdRows(const Kernels& kernels, const CacheView& cache, int head_size,
                   const CodedPart& index)
    : kernels_(kernels),
      head_size_(head_size),
      stride_(cache.stride),
      fields_(spec::code_bytes(cache.codec, head_size)),
      signs_at_(spec::plane_offset(cache.codec, spec::planes(cache.codec).count - 1, head_size)),
      index_(index),
      signs_(kernels, row_format(1, head_size, kernels.lanes, cache.stride), kSigns,
             index.is_integer() ? std::optional<IntegerTable>(kIntegerSigns) : std::nullopt) {}

void ProdRows::prepare_query(const float* natural, float* prepared) const {
  index_.prepare_query(natural, prepared);
  signs_.prepare_query(natural + head_size_, prepared + index_.query_width());
}

void ProdRows::natural_sums(const float* sums, float* natural) const {
  index_.natural_sums(sums, natural);
  signs_.natural_sums(sums + index_.sums_width(), natural + head_size_);
}

void ProdRows::load_scales(const uint8_t* rows, int count, float* index, float* sign) const {
  kernels_.load_fields(rows + fields_, stride_, count, index);
  kernels_.load_fields(rows + fields_ + 2, stride_, count, sign);
  kernels_.scale(sign, static_cast<float>(kRootOfHalfPi / head_size_), kBlock);
}

bool ProdRows::is_fused(int queries) const {
  // Integers are never decoded: their queries lie in another order.
  return index_.is_integer() || queries <= kMaxFused;
}

// Scales of both parts; per query a block of scores or weights, and a row of one part with what its
// products want.
std::size_t ProdRows::work_size(int queries) const {
  const int widest = std::max({index_.query_width(), signs_.query_width(),
                               index_.sums_width() + kNumbersFloats,
                               signs_.sums_width() + kNumbersFloats});
  return 2 * kBlock + static_cast<std::size_t>(queries) * (kBlock + widest);
}

// `query` points at the part in the first row. The kernels want its rows one after the other. Both
// parts of a row are asked of memory at once, by the first one.
void ProdRows::score_part(const CodedPart& part, const uint8_t* rows, int count,
                          const float* query, int queries, float* work, float* scores,
                          Ahead ahead) const {
  const int width = part.query_width();
  for (int r = 0; r < queries; ++r) {
    std::copy_n(query + r * query_width(), width, work + r * width);
  }
  part.score(rows, count, work, queries, scores, ahead);
}

void ProdRows::score(const uint8_t* rows, int count, const float* query, int queries, float* work,
                     float* scores) const {
  float* const index_scales = work;
  float* const sign_scales = index_scales + kBlock;
  float* const of_signs = sign_scales + kBlock;
  float* const rest = of_signs + static_cast<std::size_t>(queries) * kBlock;
  load_scales(rows, count, index_scales, sign_scales);
  score_part(index_, rows, count, query, queries, rest, scores, index_.ahead_of(rows, count));
  score_part(signs_, signs(rows), count, query + index_.query_width(), queries, rest, of_signs, {});
  for (int r = 0; r < queries; ++r) {
    float* const score = scores + r * kBlock;
    const float* const of_sign = of_signs + r * kBlock;
    for (int t = 0; t < count; ++t) {
      score[t] = score[t] * index_scales[t] + of_sign[t] * sign_scales[t];
    }
  }
}

// `sums` points at the part in the first row.
void ProdRows::accumulate_part(const CodedPart& part, const uint8_t* rows, int count,
                               const float* weights, int queries, float* work, float* sums,
                               Ahead ahead) const {
  const int width = part.sums_width();
  float* const rest = work + static_cast<std::size_t>(queries) * width;
  for (int r = 0; r < queries; ++r) std::copy_n(sums + r * sums_width(), width, work + r * width);
  part.accumulate(rows, count, weights, queries, rest, work, ahead);
  for (int r = 0; r < queries; ++r) std::copy_n(work + r * width, width, sums + r * sums_width());
}

void ProdRows::accumulate(const uint8_t* rows, int count, const float* weights, int queries,
                          float* work, float* sums) const {
  float* const index_scales = work;
  float* const sign_scales = index_scales + kBlock;
  float* const scaled = sign_scales + kBlock;
  float* const rest = scaled + static_cast<std::size_t>(queries) * kBlock;
  load_scales(rows, count, index_scales, sign_scales);
  const auto scale_weights = [&](const float* scales) {
    for (int r = 0; r < queries; ++r) {
      kernels_.apply_fields(weights + r * kBlock, scales, nullptr, count, scaled + r * kBlock);
    }
  };
  scale_weights(index_scales);
  accumulate_part(index_, rows, count, scaled, queries, rest, sums, index_.ahead_of(rows, count));
  scale_weights(sign_scales);
  accumulate_part(signs_, signs(rows), count, scaled, queries, rest, sums + index_.sums_width(),
                  {});
}

void ProdRows::decode(const uint8_t* rows, int count, float* values) const {
  alignas(64) float index_scales[kBlock], sign_scales[kBlock];
  load_scales(rows, count, index_scales, sign_scales);
  for (int t = 0; t < count; ++t, rows += stride_, values += padded()) {
    float* const sign_values = values + index_.padded();
    index_.decode_rows(rows, 1, values);
    kernels_.scale(values, index_scales[t], index_.padded());
    signs_.decode_rows(signs(rows), 1, sign_values);
    kernels_.scale(sign_values, sign_scales[t], signs_.padded());
  }
}

}  // namespace tq
