// Logarithms and powers in float64: none of a float32 comes so near to the middle of two steps that
// libraries of mathematics could round it differently.
#include "core/stored_scale.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "tq/codec_spec.h"

namespace tq {
namespace {

constexpr int kBytes = spec::kLargestScale + 1;
static_assert(kBytes == 256 && spec::kStepsPerOctave == 32 &&
                  spec::kUsualScale % spec::kStepsPerOctave == 0,
              "as Kernels::load_scale_pairs takes the table");

std::array<float, kBytes> all_scales() {
  std::array<float, kBytes> scales{};
  for (int i = 1; i < kBytes; ++i) {
    // Rounded within an octave, so that numbers 32 places apart are twice each other to the bit.
    const int octave = i / spec::kStepsPerOctave - spec::kUsualScale / spec::kStepsPerOctave;
    const double rest = static_cast<double>(i % spec::kStepsPerOctave) / spec::kStepsPerOctave;
    scales[static_cast<std::size_t>(i)] = std::ldexp(static_cast<float>(std::exp2(rest)), octave);
  }
  return scales;
}

}  // namespace

uint8_t stored_scale(float scale) {
  if (!(scale > 0.0f)) return 0;
  const double octaves = std::log2(static_cast<double>(scale));
  const double step = std::nearbyint(spec::kStepsPerOctave * octaves) + spec::kUsualScale;
  if (step < spec::kLowestStep) return 0;
  return static_cast<uint8_t>(std::clamp(step, 1.0, double{spec::kLargestScale}));
}

const float* scales_of_bytes() {
  static const std::array<float, kBytes> scales = all_scales();
  return scales.data();
}

}  // namespace tq
