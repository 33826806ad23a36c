// A paged cache: the pages that a block table lists, and the packed tokens of the requests.
//
// Bytes of a page are [N, S, W]: rows of a head lie together. A request's token in slot p is in row
// p % S of the page in column p / S of its line of the table. With exact tokens rows may be narrower
// than W: what is left lies behind the last one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/page_window.h"

namespace tq {

struct Paging {
  const int32_t* table;  // [requests, columns]; entries that tokens need are valid
  int64_t columns;
  int64_t page_slots;  // S
  int64_t packed;  // tokens of all requests in the tensors of the call
  // Of sequence b of the call, which is one of the requests: its line of the table, and where its
  // tokens begin among the packed ones.
  const int64_t* requests;
  const int64_t* starts;

  const PageWindow* window;  // null without exact tokens

  // Page of a sequence's token.
  int64_t page(int64_t b, int64_t token) const {
    return table[requests[b] * columns + token / page_slots];
  }
  // Number of tokens, from this one on, whose rows are contiguous.
  int64_t together(int64_t token) const { return page_slots - token % page_slots; }
};

}  // namespace tq
