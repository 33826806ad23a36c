// The exact window in guarded memory: entries as they should be, and tags that lie. What attention
// makes of it is compared with the oracle by the tests in Python; here levels agree.
#include <limits>

#include "core/attention.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

struct Sizes {
  Codec codec = lloyd_max(4);
  int head_size = 64;
  int64_t batch = 2, heads = 2, group = 2, tokens = 1;
  std::vector<int64_t> lengths{70, 3};
  Window window{24, 3, 0};
  int64_t spare = 0;  // rows behind those of the longest sequence
  int padding = 1;
  bool causal = true;
  int64_t sliding = 0;
  bool has_integers = false;

  int width() const { return spec::row_bytes(codec, head_size) + padding; }
  int64_t lanes() const { return batch * heads; }
  int64_t slots() const {
    return window.overlay_rows + *std::max_element(lengths.begin(), lengths.end()) + tokens + spare;
  }
  int64_t entry() const { return int64_t{spec::rows_per_entry(head_size, width())} * width(); }
};

std::string describe(const Sizes& s, const char* level) {
  return test::describe(level, s.codec, s.head_size) + ", T" + std::to_string(s.tokens) + " R" +
         std::to_string(s.window.recent) + (s.causal ? "" : " of everything") + " W" +
         std::to_string(s.sliding);
}

// Keys or values: vectors of the call, and their cache.
struct Plane {
  Plane(const Sizes& s, Random& random)
      : tables(s.codec, s.head_size, random),
        vectors(static_cast<std::size_t>(s.lanes() * s.tokens * s.head_size)),
        cache(static_cast<std::size_t>(s.lanes() * s.slots() * s.width())) {
    if (s.has_integers) round_centroids(tables);
    fill_normal(vectors.data(), vectors.size(), random);
    fill_rows(cache.data(), static_cast<std::size_t>(s.lanes() * s.slots()), s.codec, s.head_size,
              s.width(), random);
  }

  uint8_t* entry(const Sizes& s, int64_t lane, int64_t index) {
    return cache.data() + lane * s.slots() * s.width() + index * s.entry();
  }

  // Entries of tokens up to the past, the newest ones and the sinks.
  void fill_entries(const Sizes& s, Random& random) {
    for (int64_t lane = 0; lane < s.lanes(); ++lane) {
      const int64_t past = s.lengths[static_cast<std::size_t>(lane / s.heads)];
      for (int64_t token = 0; token < past; ++token) {
        if (token >= s.window.sinks && token < past - s.window.recent) continue;
        uint8_t* const out = entry(s, lane, s.window.entry(token));
        std::vector<float> x(static_cast<std::size_t>(s.head_size));
        fill_normal(x.data(), x.size(), random);
        for (int j = 0; j < s.head_size; ++j)
          store_half(x[static_cast<std::size_t>(j)], out + 2 * j);
        set_entry_tag(out, s.head_size, static_cast<uint32_t>(token + 1));
      }
    }
  }

  EncodeCall encode(const Sizes& s) {
    EncodeCall call = encode_call(s.codec, s.head_size, s.width(), tables);
    call.batch = s.batch;
    call.heads = s.heads;
    call.tokens = s.tokens;
    call.vectors = vectors.data();
    call.past = cache.data();
    call.present = cache.data();
    call.past_slots = call.present_slots = s.slots();
    call.past_length = s.lengths.data();
    call.length_per_batch = true;
    call.window = s.window;
    return call;
  }

  Tables tables;
  Guarded<float> vectors;
  Guarded<uint8_t> cache;
};

void make_room(Sizes* s) {
  s->window.overlay_rows = s->window.entries() * spec::rows_per_entry(s->head_size, s->width());
}

std::vector<float> attend(const Kernels& level, const Sizes& s, const Guarded<float>& query,
                          const Plane& key, const Plane& value, const Parallel& parallel) {
  std::vector<float> output(query.size(), std::numeric_limits<float>::quiet_NaN());
  AttentionCall call{};
  call.element = Element::kFloat;
  call.query = query.data();
  call.output = output.data();
  call.key = {key.cache.data(), s.codec, s.width(), key.tables.centroids.data()};
  call.value = {value.cache.data(), s.codec, s.width(), value.tables.centroids.data()};
  call.key_rotation = key.tables.ready();
  call.value_rotation = value.tables.ready();
  call.past_length = s.lengths.data();
  call.length_per_batch = true;
  call.batch = s.batch;
  call.query_heads = s.heads * s.group;
  call.heads = s.heads;
  call.tokens = s.tokens;
  call.slots = s.slots();
  call.head_size = s.head_size;
  call.scale = 1.0f / std::sqrt(static_cast<float>(s.head_size));
  call.causal = s.causal;
  call.sliding_window = s.sliding;
  call.window = s.window;
  call.new_keys = key.vectors.data();
  call.new_values = value.vectors.data();
  CHECK(attention(level, call, parallel), describe(s, level.name));
  return output;
}

double largest_difference(const std::vector<float>& one, const std::vector<float>& other) {
  double most = 0;
  for (std::size_t i = 0; i < one.size(); ++i) {
    const double difference = std::abs(one[i] - other[i]);
    most = std::isnan(difference) ? 1e9 : std::max(most, difference);
  }
  return most;
}

// Levels agree, threads change nothing, and memory beyond the arrays is left alone.
std::vector<float> solve(const Sizes& s, Plane& key, Plane& value, Random& random) {
  Guarded<float> query(static_cast<std::size_t>(s.lanes() * s.group * s.tokens * s.head_size));
  fill_normal(query.data(), query.size(), random);
  const std::vector<float> plain = attend(*scalar_kernels(), s, query, key, value, serial());
  float largest = 0.0f;
  for (const float x : plain) largest = std::max(largest, std::abs(x));
  for (const Kernels* const level : levels_with(nullptr)) {
    const std::vector<float> output = attend(*level, s, query, key, value, serial());
    const std::vector<float> again = attend(*level, s, query, key, value, threaded());
    CHECK(output == again, describe(s, level->name) + ": threads change the result");
    const double off = largest_difference(output, plain) / largest;
    // Integers have 8 bits of queries and weights, those of prompts 16, whatever there is of a window.
    const bool is_rounded = s.has_integers && level->multiply_pairs != nullptr;
    const bool has_integers = level->integers != nullptr;
    // Uniform rows are up to 1.2 * 15 * sqrt(D) long. A query's coordinate is off by a deviation of
    // 1 / sqrt(12) of 1 / 127 of some 3.5, so a score by 0.14.
    const double of_bytes = s.codec.kind == Kind::kUniform ? 0.15 : 2e-2;
    const double allowed = has_integers ? of_bytes : (is_rounded ? 2e-4 : 1e-4);
    CHECK(off <= allowed, describe(s, level->name) + ": " + std::to_string(off * 1e6) + "e-6");
  }
  return plain;
}

// A prompt and a step, in caches that are full, that have room for some entries, and for all: then
// the result is that of an overlay, which is the first one here.
TEST(entries_in_spare_rows) {
  for (const Codec codec : float_codecs()) {
    if (codec.kind == Kind::kRaw) continue;
    Sizes s;
    s.codec = codec;
    make_room(&s);
    const int64_t needed = s.window.overlay_rows;
    std::vector<float> expected;
    for (const int64_t spare : {int64_t{0}, int64_t{1}, int64_t{8}, needed / 2, needed + 9}) {
      if (spare > 0) s.window.overlay_rows = 0;
      s.lengths = {0, 0};
      s.tokens = 70;
      s.spare = spare + 1;
      Random of_keys(46), of_values(47), of_queries(48);
      Plane key(s, of_keys), value(s, of_values);
      for (Plane* plane : {&key, &value}) encode(*scalar_kernels(), plane->encode(s), threaded());
      s.lengths = {70, 30};
      s.tokens = 1;
      s.spare = spare;
      for (Plane* plane : {&key, &value}) encode(*scalar_kernels(), plane->encode(s), threaded());
      const std::vector<float> output = solve(s, key, value, of_queries);
      if (spare == 0) expected = output;
      const double off = largest_difference(output, expected);
      CHECK(spare <= needed || off <= 1e-5, describe(s, "scalar") + ": " + std::to_string(off));
    }
  }
}

TEST(window_of_every_codec) {
  Share share;
  Random random(40);
  for (const Codec codec : float_codecs()) {
    if (codec.kind == Kind::kRaw) continue;
    for (const int size : {8, 64, 80}) {
      for (const int64_t tokens : {1, 5, 40}) {
        if (share.leaves_out_next()) continue;
        Sizes s;
        s.codec = codec;
        s.head_size = size;
        s.tokens = tokens;
        make_room(&s);
        Plane key(s, random), value(s, random);
        key.fill_entries(s, random);
        value.fill_entries(s, random);
        for (Plane* plane : {&key, &value}) encode(*scalar_kernels(), plane->encode(s), serial());
        solve(s, key, value, random);
      }
    }
  }
}

// Tiles of many rows, whose exact part goes by attend_block.
TEST(window_of_prompts) {
  Random random(45);
  for (const Window window : {Window{32, 4, 0}, Window{150, 0, 0}, Window{0, 5, 0}}) {
    for (const int variant : {0, 1, 2, 3, 4}) {
      Sizes s;
      s.codec = lloyd_max(variant == 4 ? 3 : 4);
      s.head_size = variant == 4 ? 24 : 64;
      s.heads = 1;
      s.group = variant == 1 ? 1 : 3;
      s.tokens = 210;
      s.lengths = {90, 0};
      s.window = window;
      s.causal = variant != 2;
      s.sliding = variant == 3 ? 20 : 0;
      s.has_integers = variant != 4;
      make_room(&s);
      Plane key(s, random), value(s, random);
      for (Plane* plane : {&key, &value}) {
        plane->fill_entries(s, random);
        plane->vectors[5] = -0.0f;
        plane->vectors[70] = 1e6f;
      }
      solve(s, key, value, random);
    }
  }
}

// A value that is not finite spoils the queries that take it, at every level, and no others.
TEST(window_of_prompts_with_strange_entries) {
  Random random(46);
  Sizes s;
  s.heads = 1;
  s.tokens = 150;
  s.lengths = {90, 0};
  s.window = {32, 2, 0};
  make_room(&s);
  Plane key(s, random), value(s, random);
  key.fill_entries(s, random);
  value.fill_entries(s, random);
  value.entry(s, 0, s.window.entry(80))[1] = 0x7e;
  Guarded<float> query(static_cast<std::size_t>(s.lanes() * s.group * s.tokens * s.head_size));
  fill_normal(query.data(), query.size(), random);
  for (const Kernels* level : supported_kernels()) {
    const std::vector<float> output = attend(*level, s, query, key, value, serial());
    for (int64_t t = 0; t < s.tokens; ++t) {
      const bool is_spoilt = std::isnan(output[static_cast<std::size_t>(t * s.head_size)]);
      CHECK(is_spoilt == (90 + t - 80 < s.window.recent), describe(s, level->name));
    }
  }
}

TEST(window_with_tags_that_lie) {
  Random random(41);
  const auto any = [](Random& r) { return static_cast<uint32_t>(r()); };
  for (const int64_t tokens : {1, 40}) {
    for (int round = 0; round < 20; ++round) {
      Sizes s;
      s.head_size = 24;
      s.tokens = tokens;
      s.window = {round % 3 ? 150 : 9, round % 4, 0};
      make_room(&s);
      Plane key(s, random), value(s, random);
      for (Plane* plane : {&key, &value}) {
        plane->fill_entries(s, random);
        for (int64_t lane = 0; lane < s.lanes(); ++lane) {
          for (int64_t entry = 0; entry < s.window.entries(); ++entry) {
            const uint32_t tag = any(random);
            const uint32_t lies[] = {tag, tag % 80, 0xffffffffu, 0x80000000u, 0};
            if (tag % 3 == 0) {
              set_entry_tag(plane->entry(s, lane, entry), s.head_size, lies[tag % 5]);
            }
          }
        }
      }
      // Halves that nobody writes are not taken, unless a tag says so: those would be no numbers.
      for (Plane* plane : {&key, &value}) {
        for (int64_t lane = 0; lane < s.lanes(); ++lane) {
          for (int64_t entry = 0; entry < s.window.entries(); ++entry) {
            uint8_t* const out = plane->entry(s, lane, entry);
            for (int j = 0; j < s.head_size; ++j) out[2 * j + 1] &= 0xbf;
          }
        }
      }
      solve(s, key, value, random);
    }
  }
}

// All that queries see is in the window: what the rows hold does not matter.
TEST(window_that_holds_everything) {
  Random random(42);
  for (const int64_t tokens : {1, 40}) {
    Sizes s;
    s.tokens = tokens;
    s.lengths = {20, 0};
    s.window = {100, 0, 0};
    make_room(&s);
    Plane key(s, random), value(s, random);
    for (Plane* plane : {&key, &value}) {
      plane->fill_entries(s, random);
      encode(*scalar_kernels(), plane->encode(s), serial());
    }
    const Random before = random;
    const std::vector<float> output = solve(s, key, value, random);
    for (Plane* plane : {&key, &value}) {
      for (int64_t lane = 0; lane < s.lanes(); ++lane) {
        uint8_t* const plane_at = plane->cache.data() + lane * s.slots() * s.width();
        std::fill(plane_at + s.window.overlay_rows * s.width(), plane_at + s.slots() * s.width(),
                  uint8_t{0xff});
      }
    }
    random = before;
    CHECK(solve(s, key, value, random) == output, describe(s, "rows"));
  }
}

TEST(window_entries_of_every_call) {
  Random random(43);
  for (const int64_t tokens : {0, 1, 7, 60}) {
    Sizes s;
    s.tokens = tokens;
    s.lengths = {0, 30};
    make_room(&s);
    Plane plane(s, random);
    std::vector<std::vector<uint8_t>> made;
    for (const Kernels* level : supported_kernels()) {
      Random same(44);
      fill_rows(plane.cache.data(), static_cast<std::size_t>(s.lanes() * s.slots()), s.codec,
                s.head_size, s.width(), same);
      plane.fill_entries(s, same);
      encode(*level, plane.encode(s), threaded());
      made.emplace_back(plane.cache.begin(), plane.cache.end());
      CHECK(made.back() == made.front(), describe(s, level->name));
    }
    for (int64_t lane = 0; lane < s.lanes(); ++lane) {
      const int64_t past = s.lengths[static_cast<std::size_t>(lane / s.heads)];
      const int64_t end = past + tokens;
      for (int64_t entry = 0; entry < s.window.entries(); ++entry) {
        int64_t newest = -1;  // the last token whose entry it is
        for (int64_t t = 0; t < end; ++t) {
          if (s.window.entry(t) == entry) newest = t;
        }
        CHECK(entry_tag(plane.entry(s, lane, entry), s.head_size) ==
                  static_cast<uint32_t>(newest + 1),
              describe(s, "tags"));
      }
    }
  }
}

}  // namespace
}  // namespace tq::test
