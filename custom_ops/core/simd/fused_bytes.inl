// Few query rows against rows that hold their coordinates one after the other, as bytes or floats:
// decoded keys and values stay in registers.
//   score_bytes:      scores[q][t] = sum over j of query[q][j] * coordinate(t, j)
//   accumulate_bytes: sums[q][j]  += sum over t of weights[q][t] * coordinate(t, j)
// Order of summation as in fused.inl: neither the group of a query row nor the cut of a row shows.

namespace {

using tq::ByteFormat;
using tq::Coordinate;

constexpr int kScaleBlocks = 512 / tq::kScaleBlock;
constexpr int kBytesAhead = 4096;  // between what is read and what is asked for

// scales[block][t] of kInt8, leading dimension kBlock.
struct BlockScales {
  float of[kScaleBlocks * kBlock];
  BlockScales(const ByteFormat& format, const uint8_t* rows, int count) {
    for (int block = 0; block * tq::kScaleBlock < format.head_size; ++block) {
      load_fields(rows + format.scales + 2 * block, format.stride, count, of + block * kBlock);
    }
  }
};

// Coordinates from `at` on, n of them; fp8 as 256ths.
template <Coordinate KIND>
TQ_INLINE V coordinates(const uint8_t* row, const float* scales, int at, int t, int n) {
  if constexpr (KIND == Coordinate::kFp8) {
    return load_fp8(row + at, n);
  } else if constexpr (KIND == Coordinate::kInt8) {
    return mul(load_int8(row + at, n), set1(scales[at / tq::kScaleBlock * kBlock + t]));
  } else if constexpr (KIND == Coordinate::kHalf) {
    return load_half_bytes(row + 2 * at, n);
  } else if constexpr (KIND == Coordinate::kBfloat) {
    return load_bfloat(row + 2 * at, n);
  } else {
    return load_up_to(reinterpret_cast<const float*>(row + 4 * at), n);
  }
}

template <Coordinate KIND>
constexpr float kUnit = KIND == Coordinate::kFp8 ? 256.0f : 1.0f;

// body(n, at): n is kLanes in a way that the compiler sees, but at the end.
template <class Body>
TQ_INLINE void for_each_vector(const ByteFormat& format, Body&& body) {
  int at = 0;
  for (; at + kLanes <= format.head_size; at += kLanes) body(kLanes, at);
  if constexpr (kLanes > 8) {  // head sizes are multiples of 8
    if (at < format.head_size) body(format.head_size - at, at);
  }
}

TQ_INLINE void prefetch_bytes(const uint8_t* at, int bytes) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(at) + kBytesAhead;
  for (int i = 0; i < bytes; i += 64) prefetch(reinterpret_cast<const void*>(from + i));
}

template <Coordinate KIND, int QUERIES>
void score_bytes_of(const ByteFormat& format, const uint8_t* rows, int count, const float* scales,
                    const float* query, float* scores) {
  for (int t = 0; t < count; t += 4) {
    prefetch_bytes(rows + t * format.stride, 4 * format.stride);
    // Behind the last row comes itself again: scores have room for whole blocks.
    int at_row[4];
    for (int r = 0; r < 4; ++r) at_row[r] = smaller(t + r, count - 1);
    V sums[QUERIES][4];
    for (int q = 0; q < QUERIES; ++q) {
      for (int r = 0; r < 4; ++r) sums[q][r] = zero();
    }
    for_each_vector(format, [&](int n, int at) TQ_INLINED {
      V key[4];
      for (int r = 0; r < 4; ++r) {
        key[r] = coordinates<KIND>(rows + at_row[r] * format.stride, scales, at, at_row[r], n);
      }
      for (int q = 0; q < QUERIES; ++q) {
        const V by = load(query + q * format.padded + at);
        for (int r = 0; r < 4; ++r) sums[q][r] = fma(key[r], by, sums[q][r]);
      }
    });
    for (int q = 0; q < QUERIES; ++q) {
      float* const out = scores + q * kBlock + t;
      store_4_sums(out, sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
      if constexpr (kUnit<KIND> != 1.0f) {
        for (int r = 0; r < 4; ++r) out[r] *= kUnit<KIND>;
      }
    }
  }
}

// Where sums are not finite: a weight of zero adds nothing, whatever the row says.
template <Coordinate KIND>
void accumulate_nonfinite(const ByteFormat& format, const uint8_t* rows, int count,
                          const float* scales, const float* weights, int at, int n, float* sum) {
  V total = load(sum);
  for (int t = 0; t < count; ++t) {
    if (weights[t] == 0.0f) continue;
    total = fma(coordinates<KIND>(rows + t * format.stride, scales, at, t, n),
                set1(weights[t] * kUnit<KIND>), total);
  }
  store(sum, total);
}

template <Coordinate KIND, int QUERIES, int VECTORS>
TQ_INLINE void accumulate_bytes_pass(const ByteFormat& format, const uint8_t* rows, int count,
                                     const float* scales, const float* weights, int at, int n,
                                     float* sums) {
  V total[VECTORS][QUERIES];
  for (int c = 0; c < VECTORS; ++c) {
    for (int q = 0; q < QUERIES; ++q) {
      total[c][q] = load(sums + q * format.padded + at + c * kLanes);
    }
  }
  for (int t = 0; t < count; ++t) {
    const uint8_t* const row = rows + t * format.stride;
    prefetch_bytes(row + at * format.bytes, VECTORS * kLanes * format.bytes);
    V by[QUERIES];
    for (int q = 0; q < QUERIES; ++q) by[q] = set1(weights[q * kBlock + t] * kUnit<KIND>);
    for (int c = 0; c < VECTORS; ++c) {
      const V value = coordinates<KIND>(row, scales, at + c * kLanes, t, n);
      for (int q = 0; q < QUERIES; ++q) total[c][q] = fma(value, by[q], total[c][q]);
    }
  }
  V nonfinite = zero();
  for (int c = 0; c < VECTORS; ++c) {
    for (int q = 0; q < QUERIES; ++q) nonfinite = fma(total[c][q], zero(), nonfinite);
  }
  const bool is_finite = lane_sum(nonfinite) == 0.0f;
  for (int c = 0; c < VECTORS; ++c) {
    for (int q = 0; q < QUERIES; ++q) {
      float* const sum = sums + q * format.padded + at + c * kLanes;
      if (is_finite) {
        store(sum, total[c][q]);
      } else {
        accumulate_nonfinite<KIND>(format, rows, count, scales, weights + q * kBlock,
                                   at + c * kLanes, n, sum);
      }
    }
  }
}

template <Coordinate KIND, int QUERIES>
void accumulate_bytes_of(const ByteFormat& format, const uint8_t* rows, int count,
                         const float* scales, const float* weights, float* sums) {
  constexpr int kFit = kSumRegisters / QUERIES;
  constexpr int kWide = kFit >= 8 ? 8 : (kFit >= 4 ? 4 : 2);
  constexpr int kNarrow = kWide / 2;
  const int size = format.head_size;
  int at = 0;
  for (; at + kWide * kLanes <= size; at += kWide * kLanes) {
    accumulate_bytes_pass<KIND, QUERIES, kWide>(format, rows, count, scales, weights, at, kLanes,
                                                sums);
  }
  for (; at + kNarrow * kLanes <= size; at += kNarrow * kLanes) {
    accumulate_bytes_pass<KIND, QUERIES, kNarrow>(format, rows, count, scales, weights, at, kLanes,
                                                  sums);
  }
  for (; at < size; at += kLanes) {
    accumulate_bytes_pass<KIND, QUERIES, 1>(format, rows, count, scales, weights, at,
                                            smaller(kLanes, size - at), sums);
  }
}

// body(kind): a std::integral_constant without the STL.
template <Coordinate KIND>
struct KindOf {
  static constexpr Coordinate value = KIND;
};
template <class Body>
TQ_INLINE void with_kind(Coordinate kind, Body&& body) {
  switch (kind) {
    case Coordinate::kFp8:
      return body(KindOf<Coordinate::kFp8>{});
    case Coordinate::kInt8:
      return body(KindOf<Coordinate::kInt8>{});
    case Coordinate::kHalf:
      return body(KindOf<Coordinate::kHalf>{});
    case Coordinate::kBfloat:
      return body(KindOf<Coordinate::kBfloat>{});
    default:
      return body(KindOf<Coordinate::kFloat>{});
  }
}

// body(first, Number<some>) for even shares of at most kScoreGroup query rows.
template <class Body>
TQ_INLINE void for_each_group(int queries, Body&& body) {
  const int groups = (queries + kScoreGroup - 1) / kScoreGroup;
  int first = 0;
  for (int group = 0; group < groups; ++group) {
    const int some = (queries - first + groups - group - 1) / (groups - group);
    with_group(some, [&](auto number) { body(first, number); });
    first += some;
  }
}

template <class Body>
TQ_INLINE void with_scales(const ByteFormat& format, const uint8_t* rows, int count, Body&& body) {
  if (format.kind != Coordinate::kInt8) return body(static_cast<const float*>(nullptr));
  const BlockScales scales(format, rows, count);
  body(scales.of);
}

void score_bytes(const ByteFormat& format, const uint8_t* rows, int count, const float* query,
                 int queries, float* scores) {
  with_scales(format, rows, count, [&](const float* scales) {
    with_kind(format.kind, [&](auto kind) {
      for_each_group(queries, [&](int first, auto some) {
        score_bytes_of<decltype(kind)::value, decltype(some)::value>(
            format, rows, count, scales, query + static_cast<ptrdiff_t>(first) * format.padded,
            scores + first * kBlock);
      });
    });
  });
}

void accumulate_bytes(const ByteFormat& format, const uint8_t* rows, int count,
                      const float* weights, int queries, float* sums) {
  with_scales(format, rows, count, [&](const float* scales) {
    with_kind(format.kind, [&](auto kind) {
      for_each_group(queries, [&](int first, auto some) {
        accumulate_bytes_of<decltype(kind)::value, decltype(some)::value>(
            format, rows, count, scales, weights + first * kBlock,
            sums + static_cast<ptrdiff_t>(first) * format.padded);
      });
    });
  });
}

float apply_fields(const float* weights, const float* scales, const float* zeros, int count,
                   float* out) {
  V sum = zero();
  for (int t = 0; t < count; t += kLanes) {
    const V weight = load(weights + t);
    const M is_zero = less_equal(abs(weight), zero());
    if (zeros != nullptr) sum = add(sum, select(is_zero, zero(), mul(weight, load(zeros + t))));
    store(out + t, select(is_zero, zero(), mul(weight, load(scales + t))));
  }
  return lane_sum(sum);
}

}  // namespace
