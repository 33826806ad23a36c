// How attention is cut, for the kernel that reads the caches and the one that merges its parts.
//
// A task is up to eight queries that read one KV head: the query group of as many tokens as fit.
// The keys of a task may be divided into parts of equal length; the last part may be shorter. A core
// computes parts and writes the result of each to scratch memory. A second launch merges the parts of
// a task. The host chooses the number of parts from the sizes alone (tiling.h): the result does not
// depend on the number of cores.
//
// A query sees the keys from `first_slot` to its own; with a sliding window, the last of these. A task
// begins at the tile of the first key that any of its queries sees. Tiles before it are not fetched
// and belong to no part.
//
// Scratch holds, for part p of task t and its eight queries: sums of values [tasks, parts, 8, D],
// largest scores [tasks, parts, 8], sums of weights [tasks, parts, 8]. Parts after the end of a
// sequence are neither written nor read.
#pragma once

#include "tile.h"

namespace tq {

template <uint32_t D>
class AttentionTasks {
 public:
  __aicore__ inline void init(const TqAttentionTiling& tiling) {
    past_length_ = tiling.past_length;
    per_sequence_ = tiling.lengths != 0;
    heads_ = tiling.heads;
    group_ = tiling.query_heads / heads_;
    new_tokens_ = tiling.new_tokens;
    sliding_window_ = tiling.sliding_window;
    first_slot_ = tiling.first_slot;
    parts_ = tiling.parts;
    part_tokens_ = tiling.part_tokens;
    // Whole groups where they fit.
    step_ = group_ < kTaskRows ? kTaskRows / group_ * group_ : kTaskRows;
    queries_ = group_ * new_tokens_;
    blocks_ = (queries_ + step_ - 1) / step_;
    count_ = tiling.batch * heads_ * blocks_;
    lengths_.SetGlobalBuffer((__gm__ int64_t*)tiling.lengths, per_sequence_ ? tiling.batch : 0);
    if (parts_ == 1) return;
    const uint64_t places = static_cast<uint64_t>(count_) * parts_ * kTaskRows;
    __gm__ float* const scratch = (__gm__ float*)tiling.scratch;
    sums_.SetGlobalBuffer(scratch, places * D);
    tops_.SetGlobalBuffer(scratch + places * D, places);
    weights_.SetGlobalBuffer(scratch + places * (D + 1), places);
  }

  __aicore__ inline uint32_t count() { return count_; }
  __aicore__ inline uint32_t parts() { return parts_; }

  __aicore__ inline void choose(uint32_t task) {
    task_ = task;
    head_ = task / blocks_;
    first_ = task % blocks_ * step_;
    rows_ = queries_ - first_ < step_ ? queries_ - first_ : step_;
    past_ = per_sequence_ ? static_cast<uint32_t>(lengths_.GetValue(head_ / heads_))
                          : past_length_;
    const uint32_t first = least_seen(0) < keys() ? least_seen(0) : keys() - 1;
    origin_ = first / kTileRows * kTileRows;
  }

  // Of the chosen task: its KV head, the past length of its sequence, its number of queries.
  __aicore__ inline uint32_t head() { return head_; }
  __aicore__ inline uint32_t past() { return past_; }
  __aicore__ inline uint32_t rows() { return rows_; }

  // The first element of query `r` in the query and output tensors; queries are ordered by token,
  // then by head of the group.
  __aicore__ inline uint64_t place(uint32_t r) {
    const uint64_t query_head = static_cast<uint64_t>(head_) * group_ + (first_ + r) % group_;
    return (query_head * new_tokens_ + token(r)) * D;
  }

  // The query head of query `r`.
  __aicore__ inline uint32_t query_head(uint32_t r) {
    return head_ % heads_ * group_ + (first_ + r) % group_;
  }

  // Query `r` sees the keys least_seen(r) .. seen(r) - 1, none if least_seen(r) is not below seen(r).
  // keys() is the largest seen(r) of the task.
  __aicore__ inline uint32_t least_seen(uint32_t r) {
    const uint32_t end = seen(r);
    const uint32_t first = sliding_window_ > 0 && end > sliding_window_ ? end - sliding_window_ : 0;
    return first > first_slot_ ? first : first_slot_;
  }
  __aicore__ inline uint32_t seen(uint32_t r) { return past_ + token(r) + 1; }
  __aicore__ inline uint32_t keys() { return seen(rows_ - 1); }

  // How many parts have keys, and where part `p` begins and ends.
  __aicore__ inline uint32_t parts_with_keys() {
    return parts_ == 1 ? 1 : (keys() - origin_ + part_tokens_ - 1) / part_tokens_;
  }
  __aicore__ inline uint32_t begin(uint32_t p) { return origin_ + p * part_tokens_; }
  __aicore__ inline uint32_t end(uint32_t p) {
    return p + 1 < parts_with_keys() ? begin(p + 1) : keys();
  }

  // Scratch of the parts from `p` on.
  __aicore__ inline GlobalTensor<float> sums(uint32_t p) { return sums_[index(p) * D]; }
  __aicore__ inline GlobalTensor<float> tops(uint32_t p) { return tops_[index(p)]; }
  __aicore__ inline GlobalTensor<float> weights(uint32_t p) { return weights_[index(p)]; }

 private:
  __aicore__ inline uint32_t token(uint32_t r) { return (first_ + r) / group_; }

  __aicore__ inline uint64_t index(uint32_t p) {
    return (static_cast<uint64_t>(task_) * parts_ + p) * kTaskRows;
  }

  uint32_t past_length_, heads_, group_, new_tokens_, parts_, part_tokens_;
  uint32_t sliding_window_, first_slot_;
  uint32_t step_, queries_, blocks_, count_;
  uint32_t task_, head_, first_, rows_, past_, origin_;
  bool per_sequence_;
  GlobalTensor<int64_t> lengths_;
  GlobalTensor<float> sums_, tops_, weights_;
};

}  // namespace tq
