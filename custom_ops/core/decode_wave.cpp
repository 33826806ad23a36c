// Waves of KV heads; the contract is in decode_wave.h.
#include "core/decode_wave.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "core/buffer.h"

namespace tq {
namespace {

constexpr int64_t kChunk = 512;  // keys per task
constexpr int64_t kMaxChunks = 64;
constexpr int64_t kFlatRows = 8;  // query rows rotated or un-rotated together

// Query rows, and rows of partial results, that are kept at a time.
constexpr int64_t kWaveRows = 256;
constexpr int64_t kPartialRows = 512;

// Keys of every sequence.
Range range_of(const AttentionCall& call, const QueryRows& queries) {
  Range all = queries.visible(0, 0, queries.count() - 1);
  for (int64_t b = 1; b < call.batch; ++b) {
    const Range range = queries.visible(b, 0, queries.count() - 1);
    all = {std::min(all.low, range.low), std::max(all.high, range.high)};
  }
  return all;
}

// How the work of some KV heads is cut: each head has chunks of keys, which lie at multiples of a
// length, and its query rows have a partial result of each.
struct Schedule {
  int64_t first_head, heads;  // b * N + n
  int rows;                   // query rows of a head
  int64_t together;           // heads of a task; divides `heads`
  int64_t end;                // of the keys of all sequences
  int64_t chunk, first_chunk, chunks;

  Schedule(const AttentionRows& worker, Range all, int64_t first, int64_t count)
      : first_head(first),
        heads(count),
        rows(static_cast<int>(worker.queries().count())),
        together(worker.cursor().heads_together()),
        end(all.high) {
    const int64_t most = std::clamp<int64_t>(kPartialRows / (heads * rows), 1, kMaxChunks);
    const int64_t factor = (all.high - all.low) / (kChunk * most) + 1;
    chunk = kChunk * factor;
    first_chunk = all.low / chunk;
    chunks = std::max<int64_t>(1, (all.high + chunk - 1) / chunk - first_chunk);
  }

  std::size_t query_rows() const { return static_cast<std::size_t>(heads * rows); }
  std::size_t partials() const { return query_rows() * static_cast<std::size_t>(chunks); }
  // The first row of partial results of a chunk of a head; those of its rows lie together.
  std::size_t partial(int64_t head, int64_t c) const {
    return static_cast<std::size_t>((head * chunks + c) * rows);
  }
  int64_t flat_tasks() const {
    return (static_cast<int64_t>(query_rows()) + kFlatRows - 1) / kFlatRows;
  }
};

// Heads are counted from the first one of the wave.
class DecodeWave {
 public:
  DecodeWave(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
             const Schedule& schedule)
      : kernels_(kernels),
        call_(call),
        worker_(worker),
        window_(worker.window()),
        schedule_(schedule),
        query_(schedule.query_rows() * worker.query_width()),
        shifts_(schedule.query_rows() * worker.shift_width()),
        sums_(schedule.partials() * worker.sums_width()),
        extremes_((2 + worker.bucket_width()) * schedule.partials()),
        exact_(2 * exact_rows() * (window_.width() + 1)),
        resident_(new (std::nothrow) ResidentTokens[window_.is_on() ? schedule.heads : 0]) {}

  // False when there was no memory.
  bool run(const Parallel& parallel) {
    for (const FloatBuffer* buffer : {&query_, &shifts_, &sums_, &extremes_, &exact_}) {
      if (buffer->get() == nullptr) return false;
    }
    return resident_ != nullptr && prepare(parallel) && attend(parallel) && merge(parallel);
  }

 private:
  // Floats of each query row, or of each row of partial results.
  std::size_t exact_rows() const { return window_.is_on() ? schedule_.query_rows() : 0; }
  float* query(std::size_t row) const { return query_.get() + row * worker_.query_width(); }
  float* shifts(std::size_t row) const { return shifts_.get() + row * worker_.shift_width(); }
  float* sums(std::size_t partial) const { return sums_.get() + partial * worker_.sums_width(); }
  float* max() const { return extremes_.get(); }
  float* weight() const { return max() + schedule_.partials(); }
  float* buckets(std::size_t partial) const {
    return weight() + schedule_.partials() + partial * worker_.bucket_width();
  }
  float* exact_query(std::size_t row) const { return exact_.get() + row * window_.width(); }
  float* exact_sums(std::size_t row) const {
    return exact_query(exact_rows()) + row * window_.width();
  }
  float* exact_max() const { return exact_sums(exact_rows()); }
  float* exact_weight() const { return exact_max() + exact_rows(); }

  int64_t sequence(int64_t head) const { return (schedule_.first_head + head) / call_.heads; }
  int64_t kv_head(int64_t head) const { return (schedule_.first_head + head) % call_.heads; }
  ResidentTokens resident(int64_t head) const {
    return window_.is_on() ? resident_[static_cast<std::size_t>(head)] : kNoResidentTokens;
  }

  // Flat query row -> head * rows + row.
  std::size_t row_of(int64_t flat_row) const {
    const QueryRows& queries = worker_.queries();
    const int64_t t = flat_row % call_.tokens;
    const int64_t query_head = flat_row / call_.tokens;  // b * H + h; H = N * group
    const int64_t head = query_head / queries.group() - schedule_.first_head;
    return static_cast<std::size_t>(head * schedule_.rows + t * queries.group() +
                                    query_head % queries.group());
  }

  // Runs body(index, work) with so many floats of work; false when there was no memory.
  template <class Body>
  static bool for_each(int64_t count, std::size_t work_size, const Parallel& parallel,
                       const Body& body) {
    std::atomic<bool> complete{true};
    auto task = [&](std::size_t index) {
      FloatBuffer work(work_size);
      if (work.get() == nullptr) {
        complete = false;
      } else {
        body(static_cast<int64_t>(index), work.get());
      }
    };
    parallel(static_cast<std::size_t>(count), task);
    return complete;
  }

  // Fills flat_rows with the rows of a task of `prepare` or `merge`; returns how many.
  int flat_rows_of(int64_t index, int64_t* flat_rows) const {
    const int64_t first = index * kFlatRows;
    const int64_t count = static_cast<int64_t>(schedule_.query_rows());
    const int some = static_cast<int>(std::min(kFlatRows, count - first));
    for (int r = 0; r < some; ++r) {
      flat_rows[r] = schedule_.first_head * schedule_.rows + first + r;
    }
    return some;
  }

  bool prepare(const Parallel& parallel) {
    const int64_t tasks = schedule_.flat_tasks();
    const std::size_t scratch = kFlatRows * worker_.scratch_width();
    return for_each(tasks, scratch, parallel, [&](int64_t index, float* work) {
      for (int64_t head = index; window_.is_on() && head < schedule_.heads; head += tasks) {
        resident_[static_cast<std::size_t>(head)] =
            window_.resident_tokens(sequence(head), kv_head(head));
      }
      int64_t flat_rows[kFlatRows];
      float *queries[kFlatRows], *all_shifts[kFlatRows], *exact[kFlatRows];
      const int some = flat_rows_of(index, flat_rows);
      for (int r = 0; r < some; ++r) {
        const std::size_t row = row_of(flat_rows[r]);
        queries[r] = query(row);
        all_shifts[r] = shifts(row);
        exact[r] = exact_query(row);
      }
      worker_.prepare(flat_rows, some, work, queries, all_shifts, exact);
    });
  }

  // A head's first task is what its queries take exactly: the entries lie in front of the rows,
  // which the last rows of the head before have already prefetched. Where values are skipped, their
  // maxima have to be there before.
  bool attend(const Parallel& parallel) const {
    const bool is_exact_first = window_.is_on() && worker_.skips(schedule_.end);
    if (is_exact_first &&
        !for_each(schedule_.heads, window_.work_size(schedule_.rows), parallel,
                  [&](int64_t head, float* work) { attend_exactly(head, work); })) {
      return false;
    }
    const int64_t exact_tasks = window_.is_on() && !is_exact_first ? 1 : 0;
    const int64_t tasks = schedule_.chunks + exact_tasks;  // of `together` heads
    const std::size_t work_size =
        std::max(worker_.work_size(schedule_.rows), window_.work_size(schedule_.rows));
    return for_each(schedule_.heads / schedule_.together * tasks, work_size, parallel,
                    [&](int64_t index, float* work) {
                      const int64_t head = index / tasks * schedule_.together;
                      const int64_t c = index % tasks - exact_tasks;
                      if (c >= 0) return attend_chunk(head, c, work);
                      for (int64_t h = 0; h < schedule_.together; ++h)
                        attend_exactly(head + h, work);
                    });
  }

  void attend_exactly(int64_t head, float* work) const {
    const std::size_t row = static_cast<std::size_t>(head * schedule_.rows);
    window_.attend({sequence(head), kv_head(head), 0, schedule_.rows, resident(head),
                    exact_query(row), exact_sums(row), exact_max() + row, exact_weight() + row},
                   work);
  }

  void attend_chunk(int64_t head, int64_t c, float* work) const {
    HeadTask heads[PageCursor::kHeadsTogether];
    const int together = static_cast<int>(schedule_.together);
    for (int h = 0; h < together; ++h) heads[h] = task_of(head + h, c);
    const int64_t b = heads->b, at = (schedule_.first_chunk + c) * schedule_.chunk;
    const Range range = worker_.queries().coded_of_all(b, heads->resident);
    const Range keys{std::max(range.low, at), std::min(range.high, at + schedule_.chunk)};
    if (c == 0) worker_.prefetch(b, heads->n, together, keys);
    if (!worker_.skips(call_.past(b) + call_.tokens)) {
      return worker_.attend(heads, together, keys, c == 0, work);
    }
    const float* const exact =
        window_.is_on() ? exact_max() + static_cast<std::size_t>(head * schedule_.rows) : nullptr;
    worker_.attend_skipping(heads, together, keys, c == 0, exact, work);
  }

  HeadTask task_of(int64_t head, int64_t c) const {
    const std::size_t row = static_cast<std::size_t>(head * schedule_.rows);
    const std::size_t partial = schedule_.partial(head, c);
    RowRun next{0, 0, 0, 0};
    const int64_t after = head + schedule_.together;
    if (after < schedule_.heads) {
      next = worker_.run_of(sequence(after), kv_head(after), resident(after));
    }
    const int64_t b = sequence(head);
    return {b,
            kv_head(head),
            0,
            schedule_.rows,
            resident(head),
            query(row),
            shifts(row),
            sums(partial),
            buckets(partial),
            max() + partial,
            weight() + partial,
            worker_.queries().coded_of_all(b, resident(head)).high,
            next};
  }

  bool merge(const Parallel& parallel) const {
    const std::size_t scratch = kFlatRows * worker_.scratch_width();
    return for_each(schedule_.flat_tasks(), scratch, parallel, [&](int64_t index, float* work) {
      int64_t flat_rows[kFlatRows];
      float *all_sums[kFlatRows], *all_buckets[kFlatRows], *exact[kFlatRows];
      float total[kFlatRows];
      const int some = flat_rows_of(index, flat_rows);
      for (int r = 0; r < some; ++r) {
        const std::size_t row = row_of(flat_rows[r]);
        const std::size_t first = schedule_.partial(static_cast<int64_t>(row) / schedule_.rows, 0) +
                                  row % static_cast<std::size_t>(schedule_.rows);
        total[r] = merge_row(row, first);
        all_sums[r] = sums(first);
        all_buckets[r] = buckets(first);
        exact[r] = exact_sums(row);
      }
      worker_.finish(flat_rows, some, all_sums, all_buckets, exact, total, work);
    });
  }

  // In place: what the first chunk has, at `first`, becomes what the row has. Returns its weight.
  float merge_row(std::size_t row, std::size_t first) const {
    const std::size_t rows = static_cast<std::size_t>(schedule_.rows);
    const std::size_t chunks = static_cast<std::size_t>(schedule_.chunks);
    float factors[kMaxChunks + 2] = {};
    float top = kNoMaximum, total = 0.0f;
    for (std::size_t c = 0; c < chunks; ++c) top = std::max(top, max()[first + c * rows]);
    if (window_.is_on()) top = std::max(top, exact_max()[row]);
    if (top == kNoMaximum) top = 0.0f;
    for (std::size_t c = 0; c < chunks; ++c) {
      factors[c] = std::exp(max()[first + c * rows] - top);
      total += factors[c] * weight()[first + c * rows];
    }
    if (window_.is_on()) {
      const float share = std::exp(exact_max()[row] - top);
      total += share * exact_weight()[row];
      kernels_.scale(exact_sums(row), share, static_cast<int>(window_.width()));
    }
    const int width = static_cast<int>(worker_.sums_width());
    kernels_.scale(sums(first), factors[0], width);
    if (chunks > 1) {
      kernels_.multiply(factors + 1, 0, sums(first + rows), static_cast<int>(rows) * width,
                        sums(first), 0, 1, width, static_cast<int>(chunks - 1), true);
    }
    for (std::size_t p = 0; p < worker_.bucket_width(); ++p) {
      float sum = 0.0f;
      for (std::size_t c = 0; c < chunks; ++c) sum += factors[c] * buckets(first + c * rows)[p];
      buckets(first)[p] = sum;
    }
    return total;
  }

  const Kernels& kernels_;
  const AttentionCall& call_;
  const AttentionRows& worker_;
  const WindowRows& window_;
  const Schedule schedule_;
  FloatBuffer query_, shifts_;         // of each query row
  FloatBuffer sums_, extremes_;        // of each row of partial results
  FloatBuffer exact_;  // queries, sums, maxima and weights of what is taken exactly
  std::unique_ptr<ResidentTokens[]> resident_;  // of each head
};

}  // namespace

bool run_decode(const Kernels& kernels, const AttentionCall& call, const AttentionRows& worker,
                const Parallel& parallel) {
  const Range all = range_of(call, worker.queries());
  const int64_t heads = call.batch * call.heads;
  const int64_t together = worker.cursor().heads_together();
  const int64_t wave =
      std::max<int64_t>(1, kWaveRows / worker.queries().count() / together) * together;
  for (int64_t first = 0; first < heads; first += wave) {
    const Schedule schedule(worker, all, first, std::min(wave, heads - first));
    if (!DecodeWave(kernels, call, worker, schedule).run(parallel)) return false;
  }
  return true;
}

}  // namespace tq
