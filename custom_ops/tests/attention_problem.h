// One call of attention with everything in it, solved by every level and in float64.
#pragma once

#include "core/attention.h"
#include "core/paged_attention.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Problem {
  Codec key = lloyd_max(4), value = lloyd_max(4);
  int head_size = 64;
  int64_t batch = 1, heads = 1, group = 1, tokens = 1, slots = 1;
  std::vector<int64_t> lengths{0};
  bool causal = true;
  int64_t window = 0;
  float softcap = 0.0f;
  std::vector<int64_t> bias_dims;  // empty: none
  bool garbage_in_hidden_rows = false;
  std::vector<float> sinks;  // taken in turn by the query heads; empty: none
  int64_t offsets = 0;  // of values, and of keys that do not turn
  float fastest = 0.0f;  // radians; keys have offsets that turn, by slots behind the left padding
  int64_t first_slots = 0;  // behind it, whose keys have more of an offset
  std::vector<int64_t> left_padding;  // of each sequence, or of all; empty: none
  int padding = 0;  // more bytes per row
  Window exact{};  // the overlay is made as large as it needs to be; raw caches have none
  bool with_threads = true;  // too, and the result is the same
  bool has_integers = false;  // centroids are multiples of 1/127 of the largest
  const char* products = nullptr;  // TQ_ONNX_PRODUCTS; null for the default and for float
  float peak = 1.0f;  // what queries are multiplied with
  int64_t needle = -1;  // queries ask for the key of this slot
  float zero = 0.0f;  // of uniform keys, all of them, instead of arbitrary ones
};

// Two sequences, one of which is short: three tokens with a softcap and a window, 50 with sinks.
inline Problem uneven_problem(Codec key, Codec value, int64_t longest, int64_t tokens) {
  Problem p;
  p.key = key;
  p.value = value;
  p.batch = 2;
  p.heads = 2;
  p.group = 2;
  p.tokens = tokens;
  p.lengths = {longest, 2};
  p.slots = longest + tokens + 7;
  p.garbage_in_hidden_rows = true;
  if (tokens == 3) {
    p.softcap = 2.5f;
    p.window = 30;
  }
  if (tokens == 50) p.sinks = {0.5f, 4.0f, -kInfinity};
  return p;
}

inline std::string describe(const Problem& p, const char* level) {
  return std::string(level) + ": " + name_of(p.key) + ", " + name_of(p.value) + " D" +
         std::to_string(p.head_size) + " B" + std::to_string(p.batch) + " N" +
         std::to_string(p.heads) + " G" + std::to_string(p.group) + " T" +
         std::to_string(p.tokens) + " S" + std::to_string(p.slots) + " P" +
         std::to_string(p.offsets) +
         (p.fastest > 0 ? " turning by " + std::to_string(p.fastest) : "") +
         (p.first_slots > 0 ? " but for " + std::to_string(p.first_slots) : "");
}

inline int64_t padding_of(const Problem& p, int64_t b) {
  return p.left_padding.empty()
             ? 0
             : p.left_padding[p.left_padding.size() > 1 ? static_cast<std::size_t>(b) : 0];
}

// Frequencies of pairs of coordinates, halves or neighbours; of some none, of some several the same.
inline void fill_frequencies(Guarded<float>& frequencies, float fastest, Random& random) {
  const std::size_t half = frequencies.size() / 2;
  const bool is_interleaved = random() % 2 == 0;
  const double base = std::pow(10.0, UniformReal<double>(1, 7)(random));
  for (std::size_t i = 0; i < half; ++i) {
    double own = fastest * std::pow(base, -static_cast<double>(i) / static_cast<double>(half));
    if (random() % 8 == 0) own = random() % 2 ? 0.0 : fastest;
    frequencies[is_interleaved ? 2 * i : i] = static_cast<float>(own);
    frequencies[is_interleaved ? 2 * i + 1 : half + i] = static_cast<float>(own);
  }
}

// What of the rows of an offset [rows, heads, D] is added to head n in a slot, by coordinate. Those of
// keys may turn, with rows for the first slots behind the two of cosines and sines; others have no
// frequencies.
inline double offset_at(const float* offset, int64_t rows, const float* frequencies, int64_t heads,
                        int size, int64_t n, int64_t slot, int j) {
  const auto at = [&](int64_t row) {
    return static_cast<double>(offset[(row * heads + n) * size + j]);
  };
  if (frequencies == nullptr) return at(std::min(slot, rows - 1));
  const double angle = static_cast<double>(frequencies[j]) * static_cast<double>(slot);
  const double own = slot + 2 < rows ? at(slot + 2) : 0.0;
  return at(0) * std::cos(angle) + at(1) * std::sin(angle) + own;
}

// Decoded rows [lanes * slots, head_size] in float64, with their offsets.
inline std::vector<double> decoded(const uint8_t* rows, const Problem& p, Codec codec, int width,
                                   const Tables& tables, const Guarded<float>& offset,
                                   const float* frequencies = nullptr) {
  const int size = p.head_size;
  const std::size_t count = static_cast<std::size_t>(p.batch * p.heads * p.slots);
  const std::size_t d = static_cast<std::size_t>(size);
  const int64_t offset_rows = static_cast<int64_t>(offset.size()) / (p.heads * size);
  std::vector<double> out(count * d);
  for (std::size_t t = 0; t < count; ++t, rows += width) {
    std::vector<double> x = coordinates_of(codec, size, rows, tables.centroids.data());
    const int64_t slot = static_cast<int64_t>(t) % p.slots;
    const int64_t head = static_cast<int64_t>(t) / p.slots % p.heads;
    for (std::size_t i = 0; i < d; ++i) {
      double sum = 0;
      if (spec::is_rotated(codec.kind)) {
        for (std::size_t j = 0; j < x.size(); ++j) {
          sum += x[j] * tables.rotation[i * x.size() + j];
        }
      } else {
        sum = x[i];
      }
      if (offset.size() > 0) {
        const int64_t b = static_cast<int64_t>(t) / (p.slots * p.heads);
        const int64_t from = frequencies == nullptr ? 0 : padding_of(p, b);
        sum += offset_at(offset.data(), offset_rows, frequencies, p.heads, size, head,
                         std::max<int64_t>(0, slot - from), static_cast<int>(i));
      }
      out[t * d + i] = sum;
    }
  }
  return out;
}

// The largest coordinate of a rotated query.
inline double largest_coordinate(const float* query, Codec codec, int size, const Tables& tables) {
  double largest = 0;
  for (int j = 0; j < tables.width; ++j) {
    double x = query[j % size];
    if (spec::is_rotated(codec.kind)) {
      x = 0;
      for (int i = 0; i < size; ++i) {
        x += static_cast<double>(query[i]) *
             tables.rotation[static_cast<std::size_t>(i * tables.width + j)];
      }
    }
    largest = std::max(largest, std::abs(x));
  }
  return largest;
}

// What is added to every coordinate of a row and multiplied with nothing as an integer: the middle of
// a uniform row.
inline double middle_of(const uint8_t* row, Codec codec, int size) {
  if (codec.kind != Kind::kUniform) return 0.0;
  const uint8_t* const fields = row + spec::code_bytes(codec, size);
  return half_at(fields + 2) + 0.5 * ((1 << codec.bits) - 1) * half_at(fields);
}

// The norm of what a row is multiplied with as integers.
inline double coded_norm(const uint8_t* row, Codec codec, int size, const Tables& tables) {
  const double zero = middle_of(row, codec, size);
  double energy = 0;
  for (const double x : coordinates_of(codec, size, row, tables.centroids.data())) {
    energy += (x - zero) * (x - zero);
  }
  return std::sqrt(energy);
}

// What one part of each row of values adds to a vector, over its scale: [lanes * slots, head_size].
inline std::vector<double> part_codes(const Problem& p, const Guarded<uint8_t>& values, int width,
                                      const Tables& tables, std::size_t part) {
  const std::size_t d = static_cast<std::size_t>(p.head_size);
  const std::size_t count = values.size() / static_cast<std::size_t>(width);
  std::vector<double> out(count * d);
  for (std::size_t t = 0; t < count; ++t) {
    const uint8_t* const row = values.data() + t * static_cast<std::size_t>(width);
    const ScaledPart own = scaled_parts(p.value, p.head_size, row)[part];
    if (!(std::abs(own.scale) > 0)) continue;
    const std::vector<double> x =
        coordinates_of(p.value, p.head_size, row, tables.centroids.data());
    const double middle = middle_of(row, p.value, p.head_size);
    for (std::size_t i = 0; i < d; ++i) {
      double code = x[i] - middle;
      if (spec::is_rotated(p.value.kind)) {
        code = 0;
        for (int j = own.begin; j < own.end; ++j) {
          const std::size_t at = static_cast<std::size_t>(j);
          code += x[at] * tables.rotation[i * x.size() + at];
        }
      }
      out[t * d + i] = code / own.scale;
    }
  }
  return out;
}

// What of one cache is exact: entries, of which some are none of their tokens, and the vectors of
// the call.
struct ExactVectors {
  ExactVectors(const Problem& p, int64_t overlay_rows, int width, Random& random)
      : row_bytes(width),
        overlay(static_cast<std::size_t>(p.batch * p.heads * overlay_rows * width)),
        lane_bytes(static_cast<std::size_t>(overlay_rows * width)),
        vectors(static_cast<std::size_t>(p.batch * p.heads * p.tokens * p.head_size)) {
    for (uint8_t& byte : overlay) byte = static_cast<uint8_t>(random());
    fill_normal(vectors.data(), vectors.size(), random);
    for (int64_t lane = 0; lane < p.batch * p.heads; ++lane) {
      const int64_t past = p.lengths[p.lengths.size() > 1 ? lane / p.heads : 0];
      for (int64_t token = 0; token < past; ++token) {
        if (token >= p.exact.sinks && token < past - p.exact.recent) continue;
        uint8_t* const out = entry(p, lane, token);
        for (int j = 0; j < p.head_size; ++j) {
          store_half(Normal<float>()(random), out + 2 * j);
        }
        const uint32_t tag = static_cast<uint32_t>(token + 1);
        set_entry_tag(out, p.head_size, random() % 12 ? tag : static_cast<uint32_t>(random() % 50));
      }
    }
  }

  uint8_t* entry(const Problem& p, int64_t lane, int64_t token) {
    return overlay.data() + static_cast<std::size_t>(lane) * lane_bytes +
           p.exact.entry(token) * spec::rows_per_entry(p.head_size, row_bytes) * row_bytes;
  }
  bool has_entry(const Problem& p, int64_t lane, int64_t token) {
    return p.exact.entry(token) >= 0 &&
           entry_tag(entry(p, lane, token), p.head_size) == static_cast<uint32_t>(token + 1);
  }
  double coordinate(const Problem& p, int64_t lane, int64_t past, int64_t token, std::size_t j) {
    if (token < past) return half_at(entry(p, lane, token) + 2 * j);
    const std::size_t row = static_cast<std::size_t>(lane * p.tokens + token - past);
    return half_to_float(float_to_half(vectors[row * static_cast<std::size_t>(p.head_size) + j]));
  }

  int row_bytes;
  std::vector<uint8_t> overlay;
  std::size_t lane_bytes;
  Guarded<float> vectors;
};

// A cache with the overlay of each lane in front of its rows.
inline void join_cache(const Problem& p, const ExactVectors& exact, const Guarded<uint8_t>& rows,
                       Guarded<uint8_t>& cache) {
  const std::size_t bytes = static_cast<std::size_t>(p.slots * exact.row_bytes);
  for (std::size_t lane = 0; lane < static_cast<std::size_t>(p.batch * p.heads); ++lane) {
    uint8_t* const out = cache.data() + lane * (exact.lane_bytes + bytes);
    std::copy_n(exact.overlay.data() + lane * exact.lane_bytes, exact.lane_bytes, out);
    std::copy_n(rows.data() + lane * bytes, bytes, out + exact.lane_bytes);
  }
}

// The problem as one of packed requests: rows in pages of a shuffled table, which has columns that
// no token needs, with tables and pages between inaccessible ones.
class PagedProblem {
 public:
  static bool covers(const Problem& p) {
    return p.causal && p.bias_dims.empty() && !p.exact.is_on() && p.left_padding.empty();
  }

  PagedProblem(const Problem& p, const AttentionCall& call, int64_t page_slots, Random& random)
      : call_(call),
        page_slots_(page_slots),
        columns_((p.slots + page_slots - 1) / page_slots + 1),
        pages_(p.batch * columns_ + 2),
        table_(static_cast<std::size_t>(p.batch * columns_)),
        cumulative_(static_cast<std::size_t>(p.batch + 1)),
        past_(static_cast<std::size_t>(p.batch)),
        keys_(bytes_of(call.key)),
        values_(bytes_of(call.value)),
        query_(size()),
        output_(size()) {
    std::vector<int32_t> order(static_cast<std::size_t>(pages_));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    std::copy_n(order.begin(), table_.size(), table_.begin());
    for (std::size_t b = 0; b < past_.size(); ++b) {
      past_[b] = static_cast<int32_t>(p.lengths[p.lengths.size() > 1 ? b : 0]);
      cumulative_[b + 1] = static_cast<int32_t>((b + 1) * static_cast<std::size_t>(p.tokens));
      const int64_t used = (past_[b] + p.tokens + page_slots - 1) / page_slots;
      for (int64_t c = used; c < columns_; ++c) {
        table_[b * static_cast<std::size_t>(columns_) + static_cast<std::size_t>(c)] = -1;
      }
    }
    lay_out(call.key, keys_);
    lay_out(call.value, values_);
    const float* const query = static_cast<const float*>(call.query);
    for_each_vector([&](std::size_t batched, std::size_t packed, std::size_t count) {
      std::copy_n(query + batched, count, query_.data() + packed);
    });
  }

  // Fills `output` as the batch has it.
  bool solve(const Kernels& kernels, const Parallel& parallel, float* output) {
    PagedAttentionCall paged{call_,         call_.batch, cumulative_.data(), past_.data(),
                             table_.data(), columns_,    page_slots_};
    paged.common.query = query_.data();
    paged.common.output = output_.data();
    paged.common.key.rows = keys_.data();
    paged.common.key.end = keys_.data() + keys_.size();
    paged.common.value.rows = values_.data();
    paged.common.value.end = values_.data() + values_.size();
    paged.common.key.page_bytes = page_slots_ * call_.key.stride;
    paged.common.value.page_bytes = page_slots_ * call_.value.stride;
    const bool complete = paged_attention(kernels, paged, parallel);
    for_each_vector([&](std::size_t batched, std::size_t packed, std::size_t count) {
      std::copy_n(output_.data() + packed, count, output + batched);
    });
    return complete;
  }

 private:
  std::size_t size() const {
    return static_cast<std::size_t>(call_.batch * call_.query_heads * call_.tokens *
                                    call_.head_size);
  }
  std::size_t bytes_of(const CacheView& cache) const {
    return static_cast<std::size_t>(pages_ * page_slots_ * call_.heads * cache.stride);
  }

  void lay_out(const CacheView& cache, Guarded<uint8_t>& pages) const {
    std::fill_n(pages.data(), pages.size(), uint8_t{0xff});
    for (int64_t b = 0; b < call_.batch; ++b) {
      for (int64_t n = 0; n < call_.heads; ++n) {
        for (int64_t t = 0; t < past_.data()[b] + call_.tokens; ++t) {
          const int64_t page = table_.data()[b * columns_ + t / page_slots_];
          const int64_t row = (page * call_.heads + n) * page_slots_ + t % page_slots_;
          std::memcpy(pages.data() + row * cache.stride,
                      cache.rows + ((b * call_.heads + n) * call_.slots + t) * cache.stride,
                      static_cast<std::size_t>(cache.stride));
        }
      }
    }
  }

  // body(where a vector lies in the batch, where among the packed ones, how many numbers)
  template <class Body>
  void for_each_vector(const Body& body) const {
    for (int64_t b = 0; b < call_.batch; ++b) {
      for (int64_t h = 0; h < call_.query_heads; ++h) {
        const int64_t batched = (b * call_.query_heads + h) * call_.tokens;
        const int64_t packed = h * call_.batch * call_.tokens + b * call_.tokens;
        body(static_cast<std::size_t>(batched * call_.head_size),
             static_cast<std::size_t>(packed * call_.head_size),
             static_cast<std::size_t>(call_.tokens * call_.head_size));
      }
    }
  }

  const AttentionCall call_;
  const int64_t page_slots_, columns_, pages_;
  Guarded<int32_t> table_, cumulative_, past_;
  Guarded<uint8_t> keys_, values_;
  Guarded<float> query_, output_;
};

inline void solve(const Problem& p, Random& random) {
  const int size = p.head_size;
  const std::size_t d = static_cast<std::size_t>(size);
  const int64_t query_heads = p.heads * p.group;
  const std::size_t rows = static_cast<std::size_t>(p.batch * p.heads * p.slots);
  Tables key_tables(p.key, size, random), value_tables(p.value, size, random);
  if (p.has_integers) {
    round_centroids(key_tables);
    round_centroids(value_tables);
  }
  const int key_width = spec::row_bytes(p.key, size) + p.padding;
  const int value_width = spec::row_bytes(p.value, size) + p.padding;
  Guarded<uint8_t> keys(rows * static_cast<std::size_t>(key_width));
  Guarded<uint8_t> values(rows * static_cast<std::size_t>(value_width));
  fill_rows(keys.data(), rows, p.key, size, key_width, random);
  fill_rows(values.data(), rows, p.value, size, value_width, random);
  for (std::size_t row = 0; p.zero != 0.0f && row < rows; ++row) {
    store_half(p.zero, keys.data() + row * static_cast<std::size_t>(key_width) +
                           spec::code_bytes(p.key, size) + 2);
  }
  const int64_t key_offsets = p.fastest > 0 ? 2 + p.first_slots : p.offsets;
  Guarded<float> key_offset(static_cast<std::size_t>(key_offsets * p.heads) * d);
  Guarded<float> value_offset(static_cast<std::size_t>(p.offsets * p.heads) * d);
  Guarded<float> frequencies(d);
  if (p.fastest > 0) fill_frequencies(frequencies, p.fastest, random);
  fill_normal(key_offset.data(), key_offset.size(), random, 2.0f);
  fill_normal(value_offset.data(), value_offset.size(), random, 2.0f);
  Guarded<float> query(static_cast<std::size_t>(p.batch * query_heads * p.tokens) * d);
  fill_normal(query.data(), query.size(), random, p.peak);

  const int64_t longest = *std::max_element(p.lengths.begin(), p.lengths.end());
  std::size_t bias_size = p.bias_dims.empty() ? 0 : 1;
  for (const int64_t dim : p.bias_dims) bias_size *= static_cast<std::size_t>(dim);
  Guarded<float> bias(bias_size);
  fill_normal(bias.data(), bias_size, random);
  int64_t stride[4] = {};
  if (bias_size > 0) {
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      const int64_t dim = p.bias_dims[static_cast<std::size_t>(i)];
      stride[i] = dim == 1 ? 0 : step;
      step *= dim;
    }
    if (bias_size > 8) {
      for (std::size_t i = 0; i < bias_size; i += 5) bias[i] = i % 2 ? -kInfinity : -3.4e38f;
    }
  }

  Guarded<float> sinks(p.sinks.empty() ? 0 : static_cast<std::size_t>(query_heads));
  for (std::size_t h = 0; h < sinks.size(); ++h) sinks[h] = p.sinks[h % p.sinks.size()];

  Window window = p.exact;
  if (window.is_on()) {
    const auto needed = [&](int width) { return spec::rows_per_entry(size, width); };
    window.overlay_rows = window.entries() * std::max(needed(key_width), needed(value_width));
  }
  ExactVectors exact_keys(p, window.overlay_rows, key_width, random);
  ExactVectors exact_values(p, window.overlay_rows, value_width, random);

  const double scale = 1.0 / std::sqrt(static_cast<double>(size));
  const auto past = [&](int64_t b) { return p.lengths[p.lengths.size() > 1 ? b : 0]; };
  const auto value_row = [&](std::size_t row) {
    return values.data() + row * static_cast<std::size_t>(value_width);
  };
  std::vector<double> expected(query.size());
  std::vector<bool> seen(rows), blind(query.size());  // of what sees no key, zero is exact
  const auto k = decoded(keys.data(), p, p.key, key_width, key_tables, key_offset,
                         p.fastest > 0 ? frequencies.data() : nullptr);
  const auto v = decoded(values.data(), p, p.value, value_width, value_tables, value_offset);
  if (p.needle >= 0) {
    for (std::size_t i = 0; i < query.size(); ++i) {
      const std::size_t lane = i / (d * static_cast<std::size_t>(p.group * p.tokens));
      const std::size_t row =
          lane * static_cast<std::size_t>(p.slots) + static_cast<std::size_t>(p.needle);
      query[i] = p.peak * static_cast<float>(k[row * d + i % d]);
    }
  }
  std::vector<double> norms(rows);
  for (std::size_t row = 0; row < rows; ++row) {
    norms[row] = coded_norm(keys.data() + row * static_cast<std::size_t>(key_width), p.key, size,
                            key_tables);
  }
  // Where weights may be rounded to 8 bits, what each error is multiplied with.
  std::vector<std::vector<double>> codes;
  if (p.value.kind == Kind::kUniform || (p.has_integers && spec::is_rotated(p.value.kind))) {
    for (std::size_t part = 0; part < scaled_parts(p.value, size, value_row(0)).size(); ++part) {
      codes.push_back(part_codes(p, values, value_width, value_tables, part));
    }
  }
  double largest = 0;
  double of_queries = 0, of_weights = 0;  // errors where each is rounded to steps of its largest
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < query_heads; ++h) {
      for (int64_t t = 0; t < p.tokens; ++t) {
        const std::size_t at = static_cast<std::size_t>((b * query_heads + h) * p.tokens + t) * d;
        const std::size_t lane = static_cast<std::size_t>((b * p.heads + h / p.group) * p.slots);
        const int64_t position = past(b) + t;
        const int64_t kv_lane = b * p.heads + h / p.group, end = past(b) + p.tokens;
        const auto at_hand = [&](int64_t token) {
          return token >= past(b) || (exact_keys.has_entry(p, kv_lane, token) &&
                                      exact_values.has_entry(p, kv_lane, token));
        };
        const auto is_exact = [&](int64_t token) {
          bool is_sink = token < window.sinks;
          for (int64_t s = 0; is_sink && s <= token; ++s) is_sink = at_hand(s);
          bool is_recent = window.recent > 0 && position - token < window.recent;
          for (int64_t s = token; is_recent && s < end; ++s) is_recent = at_hand(s);
          return is_sink || is_recent;
        };
        std::vector<bool> exact;
        const auto key_at = [&](std::size_t row, int64_t token, bool is_taken, std::size_t i) {
          return is_taken ? exact_keys.coordinate(p, kv_lane, past(b), token, i) : k[row * d + i];
        };
        std::vector<double> scores;
        std::vector<std::size_t> visible;
        for (int64_t s = 0; s < past(b) + p.tokens; ++s) {
          if (p.causal && s > position) continue;
          if (p.window > 0 && position - s >= p.window) continue;
          if (s < padding_of(p, b)) continue;
          double more = 0;
          if (bias_size > 0) {
            more = bias[static_cast<std::size_t>(b * stride[0] + h * stride[1] + t * stride[2] +
                                                 s * stride[3])];
            if (more <= -1.7e38) continue;
          }
          const std::size_t row = lane + static_cast<std::size_t>(s);
          double score = 0;
          const bool is_taken = is_exact(s);
          for (std::size_t i = 0; i < d; ++i) score += query[at + i] * key_at(row, s, is_taken, i);
          exact.push_back(is_taken);
          score *= scale;
          if (p.softcap > 0) score = p.softcap * std::tanh(score / p.softcap);
          scores.push_back(score + more);
          visible.push_back(row);
          seen[row] = true;
        }
        if (visible.empty()) {
          std::fill_n(blind.begin() + static_cast<std::ptrdiff_t>(at), d, true);
          continue;
        }
        const auto value_at = [&](std::size_t s, std::size_t i) {
          const int64_t token = static_cast<int64_t>(visible[s] - lane);
          return exact[s] ? exact_values.coordinate(p, kv_lane, past(b), token, i)
                          : v[visible[s] * d + i];
        };
        const double sink = p.sinks.empty() ? -kInfinity : sinks[static_cast<std::size_t>(h)];
        const double top = std::max(sink, *std::max_element(scores.begin(), scores.end()));
        double sum = std::exp(sink - top);
        for (double& score : scores) sum += score = std::exp(score - top);
        for (std::size_t i = 0; i < d; ++i) {
          double x = 0;
          for (std::size_t s = 0; s < visible.size(); ++s) x += scores[s] * value_at(s, i);
          expected[at + i] = x / sum;
          largest = std::max(largest, std::abs(x / sum));
        }
        // Products with integers round the query to steps of its largest coordinate, each by a
        // deviation of a step over sqrt(12), and so a score by that times the norm of its row.
        // d out = sum p (v - out) d score, whatever the scores have in common. Weights times the
        // scales of their rows are rounded to steps of the largest, each by the same deviation.
        double longest_row = 0, spread = 0, weight = 0, swing = 0;
        for (std::size_t s = 0; s < visible.size(); ++s) {
          if (scores[s] > 1e-6 * sum) longest_row = std::max(longest_row, norms[visible[s]]);
        }
        const double step = largest_coordinate(query.data() + at, p.key, size, key_tables);
        for (std::size_t i = 0; i < d; ++i) {
          double mean = 0;
          for (std::size_t s = 0; s < visible.size(); ++s) {
            mean += scores[s] / sum * std::abs(value_at(s, i) - expected[at + i]);
          }
          spread = std::max(spread, mean);
        }
        of_queries =
            std::max(of_queries, 6 * scale * step / std::sqrt(12.0) * longest_row * spread);
        double of_parts = 0;
        for (std::size_t part = 0; part < codes.size(); ++part) {
          weight = swing = 0;
          for (std::size_t s = 0; s < visible.size(); ++s) {
            const double own = scaled_parts(p.value, size, value_row(visible[s]))[part].scale;
            weight = std::max(weight, scores[s] / sum * own);
          }
          for (std::size_t i = 0; i < d; ++i) {
            double energy = 0;
            for (const std::size_t row : visible) {
              energy += codes[part][row * d + i] * codes[part][row * d + i];
            }
            swing = std::max(swing, energy);
          }
          of_parts += 6 * weight / std::sqrt(12.0) * std::sqrt(swing);
        }
        of_weights = std::max(of_weights, of_parts);
      }
    }
  }
  if (p.garbage_in_hidden_rows) {
    for (std::size_t row = 0; row < rows; ++row) {
      if (seen[row]) continue;
      std::fill_n(keys.data() + row * static_cast<std::size_t>(key_width), key_width,
                  uint8_t{0xff});
      std::fill_n(values.data() + row * static_cast<std::size_t>(value_width), value_width,
                  uint8_t{0xff});
    }
  }

  Guarded<uint8_t> key_cache(window.is_on() ? keys.size() + exact_keys.overlay.size() : 0);
  Guarded<uint8_t> value_cache(window.is_on() ? values.size() + exact_values.overlay.size() : 0);
  AttentionCall call{};
  Guarded<float> output(query.size()), again(query.size());
  call.element = Element::kFloat;
  call.query = query.data();
  const auto view = [](const Guarded<uint8_t>& cache, Codec codec, int width, const Tables& own) {
    return CacheView{cache.data(), codec, width, own.centroids.data(), cache.data() + cache.size()};
  };
  call.key = view(keys, p.key, key_width, key_tables);
  call.value = view(values, p.value, value_width, value_tables);
  call.window = window;
  if (window.is_on()) {
    join_cache(p, exact_keys, keys, key_cache);
    join_cache(p, exact_values, values, value_cache);
    call.key = view(key_cache, p.key, key_width, key_tables);
    call.value = view(value_cache, p.value, value_width, value_tables);
    call.new_keys = exact_keys.vectors.data();
    call.new_values = exact_values.vectors.data();
  }
  call.key_rotation = key_tables.ready();
  call.value_rotation = value_tables.ready();
  call.key_rotation.transposed = call.value_rotation.matrix = nullptr;  // nobody asks for them
  std::optional<RotaryOffset> rotary_offset;
  if (p.fastest > 0) {
    rotary_offset.emplace(frequencies.data(), key_offset.data(), key_offsets, p.heads, size);
    call.rotary_offset = &*rotary_offset;
  } else {
    call.key_offset = key_offset.data();
    call.key_offsets = key_offsets;
  }
  call.value_offset = value_offset.data();
  call.value_offsets = p.offsets;
  call.left_padding = p.left_padding.empty() ? nullptr : p.left_padding.data();
  call.padding_per_batch = p.left_padding.size() > 1;
  call.past_length = p.lengths.data();
  call.length_per_batch = p.lengths.size() > 1;
  call.batch = p.batch;
  call.query_heads = query_heads;
  call.heads = p.heads;
  call.tokens = p.tokens;
  call.slots = window.overlay_rows + p.slots;
  call.head_size = size;
  call.bias = bias_size > 0 ? bias.data() : nullptr;
  std::copy_n(stride, 4, call.bias_stride);
  call.sink = p.sinks.empty() ? nullptr : sinks.data();
  call.scale = static_cast<float>(scale);
  call.softcap = p.softcap;
  call.skip_below = 1e-7f;  // nothing that shows
  call.causal = p.causal;
  call.sliding_window = p.window;
  (void)longest;
  std::unique_ptr<PagedProblem> paged;
  if (PagedProblem::covers(p) && random() % 2 == 0) {
    constexpr int64_t kPageSlots[] = {16, 128, 48, 256};
    paged = std::make_unique<PagedProblem>(p, call, kPageSlots[random() % 4], random);
  }
  AttentionCall apart = call;
  Guarded<uint8_t> key_planes(static_cast<std::size_t>(p.batch * p.heads * call.slots * key_width));
  Guarded<uint8_t> value_planes(
      static_cast<std::size_t>(p.batch * p.heads * call.slots * value_width));
  const bool has_planes = spec::is_rotated(p.key.kind) && spec::is_rotated(p.value.kind) &&
                          p.padding == 0 && random() % 2 == 0;
  if (has_planes) {
    apart.window.has_planes = true;
    lay_out_planes(planes_of(call, call.key), p.batch, call.key.rows, key_planes.data());
    lay_out_planes(planes_of(call, call.value), p.batch, call.value.rows, value_planes.data());
    apart.key = view(key_planes, p.key, key_width, key_tables);
    apart.value = view(value_planes, p.value, value_width, value_tables);
  }
  for (const Kernels* const level : levels_with(p.products)) {
    std::fill(output.begin(), output.end(), std::numeric_limits<float>::quiet_NaN());
    call.output = output.data();
    CHECK(attention(*level, call, serial()), describe(p, level->name));
    if (p.with_threads) {
      call.output = again.data();
      CHECK(attention(*level, call, threaded()), describe(p, level->name));
      CHECK(std::memcmp(output.data(), again.data(), output.size() * sizeof(float)) == 0,
            describe(p, level->name) + ": threads change the result");
    }
    double worst = 0;
    bool exact_zeros = true;
    const auto compare = [&] {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        worst = std::max(worst, std::isnan(output[i]) ? 1e9 : std::abs(output[i] - expected[i]));
        if (blind[i]) exact_zeros = exact_zeros && output[i] == 0.0f;
      }
    };
    compare();
    if (paged != nullptr) {
      CHECK(paged->solve(*level, serial(), output.data()), describe(p, level->name) + " in pages");
      compare();
    }
    if (has_planes) {
      apart.output = output.data();
      CHECK(attention(*level, apart, threaded()), describe(p, level->name) + " in planes");
      compare();
    }
    double tolerance = 2e-5 * largest;
    if (level->integers != nullptr) {
      tolerance += of_queries / kLargestByte + of_weights / kLargestByteWeight;
    }
    CHECK(worst <= tolerance, describe(p, level->name) + ": relative error " +
                                  std::to_string(worst / largest * 1e6) + "e-6");
    CHECK(exact_zeros, describe(p, level->name));
  }
}

}  // namespace tq::test
