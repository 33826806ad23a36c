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

}  // namespace
