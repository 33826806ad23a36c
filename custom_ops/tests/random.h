// Random numbers that are the same with every C++ library: which ones its distributions give is left
// to it, and some limits of tests are near what they measure.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace tq::test {

using Random = std::mt19937;

// In [0, 1), of as many bits as the type has.
template <class T>
T uniform(Random& random) {
  constexpr double kRange = 4294967296.0;
  double out = static_cast<double>(static_cast<T>(random())) / kRange;
  if (std::numeric_limits<T>::digits > 32) {
    out = (out * kRange + static_cast<double>(random()) * kRange) / (kRange * kRange);
  }
  const T below_one = static_cast<T>(1) - std::numeric_limits<T>::epsilon() / 2;
  return out < 1.0 ? static_cast<T>(out) : below_one;
}

template <class T>
class UniformReal {
 public:
  UniformReal(T low, T high) : low_(low), high_(high) {}
  T operator()(Random& random) { return uniform<T>(random) * (high_ - low_) + low_; }

 private:
  T low_, high_;
};

// From least to most, both included, of ranges below 2^32: Lemire's method.
template <class T>
class UniformInt {
 public:
  UniformInt(T least, T most) : least_(least), range_(static_cast<uint32_t>(most - least) + 1) {}
  T operator()(Random& random) {
    uint64_t product = static_cast<uint64_t>(random()) * range_;
    const uint32_t unfair = (0u - range_) % range_;
    while (static_cast<uint32_t>(product) < unfair) {
      product = static_cast<uint64_t>(random()) * range_;
    }
    return least_ + static_cast<T>(product >> 32);
  }

 private:
  T least_;
  uint32_t range_;
};

// Marsaglia's polar method, which makes two at a time.
template <class T>
class Normal {
 public:
  T operator()(Random& random) {
    has_other_ = !has_other_;
    if (!has_other_) return other_;
    T x, y, square;
    do {
      x = 2 * uniform<T>(random) - 1;
      y = 2 * uniform<T>(random) - 1;
      square = x * x + y * y;
    } while (square > 1 || square == 0);
    const T length = std::sqrt(-2 * std::log(square) / square);
    other_ = x * length;
    return y * length;
  }

 private:
  bool has_other_ = false;
  T other_ = 0;
};

}  // namespace tq::test
