// Packed requests over pages: what each gets is what it gets alone, wherever its pages lie.
#include "core/attention.h"
#include "core/paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <string>

#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/guard.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr int kHeadSize = 64;
constexpr int64_t kHeads = 2, kGroup = 3;

// What all calls over rows of a codec, `stride` bytes apart, have in common.
EncodeCall encode_call_of(Codec codec, int stride, const Tables& tables) {
  EncodeCall call{};
  call.element = Element::kFloat;
  call.heads = kHeads;
  call.batch = 1;
  call.head_size = kHeadSize;
  call.width = stride;
  call.codec = codec;
  call.norm_correction = 1;
  call.rotation = tables.ready();
  call.centroids = tables.centroids.data();
  call.boundaries = tables.boundaries.data();
  return call;
}

AttentionCall attention_call_of(const CacheView& cache, const Tables& tables) {
  AttentionCall call{};
  call.element = Element::kFloat;
  call.key = call.value = cache;
  call.key_rotation = call.value_rotation = tables.ready();
  call.query_heads = kHeads * kGroup;
  call.heads = kHeads;
  call.head_size = kHeadSize;
  call.scale = 0.125f;
  call.causal = true;
  return call;
}

// Requests of several lengths, with one token or many, in shuffled pages.
struct Server {
  Server(Codec row_codec, int64_t slots, const std::vector<int64_t>& cached,
         const std::vector<int64_t>& new_tokens, Random& random)
      : codec(row_codec),
        width(spec::row_bytes(row_codec, kHeadSize) + 2),
        page_slots(slots),
        past(cached),
        fresh(new_tokens),
        tables(row_codec, kHeadSize, random) {
    for (std::size_t r = 0; r < past.size(); ++r) {
      columns = std::max(columns, (past[r] + fresh[r] + page_slots - 1) / page_slots);
      lengths.push_back(static_cast<int32_t>(past[r]));
      cumulative.push_back(cumulative.back() + static_cast<int32_t>(fresh[r]));
    }
    pages = static_cast<int64_t>(past.size()) * columns + 1;
    std::vector<int32_t> order(static_cast<std::size_t>(pages));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random);
    table.assign(order.begin(), order.end() - 1);
    vectors.resize(static_cast<std::size_t>(kHeads * packed() * kHeadSize));
    fill_normal(vectors.data(), vectors.size(), random);
    query.resize(vectors.size() * kGroup);
    fill_normal(query.data(), query.size(), random);
    cache.resize(static_cast<std::size_t>(rows() * width));
    fill_rows(cache.data(), static_cast<std::size_t>(rows()), codec, kHeadSize, width, random);
  }

  int64_t packed() const { return cumulative.back(); }
  int64_t rows() const { return pages * page_slots * kHeads; }
  int64_t row_of(std::size_t r, int64_t n, int64_t slot) const {
    const int64_t page =
        table[r * static_cast<std::size_t>(columns) + static_cast<std::size_t>(slot / page_slots)];
    return (page * kHeads + n) * page_slots + slot % page_slots;
  }

  EncodeCall encode_call() const { return encode_call_of(codec, width, tables); }
  AttentionCall attention_call(const uint8_t* cached) const {
    return attention_call_of(
        {cached, codec, width, tables.centroids.data(), nullptr, page_slots * width}, tables);
  }

  std::vector<uint8_t> encode_paged(const Kernels& kernels, bool in_place) const {
    std::vector<int64_t> to, slots;
    for (std::size_t r = 0; r < past.size(); ++r) {
      for (int64_t t = 0; t < fresh[r]; ++t) {
        slots.push_back(past[r] + t);
        to.push_back(row_of(r, 0, past[r] + t) * width);
      }
    }
    TokenPlaces places{};
    places.rows = to.data();
    places.slots = slots.data();
    places.page_bytes = page_slots * width;
    places.bytes = static_cast<int64_t>(cache.size());
    std::vector<uint8_t> present = in_place ? cache : std::vector<uint8_t>(cache.size());
    EncodeCall call = encode_call();
    call.vectors = vectors.data();
    call.past = in_place ? present.data() : cache.data();
    call.present = present.data();
    call.tokens = packed();
    call.places = &places;
    encode(kernels, call, threaded());
    return present;
  }

  std::vector<float> attend_paged(const Kernels& kernels, const std::vector<uint8_t>& present,
                                  const Parallel& parallel) const {
    std::vector<float> output(query.size());
    PagedAttentionCall call{attention_call(present.data()),
                            static_cast<int64_t>(past.size()),
                            cumulative.data(),
                            lengths.data(),
                            table.data(),
                            columns,
                            page_slots};
    call.common.query = query.data();
    call.common.output = output.data();
    CHECK(paged_attention(kernels, call, parallel), kernels.name);
    return output;
  }

  const Codec codec;
  const int width;
  const int64_t page_slots;
  const std::vector<int64_t> past, fresh;
  const Tables tables;
  int64_t columns = 1, pages = 0;
  std::vector<int32_t> lengths, cumulative{0}, table;
  std::vector<float> vectors, query;
  std::vector<uint8_t> cache;
};

// A request of a server for itself: its rows one after the other, its vectors and queries alone.
struct Alone {
  Alone(const Server& all, std::size_t request)
      : server(all), r(request), tokens(all.fresh[r]), slots(all.past[r] + tokens) {
    cache.resize(static_cast<std::size_t>(kHeads * slots * server.width));
    for (int64_t n = 0; n < kHeads; ++n) {
      for (int64_t s = 0; s < slots; ++s) {
        std::memcpy(cache.data() + (n * slots + s) * server.width,
                    server.cache.data() + server.row_of(r, n, s) * server.width,
                    static_cast<std::size_t>(server.width));
      }
    }
    take(server.vectors, kHeads, vectors);
    take(server.query, kHeads * kGroup, query);
  }

  void take(const std::vector<float>& packed, int64_t heads, std::vector<float>& out) const {
    for (int64_t h = 0; h < heads; ++h) {
      const auto first = packed.begin() + (h * server.packed() + server.cumulative[r]) * kHeadSize;
      out.insert(out.end(), first, first + tokens * kHeadSize);
    }
  }

  void encode_rows(const Kernels& kernels) {
    const int64_t past = server.past[r];
    EncodeCall call = server.encode_call();
    call.vectors = vectors.data();
    call.past = call.present = cache.data();
    call.past_length = &past;
    call.tokens = tokens;
    call.past_slots = call.present_slots = slots;
    encode(kernels, call, serial());
  }

  std::vector<float> attend(const Kernels& kernels) const {
    const int64_t past = server.past[r];
    std::vector<float> output(query.size());
    AttentionCall call = server.attention_call(cache.data());
    call.query = query.data();
    call.output = output.data();
    call.past_length = &past;
    call.batch = 1;
    call.tokens = tokens;
    call.slots = slots;
    CHECK(attention(kernels, call, serial()), kernels.name);
    return output;
  }

  const Server& server;
  const std::size_t r;
  const int64_t tokens, slots;
  std::vector<uint8_t> cache;
  std::vector<float> vectors, query;
};

TEST(requests_in_pages_get_what_they_get_alone) {
  Share share;
  Random random(31);
  const std::vector<int64_t> past{0, 300, 17, 511, 0, 130, 129, 0};
  const std::vector<int64_t> fresh{70, 1, 1, 1, 3, 40, 3, 0};
  for (const Codec codec : float_codecs()) {
    for (const int64_t page_slots : {16, 128, 144}) {
      if (share.leaves_out_next()) continue;
      const Server server(codec, page_slots, past, fresh, random);
      for (const Kernels* const level : levels_with(nullptr)) {
        const std::string what =
            std::string(level->name) + ", " + name_of(codec) + ", " + std::to_string(page_slots);
        const std::vector<uint8_t> present = server.encode_paged(*level, page_slots == 16);
        const std::vector<float> output = server.attend_paged(*level, present, serial());
        CHECK(output == server.attend_paged(*level, present, threaded()),
              what + ": threads change the result");
        std::size_t written = 0;
        for (std::size_t r = 0; r < past.size(); ++r) {
          if (fresh[r] == 0) continue;
          Alone alone(server, r);
          alone.encode_rows(*level);
          bool same_rows = true;
          for (int64_t n = 0; n < kHeads; ++n) {
            for (int64_t s = 0; s < alone.slots; ++s) {
              same_rows = same_rows &&
                          std::memcmp(alone.cache.data() + (n * alone.slots + s) * server.width,
                                      present.data() + server.row_of(r, n, s) * server.width,
                                      static_cast<std::size_t>(server.width)) == 0;
            }
          }
          CHECK(same_rows, what + ": rows of request " + std::to_string(r));
          std::vector<float> own;
          alone.take(output, kHeads * kGroup, own);
          CHECK(own == alone.attend(*level), what + ": request " + std::to_string(r));
          written += static_cast<std::size_t>(kHeads * fresh[r]);
        }
        std::size_t changed = 0;  // no other row is written
        for (int64_t row = 0; row < server.rows(); ++row) {
          const std::ptrdiff_t at = row * server.width;
          changed += std::memcmp(present.data() + at, server.cache.data() + at,
                                 static_cast<std::size_t>(server.width)) != 0;
        }
        CHECK(changed == written, what + ": " + std::to_string(changed) + " rows are written");
      }
    }
  }
}

TEST(long_requests_are_cut_as_they_are_alone) {
  Random random(32);
  for (const int64_t page_slots : {16, 128}) {
    // As many lanes as one request has: the cut of keys into chunks depends on these.
    const Server server(lloyd_max(4), page_slots, {9000}, {1}, random);
    for (const Kernels* const level : levels_with(nullptr)) {
      const std::vector<float> output = server.attend_paged(*level, server.cache, serial());
      std::vector<float> own;
      const Alone alone(server, 0);
      alone.take(output, kHeads * kGroup, own);
      CHECK(own == alone.attend(*level), level->name);
    }
  }
}

// Pages of `slots` tokens with exact ones, in a buffer with inaccessible bytes on both sides.
struct ExactPages {
  ExactPages(Codec row_codec, const Window& exact, int64_t slots, int64_t spare, Random& random)
      : codec(row_codec),
        stride(spec::row_bytes(row_codec, kHeadSize)),
        window(exact),
        page_slots(slots),
        page_bytes(slots * stride + spare),
        tables(row_codec, kHeadSize, random),
        places(exact, kHeadSize, slots, stride, page_bytes),
        table(kPages) {
    for (std::size_t i = 0; i < kPages; ++i) table[i] = static_cast<int32_t>(i);
    std::shuffle(table.begin(), table.end(), random);
  }

  static constexpr std::size_t kPages = 8;
  int64_t bytes() const { return static_cast<int64_t>(kPages) * kHeads * page_bytes; }

  void encode_in(const Kernels& kernels, uint8_t* cache, const float* vectors, int32_t past,
                 int32_t count) const {
    const int32_t cumulative[] = {0, count};
    std::vector<int64_t> to, slots;
    for (int64_t slot = past; slot < past + count; ++slot) {
      const int64_t page = table[static_cast<std::size_t>(slot / page_slots)];
      to.push_back(page * kHeads * page_bytes + slot % page_slots * stride);
      slots.push_back(slot);
    }
    const TokenPlaces at{to.data(), slots.data(), page_bytes, bytes(),      &places,
                         1,         cumulative,   &past,      table.data(), kPages};
    EncodeCall call = encode_call_of(codec, stride, tables);
    call.vectors = vectors;
    call.past = call.present = cache;
    call.tokens = count;
    call.places = &at;
    encode(kernels, call, threaded());
  }

  std::vector<float> attend(const Kernels& kernels, const Guarded<uint8_t>& cache,
                            const std::vector<float>& query, const float* vectors, int32_t past,
                            const Parallel& parallel) const {
    const int32_t count = static_cast<int32_t>(query.size() / (kHeads * kGroup * kHeadSize));
    const int32_t cumulative[] = {0, count};
    std::vector<float> output(query.size());
    AttentionCall common = attention_call_of({cache.data(), codec, stride, tables.centroids.data(),
                                              cache.data() + cache.size(), page_bytes},
                                             tables);
    common.window = window;
    common.query = query.data();
    common.output = output.data();
    common.new_keys = common.new_values = vectors;
    const PagedAttentionCall call{common, 1, cumulative, &past, table.data(), kPages, page_slots};
    CHECK(paged_attention(kernels, call, parallel), kernels.name);
    return output;
  }

  const Codec codec;
  const int stride;
  const Window window;
  const int64_t page_slots, page_bytes;
  const Tables tables;
  const PageWindow places;
  std::vector<int32_t> table;
};

// Every way to feed tokens leaves the same bytes in pages, and a query sees the same: exactly that where
// all levels are compared with the scalar one.
TEST(exact_tokens_in_pages) {
  Random random(33);
  struct Shape {
    Window window;
    int64_t slots, spare;
  };
  const Shape shapes[] = {{{9, 2, 0}, 16, 300},
                          {{32, 4, 0}, 48, 560},
                          {{40, 0, 0}, 16, 1},
                          {{0, 3, 0}, 16, 400},
                          {{5, 1, 0}, 1, 132}};
  for (const Shape& shape : shapes) {
    const ExactPages pages(lloyd_max(4), shape.window, shape.slots, shape.spare, random);
    const int32_t total =
        static_cast<int32_t>(std::min<int64_t>(90, shape.slots * ExactPages::kPages));
    const int32_t steps[] = {total / 2, 1, 1, total / 5, 1};
    std::vector<float> all(static_cast<std::size_t>(kHeads * total * kHeadSize));
    fill_normal(all.data(), all.size(), random);
    const auto slice = [&](int32_t from, int32_t count) {
      std::vector<float> vectors;
      for (int64_t n = 0; n < kHeads; ++n) {
        const auto first = all.begin() + (n * total + from) * kHeadSize;
        vectors.insert(vectors.end(), first, first + count * kHeadSize);
      }
      return vectors;
    };
    std::vector<std::vector<float>> expected;
    for (const Kernels* const level : levels_with(nullptr)) {
      Guarded<uint8_t> cache(static_cast<std::size_t>(pages.bytes()));
      std::fill_n(cache.data(), cache.size(), uint8_t{0xab});
      Random queries(34);
      int32_t past = 0;
      for (std::size_t i = 0; i < std::size(steps); past += steps[i++]) {
        const std::vector<float> vectors = slice(past, steps[i]);
        pages.encode_in(*level, cache.data(), vectors.data(), past, steps[i]);
        std::vector<float> query(vectors.size() * kGroup);
        fill_normal(query.data(), query.size(), queries);
        const std::vector<float> output =
            pages.attend(*level, cache, query, vectors.data(), past, serial());
        CHECK(output == pages.attend(*level, cache, query, vectors.data(), past, threaded()),
              std::string(level->name) + ": threads change the result");
        if (expected.size() <= i) expected.push_back(output);
        float worst = 0.0f;
        for (std::size_t j = 0; j < output.size(); ++j) {
          worst = std::max(worst, std::fabs(output[j] - expected[i][j]));
        }
        CHECK(worst < 0.05f, std::string(level->name) + ": " + std::to_string(worst));
      }
      // Token by token.
      Guarded<uint8_t> other(cache.size());
      std::fill_n(other.data(), other.size(), uint8_t{0x5a});
      for (int32_t t = 0; t < past; ++t) {
        pages.encode_in(*level, other.data(), slice(t, 1).data(), t, 1);
      }
      bool same = true;
      for (int32_t t = 0; t < past; ++t) {
        const int64_t place = pages.places.place(t, past);
        if (place < 0 ||
            t < pages.places.oldest(pages.places.last_of(pages.places.column(t), past)))
          continue;
        const int64_t page = pages.table[static_cast<std::size_t>(t / shape.slots)];
        for (int64_t n = 0; n < kHeads; ++n) {
          const int64_t at = (page * kHeads + n) * pages.page_bytes + pages.places.begin(place);
          same = same && std::memcmp(cache.data() + at, other.data() + at,
                                     static_cast<std::size_t>(pages.places.bytes())) == 0;
        }
      }
      CHECK(same, std::string(level->name) + ": entries depend on the calls");
    }
  }
}

}  // namespace
}  // namespace tq::test
