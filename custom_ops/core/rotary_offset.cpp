// Tables of angles, and blocks of sums; the contract is in rotary_offset.h.
#include "core/rotary_offset.h"

#include <algorithm>
#include <cmath>
#include <mutex>

namespace tq {
namespace {

constexpr int kHalf = kBlock / 2;
constexpr double kLargestError = 1e-5;  // of a basis
constexpr float kFast = 0.1f;  // radians, of frequencies that have nearly a vector each
constexpr std::size_t kTogether = 8;  // slow frequencies

static_assert(kMaxFrequencies == spec::kMaxHeadSize, "a coordinate has a frequency");

// Angles of a slot, which may be a half: [2, width].
void fill_angles(const std::vector<float>& frequencies, double slot, std::size_t width,
                 float* out) {
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double angle = static_cast<double>(frequencies[i]) * slot;
    out[i] = static_cast<float>(std::cos(angle));
    out[width + i] = static_cast<float>(std::sin(angle));
  }
}

// What is a cos(x) + b sin(x) of angles x becomes the same of angles that are smaller by `by`.
// Pairs are [2, width].
void turn(const float* by, std::size_t width, float* pairs) {
  const float *const cosines = by, *const sines = by + width;
  for (std::size_t i = 0; i < width; ++i) {
    const float a = pairs[i], b = pairs[width + i];
    pairs[i] = a * cosines[i] + b * sines[i];
    pairs[width + i] = b * cosines[i] - a * sines[i];
  }
}

// Slow frequencies are taken some at a time, and vectors one after the other, always that which those
// before describe worst, until they describe them. Behind these vectors are the waves of the others.
// `storage` and `begins` keep what the basis points to.
RotaryBasis basis_of(const std::vector<float>& frequencies, std::size_t slow, std::size_t width,
                     bool is_sine, std::unique_ptr<FloatBuffer>& storage,
                     std::vector<int>& begins) {
  const std::size_t count = frequencies.size();
  std::vector<double> rest(count * kHalf), vectors, weights;
  for (std::size_t i = 0; i < rest.size(); ++i) {
    const double angle = frequencies[i / kHalf] * (static_cast<double>(i % kHalf) + 0.5);
    rest[i] = is_sine ? std::sin(angle) : std::cos(angle);
  }
  const std::vector<double> fast(rest.begin() + static_cast<std::ptrdiff_t>(slow * kHalf),
                                 rest.end());
  for (std::size_t first = 0; first < slow;) {
    std::size_t worst = 0;
    double largest = 0, energy = -1;
    for (std::size_t i = first; i < std::min(first + kTogether, slow); ++i) {
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
    if (largest <= kLargestError) {
      first += kTogether;
      continue;
    }
    const std::size_t begin = vectors.size();
    for (std::size_t u = 0; u < kHalf; ++u) {
      vectors.push_back(rest[worst * kHalf + u] / std::sqrt(energy));
    }
    begins.push_back(static_cast<int>(first));
    weights.resize(weights.size() + width);
    for (std::size_t i = first; i < slow; ++i) {
      double weight = 0;
      for (std::size_t u = 0; u < kHalf; ++u) weight += rest[i * kHalf + u] * vectors[begin + u];
      for (std::size_t u = 0; u < kHalf; ++u) rest[i * kHalf + u] -= weight * vectors[begin + u];
      weights[weights.size() - width + i] = weight;
    }
  }
  weights.resize(weights.size() + 3 * width);
  vectors.insert(vectors.end(), fast.begin(), fast.end());
  storage = std::make_unique<FloatBuffer>(vectors.size() + weights.size());
  if (storage->get() == nullptr) throw std::bad_alloc();
  const auto narrow = [](double x) { return static_cast<float>(x); };
  float* const end = std::transform(vectors.begin(), vectors.end(), storage->get(), narrow);
  std::transform(weights.begin(), weights.end(), end, narrow);
  return {storage->get(), end, begins.data(), static_cast<int>(begins.size())};
}

}  // namespace

float dot_product(const float* a, const float* b, int size) {
  float partial[8] = {};
  for (int j = 0; j < size; j += 8) {
    for (int i = 0; i < 8; ++i) partial[i] += a[j + i] * b[j + i];
  }
  for (int half = 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  return partial[0];
}

RotaryTables::RotaryTables(std::vector<float> frequencies)
    : frequencies_(std::move(frequencies)),
      width_((frequencies_.size() + kRotaryLanes - 1) / kRotaryLanes * kRotaryLanes),
      half_block_(2 * width_) {
  const auto fast = std::lower_bound(frequencies_.begin(), frequencies_.end(), kFast);
  const std::size_t slow = static_cast<std::size_t>(fast - frequencies_.begin());
  for (int odd = 0; odd < 2; ++odd) {
    block_.basis[odd] = basis_of(frequencies_, slow, width_, odd == 1, storage_[odd], begins_[odd]);
  }
  block_.width = static_cast<int>(width_);
  block_.slow = static_cast<int>(slow);
  block_.fast = static_cast<int>(frequencies_.size() - slow);
  double step = 1;
  for (std::vector<float>& table : tables_) {
    table.resize(kDigit * half_block_.size());
    for (std::size_t digit = 0; digit < kDigit; ++digit) {
      fill_angles(frequencies_, step * static_cast<double>(digit), width_,
                  table.data() + digit * half_block_.size());
    }
    step *= kDigit;
  }
  fill_angles(frequencies_, 0.5 * (kBlock - 1), width_, half_block_.data());
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
  const float* angles = tables_[0].data();
  bool is_zero = true;
  int64_t rest = slot;
  for (const std::vector<float>& table : tables_) {
    const std::size_t digit = static_cast<std::size_t>(rest % kDigit);
    rest /= kDigit;
    if (digit == 0) continue;
    const float* const more = table.data() + digit * half_block_.size();
    if (is_zero) {
      angles = more;
    } else {
      // cos(x + y) = cos x cos y - sin x sin y, sin(x + y) = sin x cos y + cos x sin y
      for (std::size_t i = 0, j = width_; i < width_; ++i, ++j) {
        const float cosine = angles[i] * more[i] - angles[j] * more[j];
        scratch[j] = angles[j] * more[i] + angles[i] * more[j];
        scratch[i] = cosine;
      }
      angles = scratch;
    }
    is_zero = false;
  }
  if (rest == 0) return angles;
  std::fill_n(scratch, half_block_.size(), 0.0f);
  fill_angles(frequencies_, static_cast<double>(slot), width_, scratch);
  return scratch;
}

RotaryOffset::RotaryOffset(const float* frequencies, const float* offset, int64_t rows,
                           int64_t heads, int head_size)
    : heads_(heads),
      head_size_(head_size),
      first_slots_(rows - 2),
      offset_(offset, offset + rows * heads * head_size),
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
  alignas(64) float scratch[2 * kMaxFrequencies];
  const float* const all = tables_->at(slot, scratch);
  for (int j = 0; j < head_size_; ++j) {
    const int i = indices_[static_cast<std::size_t>(j)];
    cosines[j] = all[i];
    sines[j] = all[tables_->width() + static_cast<std::size_t>(i)];
  }
}

void RotaryOffset::subtract(int64_t head, int64_t slot, const float* cosines, const float* sines,
                            float* x) const {
  const float *const even = row(0, head), *const odd = row(1, head);
  for (int j = 0; j < head_size_; ++j) x[j] -= even[j] * cosines[j] + odd[j] * sines[j];
  if (slot >= first_slots_) return;
  const float* const own = row(2 + slot, head);
  for (int j = 0; j < head_size_; ++j) x[j] -= own[j];
}

void RotaryOffset::prepare_query(int64_t head, int64_t padding, const float* query,
                                 float* prepared) const {
  const std::size_t width = tables_->width();
  const float *const even = row(0, head), *const odd = row(1, head);
  std::fill_n(prepared, query_width(), 0.0f);
  for (int j = 0; j < head_size_; ++j) {
    float* const pair = prepared + indices_[static_cast<std::size_t>(j)];
    pair[0] += query[j] * even[j];
    pair[width] += query[j] * odd[j];
  }
  for (int64_t p = 0; p < first_slots_; ++p) {
    prepared[2 * width + static_cast<std::size_t>(p)] =
        dot_product(query, row(2 + p, head), head_size_);
  }
  turn(tables_->half_block(), width, prepared);
  if (padding == 0) return;
  alignas(64) float angles[2 * kMaxFrequencies], scratch[2 * kMaxFrequencies];
  std::copy_n(tables_->at(padding, scratch), 2 * width, angles);
  for (std::size_t i = width; i < 2 * width; ++i) angles[i] = -angles[i];
  turn(angles, width, prepared);
}

void RotaryOffset::add_to_scores(const Kernels& kernels, const float* prepared, std::size_t pitch,
                                 int rows, int64_t slot, int64_t padding, const float* key_scales,
                                 float* scores, PrefetchRange later) const {
  alignas(64) float scratch[2 * kMaxFrequencies];
  kernels.add_rotary(tables_->block(), tables_->at(slot, scratch), prepared,
                     static_cast<std::ptrdiff_t>(pitch), rows, key_scales, scores, later);
  const int64_t begin = std::max(slot, padding);
  const int64_t end = std::min(slot + kBlock, padding + first_slots_);
  for (int r = 0; r < rows && begin < end; ++r, prepared += pitch, scores += kBlock) {
    const float* const own = prepared + 2 * tables_->width();
    for (int64_t at = begin; at < end; ++at) scores[at - slot] += own[at - padding];
  }
}

}  // namespace tq
