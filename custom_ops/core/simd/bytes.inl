// Codecs with a byte per coordinate: floats to codes and back. Codes are the same bits at every
// level, since every step is one correctly rounded operation.

namespace {

// body(at, n): n coordinates from `at` on, kLanes of them but at the end.
template <class Body>
TQ_INLINE void for_each_lanes(int size, Body&& body) {
  for (int at = 0; at < size; at += kLanes) body(at, smaller(kLanes, size - at));
}

TQ_INLINE void store_up_to(float* p, V v, int n) {
  if (n >= kLanes) {
    store(p, v);
  } else {
    store_n(p, v, n);
  }
}

void round_steps(const float* x, float zero, float scale, float low, float high, uint8_t* codes,
                 int size) {
  const V origin = set1(zero), step = set1(scale), least = set1(low), most = set1(high);
  for_each_lanes(size, [&](int at, int n) {
    V steps = div(sub(load_up_to(x + at, n), origin), step);
    steps = max(steps, least);
    steps = select(less_equal(steps, most), steps, most);
    store_bytes(codes + at, and_int(round_to_int(steps), set1_int(0xff)), n);
  });
}

// Below 2^-6 the steps are 2^-9, the last place of numbers around 2^14; above, the exponent goes
// from bias 127 to 7 and the mantissa loses its 20 low bits.
void encode_fp8(const float* x, uint8_t* codes, int size) {
  const V largest = set1(448.0f), subnormal = set1(0.015625f), magic = set1(16384.0f);
  for_each_lanes(size, [&](int at, int n) {
    const V values = load_up_to(x + at, n);
    const I sign = and_int(shift_right<24>(bits_of(values)), set1_int(0x80));
    V magnitude = abs(values);
    magnitude = select(less_equal(magnitude, largest), magnitude, largest);
    const I bits = bits_of(magnitude);
    const I odd = and_int(shift_right<20>(bits), set1_int(1));
    const I rounded = shift_right<20>(add_int(add_int(bits, set1_int(0x7ffff)), odd));
    const I normal = sub_int(rounded, set1_int(120 << 3));
    const I small = sub_int(bits_of(add(magnitude, magic)), bits_of(magic));
    const V code = select(less_equal(magnitude, subnormal), float_of(small), float_of(normal));
    store_bytes(codes + at, or_int(bits_of(code), sign), n);
  });
}

void decode_fp8(const uint8_t* codes, float* out, int size) {
  for_each_lanes(size, [&](int at, int n) {
    const I code = load_bytes(codes + at, n);
    const I magnitude = and_int(code, set1_int(0x7f));
    const I mantissa = shift_left<20>(magnitude);
    const V normal = float_of(add_int(mantissa, set1_int(120 << 23)));
    const V small = sub(float_of(add_int(mantissa, set1_int(121 << 23))), set1(0.015625f));
    const V number = to_float(magnitude);
    V value = select(less_equal(number, set1(7.0f)), small, normal);
    value = select(less_equal(number, set1(126.0f)), value, zero());  // NaN, which nobody writes
    const I sign = shift_left<24>(and_int(code, set1_int(0x80)));
    store_up_to(out + at, float_of(or_int(bits_of(value), sign)), n);
  });
}

void decode_int8(const uint8_t* codes, float scale, float* out, int size) {
  const V by = set1(scale);
  for_each_lanes(size, [&](int at, int n) {
    const V code = to_float(load_bytes(codes + at, n));
    const V number = select(less_equal(set1(128.0f), code), sub(code, set1(256.0f)), code);
    store_up_to(out + at, mul(number, by), n);
  });
}

}  // namespace
