// Packed requests over pages: what each gets is what it gets alone, wherever its pages lie.
#include "core/attention.h"
#include "core/paged_attention.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr int kHeadSize = 64;
constexpr int64_t kHeads = 2, kGroup = 3;

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

  // Everything that both kinds of calls have in common.
  EncodeCall encode_call() const {
    EncodeCall call{};
    call.element = Element::kFloat;
    call.heads = kHeads;
    call.batch = 1;
    call.head_size = kHeadSize;
    call.width = width;
    call.codec = codec;
    call.norm_correction = 1;
    call.rotation = tables.ready();
    call.centroids = tables.centroids.data();
    call.boundaries = tables.boundaries.data();
    return call;
  }
  AttentionCall attention_call(const uint8_t* cached) const {
    AttentionCall call{};
    call.element = Element::kFloat;
    call.key =
        call.value = {cached, codec, width, tables.centroids.data(), nullptr, page_slots * width};
    call.key_rotation = call.value_rotation = tables.ready();
    call.query_heads = kHeads * kGroup;
    call.heads = kHeads;
    call.head_size = kHeadSize;
    call.scale = 0.125f;
    call.causal = true;
    return call;
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

}  // namespace
}  // namespace tq::test
