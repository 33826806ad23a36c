// What a decode step takes beyond the caches: counted where the core gets its memory from.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "core/attention.h"
#include "tests/fixture.h"
#include "tests/testing.h"

namespace {

std::atomic<std::size_t> in_use{0}, peak{0};
constexpr std::size_t kHeader = 64;

// Lies before what is given away.
struct Header {
  void* memory;
  std::size_t size;
};
static_assert(sizeof(Header) <= kHeader, "");

}  // namespace

void* operator new(std::size_t size, std::align_val_t, const std::nothrow_t&) noexcept {
  // Windows has no std::aligned_alloc.
  void* const memory = std::malloc(size + 2 * kHeader);
  if (memory == nullptr) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  char* const out = static_cast<char*>(memory) + (2 * kHeader - address % kHeader);
  const Header header{memory, size};
  std::memcpy(out - sizeof header, &header, sizeof header);
  const std::size_t now = in_use += size;
  for (std::size_t before = peak; before < now && !peak.compare_exchange_weak(before, now);) {
  }
  return out;
}

void operator delete(void* at, std::align_val_t) noexcept {
  if (at == nullptr) return;
  Header header;
  std::memcpy(&header, static_cast<char*>(at) - sizeof header, sizeof header);
  in_use -= header.size;
  std::free(header.memory);
}

namespace tq::test {
namespace {

// Peak bytes of one decode step over caches of zeros.
std::size_t decode_peak(const Kernels& level, int64_t batch, int64_t heads, int64_t group,
                        int64_t slots, const Parallel& parallel) {
  constexpr int kSize = 128;
  Random random(1);
  const Codec codec = lloyd_max(4);
  Tables tables(codec, kSize, random);
  const int width = spec::row_bytes(codec, kSize);
  const std::vector<uint8_t> rows(static_cast<std::size_t>(batch * heads * slots * width));
  std::vector<float> query(static_cast<std::size_t>(batch * heads * group * kSize), 1.0f);
  std::vector<float> output(query.size(), 1.0f);
  const int64_t past = slots - 1;
  AttentionCall call{};
  call.element = Element::kFloat;
  call.query = query.data();
  call.output = output.data();
  call.key = call.value = {rows.data(), codec, width, tables.centroids.data()};
  call.key_rotation = call.value_rotation = {kSize, tables.rotation.data(),
                                             tables.transposed.data(), nullptr, 0.0f};
  call.past_length = &past;
  call.batch = batch;
  call.query_heads = heads * group;
  call.heads = heads;
  call.tokens = 1;
  call.slots = slots;
  call.head_size = kSize;
  call.scale = 1.0f;
  call.causal = true;
  peak = in_use.load();
  const std::size_t before = peak;
  CHECK(attention(level, call, parallel), level.name);
  CHECK(output[0] == 0.0f, level.name);
  return peak - before;
}

TEST(a_decode_step_takes_little_memory) {
  Share share;
  constexpr std::size_t kMebibyte = 1 << 20;
  const struct {
    int64_t batch, heads, group, slots;
  } shapes[] = {{1, 8, 2, 1024}, {1, 8, 2, 65536}, {1, 8, 5, 65536},  {1, 8, 8, 16384},
                {8, 8, 5, 512},  {64, 8, 2, 64},   {1, 1, 1, 131072}, {64, 8, 8, 64}};
  for (const Kernels* level : supported_kernels()) {
    // The shapes decide, and the scalar level is slow.
    if (level == scalar_kernels()) continue;
    for (const auto& s : shapes) {
      if (share.leaves_out_next()) continue;
      const std::size_t one = decode_peak(*level, s.batch, s.heads, s.group, s.slots, serial());
      CHECK(one > 0 && one <= kMebibyte,
            std::string(level->name) + ": " + std::to_string(one) + " bytes, B" +
                std::to_string(s.batch) + " N" + std::to_string(s.heads) + " G" +
                std::to_string(s.group) + " S" + std::to_string(s.slots));
    }
    const std::size_t many = decode_peak(*level, 8, 8, 5, 512, threaded());
    CHECK(many <= 4 * kMebibyte, std::to_string(many));
  }
}

}  // namespace
}  // namespace tq::test
