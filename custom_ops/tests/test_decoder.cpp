// The decoder's own operators against loops in double, in every element type, between guard pages.
#include <string>
#include <vector>

#include "core/decoder.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace tq::test {
namespace {

constexpr Element kElements[] = {Element::kFloat, Element::kHalf, Element::kBfloat};

// Elements of a type, as the floats that they hold.
struct Numbers {
  Numbers(Element type, std::size_t size, Side side = Side::kEnd)
      : element(type), count(size), bytes(size * element_size(type), side) {}

  void set(const std::vector<float>& from) {
    store_floats(*scalar_kernels(), element, from.data(), bytes.data(), 0, count);
  }
  std::vector<float> get() const {
    std::vector<float> out(count);
    load_floats(*scalar_kernels(), element, bytes.data(), 0, out.data(), count);
    return out;
  }

  Element element;
  std::size_t count;
  Guarded<uint8_t> bytes;
};

std::vector<float> fill(Numbers& numbers, Random& random, float deviation = 1.0f) {
  std::vector<float> made(numbers.count);
  fill_normal(made.data(), made.size(), random, deviation);
  numbers.set(made);
  return numbers.get();
}

// Half a unit in the last place of the type, and a little for float32; `floor` is the size that the
// error of smaller numbers is measured by.
double tolerance(Element element) {
  return element == Element::kFloat ? 2e-6 : (element == Element::kHalf ? 5.5e-4 : 4.4e-3);
}

void check_close(const Numbers& got, const std::vector<double>& expected, const char* what,
                 double floor = 1e-2) {
  const std::vector<float> values = got.get();
  double worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double scale = std::max(std::abs(expected[i]), floor);
    worst = std::max(worst, std::abs(values[i] - expected[i]) / scale);
  }
  CHECK(worst <= tolerance(got.element),
        std::string(what) + " of " + std::to_string(got.count) + " elements of " +
            std::to_string(element_size(got.element)) + " bytes: " + std::to_string(worst));
}

TEST(rms_normalization_is_that_of_doubles) {
  Random random(60);
  for (const Kernels* const kernels : supported_kernels()) {
    for (const Element element : kElements) {
      for (const int64_t width : {1, 7, 64, 511, 512, 513, 1600}) {
        for (const int64_t rows : {1, 3, 40}) {
          const std::size_t count = static_cast<std::size_t>(rows * width);
          Numbers x(element, count), scale(element, static_cast<std::size_t>(width));
          Numbers y(element, count, Side::kBegin);
          const std::vector<float> in = fill(x, random), by = fill(scale, random);
          rms_normalization(
              *kernels,
              {element, x.bytes.data(), scale.bytes.data(), y.bytes.data(), rows, width, 1e-6f},
              threaded());
          std::vector<double> expected(count);
          for (int64_t r = 0; r < rows; ++r) {
            double squares = 0;
            for (int64_t j = 0; j < width; ++j) {
              squares += static_cast<double>(in[r * width + j]) * in[r * width + j];
            }
            const double length = std::sqrt(squares / static_cast<double>(width) + 1e-6);
            for (int64_t j = 0; j < width; ++j) {
              expected[r * width + j] = in[r * width + j] / length * by[j];
            }
          }
          check_close(y, expected, "rms_normalization");
        }
      }
    }
  }
}

TEST(rotary_embedding_is_that_of_doubles) {
  Random random(61);
  const int64_t batch = 2, heads = 3, tokens = 5, positions = 9;
  for (const Element element : kElements) {
    for (const int64_t size : {2, 6, 64, 128, 1100}) {
      for (const bool per_batch : {false, true}) {
        const std::size_t count = static_cast<std::size_t>(batch * heads * tokens * size);
        const std::size_t angles = static_cast<std::size_t>(positions * size / 2);
        Numbers x(element, count), y(element, count, Side::kBegin);
        Guarded<float> cosines(angles), sines(angles);
        Guarded<int64_t> places(static_cast<std::size_t>((per_batch ? batch : 1) * tokens));
        const std::vector<float> in = fill(x, random);
        fill_normal(cosines.data(), angles, random);
        fill_normal(sines.data(), angles, random);
        for (int64_t& place : places) place = random() % positions;
        places[0] = positions - 1;
        RotaryEmbeddingCall call{};
        call.element = element;
        call.x = x.bytes.data();
        call.cosines = cosines.data();
        call.sines = sines.data();
        call.positions = places.data();
        call.positions_per_batch = per_batch;
        call.y = y.bytes.data();
        call.batch = batch;
        call.heads = heads;
        call.tokens = tokens;
        call.head_size = size;
        rotary_embedding(*supported_kernels().front(), call, threaded());
        std::vector<double> expected(count);
        const int64_t half = size / 2;
        for (int64_t v = 0; v < batch * heads * tokens; ++v) {
          const int64_t row = per_batch ? v / tokens / heads * tokens : 0;
          const int64_t place = places[row + v % tokens] * half;
          for (int64_t j = 0; j < half; ++j) {
            const double x1 = in[v * size + j], x2 = in[v * size + half + j];
            expected[v * size + j] = x1 * cosines[place + j] - x2 * sines[place + j];
            expected[v * size + half + j] = x2 * cosines[place + j] + x1 * sines[place + j];
          }
        }
        check_close(y, expected, "rotary_embedding", 1.0);  // differences of products
      }
    }
  }
}

TEST(swish_is_that_of_doubles) {
  Random random(62);
  for (const Element element : kElements) {
    for (const std::size_t count : {1u, 511u, 512u, 513u, 8192u, 20001u}) {
      Numbers x(element, count), y(element, count, Side::kBegin);
      std::vector<float> in = fill(x, random, 20.0f);
      in[0] = -1000.0f;  // exp overflows
      if (count > 1) in[1] = 1000.0f;
      x.set(in);
      in = x.get();
      swish(*supported_kernels().front(),
            {element, x.bytes.data(), y.bytes.data(), static_cast<int64_t>(count)}, threaded());
      std::vector<double> expected;
      for (const float one : in) expected.push_back(one / (1.0 + std::exp(-double{one})));
      check_close(y, expected, "swish");
    }
  }
}

TEST(transpose_and_gather_move_every_byte) {
  Random random(63);
  UniformInt<int> byte(0, 255);
  for (const int64_t bytes : {2, 34, 70000}) {
    const int64_t batch = 2, rows = 3, columns = 7, count = batch * rows * columns;
    Guarded<uint8_t> x(static_cast<std::size_t>(count * bytes));
    Guarded<uint8_t> y(static_cast<std::size_t>(count * bytes));
    for (uint8_t& one : x) one = static_cast<uint8_t>(byte(random));
    transpose({x.data(), y.data(), batch, rows, columns, bytes}, threaded());
    bool same = true;
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          same &= std::memcmp(y.data() + ((b * columns + c) * rows + r) * bytes,
                              x.data() + ((b * rows + r) * columns + c) * bytes,
                              static_cast<std::size_t>(bytes)) == 0;
        }
      }
    }
    CHECK(same, "transpose of vectors of " + std::to_string(bytes) + " bytes");

    Guarded<int64_t> indices(static_cast<std::size_t>(count));
    for (int64_t& index : indices) index = static_cast<int64_t>(random() % (2 * count)) - count;
    indices[0] = -count;
    indices[1] = count - 1;
    gather({x.data(), indices.data(), y.data(), count, bytes, count}, threaded());
    same = true;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (indices[i] + count) % count;
      same &= std::memcmp(y.data() + i * bytes, x.data() + row * bytes,
                          static_cast<std::size_t>(bytes)) == 0;
    }
    CHECK(same, "gather of rows of " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace
}  // namespace tq::test
