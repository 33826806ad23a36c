// Raw rows of every element type: stored to the bit, read as floats, wherever they lie.
#include <limits>
#include <string>
#include <utility>

#include "core/attention.h"
#include "core/encode.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr Element kElements[] = {Element::kFloat, Element::kHalf, Element::kBfloat};

std::string describe(const char* level, Element element, int size) {
  return std::string(level) + ", element of " + std::to_string(element_size(element)) +
         " bytes, head size " + std::to_string(size);
}

Codec raw_of(Element element) { return {Kind::kRaw, static_cast<int>(8 * element_size(element))}; }

EncodeCall raw_call(Element element, int size) {
  EncodeCall call{};
  call.element = element;
  call.head_size = size;
  call.codec = raw_of(element);
  call.width = spec::row_bytes(call.codec, size);
  return call;
}

TEST(raw_rows_are_the_vectors) {
  Random random(30);
  UniformInt<int> byte(0, 255);
  const int64_t batch = 2, heads = 2, tokens = 11, lengths[] = {3, 0};
  for (const Element element : kElements) {
    for (const int size : kHeadSizes) {
      const std::size_t width = static_cast<std::size_t>(size) * element_size(element);
      for (const int64_t past_slots : {int64_t{3}, int64_t{20}}) {
        const int64_t slots = std::max<int64_t>(past_slots, 14);
        Guarded<uint8_t> vectors(static_cast<std::size_t>(batch * heads * tokens) * width);
        Guarded<uint8_t> past(static_cast<std::size_t>(batch * heads * past_slots) * width);
        Guarded<uint8_t> present(static_cast<std::size_t>(batch * heads * slots) * width);
        for (uint8_t& x : vectors) x = static_cast<uint8_t>(byte(random));  // NaN and all
        for (uint8_t& x : past) x = static_cast<uint8_t>(byte(random));
        EncodeCall call = raw_call(element, size);
        call.vectors = vectors.data();
        call.past = past.data();
        call.present = present.data();
        call.past_length = lengths;
        call.length_per_batch = true;
        call.batch = batch;
        call.heads = heads;
        call.tokens = tokens;
        call.past_slots = past_slots;
        call.present_slots = slots;
        const Kernels& kernels = *supported_kernels().front();
        encode(kernels, call, threaded());
        bool same = true;
        for (int64_t lane = 0; lane < batch * heads; ++lane) {
          const int64_t length = lengths[lane / heads];
          for (int64_t s = 0; s < slots; ++s) {
            const std::vector<uint8_t> zeros(width, 0);
            const bool is_new = s >= length && s < length + tokens;
            const uint8_t* expected = zeros.data();
            if (is_new) {
              const int64_t at = lane * tokens + s - length;
              expected = vectors.data() + static_cast<std::size_t>(at) * width;
            } else if (s < past_slots) {
              expected = past.data() + static_cast<std::size_t>(lane * past_slots + s) * width;
            }
            const uint8_t* const row =
                present.data() + static_cast<std::size_t>(lane * slots + s) * width;
            same = same && std::memcmp(row, expected, width) == 0;
          }
        }
        CHECK(same, describe(kernels.name, element, size));
        if (slots == past_slots) {  // in place gives the same
          call.present = past.data();
          encode(kernels, call, serial());
          CHECK(std::memcmp(past.data(), present.data(), present.size()) == 0, "in place");
        }
      }
    }
  }
}

// Vectors of one element type, and what they are as floats.
struct Vectors {
  Vectors(Element element, std::size_t count, Random& random)
      : stored(count * element_size(element) + 1), floats(count) {
    fill_normal(floats.data(), count, random);
    for (std::size_t i = 0; i < count; ++i) {
      if (element == Element::kFloat) {
        std::memcpy(at() + 4 * i, &floats[i], 4);
        continue;
      }
      const bool half = element == Element::kHalf;
      const uint16_t bits = half ? float_to_half(floats[i]) : float_to_bfloat(floats[i]);
      std::memcpy(at() + 2 * i, &bits, 2);
      floats[i] = half ? half_to_float(bits) : bfloat_to_float(bits);
    }
  }
  // At an odd address: a caller binds what memory he likes.
  uint8_t* at() { return stored.data() + 1; }

  Guarded<uint8_t> stored;
  std::vector<float> floats;
};

// Attention of one query head over `count` keys, as float64 says.
std::vector<double> expected_attention(const std::vector<float>& query, const Vectors& keys,
                                       const Vectors& values, std::size_t count, std::size_t size) {
  std::vector<double> weights(count), out(size);
  double sum = 0;
  for (std::size_t t = 0; t < count; ++t) {
    double score = 0;
    for (std::size_t j = 0; j < size; ++j) {
      score += static_cast<double>(query[j]) * keys.floats[t * size + j];
    }
    sum += weights[t] = std::exp(score);
  }
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t j = 0; j < size; ++j) {
      out[j] += weights[t] / sum * values.floats[t * size + j];
    }
  }
  return out;
}

// Elements of a call and of its rows.
constexpr std::pair<Element, Element> kPairs[] = {{Element::kFloat, Element::kFloat},
                                                  {Element::kHalf, Element::kHalf},
                                                  {Element::kBfloat, Element::kBfloat},
                                                  {Element::kFloat, Element::kHalf}};

TEST(float_vectors_become_float16_rows_where_the_model_is_float16) {
  Random random(33);
  for (const int size : kHeadSizes) {
    const std::size_t count = static_cast<std::size_t>(size) * 21;
    Guarded<float> vectors(count);
    fill_normal(vectors.data(), count, random);
    Guarded<uint8_t> present(2 * count);
    const int64_t length = 0;
    EncodeCall call = raw_call(Element::kFloat, size);
    call.codec = raw_of(Element::kHalf);
    call.width = spec::row_bytes(call.codec, size);
    call.vectors = vectors.data();
    call.present = present.data();
    call.past_length = &length;
    call.batch = call.heads = 1;
    call.tokens = call.present_slots = 21;
    for (const Kernels* level : supported_kernels()) {
      std::memset(present.data(), 0xff, present.size());
      encode(*level, call, threaded());
      bool same = true;
      for (std::size_t i = 0; i < count; ++i) {
        uint16_t bits;
        std::memcpy(&bits, present.data() + 2 * i, 2);
        same = same && bits == float_to_half(vectors[i]);
      }
      CHECK(same, describe(level->name, Element::kHalf, size));
    }
  }
}

TEST(raw_rows_of_every_element_are_read_at_any_address) {
  Random random(31);
  for (const auto& [element, stored] : kPairs) {
    for (const int head_size : kHeadSizes) {
      const std::size_t size = static_cast<std::size_t>(head_size), count = 75;
      Vectors keys(stored, count * size, random), values(stored, count * size, random);
      std::vector<float> query(size);
      fill_normal(query.data(), size, random, 1.0f / std::sqrt(static_cast<float>(head_size)));
      std::vector<uint16_t> narrow(size);
      for (std::size_t j = 0; j < size; ++j) {
        if (element == Element::kHalf) {
          query[j] = half_to_float(narrow[j] = float_to_half(query[j]));
        }
        if (element == Element::kBfloat) {
          query[j] = bfloat_to_float(narrow[j] = float_to_bfloat(query[j]));
        }
      }
      const std::vector<double> expected = expected_attention(query, keys, values, count, size);
      Guarded<uint8_t> output(size * element_size(element));
      const int64_t length = static_cast<int64_t>(count) - 1;
      const int width = spec::row_bytes(raw_of(stored), head_size);
      AttentionCall call{};
      call.element = element;
      call.query = element == Element::kFloat ? static_cast<const void*>(query.data())
                                              : static_cast<const void*>(narrow.data());
      call.output = output.data();
      call.key = {keys.at(), raw_of(stored), width, nullptr};
      call.value = {values.at(), raw_of(stored), width, nullptr};
      call.past_length = &length;
      call.batch = call.query_heads = call.heads = call.tokens = 1;
      call.slots = static_cast<int64_t>(count);
      call.head_size = head_size;
      call.scale = 1.0f;
      call.causal = true;
      const double tolerance =
          element == Element::kFloat ? 1e-5 : (element == Element::kHalf ? 1e-3 : 8e-3);
      for (const Kernels* level : supported_kernels()) {
        CHECK(attention(*level, call, serial()), level->name);
        std::vector<float> found(size);
        load_floats(*level, element, output.data(), 0, found.data(), size);
        double worst = 0, largest = 0;
        for (std::size_t j = 0; j < size; ++j) {
          worst = std::max(worst, std::isnan(found[j]) ? 1e9 : std::abs(found[j] - expected[j]));
          largest = std::max(largest, std::abs(expected[j]));
        }
        CHECK(worst <= tolerance * largest, describe(level->name, element, head_size));
      }
    }
  }
}

// Key 3 is hidden from the query at position 2 and seen by the one at position 3.
TEST(a_raw_value_that_is_not_finite_spoils_who_sees_it) {
  Random random(32);
  const std::size_t size = 64;
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> keys(4 * size), values(4 * size), query(2 * size), output(2 * size);
    fill_normal(keys.data(), keys.size(), random);
    fill_normal(values.data(), values.size(), random);
    fill_normal(query.data(), query.size(), random);
    values[3 * size + 5] = bad;
    const int64_t length = 2;
    AttentionCall call{};
    call.element = Element::kFloat;
    call.query = query.data();
    call.output = output.data();
    const int width = spec::row_bytes(kRaw, static_cast<int>(size));
    call.key = {reinterpret_cast<const uint8_t*>(keys.data()), kRaw, width, nullptr};
    call.value = {reinterpret_cast<const uint8_t*>(values.data()), kRaw, width, nullptr};
    call.past_length = &length;
    call.batch = call.query_heads = call.heads = 1;
    call.tokens = 2;
    call.slots = 4;
    call.head_size = static_cast<int>(size);
    call.scale = 0.125f;
    call.causal = true;
    for (const Kernels* level : supported_kernels()) {
      CHECK(attention(*level, call, serial()), level->name);
      int nonfinite = 0;
      for (std::size_t i = 0; i < output.size(); ++i) nonfinite += !std::isfinite(output[i]);
      CHECK(nonfinite == 1 && !std::isfinite(output[size + 5]), level->name);
    }
  }
}

}  // namespace
}  // namespace tq::test
