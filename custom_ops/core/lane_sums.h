// Steps of queries and weights whose products are added in lanes of 16 bits: what the avx2 level and its
// scalar reference have in common. Included by files of one instruction set, see core/kernels.h.
//
// A lane adds products of bytes: vpmaddubsw has two of them, and kLaneVectors or 1 of its results are
// added before they are widened. No sum may leave 16 bits, of any codes. Let L be the largest integer
// of the codebook and n the vectors that are added; a lane has 2 n products.
//   keys    entries count from -L and lie in [0, 2 L]; the sums of a lane are between those of its
//           negative and of its positive query coordinates: 2 L sum |q| <= 32767 for each sign alone
//   values  entries lie in [-L, L] and weights are not negative: L sum w <= 32767
// A number is rounded by at most half a step, a lane's sum by n. So a step is at least the sum of what a
// lane has over 32767 / (2 L) - n for queries, and over 32767 / L - n for weights. As for all levels it
// is also at least a 127th of the largest query coordinate, and a 255th of the largest weight. With
// small integers that is mostly more.
#pragma once

#include <stdint.h>

#include "core/kernels.h"

namespace {

constexpr int kLaneVectors = 2;
// Up to here two vectors are added: products of 64 and 127 twice, or of 64 and 255, fit in.
constexpr int kSmallInteger = 64;
constexpr int kMostInLane = 32767;

constexpr int lane_vectors(int largest) { return largest <= kSmallInteger ? kLaneVectors : 1; }

// Of a lane's sum: what is compared with the largest number of a query, or of weights.
constexpr float lane_share_of_query(int largest) {
  return tq::kLargestByte / (static_cast<float>(kMostInLane) / static_cast<float>(2 * largest) -
                             static_cast<float>(lane_vectors(largest)));
}
constexpr float lane_share_of_weights(int largest) {
  return tq::kLargestByteWeight / (static_cast<float>(kMostInLane) / static_cast<float>(largest) -
                                   static_cast<float>(lane_vectors(largest)));
}

}  // namespace
