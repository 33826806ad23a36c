// Tiles of query rows; the contract is in attention_prefill.h.
//
// Where both caches are lloyd_max or uniform_signed and a score is a product and nothing more, a tile goes through
// blocks of kPrefillBlock keys by kernels.attend_block: PlainTile. Everything else goes the general
// way, by AttentionRows: GeneralTile.
#include "core/attention_prefill.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "core/buffer.h"
#include "core/element.h"
#include "core/plain_rows.h"
#include "core/rotation.h"
#include "core/row_format.h"
#include "core/window_tile.h"

namespace tq {
namespace {

// Neighbouring query rows of one KV head of one sequence; arrays of `count`.
struct Tile {
  int64_t b, n, first;
  int count;
  const int64_t* flat_rows;
  float *max, *weight;
};

// Attends to the resident tokens, and joins them with what the tile has summed over rows: its weights are
// those of both then, and coded[r] is what the sums over rows have to be multiplied with.
void attend_exactly(const Kernels& kernels, const WindowRows& window, const Tile& tile,
                    const ResidentTokens& resident, const float* query, float* sums, float* work,
                    float* coded) {
  float max[WindowTile::kMaxRows], weight[WindowTile::kMaxRows];
  window.attend({tile.b, tile.n, tile.first, tile.count, resident, query, sums, max, weight}, work);
  for (int r = 0; r < tile.count; ++r) {
    const WindowRows::Factors factors =
        WindowRows::merge(tile.max[r], max[r], weight[r], tile.weight + r);
    kernels.scale(sums + static_cast<std::size_t>(r) * window.width(), factors.exact,
                  static_cast<int>(window.width()));
    coded[r] = factors.coded;
  }
}

class GeneralTile {
 public:
  static constexpr int kRows = kDecodeRows;

  GeneralTile(const Kernels& kernels, const AttentionRows& worker)
      : kernels_(kernels), worker_(worker) {}

  std::size_t work_size() const {
    return kRows *
               (worker_.query_width() + worker_.sums_width() + worker_.shift_width() +
                worker_.bucket_width() + worker_.scratch_width() + 2 * worker_.window().width()) +
           std::max(worker_.work_size(kRows), worker_.window().work_size(kRows));
  }

  void run(const Tile& tile, float* work) const {
    const auto take = [&work](std::size_t size) {
      float* const taken = work;
      work += kRows * size;
      return taken;
    };
    float* const query = take(worker_.query_width());
    float* const sums = take(worker_.sums_width());
    float* const shifts = take(worker_.shift_width());
    float* const buckets = take(worker_.bucket_width());
    float* const scratch = take(worker_.scratch_width());
    const WindowRows& window = worker_.window();
    float* const exact_query = take(window.width());
    float* const exact_sums = take(window.width());
    float *wide[kRows], *narrow[kRows], *exact[kRows];
    for (int r = 0; r < tile.count; ++r) {
      wide[r] = query + static_cast<std::size_t>(r) * worker_.query_width();
      narrow[r] = shifts + static_cast<std::size_t>(r) * worker_.shift_width();
      exact[r] = exact_query + static_cast<std::size_t>(r) * window.width();
    }
    worker_.prepare(tile.flat_rows, tile.count, scratch, wide, narrow, exact);
    const ResidentTokens resident = window.resident_tokens(tile.b, tile.n);
    const Range keys =
        worker_.queries().coded(tile.b, tile.first, tile.first + tile.count - 1, resident);
    const HeadTask task{tile.b, tile.n,  tile.first, tile.count,  resident,  query,       shifts,
                        sums,   buckets, tile.max,   tile.weight, keys.high, {0, 0, 0, 0}};
    worker_.attend(&task, 1, keys, true, work);
    if (window.is_on()) {
      float coded[kRows];
      attend_exactly(kernels_, window, tile, resident, exact_query, exact_sums, work, coded);
      for (int r = 0; r < tile.count; ++r) worker_.scale_sums(task, r, coded[r]);
    }
    for (int r = 0; r < tile.count; ++r) {
      wide[r] = sums + static_cast<std::size_t>(r) * worker_.sums_width();
      narrow[r] = buckets + static_cast<std::size_t>(r) * worker_.bucket_width();
      exact[r] = exact_sums + static_cast<std::size_t>(r) * window.width();
    }
    worker_.finish(tile.flat_rows, tile.count, wide, narrow, exact, tile.weight, scratch);
  }

 private:
  const Kernels& kernels_;
  const AttentionRows& worker_;
};

class PlainTile {
 public:
  // Many, since each tile decodes every block; a multiple of the rows of a tile of products.
  static constexpr int kRows = WindowTile::kMaxRows;

  PlainTile(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker)
      : kernels_(kernels),
        call_(call),
        queries_(worker.queries()),
        cursor_(worker.cursor()),
        window_(worker.window()),
        exact_(kernels, call, window_),
        key_(kernels, call.key, call.head_size),
        value_(kernels, call.value, call.head_size),
        is_integer_(key_.is_integer() && value_.is_integer()) {}

  static bool covers(const Kernels& kernels, const AttentionCall& call) {
    const auto is_coded = [](const CacheView& cache) {
      return cache.codec.kind == spec::Kind::kLloydMax || spec::is_signed(cache.codec.kind);
    };
    return kernels.attend_block != nullptr && is_coded(call.key) && is_coded(call.value) &&
           call.bias == nullptr && call.softcap == 0.0f && call.key_offsets == 0 &&
           call.value_offsets == 0 && call.rotary_offset == nullptr;
  }

  std::size_t work_size() const {
    const std::size_t scratch = 2 * kRows * static_cast<std::size_t>(call_.head_size);
    return kRows * (key_.width() + value_.width() + 2 * window_.width()) +
           std::max({scratch, blocks_size(), window_.work_size(kRows), exact_.work_size()});
  }

  void run(const Tile& tile, float* work) const {
    float* const query = work;
    float* const sums = query + kRows * key_.width();
    float* const exact_query = sums + kRows * value_.width();
    float* const exact_sums = exact_query + kRows * window_.width();
    float* const rest = exact_sums + kRows * window_.width();  // rotations and blocks take turns
    const ResidentTokens resident = window_.resident_tokens(tile.b, tile.n);
    prepare(tile, rest, query, exact_query);
    std::fill_n(sums, static_cast<std::size_t>(tile.count) * value_.width(), 0.0f);
    start(tile);
    if (is_integer_) {
      attend_pairs(tile, resident, rest, query, sums);
    } else {
      attend(tile, resident, rest, query, sums);
    }
    if (window_.is_on()) {
      float coded[kRows];
      attend_exactly(tile, resident, exact_query, exact_sums, rest, coded);
      for (int r = 0; r < tile.count; ++r) {
        if (coded[r] == 1.0f) continue;
        kernels_.scale(sums + static_cast<std::size_t>(r) * value_.width(), coded[r],
                       static_cast<int>(value_.width()));
      }
    }
    finish(tile, rest, sums, exact_sums);
  }

 private:
  std::size_t blocks_size() const {
    return kPrefillBlock * (key_.width() + value_.width() + 2) + 2 * cursor_.copy_size();
  }

  void prepare(const Tile& tile, float* scratch, float* query, float* exact) const {
    const int size = call_.head_size;
    float* const natural = window_.takes_natural_queries() ? exact : scratch;
    float* const rotated = scratch + static_cast<std::ptrdiff_t>(tile.count) * size;
    for (int r = 0; r < tile.count; ++r) {
      load_floats(kernels_, call_.element, call_.query,
                  static_cast<std::size_t>(queries_.vector_of(tile.flat_rows[r])) * size,
                  natural + r * size, static_cast<std::size_t>(size));
    }
    kernels_.scale(natural, call_.scale, tile.count * size);
    rotate(kernels_, call_.key_rotation, natural, rotated, tile.count, size, size);
    for (int r = 0; r < tile.count; ++r) {
      to_slot_order(key_.format(), rotated + r * size,
                    query + static_cast<std::size_t>(r) * key_.width());
      if (natural == exact) continue;
      window_.prepare_query(natural + r * size,
                            exact + static_cast<std::size_t>(r) * window_.width());
    }
  }

  // A sink is a key without a value that every query sees: exp(sink - max) with max = sink.
  void start(const Tile& tile) const {
    std::fill_n(tile.max, tile.count, kNoMaximum);
    std::fill_n(tile.weight, tile.count, 0.0f);
    if (call_.sink == nullptr) return;
    for (int r = 0; r < tile.count; ++r) {
      load_floats(kernels_, call_.element, call_.sink,
                  static_cast<std::size_t>(queries_.query_head(tile.n, tile.first + r)),
                  tile.max + r, 1);
      tile.weight[r] = tile.max[r] == kNoMaximum ? 0.0f : 1.0f;
    }
  }

  // body(rows of the keys, rows of the values, count, low, high) for every block; `copies` has
  // twice what the cursor says.
  template <class Body>
  void for_each_block(const Tile& tile, const ResidentTokens& resident, uint8_t* copies,
                      const Body& body) const {
    static_assert(kPrefillBlock == kBlock, "blocks do not lie across pages");
    const Range all = queries_.coded(tile.b, tile.first, tile.first + tile.count - 1, resident);
    Range ranges[kRows];
    for (int r = 0; r < tile.count; ++r)
      ranges[r] = queries_.coded(tile.b, tile.first + r, resident);
    int64_t end = cursor_.origin(all) + kPrefillBlock;
    for (int64_t at = all.low; at < all.high; at = end, end += kPrefillBlock) {
      const int count = static_cast<int>(std::min(end, all.high) - at);
      int low[kRows], high[kRows];
      for (int r = 0; r < tile.count; ++r) {
        low[r] = static_cast<int>(std::clamp<int64_t>(ranges[r].low - at, 0, count));
        high[r] = static_cast<int>(std::clamp<int64_t>(ranges[r].high - at, 0, count));
      }
      body(cursor_.block_rows(call_.key, tile.b, tile.n, at, count, copies),
           cursor_.block_rows(call_.value, tile.b, tile.n, at, count,
                              copies + cursor_.copy_size() * sizeof(float)),
           count, low, high);
    }
  }

  void attend(const Tile& tile, const ResidentTokens& resident, float* work, const float* query,
              float* sums) const {
    float* const keys = work;
    float* const values = keys + kPrefillBlock * key_.width();
    float* const key_scales = values + kPrefillBlock * value_.width();
    float* const value_scales = key_scales + kPrefillBlock;
    const PrefillBlock block{keys,
                             values,
                             key_scales,
                             value_scales,
                             static_cast<int>(key_.width()),
                             static_cast<int>(value_.width())};
    uint8_t* const copies = reinterpret_cast<uint8_t*>(value_scales + kPrefillBlock);
    for_each_block(tile, resident, copies,
                   [&](const uint8_t* key_rows, const uint8_t* value_rows, int count,
                       const int* low, const int* high) {
                     key_.decode_keys(key_rows, count, keys);
                     key_.scales(key_rows, count, key_scales);
                     value_.decode_values(value_rows, count, values);
                     value_.scales(value_rows, count, value_scales);
                     kernels_.attend_block(block, query, tile.count, low, high, tile.max,
                                           tile.weight, sums);
                   });
  }

  // As the function of that name.
  void attend_exactly(const Tile& tile, const ResidentTokens& resident, const float* query,
                      float* sums, float* work, float* coded) const {
    const WindowRows::Rows rows{tile.b, tile.n, tile.first, tile.count, resident,
                                query,  sums,   tile.max,   tile.weight};
    if (!exact_.covers(rows)) {
      return tq::attend_exactly(kernels_, window_, tile, resident, query, sums, work, coded);
    }
    float before[kRows];
    std::copy_n(tile.max, tile.count, before);
    exact_.attend(rows, work);
    for (int r = 0; r < tile.count; ++r) {
      coded[r] = tile.max[r] > before[r] ? std::exp(before[r] - tile.max[r]) : 1.0f;
    }
  }

  // `query` is replaced by its words.
  void attend_pairs(const Tile& tile, const ResidentTokens& resident, float* work, float* query,
                    float* sums) const {
    const std::size_t pairs = key_.width() / 2;
    int32_t* const words = reinterpret_cast<int32_t*>(query);
    float steps[kRows];
    alignas(64) float row[spec::kMaxHeadSize * 2];
    for (int r = 0; r < tile.count; ++r) {
      std::copy_n(query + r * key_.width(), key_.width(), row);
      steps[r] = kernels_.pairs->pack_query(key_.format(), row, words + r * pairs);
    }
    int32_t* const keys = reinterpret_cast<int32_t*>(work);
    int32_t* const values = keys + kPrefillBlock * pairs;
    float* const key_scales = reinterpret_cast<float*>(values + kPrefillBlock / 2 * value_.width());
    float* const value_scales = key_scales + kPrefillBlock;
    const PairBlock block{keys,
                          values,
                          key_scales,
                          value_scales,
                          static_cast<int>(pairs),
                          static_cast<int>(value_.width()),
                          kernels_.multiply_pairs};
    uint8_t* const copies = reinterpret_cast<uint8_t*>(value_scales + kPrefillBlock);
    for_each_block(tile, resident, copies,
                   [&](const uint8_t* key_rows, const uint8_t* value_rows, int count,
                       const int* low, const int* high) {
                     key_.decode_keys(key_rows, count, keys);
                     key_.scales(key_rows, count, key_scales);
                     kernels_.scale(key_scales, key_.unit(), kPrefillBlock);
                     value_.decode_values(value_rows, count, values);
                     value_.scales(value_rows, count, value_scales);
                     kernels_.scale(value_scales, value_.unit(), kPrefillBlock);
                     kernels_.pairs->attend_block(block, words, steps, tile.count, low, high,
                                                  tile.max, tile.weight, sums);
                   });
  }

  void finish(const Tile& tile, float* scratch, const float* sums, const float* exact) const {
    const int size = call_.head_size;
    float* const natural = scratch;
    float* const out = scratch + static_cast<std::ptrdiff_t>(tile.count) * size;
    for (int r = 0; r < tile.count; ++r) {
      float* const x = natural + r * size;
      to_natural_order(value_.format(), sums + static_cast<std::size_t>(r) * value_.width(), x);
      if (tile.weight[r] == 0.0f) {  // every key is hidden, and there is no sink
        std::fill_n(x, size, 0.0f);
      } else {
        kernels_.divide(x, tile.weight[r], x, size);
      }
    }
    unrotate(kernels_, call_.value_rotation, natural, out, tile.count, size, size);
    for (int r = 0; r < tile.count; ++r) {
      if (window_.is_on() && tile.weight[r] != 0.0f) {
        window_.add_share(exact + static_cast<std::size_t>(r) * window_.width(), tile.weight[r],
                          out + r * size);
      }
      store_floats(kernels_, call_.element, out + r * size, call_.output,
                   static_cast<std::size_t>(queries_.vector_of(tile.flat_rows[r])) * size,
                   static_cast<std::size_t>(size));
    }
  }

  const Kernels& kernels_;
  const AttentionCall& call_;
  const QueryRows& queries_;
  const PageCursor& cursor_;
  const WindowRows& window_;
  const WindowTile exact_;
  const PlainRows key_, value_;
  const bool is_integer_;
};

template <class AnyTile>
bool run_tiles(const AttentionCall& call, const AttentionRows& worker, const Parallel& parallel,
               const AnyTile& any) {
  constexpr int kRows = AnyTile::kRows;
  const int64_t heads = call.batch * call.heads;
  const int64_t tiles = (worker.queries().count() + kRows - 1) / kRows;
  std::atomic<bool> complete{true};
  auto task = [&](std::size_t index) {
    FloatBuffer buffer(any.work_size());
    if (buffer.get() == nullptr) {
      complete = false;
      return;
    }
    // Tiles of a KV head read the same rows and vectors: they go one after the other, the last one,
    // which sees most in a causal prefill, first, so that threads end together.
    const int64_t first = (tiles - 1 - static_cast<int64_t>(index) % tiles) * kRows;
    const int64_t head = static_cast<int64_t>(index) / tiles;
    int64_t flat_rows[kRows];
    float max[kRows], weight[kRows];
    const Tile tile{head / call.heads,
                    head % call.heads,
                    first,
                    static_cast<int>(std::min<int64_t>(kRows, worker.queries().count() - first)),
                    flat_rows,
                    max,
                    weight};
    for (int r = 0; r < tile.count; ++r)
      flat_rows[r] = worker.queries().flat(tile.b, tile.n, first + r);
    any.run(tile, buffer.get());
  };
  parallel(static_cast<std::size_t>(heads * tiles), task);
  return complete;
}

}  // namespace

bool is_prefill(const AttentionRows& worker) { return worker.queries().count() > kDecodeRows; }

bool run_prefill(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
                 const Parallel& parallel) {
  if (PlainTile::covers(kernels, call)) {
    return run_tiles(call, worker, parallel, PlainTile(kernels, call, worker));
  }
  return run_tiles(call, worker, parallel, GeneralTile(kernels, worker));
}

}  // namespace tq
