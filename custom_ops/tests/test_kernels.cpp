// The inner loops of every level against the definition of the row layout, between guard pages.
#include "tests/fixture.h"
#include "tests/testing.h"

#include <limits>

namespace tq::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

bool near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance; }

// Every number of bits per code that has its own planes.
constexpr Codec kPacked[] = {lloyd_max(1), lloyd_max(2), lloyd_max(3),
                             lloyd_max(4), lloyd_max(5), {Kind::kU8, 4}};

struct Rows {
  Rows(const Kernels& level, Codec codec_, int size, int count_, int more, Side side,
       Random& random)
      : codec(codec_),
        format(row_format(codec.kind == Kind::kU8 ? 8 : codec.bits, size, level.lanes,
                          spec::row_bytes(codec, size) + more)),
        fields(spec::code_bytes(codec, size)),
        count(count_),
        bytes(static_cast<std::size_t>(count) * format.stride, side) {
    fill_rows(bytes.data(), static_cast<std::size_t>(count), codec, size, format.stride, random);
    float centroids[spec::kMaxLevels], boundaries[spec::kMaxLevels];
    fill_codebook(codec.bits, size, centroids, boundaries);
    fill_table(centroids, 1 << codec.bits, table);
  }
  float centroid(int t, int j) const {
    const uint8_t* const row = bytes.data() + t * format.stride;
    return table[code_of(codec, format.head_size, row, j) % kTable];
  }
  // Position of coordinate j in slot order.
  int at(int j) const { return j / format.slot_size * format.padded_slot + j % format.slot_size; }

  Codec codec;
  RowFormat format;
  int fields, count;
  Guarded<uint8_t> bytes;
  float table[kTable];
};

template <class Body>
void for_each_format(Body&& body) {
  Random random(7);
  for (const Kernels* level : supported_kernels()) {
    for (const int size : kHeadSizes) {
      for (const Codec codec : kPacked) {
        for (const int count : {1, 3, 4, 17, kBlock}) {
          const Side side = count % 2 ? Side::kBegin : Side::kEnd;
          const Rows rows(*level, codec, size, count, count == 17 ? 5 : 0, side, random);
          body(*level, rows, random, describe(level->name, codec, size));
        }
      }
    }
  }
}

TEST(decoding_follows_the_layout) {
  for_each_format([](const Kernels& level, const Rows& rows, Random&, const std::string& what) {
    const RowFormat& format = rows.format;
    Guarded<float> values(static_cast<std::size_t>(rows.count) * format.padded);
    Guarded<float> keys(static_cast<std::size_t>(kBlock) * format.padded);
    Guarded<float> scales(kBlock);
    level.decode_rows(format, rows.bytes.data(), rows.count, rows.table, values.data());
    level.decode_columns(format, rows.bytes.data(), rows.count, rows.table, keys.data());
    level.load_fields(rows.bytes.data() + rows.fields, format.stride, rows.count, scales.data());
    if (format.stride >= 4) {  // pairs: the last bytes of a row, whatever they say
      const uint8_t* const pair = rows.bytes.data() + format.stride - 4;
      Guarded<float> first(kBlock), second(kBlock), one(kBlock), other(kBlock);
      level.load_field_pairs(pair, format.stride, rows.count, first.data(), second.data());
      level.load_fields(pair, format.stride, rows.count, one.data());
      level.load_fields(pair + 2, format.stride, rows.count, other.data());
      const auto is_same = [](float a, float b) { return a == b || (a != a && b != b); };
      CHECK(std::equal(first.begin(), first.end(), one.begin(), is_same) &&
                std::equal(second.begin(), second.end(), other.begin(), is_same),
            describe(level.name, rows.codec, format.head_size));
    }
    bool same = true;
    for (int t = 0; t < rows.count; ++t) {
      for (int j = 0; j < format.head_size; ++j) {
        const float expected = rows.centroid(t, j);
        same = same && values[static_cast<std::size_t>(t * format.padded + rows.at(j))] == expected;
        same = same && keys[static_cast<std::size_t>(rows.at(j) * kBlock + t)] == expected;
      }
      const float scale = half_at(rows.bytes.data() + t * format.stride + rows.fields);
      const float got = scales[static_cast<std::size_t>(t)];
      same = same && (got == scale || std::isnan(scale));
    }
    CHECK(same, what);
  });
}

TEST(fused_scores_and_sums_are_right) {
  for_each_format(
      [](const Kernels& level, const Rows& rows, Random& random, const std::string& what) {
        const RowFormat& format = rows.format;
        for (int queries = 1; queries <= std::min(level.max_fused, 7); ++queries) {
          const std::size_t size = static_cast<std::size_t>(queries) * format.padded;
          Guarded<float> query(size), sums(size);
          Guarded<float> scores(static_cast<std::size_t>(queries) * kBlock);
          std::vector<float> natural(static_cast<std::size_t>(format.head_size));
          std::vector<double> expected(scores.size());
          for (int q = 0; q < queries; ++q) {
            fill_normal(natural.data(), natural.size(), random);
            to_slot_order(format, natural.data(), query.data() + q * format.padded);
            for (int t = 0; t < rows.count; ++t) {
              for (int j = 0; j < format.head_size; ++j) {
                expected[static_cast<std::size_t>(q * kBlock + t)] +=
                    static_cast<double>(natural[static_cast<std::size_t>(j)]) * rows.centroid(t, j);
              }
            }
          }
          level.score_rows(format, rows.bytes.data(), rows.count, rows.table, query.data(), queries,
                           scores.data());
          double worst = 0;
          for (int q = 0; q < queries; ++q) {
            for (int t = 0; t < rows.count; ++t) {
              const std::size_t i = static_cast<std::size_t>(q * kBlock + t);
              worst = std::max(worst, std::abs(scores[i] - expected[i]));
            }
          }
          CHECK(worst < 2e-5, what + ", score off by " + std::to_string(worst));

          fill_normal(scores.data(), scores.size(), random);
          std::fill(sums.begin(), sums.end(), 1.0f);
          level.accumulate_rows(format, rows.bytes.data(), rows.count, rows.table, scores.data(),
                                queries, sums.data());
          worst = 0;
          for (int q = 0; q < queries; ++q) {
            for (int j = 0; j < format.head_size; ++j) {
              double sum = 1;
              for (int t = 0; t < rows.count; ++t) {
                sum += static_cast<double>(scores[static_cast<std::size_t>(q * kBlock + t)]) *
                       rows.centroid(t, j);
              }
              const float got = sums[static_cast<std::size_t>(q * format.padded + rows.at(j))];
              worst = std::max(worst, std::abs(got - sum));
            }
          }
          CHECK(worst < 2e-4, what + ", sum off by " + std::to_string(worst));
        }
      });
}

TEST(products_and_rotations_are_right) {
  Random random(8);
  for (const Kernels* level : supported_kernels()) {
    for (const int m : {1, 2, 5, 6, 7, 13}) {
      for (const int n : {16, 64, 80, 128}) {
        for (const int k : {1, 8, 65}) {
          for (const bool accumulate : {false, true}) {
            Guarded<float> a(static_cast<std::size_t>(m * k)), b(static_cast<std::size_t>(k * n)),
                c(static_cast<std::size_t>(m * n));
            fill_normal(a.data(), a.size(), random);
            fill_normal(b.data(), b.size(), random);
            std::fill(c.begin(), c.end(), accumulate ? 2.0f : kNan);
            level->multiply(a.data(), k, b.data(), n, c.data(), n, m, n, k, accumulate);
            bool good = true;
            for (int i = 0; i < m; ++i) {
              for (int j = 0; j < n; ++j) {
                double sum = accumulate ? 2 : 0;
                for (int x = 0; x < k; ++x) {
                  sum += static_cast<double>(a[static_cast<std::size_t>(i * k + x)]) *
                         b[static_cast<std::size_t>(x * n + j)];
                }
                good = good && near(c[static_cast<std::size_t>(i * n + j)], sum, 1e-4);
              }
            }
            CHECK(good, std::string(level->name) + " " + std::to_string(m) + "x" +
                            std::to_string(n) + "x" + std::to_string(k));
          }
        }
      }
    }
    for (const int size : kHeadSizes) {  // rotations agree to the bit
      const int rows = 9;
      Guarded<float> x(static_cast<std::size_t>(rows * size)), y(x.size()), expected(x.size());
      Guarded<float> rotation(static_cast<std::size_t>(size) * size);
      fill_normal(x.data(), x.size(), random);
      fill_normal(rotation.data(), rotation.size(), random);
      const float* const matrix = rotation.data();
      scalar_kernels()->rotate(x.data(), size, matrix, size, expected.data(), size, rows, size,
                               size);
      level->rotate(x.data(), size, matrix, size, y.data(), size, rows, size, size);
      CHECK(std::memcmp(y.data(), expected.data(), x.size() * sizeof(float)) == 0,
            std::string(level->name) + ", " + std::to_string(size));
    }
  }
}

TEST(signs_are_decoded) {
  Random random(16);
  const float signs[kTable] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1,
                               -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
  UniformInt<int> byte(0, 255);
  for (const Kernels* level : supported_kernels()) {
    for (const int size : kHeadSizes) {
      const RowFormat format = row_format(1, size, level->lanes, size / 8);
      Guarded<uint8_t> rows(static_cast<std::size_t>(3 * format.stride));
      Guarded<float> values(static_cast<std::size_t>(3 * format.padded));
      for (uint8_t& x : rows) x = static_cast<uint8_t>(byte(random));
      level->decode_rows(format, rows.data(), 3, signs, values.data());
      bool same = true;
      for (int t = 0; t < 3; ++t) {
        for (int j = 0; j < size; ++j) {
          const int slot = j / format.slot_size, at = j % format.slot_size;
          const bool is_set = rows[static_cast<std::size_t>(t * format.stride + at)] >> slot & 1;
          same = same &&
                 values[static_cast<std::size_t>(t * format.padded + slot * format.padded_slot +
                                                 at)] == (is_set ? 1.0f : -1.0f);
        }
      }
      CHECK(same, std::string(level->name) + ", " + std::to_string(size));
    }
  }
}

TEST(bytes_become_floats) {
  Guarded<uint8_t> codes(256);
  Guarded<float> out(256);
  for (int i = 0; i < 256; ++i) codes[static_cast<std::size_t>(i)] = static_cast<uint8_t>(i);
  for (const Kernels* level : supported_kernels()) {
    for (const int from : {0, 8, 40, 248}) {
      const std::size_t at = static_cast<std::size_t>(from);
      level->decode_fp8(codes.data() + at, out.data() + at, 256 - from);
      bool same = true;
      for (int i = from; i < 256; ++i) {
        const float got = out[static_cast<std::size_t>(i)];
        same = same && got == static_cast<float>(fp8_value(i));
      }
      CHECK(same, level->name);
      level->decode_int8(codes.data() + at, 0.375f, out.data() + at, 256 - from);
      for (int i = from; i < 256; ++i) {
        const int code = i < 128 ? i : i - 256;
        same = same && out[static_cast<std::size_t>(i)] == 0.375f * static_cast<float>(code);
      }
      CHECK(same, level->name);
    }
  }
}

// Every float that is halfway between two codes, and its neighbours, goes to the even one or the
// nearer one.
TEST(floats_become_the_nearest_fp8) {
  std::vector<float> values{0.0f, -0.0f, 1e-45f, 1e-30f, 448.0f, 464.0f, 1e38f, 3.4e38f};
  std::vector<int> expected{0, 0x80, 0, 0, 0x7e, 0x7e, 0x7e, 0x7e};
  for (int code = 0; code < 0x7e; ++code) {
    const float low = static_cast<float>(fp8_value(code));
    const float high = static_cast<float>(fp8_value(code + 1));
    const float middle = 0.5f * (low + high);  // exact
    values.insert(values.end(), {low, std::nextafter(middle, 0.0f), middle,
                                 std::nextafter(middle, kInfinity), -middle});
    const int even = code % 2 ? code + 1 : code;
    expected.insert(expected.end(), {code, code, even, code + 1, even | 0x80});
  }
  while (values.size() % 8) {
    values.push_back(1.0f);
    expected.push_back(0x38);
  }
  Guarded<float> x(values.size());
  Guarded<uint8_t> codes(values.size());
  std::copy(values.begin(), values.end(), x.begin());
  for (const Kernels* level : supported_kernels()) {
    level->encode_fp8(x.data(), codes.data(), static_cast<int>(x.size()));
    bool same = true;
    for (std::size_t i = 0; i < x.size(); ++i) same = same && codes[i] == expected[i];
    CHECK(same, level->name);
  }
}

TEST(steps_are_rounded_to_even_and_kept_in_range) {
  const float x[] = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f,   1e38f,  -1e38f, 3.0f,
                     3.4f, 3.6f, 0.0f, -0.0f, -127.5f, 126.5f, -2.4f,  7.0f};
  const int signed_codes[] = {0, 2, 2, 0, -2, 127, -127, 3, 3, 4, 0, 0, -127, 126, -2, 7};
  Guarded<float> in(16);
  Guarded<uint8_t> codes(16);
  for (const Kernels* level : supported_kernels()) {
    for (const int size : {8, 16}) {
      const std::size_t at = static_cast<std::size_t>(16 - size);
      std::copy(x, x + 16, in.begin());
      level->round_steps(in.data() + at, 0.0f, 1.0f, -127.0f, 127.0f, codes.data() + at, size);
      bool same = true;
      for (std::size_t i = at; i < 16; ++i) {
        same = same && static_cast<int8_t>(codes[i]) == signed_codes[i];
      }
      CHECK(same, level->name);
      for (float& value : in) value = 0.25f * value - 3.0f;
      level->round_steps(in.data() + at, -3.0f, 0.25f, 0.0f, 7.0f, codes.data() + at, size);
      for (std::size_t i = at; i < 16; ++i) {
        const int code = signed_codes[i] < 0 ? 0 : signed_codes[i] > 7 ? 7 : signed_codes[i];
        same = same && codes[i] == code;
      }
      CHECK(same, level->name);
    }
  }
}

TEST(scores_of_two_parts_are_added) {
  Random random(18);
  for (const Kernels* level : supported_kernels()) {
    for (const int count : {1, 3, 4, 16, 17, 64, 127, kBlock}) {
      Guarded<float> first(kBlock), second(kBlock), x(kBlock), other(kBlock), expected(kBlock);
      for (Guarded<float>* const each : {&first, &second, &x, &other}) {
        fill_normal(each->data(), kBlock, random);
      }
      std::copy(x.begin(), x.end(), expected.begin());
      scalar_kernels()->add_scaled(expected.data(), first.data(), other.data(), second.data(),
                                   count);
      level->add_scaled(x.data(), first.data(), other.data(), second.data(), count);
      CHECK(std::equal(x.begin(), x.begin() + count, expected.begin()), level->name);
    }
  }
}

TEST(blocks_are_transposed) {
  Random random(17);
  for (const Kernels* level : supported_kernels()) {
    for (const int width : {16, 48, 128}) {
      for (const int count : {1, 5, 16, 17, kBlock}) {
        Guarded<float> rows(static_cast<std::size_t>(count * width));
        Guarded<float> columns(static_cast<std::size_t>(kBlock * width));
        fill_normal(rows.data(), rows.size(), random);
        level->transpose_block(rows.data(), count, width, columns.data());
        bool same = true;
        for (int t = 0; t < count; ++t) {
          for (int j = 0; j < width; ++j) {
            same = same && rows[static_cast<std::size_t>(t * width + j)] ==
                               columns[static_cast<std::size_t>(j * kBlock + t)];
          }
        }
        CHECK(same, level->name);
      }
    }
  }
}

TEST(softmax_steps_hide_and_keep) {
  Random random(9);
  for (const Kernels* level : supported_kernels()) {
    for (const int count : {1, 5, 16, 31, kBlock}) {
      for (const bool with_bias : {false, true}) {
        for (const float softcap : {0.0f, 3.0f}) {
          Guarded<float> scores(kBlock), key_scales(kBlock), value_scales(kBlock), bias(kBlock);
          Guarded<float> shift(kBlock);
          fill_normal(scores.data(), kBlock, random, 4.0f);
          std::fill(key_scales.begin(), key_scales.end(), 0.5f);
          std::fill(value_scales.begin(), value_scales.end(), 2.0f);
          fill_normal(bias.data(), kBlock, random);
          fill_normal(shift.data(), kBlock, random);
          const int low = count > 8 ? 3 : 0, high = count > 8 ? count - 2 : count;
          std::vector<double> expected(kBlock, -INFINITY);
          double top = -INFINITY;
          for (int t = low; t < high; ++t) {
            if (with_bias && t % 4 == 1) {
              bias[static_cast<std::size_t>(t)] = t % 8 == 1 ? -kInfinity : -3e38f;
              continue;
            }
            const std::size_t i = static_cast<std::size_t>(t);
            double s = 0.5 * scores[i] + (with_bias ? shift[i] : 0.0f);
            if (softcap > 0) s = softcap * std::tanh(s / softcap);
            expected[i] = s + (with_bias ? bias[i] : 0.0f);
            top = std::max(top, expected[i]);
          }
          for (int t = 0; t < kBlock; ++t) {  // hidden positions are never looked at
            if (expected[static_cast<std::size_t>(t)] != -INFINITY) continue;
            key_scales[static_cast<std::size_t>(t)] = kNan;
            value_scales[static_cast<std::size_t>(t)] = kNan;
          }
          const float max = level->finish_scores(
              scores.data(), key_scales.data(), with_bias ? shift.data() : nullptr,
              with_bias ? bias.data() : nullptr, -1.7e38f, softcap, count, low, high);
          CHECK(max == top || near(max, top, 2e-6), level->name);
          const float used = std::isinf(max) ? 0.0f : max;
          const double sum = level->weigh(scores.data(), value_scales.data(), count, used);
          double expected_sum = 0;
          bool good = true;
          for (int t = 0; t < count; ++t) {
            const double e = std::exp(expected[static_cast<std::size_t>(t)] - used);
            expected_sum += e;
            const float got = scores[static_cast<std::size_t>(t)];
            good = good && (e == 0 ? got == 0.0f : near(got, 2 * e, 1e-5));
          }
          CHECK(good && near(sum, expected_sum, 1e-5 * kBlock), level->name);
        }
      }
    }
    float scores[kBlock] = {kNan, 1.0f}, scales[kBlock];
    std::fill_n(scales, kBlock, 1.0f);
    const float max =
        level->finish_scores(scores, scales, nullptr, nullptr, -1.7e38f, 0.0f, 2, 0, 2);
    CHECK(max == 1.0f, level->name);
    CHECK(std::isnan(level->weigh(scores, scales, 2, max)), level->name);
  }
}

TEST(products_are_chosen_by_name) {
  for (const Kernels* level : supported_kernels()) {
    std::string reason;
    CHECK(with_products(*level, nullptr, reason) == level, level->name);
    const std::string own = level->name;
    CHECK((own == "scalar") == (level->integers == nullptr), own + ": the default");
    const Kernels* const bytes = with_products(*level, "8", reason);
    CHECK(bytes != nullptr && std::string(bytes->name) == level->name && bytes->integers != nullptr,
          level->name);
    const Kernels* const exact = with_products(*level, "float", reason);
    CHECK(exact != nullptr && exact->integers == nullptr && exact->multiply_pairs == nullptr,
          level->name);
    CHECK(std::string(exact->name) == level->name, level->name);
    CHECK(with_products(*level, "fast", reason) == nullptr &&
              reason.find("expected 8 or float") != std::string::npos,
          reason);
    CHECK(with_products(*level, "16", reason) == nullptr &&
              reason.find("'16', which was removed") != std::string::npos,
          reason);
  }
}

TEST(unknown_levels_are_refused_by_name) {
  std::string reason;
  CHECK(find_kernels("mmx", reason) == nullptr, "no such level");
  CHECK(reason.find("mmx") != std::string::npos && reason.find("scalar") != std::string::npos,
        reason);
  CHECK(std::string(find_kernels("scalar", reason)->name) == "scalar", "scalar is everywhere");
  CHECK(find_kernels("", reason) == supported_kernels().front(), "empty means the best");
  CHECK(find_kernels(nullptr, reason) == supported_kernels().front(), "unset means the best");
}

}  // namespace
}  // namespace tq::test
