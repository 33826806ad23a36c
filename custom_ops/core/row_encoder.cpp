// One small batch of rows at a time; the contract is in row_encoder.h.
#include "core/row_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/rotation.h"

namespace tq {
namespace {

using spec::Kind;

static_assert(kMaxGains == spec::kMaxGains, "core/kernels.h and tq_onnx/codec/search.py");

constexpr int kNormKept = 1, kUnbiased = 2;  // of EncodeCall::norm_correction
constexpr float kOne = 1.0f;                 // the gain of an encoder that tries no others

uint16_t stored_half(float value) {
  if (!(value <= spec::kMaxHalf)) value = spec::kMaxHalf;
  if (value < -spec::kMaxHalf) value = -spec::kMaxHalf;
  return float_to_half(value);
}

void store(uint16_t half, uint8_t* out) { std::memcpy(out, &half, sizeof half); }

template <int WIDTH>
void pack_plane(const uint8_t* codes, int shift, int bytes, uint8_t* out) {
  for (int i = 0; i < bytes; ++i) {
    unsigned packed = 0;
    for (int k = 0; k < 8 / WIDTH; ++k) {
      packed |= (codes[i + k * bytes] >> shift & ((1u << WIDTH) - 1u)) << (k * WIDTH);
    }
    out[i] = static_cast<uint8_t>(packed);
  }
}

}  // namespace

RowEncoder::RowEncoder(const Kernels& kernels, const EncodeCall& call)
    : kernels_(kernels),
      call_(call),
      size_(call.head_size),
      fields_(spec::code_bytes(call.codec, call.head_size)),
      used_(spec::row_bytes(call.codec, call.head_size)),
      searches_(call.gain_count > 0 || call.feedback != nullptr ||
                call.norm_correction == kUnbiased),
      planes_(spec::planes(call.codec)),
      levels_(spec::levels(call.codec)) {
  if (!spec::is_rotated(call.codec.kind)) return;
  fill_table(call.centroids, levels_, table_);
  const auto integers = encoder_integers(table_, levels_);
  unit_ = integers.has_value() ? integers->unit : 1.0f;
  for (int i = 0; i < kTable; ++i) {
    numbers_[i] = integers.has_value() ? integers->entries[i % levels_] : table_[i];
  }
}

void RowEncoder::encode(float* x, int count, const int64_t* heads, uint8_t* const* rows) const {
  for (int r = 0; r < count; ++r) {
    std::memset(rows[r] + used_, 0, static_cast<std::size_t>(call_.width - used_));
  }
  if (spec::is_rotated(call_.codec.kind)) return encode_rotated(x, count, heads, rows);
  for (int r = 0; r < count; ++r, x += size_) {
    if (call_.codec.kind == Kind::kRaw) {
      // The cache may lie at any address, the conversions want whole elements.
      alignas(64) uint16_t aligned[spec::kMaxHeadSize * sizeof(float) / sizeof(uint16_t)];
      store_floats(kernels_, raw_element(call_.element, call_.codec.bits), x, aligned, 0,
                   static_cast<std::size_t>(size_));
      std::memcpy(rows[r], aligned, static_cast<std::size_t>(used_));
      continue;
    }
    if (!is_finite(x, size_)) std::fill_n(x, size_, 0.0f);
    switch (call_.codec.kind) {
      case Kind::kFp8E4m3:
        kernels_.encode_fp8(x, rows[r], size_);
        break;
      case Kind::kQ8_0:
        encode_blocks(x, rows[r]);
        break;
      default:
        encode_steps(x, rows[r]);
    }
  }
}

void RowEncoder::encode_rotated(float* x, int count, const int64_t* heads,
                                uint8_t* const* rows) const {
  alignas(64) float unit[kMaxFloats];
  alignas(64) float rotated[kMaxFloats];
  alignas(64) uint8_t codes[kMaxFloats];
  float norms[kMaxRows], scales[kMaxRows];
  for (int r = 0; r < count; ++r) {
    float* const from = x + r * size_;
    float* const to = unit + r * size_;
    norms[r] = std::sqrt(kernels_.sum_squares(from, size_));
    if (!std::isfinite(norms[r])) norms[r] = 0.0f;
    if (norms[r] == 0.0f) {
      std::fill_n(from, size_, 0.0f);
      std::fill_n(to, size_, 0.0f);
    } else {
      kernels_.divide(from, norms[r], to, size_);
    }
  }
  rotate(kernels_, call_.rotation, unit, rotated, count, size_, size_);
  code(rotated, count, heads, norms, codes, scales);
  for (int r = 0; r < count; ++r) {
    uint8_t* const own = codes + r * size_;
    uint8_t* const fields = rows[r] + fields_;
    if (spec::has_float_scale(call_.codec.kind)) {
      // What is signed is written in steps, of which the centroid of the integer 1 is one.
      const float scale =
          spec::is_signed(call_.codec.kind) ? scales[r] * table_[levels_ / 2 + 1] : norms[r];
      std::memcpy(fields, &scale, sizeof scale);
    } else {
      store(stored_half(scales[r]), fields);
    }
    const int sign_bit = spec::sign_bit(call_.codec);
    for (int j = 0; sign_bit != 0 && j < size_; ++j) {
      own[j] = static_cast<uint8_t>(own[j] ^ sign_bit);
    }
    if (!spec::has_sketch(call_.codec.kind)) pack(own, rows[r]);
  }
  if (spec::has_sketch(call_.codec.kind)) {
    encode_residuals(x, count, scales, rotated, codes, rows);
  }
}

// Codes and scales of vectors of these norms, over their norms.
void RowEncoder::code(const float* y, int count, const int64_t* heads, const float* norms,
                      uint8_t* codes, float* scales) const {
  if (searches_) return search(y, count, heads, norms, codes, scales);
  for (int r = 0; r < count; ++r, y += size_, codes += size_) {
    const float square = kernels_.quantise(y, call_.boundaries, levels_, table_, codes, size_);
    scales[r] = call_.norm_correction == kNormKept && norms[r] != 0.0f
                    ? norms[r] / std::sqrt(square)
                    : norms[r];
  }
}

// The same of the codes of the best gains.
void RowEncoder::search(const float* y, int count, const int64_t* heads, const float* norms,
                        uint8_t* codes, float* scales) const {
  const bool has_gains = call_.gain_count > 0, is_signed = spec::is_signed(call_.codec.kind);
  const SearchTables tables{has_gains ? call_.gains : &kOne,
                            has_gains ? call_.gain_count : 1,
                            call_.boundaries,
                            levels_,
                            table_,
                            numbers_,
                            unit_,
                            is_signed ? -std::numeric_limits<float>::infinity() : 0.0f};
  Found found[kMaxRows];
  if (call_.feedback == nullptr) {
    kernels_.search(tables, nullptr, y, count, size_, codes, found);
  } else {
    Feedback feedback[kMaxRows];
    for (int r = 0; r < count; ++r) feedback[r] = call_.feedback[heads[r]];
    const auto fed = feedback->bytes != nullptr ? kernels_.search_bytes : kernels_.search;
    fed(tables, feedback, y, count, size_, codes, found);
  }
  for (int r = 0; r < count; ++r) {
    const Found& best = found[r];
    scales[r] = norms[r];
    if (norms[r] == 0.0f) continue;
    if (call_.norm_correction == kUnbiased) {
      // Codes that say nothing of the vector have no scale.
      const bool is_usable = best.product > 0.0f || (is_signed && best.product < 0.0f);
      scales[r] = is_usable ? norms[r] * (best.own / best.product) : 0.0f;
      continue;
    }
    if (call_.norm_correction == kNormKept) {
      scales[r] *= std::sqrt(best.own / std::max(best.square, kLeastSquare));
    }
    if (is_signed && best.product < 0.0f) scales[r] = -scales[r];
  }
}

// What the codes leave over, as a reader will see them: the signs of its projection, and its norm.
void RowEncoder::encode_residuals(const float* x, int count, const float* scales, float* scratch,
                                  uint8_t* codes, uint8_t* const* rows) const {
  alignas(64) float residual[kMaxFloats];
  for (int r = 0; r < count; ++r) {
    const float scale = half_to_float(stored_half(scales[r]));
    for (int j = r * size_; j < (r + 1) * size_; ++j) scratch[j] = scale * table_[codes[j]];
  }
  unrotate(kernels_, call_.rotation, scratch, residual, count, size_, size_);
  for (int j = 0; j < count * size_; ++j) residual[j] = x[j] - residual[j];
  const Rotation& rotation = call_.rotation;
  kernels_.rotate(residual, size_, rotation.matrix + size_, rotation.width, scratch, size_, count,
                  size_, size_);
  const int sign = spec::index_bits(call_.codec);
  for (int r = 0; r < count; ++r) {
    uint8_t* const own = codes + r * size_;
    const float* const projected = scratch + r * size_;
    for (int j = 0; j < size_; ++j) {
      own[j] = static_cast<uint8_t>(own[j] | (projected[j] >= 0.0f ? 1u << sign : 0u));
    }
    pack(own, rows[r]);
    const float norm = std::sqrt(kernels_.sum_squares(residual + r * size_, size_));
    store(stored_half(norm), rows[r] + fields_ + 2);
  }
}

void RowEncoder::encode_steps(const float* x, uint8_t* row) const {
  alignas(64) uint8_t codes[spec::kMaxHeadSize];
  const float low = *std::min_element(x, x + size_);
  const float top = static_cast<float>((1 << call_.codec.bits) - 1);
  // The whole range may be more than a float can hold.
  const double range = static_cast<double>(*std::max_element(x, x + size_)) - low;
  const float scale = static_cast<float>(range / top);
  if (scale > 0.0f) {
    kernels_.round_steps(x, low, scale, 0.0f, top, codes, size_);
  } else {
    std::fill_n(codes, size_, uint8_t{0});
  }
  pack(codes, row);
  store(stored_half(scale), row + fields_);
  store(stored_half(low), row + fields_ + 2);
}

void RowEncoder::encode_blocks(const float* x, uint8_t* row) const {
  uint8_t* field = row + fields_;
  for (int from = 0; from < size_; from += spec::kQ8_0Block, field += 2) {
    const int count = std::min(spec::kQ8_0Block, size_ - from);
    float largest = 0.0f;
    for (int j = from; j < from + count; ++j) largest = std::max(largest, std::fabs(x[j]));
    const float scale = static_cast<float>(static_cast<double>(largest) / 127);
    if (scale > 0.0f) {
      kernels_.round_steps(x + from, 0.0f, scale, -127.0f, 127.0f, row + from, count);
    } else {
      std::fill_n(row + from, count, uint8_t{0});
    }
    store(stored_half(scale), field);
  }
}

void RowEncoder::pack(const uint8_t* codes, uint8_t* row) const {
  for (int i = 0; i < planes_.count; ++i) {
    const int shift = planes_.plane[i].shift;
    const int bytes = spec::plane_bytes(planes_.plane[i].width, size_);
    switch (planes_.plane[i].width) {
      case 1:
        pack_plane<1>(codes, shift, bytes, row);
        break;
      case 2:
        pack_plane<2>(codes, shift, bytes, row);
        break;
      case 4:
        pack_plane<4>(codes, shift, bytes, row);
        break;
      default:
        std::memcpy(row, codes, static_cast<std::size_t>(bytes));
    }
    row += bytes;
  }
}

}  // namespace tq
