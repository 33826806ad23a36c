// Offsets of keys that turn with their slots, against their definition in float64.
#include <cmath>
#include <string>
#include <vector>

#include "core/rotary_offset.h"
#include "tests/attention_problem.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

// Edges of blocks and of digits, and behind what tables reach.
constexpr int64_t kSlots[] = {0,     1,      127,    128,     129,     3000,    16383,  16384,
                              16411, 131072, 500000, 1048576, 1052577, 2097152, 5000001};
constexpr float kPi = 3.14159274f;

// Frequencies from `fastest` down, and offsets of heads, with rows for the first slots.
struct Offsets {
  Offsets(int size, int64_t heads, float fastest, Random& random)
      : frequencies(static_cast<std::size_t>(size)),
        offset(static_cast<std::size_t>(kRows * heads * size)) {
    fill_frequencies(frequencies, fastest, random);
    fill_normal(offset.data(), offset.size(), random, 2.0f);
    // Coordinates without a mean.
    for (std::size_t i = 0; i < offset.size(); ++i) {
      if (i % static_cast<std::size_t>(size) % 7 == 3) offset[i] = 0.0f;
    }
  }

  static constexpr int64_t kRows = 2 + 5;
  Guarded<float> frequencies, offset;
};

TEST(tables_have_the_angles_of_any_slot) {
  std::vector<float> frequencies;
  for (double f = kPi; f > 1e-7; f /= 3) frequencies.push_back(static_cast<float>(f));
  frequencies.push_back(0.0f);
  const RotaryTables tables(frequencies);
  const std::size_t count = frequencies.size();
  Guarded<float> scratch(2 * tables.width());
  double worst = 0;
  for (const int64_t slot : kSlots) {
    const float* const angles = tables.at(slot, scratch.data());
    for (std::size_t i = 0; i < count; ++i) {
      const double angle = static_cast<double>(frequencies[i]) * static_cast<double>(slot);
      worst = std::max({worst, std::abs(angles[i] - std::cos(angle)),
                        std::abs(angles[tables.width() + i] - std::sin(angle))});
    }
  }
  CHECK(worst <= 3e-7, std::to_string(worst * 1e7) + "e-7");
}

TEST(tables_are_shared) {
  const std::vector<float> some{0.5f, 0.25f}, others{0.5f, 0.125f};
  const auto tables = RotaryTables::shared(some);
  CHECK(RotaryTables::shared(some) == tables, "the same");
  CHECK(RotaryTables::shared(others) != tables, "others");
}

// Products of queries with the offsets of a block, wherever it begins.
TEST(shifts_of_blocks) {
  Share share;
  Random random(90);
  for (const int size : kHeadSizes) {
    for (const float fastest : {kPi, 0.4f, 0.02f, 1e-6f}) {
      const int64_t heads = 2;
      const int rows = 1 + static_cast<int>(random() % 9);
      const Offsets own(size, heads, fastest, random);
      const RotaryOffset offset(own.frequencies.data(), own.offset.data(), Offsets::kRows, heads,
                                size);
      const std::size_t width = offset.query_width();
      Guarded<float> queries(static_cast<std::size_t>(rows * size));
      Guarded<float> prepared(static_cast<std::size_t>(rows) * width);
      Guarded<float> scores(static_cast<std::size_t>(rows) * kBlock), scales(kBlock);
      fill_normal(queries.data(), queries.size(), random);
      fill_normal(scales.data(), kBlock, random);
      for (const int64_t slot : kSlots) {
        if (share.leaves_out_next()) continue;
        const int64_t padding = random() % 2 ? 0 : static_cast<int64_t>(random()) % (slot + 1);
        const auto head = [](int r) { return int64_t{r % 2}; };
        for (int r = 0; r < rows; ++r) {
          offset.prepare_query(head(r), padding, queries.data() + r * size,
                               prepared.data() + static_cast<std::size_t>(r) * width);
        }
        for (const Kernels* level : supported_kernels()) {
          for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = i % 3 ? 0.5f : 0.0f;
          offset.add_to_scores(*level, prepared.data(), width, rows, slot, padding, scales.data(),
                               scores.data());
          double worst = 0;  // of the largest that a sum can be
          for (int r = 0; r < rows; ++r) {
            double most = 0;
            std::vector<double> sums(kBlock);
            for (int t = 0; t < kBlock; ++t) {
              if ((r * kBlock + t) % 3)
                sums[static_cast<std::size_t>(t)] = 0.5 * scales[static_cast<std::size_t>(t)];
            }
            for (int j = 0; j < size; ++j) {
              const double x = queries[static_cast<std::size_t>(r * size + j)];
              for (int64_t row = 0; row < Offsets::kRows; ++row) {
                most += std::abs(
                    x * own.offset[static_cast<std::size_t>((row * heads + head(r)) * size + j)]);
              }
              for (int t = 0; t < kBlock; ++t) {
                sums[static_cast<std::size_t>(t)] +=
                    x * offset_at(own.offset.data(), Offsets::kRows, own.frequencies.data(), heads,
                                  size, head(r), slot - padding + t, j);
              }
            }
            for (int t = 0; t < kBlock; ++t) {
              const float score = scores[static_cast<std::size_t>(r * kBlock + t)];
              worst = std::max(worst, std::abs(score - sums[static_cast<std::size_t>(t)]) / most);
            }
          }
          CHECK(worst <= 1e-5, std::string(level->name) + ", head size " + std::to_string(size) +
                                   ", slot " + std::to_string(slot) + ", by " +
                                   std::to_string(fastest) + ": " + std::to_string(worst * 1e6) +
                                   "e-6");
        }
      }
    }
  }
}

TEST(attention_with_offsets_that_turn) {
  Share share;
  Random random(91);
  for (const Codec codec : float_codecs()) {
    for (const float fastest : {3.0f, 0.3f}) {
      for (const int64_t tokens : {int64_t{1}, int64_t{3}, int64_t{50}}) {
        if (share.leaves_out_next()) continue;
        Problem p = uneven_problem(codec, fastest > 1 ? codec : lloyd_max(4), 260, tokens);
        p.fastest = fastest;
        p.offsets = fastest > 1 ? 2 : 0;
        p.first_slots = static_cast<int64_t>(random() % 6);
        p.has_integers = random() % 2 == 0;
        if (random() % 2 == 0) p.left_padding = {131, 1};
        if (codec.kind != Kind::kRaw && random() % 2 == 0) p.exact = {32, 4, 0};
        if (tokens == 50 && fastest > 1) p.bias_dims = {2, 4, tokens, 260 + tokens};
        solve(p, random);
      }
    }
  }
  for (const int64_t offsets : {0, 1, 2, 64}) {  // many chunks, of which some are skipped
    Problem p;
    p.head_size = offsets == 1 ? 64 : 128;
    p.heads = 2;
    p.group = 5;
    p.batch = 2;
    p.lengths = {4700, 511};
    p.slots = 4800;
    p.fastest = 0.39f;
    p.offsets = offsets;
    p.first_slots = offsets == 64 ? 62 : offsets;
    p.has_integers = true;
    if (offsets == 2) p.exact = {32, 4, 0};
    if (offsets == 0) p.left_padding = {33, 500};
    solve(p, random);
  }
}

TEST(offsets_turn_far_away) {
  Random random(92);
  for (const int64_t past : {int64_t{16384}, int64_t{131000}, int64_t{1048576}}) {
    for (const int64_t tokens : {1, 70}) {
      Problem p;
      p.head_size = 8;
      p.key = p.value = lloyd_max(4);
      p.group = 2;
      p.tokens = tokens;
      p.lengths = {past};
      p.slots = past + tokens;
      p.window = 300;
      p.fastest = 0.39f;
      p.left_padding = {past / 3};
      p.with_threads = past < 100000;
      solve(p, random);
    }
  }
}

// A raw row is x - m(p) itself, and any other the row of what the raw one holds.
TEST(rows_are_encoded_without_means_that_turn) {
  Random random(93);
  for (const Codec codec : float_codecs()) {
    for (const int64_t tokens : {1, 40}) {
      const int size = 64;
      const int64_t batch = 2, heads = 3, slots = 20000;
      const std::vector<int64_t> lengths{16390, 150}, padding{5, 170};
      const std::size_t d = static_cast<std::size_t>(size);
      const Tables raw_tables(kRaw, size, random), tables(codec, size, random);
      const Offsets own(size, heads, 0.4f, random);
      const RotaryOffset offset(own.frequencies.data(), own.offset.data(), Offsets::kRows, heads,
                                size);
      Guarded<float> vectors(static_cast<std::size_t>(batch * heads * tokens) * d);
      fill_normal(vectors.data(), vectors.size(), random, 3.0f);
      const auto encoded = [&](const Kernels& level, Codec kind, const Tables& of_kind,
                               const float* x, bool is_turned) {
        const int width = spec::row_bytes(kind, size);
        EncodeCall call = encode_call(kind, size, width, of_kind);
        std::vector<uint8_t> rows(static_cast<std::size_t>(batch * heads * slots * width));
        call.vectors = x;
        call.past = call.present = rows.data();
        call.past_length = lengths.data();
        call.length_per_batch = true;
        call.batch = batch;
        call.heads = heads;
        call.tokens = tokens;
        call.past_slots = call.present_slots = slots;
        if (is_turned) {
          call.rotary_offset = &offset;
          call.left_padding = padding.data();
          call.padding_per_batch = true;
        }
        encode(level, call, threaded());
        std::vector<uint8_t> written;
        for (int64_t lane = 0; lane < batch * heads; ++lane) {
          const auto from =
              rows.begin() +
              (lane * slots + lengths[static_cast<std::size_t>(lane / heads)]) * width;
          written.insert(written.end(), from, from + tokens * width);
        }
        return written;
      };
      const std::vector<uint8_t> raw =
          encoded(*scalar_kernels(), kRaw, raw_tables, vectors.data(), true);
      Guarded<float> rests(vectors.size());
      std::memcpy(rests.data(), raw.data(), raw.size());
      double worst = 0;
      for (std::size_t i = 0; i < rests.size(); ++i) {
        const int64_t row = static_cast<int64_t>(i / d), lane = row / tokens;
        const std::size_t b = static_cast<std::size_t>(lane / heads);
        const int64_t slot = std::max<int64_t>(0, lengths[b] + row % tokens - padding[b]);
        const double mean = offset_at(own.offset.data(), Offsets::kRows, own.frequencies.data(),
                                      heads, size, lane % heads, slot, static_cast<int>(i % d));
        worst = std::max(worst, std::abs(vectors[i] - mean - rests[i]));
      }
      CHECK(worst <= 5e-6, name_of(codec) + ": " + std::to_string(worst * 1e6) + "e-6");
      const std::vector<uint8_t> expected =
          encoded(*scalar_kernels(), codec, tables, rests.data(), false);
      for (const Kernels* level : supported_kernels()) {
        CHECK(encoded(*level, codec, tables, vectors.data(), true) == expected,
              describe(level->name, codec, size));
      }
    }
  }
}

// What a window holds exactly are the vectors themselves.
TEST(entries_keep_means_that_turn) {
  Random random(94);
  const int size = 64;
  const Codec codec = lloyd_max(4);
  const int width = spec::row_bytes(codec, size);
  const Tables tables(codec, size, random);
  const Offsets own(size, 1, 0.4f, random);
  const RotaryOffset offset(own.frequencies.data(), own.offset.data(), Offsets::kRows, 1, size);
  const int64_t tokens = 50, length = 0;
  const Window window{8, 4, 12 * spec::rows_per_entry(size, width)};
  const int64_t slots = window.overlay_rows + tokens;
  Guarded<float> vectors(static_cast<std::size_t>(tokens * size));
  fill_normal(vectors.data(), vectors.size(), random);
  std::vector<uint8_t> rows[2];
  for (const bool is_turned : {false, true}) {
    std::vector<uint8_t>& cache = rows[is_turned];
    cache.resize(static_cast<std::size_t>(slots * width));
    EncodeCall call = encode_call(codec, size, width, tables);
    call.vectors = vectors.data();
    call.past = call.present = cache.data();
    call.past_length = &length;
    call.tokens = tokens;
    call.past_slots = call.present_slots = slots;
    call.window = window;
    if (is_turned) call.rotary_offset = &offset;
    encode(*supported_kernels().front(), call, serial());
  }
  const auto end = rows[0].begin() + window.overlay_rows * width;
  CHECK(std::equal(rows[0].begin(), end, rows[1].begin()), "entries");
  CHECK(rows[0] != rows[1], "rows");
}

}  // namespace
}  // namespace tq::test
