// Attention to resident tokens; the contract is in window_rows.h.
#include "core/window_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/window.h"

namespace tq {
namespace {

constexpr spec::Codec kHalves{spec::Kind::kRaw, 8 * spec::kEntryElementBytes};
constexpr int kBlockArrays = 2;  // ones and the bias of a row

std::unique_ptr<const RowReader> half_reader(const Kernels& kernels, const AttentionCall& call,
                                             int64_t stride) {
  if (!call.window.is_on()) return nullptr;
  const CacheView view{nullptr, kHalves, static_cast<int>(stride), nullptr};
  return make_row_reader(kernels, view, Element::kHalf, call.head_size);
}

}  // namespace

WindowRows::WindowRows(const Kernels& kernels, const AttentionCall& call)
    : kernels_(kernels),
      call_(call),
      group_(call.group()),
      pages_(call.paging == nullptr ? nullptr : call.paging->window),
      key_places_(call.window, call.head_size, call.key.stride, call.slots),
      value_places_(call.window, call.head_size, call.value.stride, call.slots),
      entries_{half_reader(kernels, call, pages_ ? pages_->bytes() : key_places_.bytes),
               half_reader(kernels, call, pages_ ? pages_->bytes() : value_places_.bytes)},
      new_{half_reader(kernels, call, spec::kEntryElementBytes * call.head_size),
           half_reader(kernels, call, spec::kEntryElementBytes * call.head_size)} {}

const uint8_t* WindowRows::key_entries(int64_t b, int64_t n, int64_t place) const {
  return lane_of(call_, call_.key, b, n) + key_places_.offset(place);
}

const uint8_t* WindowRows::value_entries(int64_t b, int64_t n, int64_t place) const {
  return lane_of(call_, call_.value, b, n) + value_places_.offset(place);
}

const uint8_t* WindowRows::entry_of(bool is_key, int64_t b, int64_t n, int64_t token) const {
  if (pages_ == nullptr) {
    const int64_t place = call_.window.place(call_.window.entry(token));
    return is_key ? key_entries(b, n, place) : value_entries(b, n, place);
  }
  return page_of(call_, is_key ? call_.key : call_.value, b, n, token) +
         pages_->begin(pages_->place(token, call_.past(b) + call_.tokens));
}

// Tokens are fewer than tags: the caller has seen to it.
bool WindowRows::has_entry(int64_t b, int64_t n, int64_t token) const {
  if (pages_ != nullptr) {
    const uint32_t tag = static_cast<uint32_t>(token + 1);
    return pages_->place(token, call_.past(b) + call_.tokens) >= 0 &&
           entry_tag(entry_of(true, b, n, token), call_.head_size) == tag &&
           entry_tag(entry_of(false, b, n, token), call_.head_size) == tag;
  }
  const int64_t entry = call_.window.entry(token);
  return entry >= 0 && is_entry_of(b, n, entry, token);
}

bool WindowRows::is_entry_of(int64_t b, int64_t n, int64_t entry, int64_t token) const {
  const uint32_t tag = static_cast<uint32_t>(token + 1);
  const int64_t place = call_.window.place(entry);
  return place >= first_place(b) && entry_tag(key_entries(b, n, place), call_.head_size) == tag &&
         entry_tag(value_entries(b, n, place), call_.head_size) == tag;
}

// The first query of the call sees the oldest tokens of all.
ResidentTokens WindowRows::resident_in_pages(int64_t b, int64_t n) const {
  const int64_t first = call_.past(b), end = first + call_.tokens;
  ResidentTokens resident{0, first};
  const int64_t most = std::min(call_.window.sinks, end);
  while (resident.sinks < most && (resident.sinks >= first || has_entry(b, n, resident.sinks)))
    ++resident.sinks;
  const int64_t oldest = std::max<int64_t>(0, pages_->oldest(first));
  while (resident.recent > oldest && has_entry(b, n, resident.recent - 1)) --resident.recent;
  return resident;
}

ResidentTokens WindowRows::resident_tokens(int64_t b, int64_t n) const {
  if (!is_on()) return kNoResidentTokens;
  if (pages_ != nullptr) return resident_in_pages(b, n);
  const Window& window = call_.window;
  const int64_t first = call_.past(b), end = first + call_.tokens;
  ResidentTokens resident{0, end};
  const int64_t most = std::min(window.sinks, end);
  while (resident.sinks < most && (resident.sinks >= first || has_entry(b, n, resident.sinks)))
    ++resident.sinks;
  if (window.recent == 0) return resident;
  resident.recent = first;
  const int64_t oldest = std::max<int64_t>(0, first - window.recent + 1);
  // Entries go round: without a division for each token.
  int64_t entry = window.entry(std::max<int64_t>(0, first - 1));
  while (resident.recent > oldest && is_entry_of(b, n, entry, resident.recent - 1)) {
    --resident.recent;
    const bool is_ring = resident.recent > window.sinks;
    entry = !is_ring               ? resident.recent - 1
            : entry > window.sinks ? entry - 1
                                   : window.entries() - 1;
  }
  return resident;
}

Range WindowRows::visible(const Rows& rows, int r) const {
  return visible_range(call_, rows.b, (rows.first + r) / group_);
}

void WindowRows::load(const Rows& rows, int64_t token, bool is_key, float* x) const {
  const std::size_t size = static_cast<std::size_t>(call_.head_size);
  const int64_t first = call_.past(rows.b);
  alignas(64) uint16_t halves[spec::kMaxHeadSize];
  if (token < first) {
    std::memcpy(halves, entry_of(is_key, rows.b, rows.n, token), size * sizeof *halves);
  } else {
    const int64_t index = new_vector(rows.b, rows.n, token);
    const void* const vectors = is_key ? call_.new_keys : call_.new_values;
    if (call_.element == Element::kFloat &&
        kernels_.round_to_half(static_cast<const float*>(vectors) + index * call_.head_size, x,
                               size)) {
      return;
    }
    round_vector(kernels_, call_.element, vectors, index, call_.head_size, halves);
  }
  kernels_.half_to_float(halves, x, size);
}

std::size_t WindowRows::work_size(int rows) const {
  if (!is_on()) return 0;
  return static_cast<std::size_t>(rows + kBlockArrays) * kBlock + new_size() +
         std::max(entries_.key->work_size(rows), entries_.value->work_size(rows));
}

void WindowRows::attend(const Rows& rows, float* work) const {
  const std::size_t count = static_cast<std::size_t>(rows.count);
  std::fill_n(rows.sums, count * width(), 0.0f);
  std::fill_n(rows.max, count, kNoMaximum);
  std::fill_n(rows.weight, count, 0.0f);
  std::fill_n(work, kBlock, 1.0f);
  if (pages_ != nullptr) {
    attend_entries_of_pages(rows, work);
  } else {
    attend_entries(rows, work);
  }
  // Tokens of the call without an entry: a prompt has more of them than entries.
  const int64_t first = call_.past(rows.b);
  const int64_t high = visible(rows, rows.count - 1).high;
  const int64_t recent =
      std::max(first_recent(position(rows, 0), rows.resident), rows.resident.sinks);
  attend_new(rows, {first, std::min(rows.resident.sinks, high)}, work);
  attend_new(rows, {std::max(first, recent), high}, work);
}

void WindowRows::attend_entries(const Rows& rows, float* work) const {
  const Window& window = call_.window;
  const int64_t end = call_.past(rows.b) + call_.tokens;
  // What entries hold, as a rule: that of the newest token is `turn`.
  const int64_t turn = end > window.sinks ? window.entry(end - 1) : -1;
  for (int64_t at = first_place(rows.b); at < window.entries(); at += kBlock) {
    const uint8_t* const keys = key_entries(rows.b, rows.n, at);
    const uint8_t* const values = value_entries(rows.b, rows.n, at);
    int64_t tokens[kBlock];
    int count = static_cast<int>(std::min<int64_t>(kBlock, window.entries() - at));
    for (int t = 0; t < count; ++t) {
      const int64_t entry = window.entry_at(at + t);
      const uint32_t tag = entry_tag(keys + t * key_places_.bytes, call_.head_size);
      const int64_t token = static_cast<int64_t>(tag) - 1;
      const int64_t newest = end - 1 - turn + entry - (entry > turn ? window.recent : 0);
      const bool is_its = entry >= window.sinks && token == newest ? token >= window.sinks
                                                                   : window.entry(token) == entry;
      const bool is_there = tag != 0 && token < end && is_its &&
                            entry_tag(values + t * value_places_.bytes, call_.head_size) == tag;
      tokens[t] = is_there ? token : -1;
    }
    // What no query of the call part sees yet is left out: in a prompt, nearly all of the ring.
    const int64_t high = visible(rows, rows.count - 1).high;
    while (count > 0 && (tokens[count - 1] < 0 || tokens[count - 1] >= high)) --count;
    if (count == 0) continue;
    attend_block(rows, {entries_, keys, values, count, tokens, false}, work);
  }
}

// Of tokens before the call: those of the call are at hand. The places of a page are read from the last
// one on, which lies in front.
void WindowRows::attend_entries_of_pages(const Rows& rows, float* work) const {
  const int64_t first = call_.past(rows.b), end = first + call_.tokens;
  if (first == 0) return;
  const int64_t oldest = std::clamp<int64_t>(rows.resident.recent, 0, first);
  const int64_t begin = oldest < first ? pages_->column(oldest) : pages_->column(first - 1) + 1;
  const bool has_sinks = rows.resident.sinks > 0 && begin > 0;
  for (int64_t column = has_sinks ? 0 : begin; column <= pages_->column(first - 1);
       column = column < begin ? begin : column + 1) {
    const int64_t at = pages_->last_of(column, first);
    const uint8_t* const key_page = page_of(call_, call_.key, rows.b, rows.n, at);
    const uint8_t* const value_page = page_of(call_, call_.value, rows.b, rows.n, at);
    for (int64_t left = pages_->places(column, end); left > 0; left -= kBlock) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, left));
      const uint8_t* const keys = key_page + pages_->begin(left - 1);
      const uint8_t* const values = value_page + pages_->begin(left - 1);
      int64_t tokens[kBlock];
      for (int t = 0; t < count; ++t) {
        const uint32_t tag = entry_tag(keys + t * pages_->bytes(), call_.head_size);
        const int64_t token = static_cast<int64_t>(tag) - 1;
        const bool is_there = tag != 0 && token < first && pages_->column(token) == column &&
                              pages_->place(token, end) == left - 1 - t &&
                              entry_tag(values + t * pages_->bytes(), call_.head_size) == tag;
        tokens[t] = is_there ? token : -1;
      }
      if (std::all_of(tokens, tokens + count, [](int64_t token) { return token < 0; })) continue;
      attend_block(rows, {entries_, keys, values, count, tokens, false}, work);
    }
  }
}

void WindowRows::attend_new(const Rows& rows, Range range, float* work) const {
  const int64_t size = spec::kEntryElementBytes * call_.head_size;
  uint8_t* const keys = reinterpret_cast<uint8_t*>(work + kBlockArrays * kBlock);
  const int most = new_at_once();
  uint8_t* const values = keys + most * size;
  int64_t tokens[kBlock];
  int count = 0;
  for (int64_t token = range.low; token < range.high; ++token) {
    if (pages_ != nullptr || !has_entry(rows.b, rows.n, token)) {
      alignas(64) uint16_t halves[spec::kMaxHeadSize];
      const auto round = [&](const void* vectors, uint8_t* out) {
        round_vector(kernels_, call_.element, vectors, new_vector(rows.b, rows.n, token),
                     call_.head_size, halves);
        std::memcpy(out, halves, static_cast<std::size_t>(size));
      };
      round(call_.new_keys, keys + count * size);
      round(call_.new_values, values + count * size);
      tokens[count++] = token;
    }
    if (count == most || (count > 0 && token + 1 == range.high)) {
      const bool is_run = tokens[count - 1] - tokens[0] == count - 1;
      const bool is_windowed = is_run && tokens[0] >= rows.resident.sinks;
      attend_block(rows, {new_, keys, values, count, tokens, is_windowed}, work);
      count = 0;
    }
  }
}

// The bias of a row of a block, with what the row does not take hidden; false if it takes all and
// there is no bias.
bool WindowRows::hide(const Rows& rows, int r, const Block& block, float* bias) const {
  const Range range = visible(rows, r);
  const int64_t recent = first_recent(position(rows, r), rows.resident);
  const int64_t row = rows.first + r;
  const int64_t* const stride = call_.bias_stride;
  const int64_t base =
      rows.b * stride[0] + (rows.n * group_ + row % group_) * stride[1] + row / group_ * stride[2];
  bool hides = call_.bias != nullptr;
  for (int t = 0; t < block.count; ++t) {
    const int64_t token = block.tokens[t];
    const bool is_taken = token >= range.low && token < range.high &&
                          (token < rows.resident.sinks || token >= recent);
    bias[t] = is_taken ? 0.0f : kNoMaximum;
    hides |= !is_taken;
    if (is_taken && call_.bias != nullptr) {
      load_floats(kernels_, call_.element, call_.bias,
                  static_cast<std::size_t>(base + token * stride[3]), bias + t, 1);
    }
  }
  return hides;
}

// One step of the online softmax.
void WindowRows::attend_block(const Rows& rows, const Block& block, float* work) const {
  const float* const ones = work;
  float* const bias = work + kBlock;
  float* const scores = work + kBlockArrays * kBlock + new_size();
  float* const decoded = scores + static_cast<std::ptrdiff_t>(rows.count) * kBlock;
  const int width = static_cast<int>(this->width());
  std::fill_n(bias, kBlock, 0.0f);
  block.format.key->score(block.keys, block.count, rows.query, rows.count, decoded, scores, {});
  for (int r = 0; r < rows.count; ++r) {
    float* const row = scores + r * kBlock;
    int low = 0, high = block.count;
    bool hides = false;
    if (block.is_run && call_.bias == nullptr) {
      const Range range = visible(rows, r);
      const int64_t from = std::max(range.low, first_recent(position(rows, r), rows.resident));
      low = static_cast<int>(std::clamp<int64_t>(from - block.tokens[0], 0, block.count));
      high = static_cast<int>(std::clamp<int64_t>(range.high - block.tokens[0], low, block.count));
    } else {
      hides = hide(rows, r, block, bias);
    }
    const float max =
        kernels_.finish_scores(row, ones, nullptr, hides ? bias : nullptr,
                               hiding_bias(call_.element), call_.softcap, block.count, low, high);
    if (max > rows.max[r]) {
      const float factor = std::exp(rows.max[r] - max);
      rows.weight[r] *= factor;
      kernels_.scale(rows.sums + static_cast<std::ptrdiff_t>(r) * width, factor, width);
      rows.max[r] = max;
    }
    rows.weight[r] +=
        kernels_.weigh(row, ones, block.count, rows.max[r] == kNoMaximum ? 0.0f : rows.max[r]);
  }
  block.format.value->accumulate(block.values, block.count, scores, rows.count, decoded, rows.sums);
}

void WindowRows::add_share(const float* sums, float weight, float* x) const {
  alignas(64) float natural[spec::kMaxHeadSize];
  if (!takes_natural_queries()) {
    entries_.value->natural_sums(sums, natural);
    sums = natural;
  }
  const float share = 1.0f / weight;
  for (int j = 0; j < call_.head_size; ++j) x[j] += share * sums[j];
}

WindowRows::Factors WindowRows::merge(float coded_max, float exact_max, float exact_weight,
                                      float* weight) {
  float top = std::max(coded_max, exact_max);
  if (top == kNoMaximum) top = 0.0f;
  const Factors factors{std::exp(coded_max - top), std::exp(exact_max - top)};
  *weight = factors.coded * *weight + factors.exact * exact_weight;
  return factors;
}

}  // namespace tq
