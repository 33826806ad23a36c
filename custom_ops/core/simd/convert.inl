// float16 bits <-> float, kLanes at a time; the rest of an array passes through a padded copy, so
// nothing beyond `count` elements is read or written. To float16: to nearest, ties to even.

namespace {

void half_to_float(const uint16_t* in, float* out, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, load_half(in + i));
  if (i < count) {
    uint16_t rest[kLanes] = {};
    float wide[kLanes];
    const size_t some = count - i;
    for (size_t j = 0; j < some; ++j) rest[j] = in[i + j];
    store(wide, load_half(rest));
    for (size_t j = 0; j < some; ++j) out[i + j] = wide[j];
  }
}

void float_to_half(const float* in, uint16_t* out, size_t count) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_half(out + i, load(in + i));
  if (i < count) {
    float rest[kLanes] = {};
    uint16_t narrow[kLanes];
    const size_t some = count - i;
    for (size_t j = 0; j < some; ++j) rest[j] = in[i + j];
    store_half(narrow, load(rest));
    for (size_t j = 0; j < some; ++j) out[i + j] = narrow[j];
  }
}

bool round_to_half(const float* in, float* out, size_t count) {
  const V most = set1(65504.0f), hidden = set1(__builtin_huge_valf());
  V largest = zero();
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const V x = load(in + i);
    uint16_t halves[kLanes];
    store_half(halves, x);
    store(out + i, load_half(halves));
    largest = max(select(less_equal(abs(x), most), zero(), hidden), largest);
  }
  bool fits = lane_max(largest) == 0.0f;
  if (i < count) {
    float rest[kLanes] = {};
    for (size_t j = i; j < count; ++j) rest[j - i] = in[j];
    fits &= round_to_half(rest, rest, kLanes);
    for (size_t j = i; j < count; ++j) out[j] = rest[j - i];
  }
  return fits;
}

}  // namespace
