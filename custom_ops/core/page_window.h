// Exact tokens in pages: entries at the end of each page, behind the rows of its tokens, as many as
// have room there. tq_onnx/codec/pagewindow.py documents the layout and the rule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/window.h"
#include "tq/codec_spec.h"

namespace tq {

class PageWindow {
 public:
  // Of pages of `slots` tokens, whose rows of a head begin `stride` bytes apart; there are
  // `page_bytes` of each head, with room for the sinks behind all rows.
  PageWindow(const Window& window, int head_size, int64_t slots, int64_t stride,
             int64_t page_bytes);

  static int64_t entry_bytes(int head_size) {
    return spec::kEntryElementBytes * head_size + spec::kEntryTagBytes;
  }
  int64_t bytes() const { return bytes_; }  // of an entry
  int64_t sinks() const { return window_.sinks; }
  int64_t column(int64_t token) const { return token / slots_; }
  bool is_first(int64_t token) const { return token % slots_ == 0; }  // of its page
  // The last token of a page that is there, of a request of so many.
  int64_t last_of(int64_t column, int64_t tokens) const {
    return std::min((column + 1) * slots_, tokens) - 1;
  }

  // Places of a page that hold something when a request has so many tokens.
  int64_t places(int64_t column, int64_t tokens) const {
    return sinks_of(column) + capacity(column, last_of(column, tokens) % slots_);
  }
  // The place of a token, -1 for none.
  int64_t place(int64_t token, int64_t tokens) const {
    const int64_t column = token / slots_;
    const int64_t place = places_[static_cast<std::size_t>(index(column, token % slots_))];
    return token < window_.sinks || place < places(column, tokens) ? place : -1;
  }
  // The first byte of a place of a head.
  int64_t begin(int64_t place) const { return page_bytes_ - (place + 1) * bytes_; }
  // The bytes behind the rows of a page that were places, from the first to the one behind the last;
  // none if the last is not larger. They are zeroed: tokens may be taken back, and half an entry with
  // its tag would count again.
  std::pair<int64_t, int64_t> remains(int64_t column, int64_t tokens) const {
    const int64_t rows = (last_of(column, tokens) % slots_ + 1) * stride_;
    return {std::max(rows, begin(sinks_of(column) + window_.recent - 1)),
            begin(places(column, tokens) - 1)};
  }
  // The first token that a query takes exactly, sinks left out; never falls.
  int64_t oldest(int64_t position) const;

 private:
  int64_t sinks_of(int64_t column) const { return column == 0 ? window_.sinks : 0; }
  // Of a first page, then of another one.
  int64_t index(int64_t column, int64_t slot) const { return (column == 0 ? 0 : slots_) + slot; }
  int64_t capacity(int64_t column, int64_t slot) const {
    return capacities_[static_cast<std::size_t>(index(column, slot))];
  }
  void place_tokens(int64_t column);

  const Window window_;
  const int64_t slots_, stride_, page_bytes_, bytes_;
  std::vector<int32_t> capacities_, places_;  // [2, slots]
};

}  // namespace tq
