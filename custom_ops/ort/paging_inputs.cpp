// Every length and every page that a token needs is looked at before a page is.
#include "ort/paging_inputs.h"

#include <string>

namespace tq::ort {
namespace {

std::string item(const char* op, const Tensor& tensor, int64_t index) {
  return std::string(op) + ": " + tensor.name + "[" + std::to_string(index) + "]";
}

std::string entry(const char* op, const PackedRequests& packed, int64_t request, int64_t column) {
  return std::string(op) + ": " + packed.table.name + "[" + std::to_string(request) + ", " +
         std::to_string(column) + "] is " + std::to_string(packed.page_of(request, column));
}

void check_bounds(const char* op, const PackedRequests& packed, int64_t tokens) {
  const int32_t* const bounds = packed.cumulative.as<int32_t>();
  if (bounds[0] != 0) {
    throw OpError(item(op, packed.cumulative, 0) + " is " + std::to_string(bounds[0]) +
                  ", expected 0");
  }
  for (int64_t r = 0; r < packed.requests; ++r) {
    if (bounds[r + 1] < bounds[r]) {
      throw OpError(item(op, packed.cumulative, r + 1) + " is " + std::to_string(bounds[r + 1]) +
                    ", less than " + std::to_string(bounds[r]) + " before it");
    }
  }
  if (bounds[packed.requests] != tokens) {
    throw OpError(item(op, packed.cumulative, packed.requests) + " is " +
                  std::to_string(bounds[packed.requests]) + ", expected the " +
                  std::to_string(tokens) + " packed tokens");
  }
}

void check_pages(const char* op, const PackedRequests& packed, int64_t pages, int64_t page_slots) {
  for (int64_t r = 0; r < packed.requests; ++r) {
    const int64_t past = packed.past_of(r), total = packed.total_of(r);
    if (past < 0) {
      throw OpError(item(op, packed.past, r) + " is " + std::to_string(past) +
                    ", expected 0 or more");
    }
    const int64_t needed = (total + page_slots - 1) / page_slots;
    if (needed > packed.columns) {
      throw OpError(item(op, packed.past, r) + " is " + std::to_string(past) + ", and with " +
                    std::to_string(total - past) + " new tokens they need " +
                    std::to_string(needed) + " pages of " + std::to_string(page_slots) +
                    ", but block_table has " + std::to_string(packed.columns) + " columns");
    }
    for (int64_t c = 0; c < needed; ++c) {
      const int64_t page = packed.page_of(r, c);
      if (page < 0 || page >= pages) {
        throw OpError(entry(op, packed, r, c) + ", expected a page from 0 to below " +
                      std::to_string(pages));
      }
    }
  }
}

}  // namespace

PackedRequests read_packed(const Api& api, OrtKernelContext* context, const char* op,
                           const spec::Input& cumulative, const spec::Input& past,
                           const spec::Input& table, int64_t tokens, int64_t pages,
                           int64_t page_slots) {
  PackedRequests packed{};
  packed.cumulative = read_input(api, context, op, cumulative);
  packed.past = read_input(api, context, op, past);
  packed.table = read_input(api, context, op, table);
  for (const Tensor* one : {&packed.cumulative, &packed.past, &packed.table}) {
    expect_type(op, *one, kInt32);
  }
  expect_rank(op, packed.table, 2);
  packed.requests = packed.table.dims[0];
  packed.columns = packed.table.dims[1];
  expect_dims(op, packed.past, {packed.requests}, "the requests of block_table");
  expect_dims(op, packed.cumulative, {packed.requests + 1},
              "one more than the requests of block_table");
  if (page_slots < 1) throw OpError(std::string(op) + ": pages have no slots");
  check_bounds(op, packed, tokens);
  check_pages(op, packed, pages, page_slots);
  return packed;
}

void expect_own_pages(const char* op, const PackedRequests& packed, int64_t pages,
                      int64_t page_slots) {
  constexpr int64_t kWord = 64;
  std::vector<uint64_t> written(static_cast<size_t>((pages + kWord - 1) / kWord));
  const auto bit = [](int64_t page) { return uint64_t{1} << page % kWord; };
  const auto word = [&](int64_t page) -> uint64_t& {
    return written[static_cast<size_t>(page / kWord)];
  };
  const auto first_written = [&](int64_t r) { return packed.past_of(r) / page_slots; };
  const auto end_of_pages = [&](int64_t r) {
    return (packed.total_of(r) + page_slots - 1) / page_slots;
  };
  const auto refuse = [&](int64_t r, int64_t c) {
    throw OpError(
        entry(op, packed, r, c) +
        ", a page that gets tokens and is in the tables of two requests, or twice in one");
  };
  const auto is_idle = [&](int64_t r) { return packed.start_of(r) == packed.end_of(r); };
  for (int64_t r = 0; r < packed.requests; ++r) {
    if (is_idle(r)) continue;
    for (int64_t c = first_written(r); c < end_of_pages(r); ++c) {
      const int64_t page = packed.page_of(r, c);
      if (word(page) & bit(page)) refuse(r, c);
      word(page) |= bit(page);
    }
  }
  for (int64_t r = 0; r < packed.requests; ++r) {
    const int64_t end = is_idle(r) ? end_of_pages(r) : first_written(r);
    for (int64_t c = 0; c < end; ++c) {
      const int64_t page = packed.page_of(r, c);
      if (word(page) & bit(page)) refuse(r, c);
    }
  }
}

}  // namespace tq::ort
