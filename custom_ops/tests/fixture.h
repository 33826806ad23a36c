// What the tests need of a codec: random data, a rotation, a codebook, and threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/encode.h"
#include "core/half.h"
#include "core/kernels.h"
#include "core/parallel.h"
#include "core/rotation.h"
#include "core/row_format.h"
#include "tests/guard.h"
#include "tests/random.h"
#include "tests/workers.h"

namespace tq::test {

inline void fill_normal(float* out, std::size_t count, Random& random, float deviation = 1.0f) {
  Normal<float> normal;
  for (std::size_t i = 0; i < count; ++i) out[i] = normal(random) * deviation;
}

// An orthogonal matrix by Gram-Schmidt.
inline void fill_rotation(float* out, int size, Random& random) {
  Normal<double> normal;
  std::vector<double> rows(static_cast<std::size_t>(size) * size);
  for (int i = 0; i < size; ++i) {
    double* const row = rows.data() + static_cast<std::size_t>(i) * size;
    for (int j = 0; j < size; ++j) row[j] = normal(random);
    for (int pass = 0; pass < 2; ++pass) {
      for (int k = 0; k < i; ++k) {
        const double* const other = rows.data() + static_cast<std::size_t>(k) * size;
        double dot = 0;
        for (int j = 0; j < size; ++j) dot += row[j] * other[j];
        for (int j = 0; j < size; ++j) row[j] -= dot * other[j];
      }
    }
    double norm = 0;
    for (int j = 0; j < size; ++j) norm += row[j] * row[j];
    for (int j = 0; j < size; ++j) row[j] /= std::sqrt(norm);
  }
  for (std::size_t i = 0; i < rows.size(); ++i) out[i] = static_cast<float>(rows[i]);
}

// Antisymmetric and rising, about right for N(0, 1/d); the kernels take any.
inline void fill_codebook(int bits, int head_size, float* centroids, float* boundaries) {
  const int levels = 1 << bits;
  for (int i = 0; i < levels; ++i) {
    const float x = (2.0f * static_cast<float>(i) + 1.0f) / static_cast<float>(levels) - 1.0f;
    centroids[i] = (1.2f * x + 1.3f * x * x * x) / std::sqrt(static_cast<float>(head_size));
  }
  for (int i = 0; i + 1 < levels; ++i) boundaries[i] = 0.5f * (centroids[i] + centroids[i + 1]);
}

using spec::Codec;
using spec::Kind;

constexpr Codec kRaw{Kind::kRaw, 32};
constexpr Codec lloyd_max(int bits) { return {Kind::kLloydMax, bits}; }

// Every codec that a model of float32 has.
inline std::vector<Codec> float_codecs() {
  std::vector<Codec> all;
  for (const Codec& codec : spec::kCodecs) {
    if (codec.kind != Kind::kRaw || codec.bits == 32) all.push_back(codec);
  }
  return all;
}

inline std::string name_of(Codec codec) {
  return std::string(spec::kKindNames[static_cast<int>(codec.kind)]) + " " +
         std::to_string(codec.bits);
}

inline float half_at(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof half);
  return half_to_float(half);
}

// One rotation per head size, since they take long to make.
inline const std::vector<float>& rotation_of(int head_size) {
  static std::map<int, std::vector<float>> all;
  std::vector<float>& rotation = all[head_size];
  if (rotation.empty()) {
    Random random(static_cast<unsigned>(head_size));
    rotation.resize(static_cast<std::size_t>(head_size) * head_size);
    fill_rotation(rotation.data(), head_size, random);
  }
  return rotation;
}

// What the rows of a codec need besides its bits.
struct Tables {
  Tables(Codec codec, int head_size, Random& random)
      : width(spec::coordinates(codec, head_size)),
        levels(spec::levels(codec)),
        rotation(static_cast<std::size_t>(spec::is_rotated(codec.kind) ? head_size * width : 0)),
        transposed(rotation.size()),
        centroids(static_cast<std::size_t>(levels)),
        boundaries(static_cast<std::size_t>(spec::boundaries(codec))) {
    if (rotation.size() == 0) return;
    const std::vector<float>& square = rotation_of(head_size);
    fill_normal(rotation.data(), rotation.size(), random);
    for (int j = 0; j < head_size; ++j) {
      const float sign = random() % 2 ? 1.0f : -1.0f;
      for (int i = 0; i < head_size; ++i) {
        rotation.data()[i * width + j] = sign * square[static_cast<std::size_t>(i * head_size + j)];
      }
    }
    transpose(rotation.data(), head_size, width, transposed.data());
    fill_codebook(spec::index_bits(codec), head_size, centroids.data(), boundaries.data());
    if (spec::is_signed(codec.kind)) {
      const float step =
          3.0f / static_cast<float>(levels) * 2.0f / std::sqrt(static_cast<float>(head_size));
      for (int i = 0; i < levels; ++i) {
        centroids.data()[i] = step * static_cast<float>(i - levels / 2);
        if (i > 0) boundaries.data()[i - 1] = centroids.data()[i] - 0.5f * step;
      }
    }
  }
  Rotation ready() const { return {width, rotation.data(), transposed.data(), nullptr, 0.0f}; }

  int width, levels;
  Guarded<float> rotation, transposed, centroids, boundaries;
};

// Every level with these products; with null, the default and, where they are others, floats.
inline std::vector<const Kernels*> levels_with(const char* products) {
  std::vector<const Kernels*> all;
  std::string reason;
  for (const Kernels* level : supported_kernels()) {
    all.push_back(with_products(*level, products, reason));
    if (products != nullptr) continue;
    const Kernels* const floats = with_products(*level, "float", reason);
    if (floats->integers != level->integers) all.push_back(floats);
  }
  return all;
}

// Centroids that are multiples of 1/127 of the largest: products with them are taken with integers. 32
// of them are further apart than before, else they would stay floats.
inline void round_centroids(Tables& tables) {
  float* const centroids = tables.centroids.data();
  const int levels = tables.levels;
  const float unit = levels > 0 ? centroids[levels - 1] / 127.0f : 1.0f;
  for (int i = 0; i < levels; ++i) {
    const float x = (2.0f * static_cast<float>(i) + 1.0f) / static_cast<float>(levels) - 1.0f;
    const float number = levels == 32 ? 90.0f * x + 36.0f * x * x * x : centroids[i] / unit;
    centroids[i] = std::nearbyint(number) * unit;
  }
}

// The encode of one head of one sequence; vectors, rows and their numbers are left to the test.
inline EncodeCall encode_call(Codec codec, int head_size, int width, const Tables& tables) {
  EncodeCall call{};
  call.element = Element::kFloat;
  call.batch = call.heads = 1;
  call.head_size = head_size;
  call.width = width;
  call.codec = codec;
  call.norm_correction = 1;
  call.rotation = tables.ready();
  call.centroids = tables.centroids.data();
  call.boundaries = tables.boundaries.data();
  return call;
}

inline void store_half(float value, uint8_t* out) {
  const uint16_t half = float_to_half(value);
  std::memcpy(out, &half, sizeof half);
}

// Arbitrary codes with fields around one; floats for raw rows.
inline void fill_rows(uint8_t* rows, std::size_t count, Codec codec, int head_size, int stride,
                      Random& random) {
  UniformInt<int> byte(0, 255);
  UniformReal<float> field(0.1f, 12.0f);
  std::vector<float> vector(static_cast<std::size_t>(head_size));
  const int codes = spec::code_bytes(codec, head_size);
  for (std::size_t t = 0; t < count; ++t, rows += stride) {
    for (int i = 0; i < stride; ++i) rows[i] = static_cast<uint8_t>(byte(random));
    switch (codec.kind) {
      case Kind::kRaw:
        fill_normal(vector.data(), vector.size(), random);
        std::memcpy(rows, vector.data(), vector.size() * sizeof(float));
        break;
      case Kind::kUniformSigned:
      case Kind::kU8: {
        float scale = field(random);
        if (codec.kind == Kind::kUniformSigned) {  // of vectors as long as those of codebooks
          const float sign = random() % 2 ? 1.0f : -1.0f;
          scale *= sign / (0.29f * std::exp2f(static_cast<float>(codec.bits)) *
                           std::sqrt(static_cast<float>(head_size)));
        }
        std::memcpy(rows + codes, &scale, sizeof scale);
        break;
      }
      case Kind::kFp8E4m3:  // up to 4, of either sign, and what nobody writes
        for (int i = 0; i < codes; ++i) {
          if (rows[i] % 0x80 != 0x7f) rows[i] = static_cast<uint8_t>((rows[i] & 0xbf) + 0x08);
        }
        break;
      case Kind::kQ8_0:
        for (int i = 0; i < head_size; i += spec::kQ8_0Block) {
          store_half(0.01f * field(random), rows + codes + i / spec::kQ8_0Block * 2);
        }
        break;
      default:
        for (int i = 0; i < spec::field_bytes(codec, head_size); i += 2) {
          const bool is_uniform = codec.kind == Kind::kUniform;
          const float own = is_uniform ? (i ? -1.0f : 0.2f) * field(random) : field(random);
          store_half(own, rows + codes + i);
        }
    }
  }
}

// A cache [B, N, S, W] of rows with codes and fields apart.
inline void lay_out_planes(const Planes& planes, int64_t batch, const uint8_t* rows, uint8_t* out) {
  for (int64_t lane = 0; lane < batch * planes.heads; ++lane) {
    const int64_t b = lane / planes.heads, n = lane % planes.heads;
    const std::size_t front = static_cast<std::size_t>(planes.overlay_rows * planes.width());
    std::memcpy(out + planes.overlay(b, n), rows, front);
    rows += front;
    for (int64_t s = 0; s < planes.slots; ++s, rows += planes.width()) {
      std::copy_n(rows, planes.code_bytes, out + planes.codes(b, n, s));
      std::copy_n(rows + planes.code_bytes, planes.field_bytes, out + planes.fields(b, n, s));
    }
  }
}

// The code of one coordinate, from the definition of the planes.
inline int code_of(Codec codec, int head_size, const uint8_t* row, int j) {
  int code = 0;
  const spec::Planes planes = spec::planes(codec);
  for (int p = 0; p < planes.count; ++p) {
    const int width = planes.plane[p].width;
    const int n = spec::plane_bytes(width, head_size);
    const uint8_t byte = row[spec::plane_offset(codec, p, head_size) + j % n];
    code |= ((byte >> (j / n * width)) & ((1 << width) - 1)) << planes.plane[p].shift;
  }
  return code;
}

// E4M3FN, from its definition.
inline double fp8_value(int code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return 0;
  const double value =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -value : value;
}

// The coordinates [C] that a row stands for, where the rotation leads to.
inline std::vector<double> coordinates_of(Codec codec, int head_size, const uint8_t* row,
                                          const float* centroids) {
  std::vector<double> out(static_cast<std::size_t>(spec::coordinates(codec, head_size)));
  const uint8_t* const fields = row + spec::code_bytes(codec, head_size);
  for (int j = 0; j < head_size; ++j) {
    const int code = code_of(codec, head_size, row, j);
    double& x = out[static_cast<std::size_t>(j)];
    float own;
    switch (codec.kind) {
      case Kind::kRaw:
        std::memcpy(&own, row + 4 * j, sizeof own);
        x = own;
        break;
      case Kind::kUniformSigned: {
        std::memcpy(&own, fields, sizeof own);
        const int half = 1 << (codec.bits - 1);
        x = static_cast<double>(own) * (code < half ? code : code - 2 * half);
        break;
      }
      case Kind::kU8:
        std::memcpy(&own, fields, sizeof own);
        x = static_cast<double>(own) * centroids[code % 16];
        break;
      case Kind::kFp8E4m3:
        x = fp8_value(code);
        break;
      case Kind::kQ8_0:
        x = static_cast<double>(half_at(fields + j / spec::kQ8_0Block * 2)) *
            static_cast<int8_t>(code);
        break;
      case Kind::kUniform:
        x = static_cast<double>(half_at(fields)) * code + half_at(fields + 2);
        break;
      default: {
        const int levels = spec::levels(codec);
        x = static_cast<double>(half_at(fields)) * centroids[code % levels];
        if (codec.kind == Kind::kProd) {
          out[static_cast<std::size_t>(head_size + j)] =
              (code >= levels ? 1.2533141373155003 : -1.2533141373155003) / head_size *
              half_at(fields + 2);
        }
      }
    }
  }
  return out;
}

// Of the coordinates [C]: those that share a scale, and what the centroids behind them are
// multiplied with.
struct ScaledPart {
  int begin, end;
  double scale;
};
inline std::vector<ScaledPart> scaled_parts(Codec codec, int head_size, const uint8_t* row) {
  const uint8_t* const fields = row + spec::code_bytes(codec, head_size);
  std::vector<ScaledPart> parts{{0, head_size, half_at(fields)}};
  if (codec.kind == Kind::kU8 || codec.kind == Kind::kUniformSigned) {
    float scale;
    std::memcpy(&scale, fields, sizeof scale);
    parts[0].scale = scale;
  }
  if (codec.kind == Kind::kProd) {
    parts.push_back(
        {head_size, 2 * head_size, 1.2533141373155003 / head_size * half_at(fields + 2)});
  }
  return parts;
}

inline Parallel serial() {
  return {[](void*, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
            for (std::size_t i = 0; i < count; ++i) task(argument, i);
          },
          nullptr};
}

// Four threads that take tasks in whatever order; calls at the same time have eight.
inline Parallel threaded() {
  return {[](void*, void (*task)(void*, std::size_t), std::size_t count, void* argument) {
            static Workers workers(8);
            workers.run(task, count, argument, 4);
          },
          nullptr};
}

inline std::string describe(const char* level, Codec codec, int head_size) {
  return std::string(level) + ", " + name_of(codec) + ", head size " + std::to_string(head_size);
}

// A third of the combinations of a product, for the sanitizers, under which they take several times
// as long. Every codec, head size and level stays in some; without sanitizers all are tested, in the
// same guarded memory.
class Share {
 public:
  bool leaves_out_next() {
#ifdef TQ_SANITIZE
    const int number = next_++;
    return (number + number / 3) % 3 != 0;  // not the same third of an inner loop each time
#else
    return false;
#endif
  }

 private:
  [[maybe_unused]] int next_ = 0;
};

constexpr int kHeadSizes[] = {8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 512};

}  // namespace tq::test
