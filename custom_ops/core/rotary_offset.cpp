// Tables of angles, and blocks of sums; the contract is in rotary_offset.h.
#include "core/rotary_offset.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace tq {
namespace {

constexpr int kHalf = kBlock / 2;
constexpr int kWidestLanes = 16;
constexpr double kLargestError = 1e-5;  // of a basis

// Angles of a slot, which may be a half: [2, F].
void fill_angles(const std::vector<float>& frequencies, double slot, float* out) {
  const std::size_t count = frequencies.size();
  for (std::size_t i = 0; i < count; ++i) {
    const double angle = static_cast<double>(frequencies[i]) * slot;
    out[i] = static_cast<float>(std::cos(angle));
    out[count + i] = static_cast<float>(std::sin(angle));
  }
}

// What is a cos(x) + b sin(x) of angles x becomes the same of angles that are smaller by `by`.
// Pairs are [2, F]; may be in place.
void turn(const float* pairs, const float* by, std::size_t count, float* out) {
  const float *const cosines = by, *const sines = by + count;
  for (std::size_t i = 0; i < count; ++i) {
    const float a = pairs[i], b = pairs[count + i];
    out[i] = a * cosines[i] + b * sines[i];
    out[count + i] = b * cosines[i] - a * sines[i];
  }
}

// Vectors are taken one after the other, always that which those before describe worst, until they
// describe all of them.
RotaryTables::Basis basis_of(const std::vector<float>& frequencies, double (*wave)(double)) {
  const std::size_t count = frequencies.size();
  std::vector<double> rest(count * kHalf), vectors, weights;
  for (std::size_t i = 0; i < rest.size(); ++i) {
    rest[i] = wave(frequencies[i / kHalf] * (static_cast<double>(i % kHalf) + 0.5));
  }
  int rank = 0;
  for (; rank < kHalf; ++rank) {
    std::size_t worst = 0;
    double largest = 0, energy = -1;
    for (std::size_t i = 0; i < count; ++i) {
      double square = 0;
      for (std::size_t u = 0; u < kHalf; ++u) {
        const double x = rest[i * kHalf + u];
        square += x * x;
        largest = std::max(largest, std::abs(x));
      }
      if (square > energy) {
        energy = square;
        worst = i;
      }
    }
    if (largest <= kLargestError) break;
    const std::size_t first = vectors.size();
    for (std::size_t u = 0; u < kHalf; ++u) {
      vectors.push_back(rest[worst * kHalf + u] / std::sqrt(energy));
    }
    for (std::size_t i = 0; i < count; ++i) {
      double weight = 0;
      for (std::size_t u = 0; u < kHalf; ++u) weight += rest[i * kHalf + u] * vectors[first + u];
      for (std::size_t u = 0; u < kHalf; ++u) rest[i * kHalf + u] -= weight * vectors[first + u];
      weights.push_back(weight);
    }
  }
  RotaryTables::Basis basis{rank, (rank + kWidestLanes - 1) / kWidestLanes * kWidestLanes, {}, {}};
  basis.vectors.assign(vectors.begin(), vectors.end());
  basis.weights.resize(count * static_cast<std::size_t>(basis.pitch));
  for (std::size_t i = 0; i < weights.size(); ++i) {
    basis.weights[i % count * static_cast<std::size_t>(basis.pitch) + i / count] =
        static_cast<float>(weights[i]);
  }
  return basis;
}

}  // namespace

RotaryTables::RotaryTables(std::vector<float> frequencies)
    : frequencies_(std::move(frequencies)),
      half_block_(2 * frequencies_.size()),
      cosines_(basis_of(frequencies_, std::cos)),
      sines_(basis_of(frequencies_, std::sin)) {
  double step = 1;
  for (std::vector<float>& table : tables_) {
    table.resize(kDigit * half_block_.size());
    for (int64_t digit = 0; digit < kDigit; ++digit) {
      fill_angles(frequencies_, step * static_cast<double>(digit),
                  table.data() + digit * 2 * count());
    }
    step *= kDigit;
  }
  fill_angles(frequencies_, 0.5 * (kBlock - 1), half_block_.data());
}

std::shared_ptr<const RotaryTables> RotaryTables::shared(const std::vector<float>& frequencies) {
  static std::mutex mutex;
  static std::vector<std::weak_ptr<const RotaryTables>> all;
  const std::lock_guard<std::mutex> lock(mutex);
  all.erase(std::remove_if(all.begin(), all.end(), [](const auto& one) { return one.expired(); }),
            all.end());
  for (const auto& one : all) {
    const std::shared_ptr<const RotaryTables> tables = one.lock();
    if (tables != nullptr && tables->frequencies() == frequencies) return tables;
  }
  const auto tables = std::make_shared<const RotaryTables>(frequencies);
  all.push_back(tables);
  return tables;
}

const float* RotaryTables::at(int64_t slot, float* scratch) const {
  const std::size_t width = half_block_.size();
  const float* angles = tables_[0].data();
  bool is_zero = true;
  int64_t rest = slot;
  for (const std::vector<float>& table : tables_) {
    const std::size_t digit = static_cast<std::size_t>(rest % kDigit);
    rest /= kDigit;
    if (digit == 0) continue;
    const float* const more = table.data() + digit * width;
    if (is_zero) {
      angles = more;
    } else {
      // cos(x + y) = cos x cos y - sin x sin y, sin(x + y) = sin x cos y + cos x sin y
      for (std::size_t i = 0, j = width / 2; j < width; ++i, ++j) {
        const float cosine = angles[i] * more[i] - angles[j] * more[j];
        scratch[j] = angles[j] * more[i] + angles[i] * more[j];
        scratch[i] = cosine;
      }
      angles = scratch;
    }
    is_zero = false;
  }
  if (rest == 0) return angles;
  fill_angles(frequencies_, static_cast<double>(slot), scratch);
  return scratch;
}

RotaryOffset::RotaryOffset(const float* frequencies, const float* offset, int64_t heads,
                           int head_size)
    : heads_(heads),
      head_size_(head_size),
      offset_(offset, offset + 2 * heads * head_size),
      indices_(static_cast<std::size_t>(head_size)) {
  // Of coordinates that have a mean: those of others are often the fast ones, and cost the most.
  std::vector<float> distinct;
  for (int j = 0; j < head_size; ++j) {
    bool has_mean = false;
    for (int64_t row = 0; row < 2 * heads; ++row) has_mean |= offset[row * head_size + j] != 0.0f;
    if (has_mean) distinct.push_back(frequencies[j]);
  }
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  if (distinct.empty()) distinct.push_back(0.0f);
  for (int j = 0; j < head_size; ++j) {
    const auto at = std::lower_bound(distinct.begin(), distinct.end() - 1, frequencies[j]);
    indices_[static_cast<std::size_t>(j)] = static_cast<int>(at - distinct.begin());
  }
  tables_ = RotaryTables::shared(distinct);
}

void RotaryOffset::angles(int64_t slot, float* cosines, float* sines) const {
  float scratch[2 * spec::kMaxHeadSize];
  const float* const all = tables_->at(slot, scratch);
  for (int j = 0; j < head_size_; ++j) {
    const int i = indices_[static_cast<std::size_t>(j)];
    cosines[j] = all[i];
    sines[j] = all[tables_->count() + i];
  }
}

void RotaryOffset::subtract(int64_t head, const float* cosines, const float* sines,
                            float* x) const {
  const float* const even = offset_.data() + head * head_size_;
  const float* const odd = even + heads_ * head_size_;
  for (int j = 0; j < head_size_; ++j) x[j] -= even[j] * cosines[j] + odd[j] * sines[j];
}

void RotaryOffset::prepare_query(int64_t head, int64_t padding, const float* query,
                                 float* prepared) const {
  const int count = tables_->count();
  const float* const even = offset_.data() + head * head_size_;
  const float* const odd = even + heads_ * head_size_;
  std::fill_n(prepared, 2 * count, 0.0f);
  for (int j = 0; j < head_size_; ++j) {
    float* const pair = prepared + indices_[static_cast<std::size_t>(j)];
    pair[0] += query[j] * even[j];
    pair[count] += query[j] * odd[j];
  }
  turn(prepared, tables_->half_block(), count, prepared);
  if (padding == 0) return;
  float angles[2 * spec::kMaxHeadSize], scratch[2 * spec::kMaxHeadSize];
  std::copy_n(tables_->at(padding, scratch), 2 * count, angles);
  for (int i = count; i < 2 * count; ++i) angles[i] = -angles[i];
  turn(prepared, angles, count, prepared);
}

std::size_t RotaryOffset::work_size(int rows) const {
  const std::size_t pitch =
      static_cast<std::size_t>(std::max(tables_->cosines().pitch, tables_->sines().pitch));
  return query_width() + static_cast<std::size_t>(rows) * (query_width() + pitch + kBlock);
}

void RotaryOffset::shifts(const Kernels& kernels, const float* prepared, std::size_t pitch,
                          int rows, int64_t slot, float* work, float* shifts) const {
  const int count = tables_->count(), width = 2 * count;
  const float* const angles = tables_->at(slot, work);
  float* const turned = work + width;
  for (int r = 0; r < rows; ++r) turn(prepared + r * pitch, angles, count, turned + r * width);
  float* const weights = turned + rows * width;
  float* halves = shifts;  // of the cosines [rows, kHalf], of the sines behind them
  const float* pairs = turned;
  for (const RotaryTables::Basis* basis : {&tables_->cosines(), &tables_->sines()}) {
    kernels.multiply(pairs, width, basis->weights.data(), basis->pitch, weights, basis->pitch, rows,
                     basis->pitch, count, false);
    kernels.multiply(weights, basis->pitch, basis->vectors.data(), kHalf, halves, kBlock, rows,
                     kHalf, basis->rank, false);
    halves += kHalf;
    pairs += count;
  }
  for (int r = 0; r < rows; ++r, shifts += kBlock) {
    float* const even = weights;
    float* const odd = even + kHalf;
    std::copy_n(shifts, kBlock, even);
    for (int u = 0; u < kHalf; ++u) {
      shifts[kHalf + u] = even[u] + odd[u];
      shifts[kHalf - 1 - u] = even[u] - odd[u];
    }
  }
}

}  // namespace tq
