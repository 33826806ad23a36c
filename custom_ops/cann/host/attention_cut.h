// How the keys of an attention launch are divided into parts. It depends on sizes, window and padding
// alone: neither the number of cores nor the other sequences of a batch change a result.
#pragma once

#include <algorithm>
#include <cstdint>

namespace tq::cann {

inline constexpr int64_t kTaskQueries = 8;   // of the kernel (attention_tasks.h)
inline constexpr int64_t kTileTokens = 64;   // a part is whole tiles
inline constexpr int64_t kPartTokens = 512;  // at least, where keys are cut
inline constexpr int64_t kMostParts = 64;    // of the kernel

// A sequence with this many tasks is not divided: there are more tasks than cores on any device.
inline constexpr int64_t kEnoughTasks = 64;

// Most parts of one launch, unless a single sequence has more. Further sequences are launched after
// it with the same scratch, which is at most that of 63 tasks of 64 parts: 16.8 MB at head size 128.
inline constexpr int64_t kLaunchParts = 512;

struct AttentionCut {
  int64_t tasks;        // of one sequence
  int64_t parts;        // of a task; 1 without a cut
  int64_t part_tokens;  // 0 without a cut
  int64_t sequences;    // of one launch, at most

  int64_t scratch_bytes(int64_t count, int64_t head_size) const {
    if (parts == 1) return 0;
    return count * tasks * parts * kTaskQueries * (head_size + 2) *
           static_cast<int64_t>(sizeof(float));
  }
};

// Most keys that a task reads: from the tile of the first key that it sees on. `keys` is the number of
// keys of the sequence with the new ones. No query sees slots before `first_slot`.
inline int64_t keys_of_task(int64_t keys, int64_t tokens, int64_t sliding_window,
                            int64_t first_slot) {
  // A task whose queries see nothing has the last tile.
  const int64_t left =
      std::min(keys, std::max(kTileTokens, keys - first_slot / kTileTokens * kTileTokens));
  if (sliding_window == 0 || sliding_window >= left) return left;
  // The window of its last token, other tokens before that, and what is before them in a tile.
  return std::min(left,
                  sliding_window + std::min(tokens, kTaskQueries) - 1 + kTileTokens - 1);
}

// `group` query heads for each of `heads` KV heads; `keys` as from keys_of_task.
inline AttentionCut cut_attention(int64_t heads, int64_t group, int64_t tokens, int64_t keys,
                                  int64_t batch) {
  const auto in = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  const int64_t step = group < kTaskQueries ? kTaskQueries / group * group : kTaskQueries;
  const int64_t tasks = heads * in(group * tokens, step);
  if (tasks >= kEnoughTasks || keys <= kPartTokens) return {tasks, 1, 0, batch};
  int64_t part_tokens = in(in(keys, kMostParts), kTileTokens) * kTileTokens;
  if (part_tokens < kPartTokens) part_tokens = kPartTokens;
  const int64_t parts = in(keys, part_tokens);
  const int64_t fitting = std::max<int64_t>(1, kLaunchParts / (tasks * parts));
  return {tasks, parts, part_tokens, std::min(fitting, batch)};
}

}  // namespace tq::cann
