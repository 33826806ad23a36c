// Encode in two parallel regions: what is not new is copied (or stays, in place), then new rows are
// written; what a row holds is in row_encoder.h. Vectors for raw rows of their own type are copied.
#include "core/encode.h"

#include <algorithm>
#include <cstring>

#include "core/row_encoder.h"

namespace tq {
namespace {

constexpr int kMostFields = 4;  // bytes of them in a row that may lie apart from its codes
constexpr int64_t kFewRows = 8;  // per task, where there are not many tasks
constexpr int64_t kFewRowsFed = 4;  // likewise, where errors are fed back
constexpr int64_t kManyTasks = 16;
constexpr int64_t kCopyBytesPerTask = 256 * 1024;

int64_t length_of(const EncodeCall& call, int64_t lane) {  // lane = b * N + n
  return call.past_length[call.length_per_batch ? lane / call.heads : 0];
}

// Where row `row` of the vectors goes, from byte `to` of present on; with planes its codes, and its
// fields to `fields`.
struct Place {
  Place(const EncodeCall& call, int64_t row)
      : lane(row / call.tokens), slot(0), to(0), fields(0) {
    const int64_t token = row % call.tokens;
    if (call.places != nullptr) {
      slot = call.places->slots[token];
      to = call.places->rows[token] + lane * call.places->page_bytes;
    } else {
      slot = length_of(call, lane) + token;
      if (call.window.has_planes) {
        const Planes planes = call.planes(call.present_slots);
        to = planes.codes(lane / call.heads, lane % call.heads, slot);
        fields = planes.fields(lane / call.heads, lane % call.heads, slot);
        return;
      }
      to = (lane * call.present_slots + call.window.overlay_rows + slot) * call.width;
    }
  }

  uint8_t* in(const EncodeCall& call) const { return call.present + to; }

  int64_t lane, slot, to, fields;
};

// By the shapes, not by the threads.
int64_t rows_per_task(const EncodeCall& call, int64_t rows) {
  const int64_t most = RowEncoder::rows_at_once(call.head_size);
  const int64_t few = call.feedback == nullptr ? kFewRows : kFewRowsFed;
  return rows >= kManyTasks * most ? most : std::min(most, few);
}

// Vector `index` as an entry without padding.
void write_entry(const Kernels& kernels, const EncodeCall& call, int64_t index, int64_t token,
                 uint8_t* out) {
  alignas(64) uint16_t halves[spec::kMaxHeadSize];
  round_vector(kernels, call.element, call.vectors, index, call.head_size, halves);
  std::memcpy(out, halves, static_cast<std::size_t>(call.head_size) * sizeof *halves);
  set_entry_tag(out, call.head_size, static_cast<uint32_t>(token + 1));
}

// Those of the new tokens of one request and head, page by page: what no page has a place for, or what
// a later token of the call takes the place of, is left out.
void write_entries_of_pages(const Kernels& kernels, const EncodeCall& call, int64_t index) {
  const TokenPlaces& places = *call.places;
  const PageWindow& window = *places.window;
  const int64_t request = index / call.heads, head = index % call.heads;
  const int64_t begin = places.cumulative_lengths[request];
  const int64_t past = places.past_lengths[request];
  const int64_t end = past + places.cumulative_lengths[request + 1] - begin;
  for (int64_t token = past; token < end;) {
    const int64_t column = window.column(token), last = window.last_of(column, end);
    const int64_t number = places.block_table[request * places.columns + column];
    uint8_t* const page = call.present + (number * call.heads + head) * places.page_bytes;
    if (window.is_first(token)) {  // whatever the page held
      const int64_t used = (last - token + 1) * call.width;
      std::memset(page + used, 0, static_cast<std::size_t>(places.page_bytes - used));
    }
    const auto [cleared, kept] = window.remains(column, end);
    if (cleared < kept) std::memset(page + cleared, 0, static_cast<std::size_t>(kept - cleared));
    const int64_t recent = window.oldest(last);
    for (; token <= last; ++token) {
      const int64_t place = window.place(token, end);
      if (place < 0 || (token >= window.sinks() && token < recent)) continue;
      write_entry(kernels, call, head * call.tokens + begin + token - past, token,
                  page + window.begin(place));
    }
  }
}

// The entries of new tokens of one lane: the last ones, and those that are sinks.
void write_entries(const Kernels& kernels, const EncodeCall& call, int64_t lane) {
  const EntryPlaces places(call.window, call.head_size, call.width, call.present_slots);
  const int64_t bytes = places.bytes;
  const int64_t past = length_of(call, lane), end = past + call.tokens;
  const int64_t first_place = places.first_place(end);
  uint8_t* const plane = call.present + call.lane_begin(lane, call.present_slots);
  if (call.window.takes_spare_rows()) {  // what tokens left of an entry, and what had other places
    const bool has_grown = call.present_slots != call.past_slots;
    const int64_t from = std::max(end, places.begin) * call.width;
    const int64_t to = has_grown ? call.present_slots * call.width : places.offset(first_place);
    std::memset(plane + from, 0, static_cast<std::size_t>(std::max<int64_t>(0, to - from)));
  }
  for (int64_t place = first_place; past == 0 && place < call.window.entries(); ++place) {
    set_entry_tag(plane + places.offset(place), call.head_size, 0);
  }
  const auto write = [&](int64_t token) {
    const int64_t place = call.window.place(call.window.entry(token));
    if (place < first_place) return;
    uint8_t* const out = plane + places.offset(place);
    const int64_t used = spec::kEntryElementBytes * call.head_size + spec::kEntryTagBytes;
    write_entry(kernels, call, lane * call.tokens + token - past, token, out);
    std::memset(out + used, 0, static_cast<std::size_t>(bytes - used));
  };
  const int64_t first_sinks = std::min(end, call.window.sinks);
  for (int64_t token = past; token < first_sinks; ++token) write(token);
  const int64_t recent = std::max(std::max(past, call.window.sinks), end - call.window.recent);
  for (int64_t token = recent; token < end; ++token) write(token);
}

struct Copy {
  const EncodeCall& call;
  int64_t rows, rows_per_task;

  void operator()(std::size_t task) const {
    const int64_t first = static_cast<int64_t>(task) * rows_per_task;
    const int64_t end = std::min(first + rows_per_task, rows);
    const std::size_t used = static_cast<std::size_t>(spec::row_bytes(call.codec, call.head_size));
    const uint8_t* const vectors = static_cast<const uint8_t*>(call.vectors);
    for (int64_t row = first; row < end; ++row) {
      uint8_t* const out = Place(call, row).in(call);
      std::memcpy(out, vectors + static_cast<std::size_t>(row) * used, used);
      std::memset(out + used, 0, static_cast<std::size_t>(call.width) - used);
    }
  }
};

// Subtracts means that turn. Neighbouring rows often have one slot: angles are those of the last one.
class TurnedMeans {
 public:
  explicit TurnedMeans(const EncodeCall& call) : call_(call) {}

  void subtract(const Place& place, float* x) {
    const int64_t padding = call_.padding(place.lane / call_.heads);
    const int64_t slot = std::max<int64_t>(0, place.slot - padding);
    if (slot != slot_) call_.rotary_offset->angles(slot, cosines_, sines_);
    slot_ = slot;
    call_.rotary_offset->subtract(place.lane % call_.heads, slot, cosines_, sines_, x);
  }

 private:
  const EncodeCall& call_;
  int64_t slot_ = -1;
  float cosines_[spec::kMaxHeadSize], sines_[spec::kMaxHeadSize];
};

struct Encode {
  const Kernels& kernels;
  const EncodeCall& call;
  const RowEncoder& encoder;
  int64_t rows, rows_per_task;

  void operator()(std::size_t task) const {
    const int64_t first = static_cast<int64_t>(task) * rows_per_task;
    const int count = static_cast<int>(std::min(rows_per_task, rows - first));
    const int size = call.head_size;
    alignas(64) float vectors[RowEncoder::kMaxFloats];
    uint8_t* out[RowEncoder::kMaxRows];
    int64_t heads[RowEncoder::kMaxRows];
    load_floats(kernels, call.element, call.vectors, static_cast<std::size_t>(first * size),
                vectors, static_cast<std::size_t>(count) * size);
    TurnedMeans means(call);
    alignas(64) uint8_t rows_apart[RowEncoder::kMaxFloats + kMostFields * RowEncoder::kMaxRows];
    for (int r = 0; r < count; ++r) {
      const Place place(call, first + r);
      out[r] = call.window.has_planes ? rows_apart + r * call.width : place.in(call);
      heads[r] = place.lane % call.heads;
      if (call.rotary_offset != nullptr) means.subtract(place, vectors + r * size);
      if (call.offset == nullptr) continue;
      const int64_t at = std::min(place.slot, call.offsets - 1) * call.heads + heads[r];
      const float* const offset = call.offset + at * size;
      for (int j = 0; j < size; ++j) vectors[r * size + j] -= offset[j];
    }
    encoder.encode(vectors, count, heads, out);
    for (int r = 0; call.window.has_planes && r < count; ++r) {
      const Place place(call, first + r);
      const std::size_t codes =
          static_cast<std::size_t>(spec::code_bytes(call.codec, call.head_size));
      std::memcpy(place.in(call), out[r], codes);
      std::memcpy(call.present + place.fields, out[r] + codes,
                  static_cast<std::size_t>(call.width) - codes);
    }
  }
};

// Everything but the new rows: slots of the past, and zeros beyond them.
struct Keeper {
  const EncodeCall& call;
  int64_t slots_per_task, tasks_per_lane;

  void operator()(std::size_t task) const {
    const int64_t lane = static_cast<int64_t>(task) / tasks_per_lane;
    const int64_t from = static_cast<int64_t>(task) % tasks_per_lane * slots_per_task;
    const int64_t to = std::min(from + slots_per_task, call.present_slots);
    const int64_t begin = call.window.overlay_rows + length_of(call, lane);
    const int64_t end = begin + call.tokens;
    fill(lane, from, std::min(to, begin));
    fill(lane, std::max(from, end), to);
  }

  void fill(int64_t lane, int64_t from, int64_t to) const {
    const int64_t out = call.lane_begin(lane, call.present_slots);
    const int64_t in = call.lane_begin(lane, call.past_slots);
    if (!call.window.has_planes) return fill(out, in, call.width, from, to, call.past_slots);
    const Planes present = call.planes(call.present_slots), past = call.planes(call.past_slots);
    const int64_t overlay = present.overlay_rows;
    const int64_t b = lane / call.heads, n = lane % call.heads;
    fill(out, in, call.width, from, std::min(to, overlay), past.overlay_rows);
    from = std::max<int64_t>(0, from - overlay);
    to -= overlay;
    fill(present.codes(b, n, 0), past.codes(b, n, 0), present.code_bytes, from, to, past.slots);
    fill(present.fields(b, n, 0), past.fields(b, n, 0), present.field_bytes, from, to, past.slots);
  }

  // Cells from .. to of `width` bytes, of which the past has so many.
  void fill(int64_t out, int64_t in, int64_t width, int64_t from, int64_t to,
            int64_t past_cells) const {
    const int64_t copied = std::min(to, past_cells);
    if (from < copied) {
      std::memcpy(call.present + out + from * width, call.past + in + from * width,
                  static_cast<std::size_t>((copied - from) * width));
    }
    const int64_t zeroed = std::max(from, copied);
    if (zeroed < to) {
      std::memset(call.present + out + zeroed * width, 0,
                  static_cast<std::size_t>((to - zeroed) * width));
    }
  }
};

// Pages as they were.
struct PageKeeper {
  const EncodeCall& call;

  void operator()(std::size_t task) const {
    const int64_t from = static_cast<int64_t>(task) * kCopyBytesPerTask;
    const int64_t some = std::min(kCopyBytesPerTask, call.places->bytes - from);
    std::memcpy(call.present + from, call.past + from, static_cast<std::size_t>(some));
  }
};

// Runs the tasks that write rows, and one for the entries of each lane.
template <class Task>
void run_with_entries(const Kernels& kernels, const EncodeCall& call, const Parallel& parallel,
                      std::size_t tasks, const Task& task) {
  const bool is_paged = call.places != nullptr;
  const bool is_on = is_paged ? call.places->window != nullptr : call.window.is_on();
  const int64_t sequences = is_paged ? call.places->requests : call.batch;
  const std::size_t lanes = is_on ? static_cast<std::size_t>(sequences * call.heads) : 0;
  auto either = [&](std::size_t index) {
    if (index < tasks) return task(index);
    const int64_t lane = static_cast<int64_t>(index - tasks);
    is_paged ? write_entries_of_pages(kernels, call, lane) : write_entries(kernels, call, lane);
  };
  parallel(tasks + lanes, either);
}

}  // namespace

void encode(const Kernels& kernels, const EncodeCall& call, const Parallel& parallel) {
  if (call.batch == 0 || call.heads == 0) return;
  const int64_t lanes = call.batch * call.heads;
  const bool in_place = call.present == call.past &&
                        (call.places != nullptr || call.present_slots == call.past_slots);
  if (!in_place && call.places != nullptr) {
    PageKeeper keeper{call};
    const int64_t bytes = call.places->bytes;
    parallel(static_cast<std::size_t>((bytes + kCopyBytesPerTask - 1) / kCopyBytesPerTask), keeper);
  } else if (!in_place) {
    const int64_t slots = std::max<int64_t>(1, kCopyBytesPerTask / call.width);
    Keeper keeper{call, slots, (call.present_slots + slots - 1) / slots};
    parallel(static_cast<std::size_t>(lanes * keeper.tasks_per_lane), keeper);
  }
  const int64_t rows = lanes * call.tokens;
  const int64_t share = rows_per_task(call, rows);
  const std::size_t tasks = static_cast<std::size_t>((rows + share - 1) / share);
  if (call.codec.kind == spec::Kind::kRaw && call.offset == nullptr &&
      call.rotary_offset == nullptr && raw_element(call.element, call.codec.bits) == call.element) {
    return run_with_entries(kernels, call, parallel, tasks, Copy{call, rows, share});
  }
  const RowEncoder encoder(kernels, call);
  run_with_entries(kernels, call, parallel, tasks, Encode{kernels, call, encoder, rows, share});
}

}  // namespace tq
