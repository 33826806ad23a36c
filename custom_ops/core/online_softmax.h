// The online softmax of query rows over blocks of keys. When the maximum of a row rises, its sums so
// far are rescaled. Then the weights of the block are added.
//
// A key or value is scale * number + zero, plus the offset of its slot. So a score is
//   scale * <q, numbers> + zero * sum(q) + <q, offset>.
// The offsets of values add their mean, weighted by the weights of their slots, to the output. These
// weights are summed in buckets, one for each row of the offset. The last bucket has all later slots.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention_call.h"
#include "core/head_task.h"
#include "core/kernels.h"
#include "core/query_rows.h"
#include "core/row_reader.h"

namespace tq {

class OnlineSoftmax {
 public:
  // All outlive this object.
  OnlineSoftmax(const Kernels& kernels, const AttentionCall& call, const QueryRows& queries,
                const RowReader& key, const RowReader& value);

  // Per query row: its sum, then what its products with the offsets of keys are made of; nothing
  // where nobody asks for it.
  std::size_t shift_width() const {
    return key_.has_zeros() || has_key_offsets() ? 1 + offset_width() : 0;
  }
  std::size_t bucket_width() const { return static_cast<std::size_t>(call_.value_offsets); }
  bool has_key_offsets() const { return call_.key_offsets > 0 || call_.rotary_offset != nullptr; }
  bool has_zeros() const { return key_.has_zeros() || value_.has_zeros(); }

  // Empties sums, buckets, maxima and weights. Of the ranges that a row's keys are split into, one
  // counts its sink.
  void start(const HeadTask& task, bool counts_sink) const;

  // Fields of the keys and of the values of a block.
  void load_key_fields(const uint8_t* keys, const KeyBlock& block) const;
  void load_value_fields(const uint8_t* values, const KeyBlock& block) const;

  // Where has_key_offsets(): scores become those of keys with their offsets, and the scales of the keys
  // ones. Prefetches `later`.
  void add_key_offsets(const HeadTask& task, const KeyBlock& block, float* scores,
                       PrefetchRange later) const;

  // Whether rows first .. first + count see all keys of a block, and nothing but their scales and
  // zeros is to be done.
  bool is_whole(const HeadTask& task, int first, int count, const KeyBlock& block) const;

  // scores[r] becomes what the numbers of the values are multiplied with.
  void weigh_block(const HeadTask& task, const KeyBlock& block, float* scores) const;
  // The same as operands of integer products, kOperandFloats of each row and part. Prefetches a share
  // of the rows `later` of the values and returns it.
  float quantise_block(const HeadTask& task, const uint8_t* values, const KeyBlock& block,
                       float* scores, float* operands, RowSpan later) const;
  // From the operands of one part to those of the next.
  std::ptrdiff_t pitch(const HeadTask& task) const {
    return task.count * std::ptrdiff_t{kOperandFloats};
  }

  // Multiplies what row r has summed over rows of the caches, but not its weight.
  void scale_sums(const HeadTask& task, int r, float factor) const;

 private:
  static constexpr int kRowsTogether = 16;  // rows whose softmax is taken together

  void start_from_sinks(const HeadTask& task) const;
  // Zeros are loaded where one of the two caches has any.
  void load_fields(const RowReader& reader, const uint8_t* rows, int count, float* scales,
                   float* zeros) const;
  bool has_zero_bias(const HeadTask& task, int first, int count, const KeyBlock& block) const;
  int64_t bias_offset(const HeadTask& task, int r, const KeyBlock& block) const;
  const float* load_bias(const HeadTask& task, int r, const KeyBlock& block) const;
  const float* load_zeros(const HeadTask& task, int r, const KeyBlock& block) const;
  std::size_t offset_width() const {
    return call_.rotary_offset != nullptr ? call_.rotary_offset->query_width()
                                          : static_cast<std::size_t>(call_.key_offsets);
  }
  // Whether the values of a block have the last row of the offset, or none.
  bool is_late(const KeyBlock& block) const { return block.at >= call_.value_offsets - 1; }
  // No kernel has both zeros and several parts.
  bool has_whole_rows() const { return !has_zeros() || value_.parts() == 1; }
  PartScales weight_scales(const HeadTask& task, const KeyBlock& block) const {
    return {block.value_scales,
            value_.parts(),
            pitch(task),
            {value_.largest(0), value_.largest(value_.parts() - 1)}};
  }
  // What weights that are not rounded yet are multiplied with.
  const float* float_scales(const KeyBlock& block) const {
    return value_.parts() > 1 ? block.ones : block.value_scales;
  }
  void weigh_row(const HeadTask& task, int r, const KeyBlock& block, float* scores) const;
  void quantise_row(const HeadTask& task, int r, const uint8_t* values, const KeyBlock& block,
                    float* scores, float* operands) const;
  void quantise_whole_rows(const HeadTask& task, int first, int count, const uint8_t* values,
                           const KeyBlock& block, float* scores, float* operands,
                           PrefetchRange prefetch) const;
  void apply_weights(const HeadTask& task, int r, const KeyBlock& block, float max,
                     float* scores) const;
  void raise_maximum(const HeadTask& task, int r, float max) const;
  // Of a row of a block whose values have one offset.
  void add_weight(const HeadTask& task, int r, float weight) const;
  void add_to_sums(const HeadTask& task, int r, float zeros) const;

  const Kernels& kernels_;
  const AttentionCall& call_;
  const QueryRows& queries_;
  const RowReader &key_, &value_;
};

}  // namespace tq
