// Places of exact tokens in pages; the contract is in page_window.h.
#include "core/page_window.h"

namespace tq {

PageWindow::PageWindow(const Window& window, int head_size, int64_t slots, int64_t stride,
                       int64_t page_bytes)
    : window_(window),
      slots_(slots),
      stride_(stride),
      page_bytes_(page_bytes),
      bytes_(entry_bytes(head_size)),
      capacities_(static_cast<std::size_t>(2 * slots)),
      places_(capacities_.size(), -1) {
  for (int64_t column = 0; column < 2; ++column) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t room = (page_bytes - (slot + 1) * stride) / bytes_ - sinks_of(column);
      capacities_[static_cast<std::size_t>(index(column, slot))] =
          static_cast<int32_t>(std::clamp<int64_t>(room, 0, window.recent));
    }
    place_tokens(column);
  }
}

// From the end of the page backwards: the token that is gone once another comes had the place of that
// one, or one of those that went with it.
void PageWindow::place_tokens(int64_t column) {
  const int64_t sinks = std::min(sinks_of(column), slots_);
  int32_t* const places = places_.data() + index(column, 0);
  for (int64_t slot = 0; slot < sinks; ++slot) places[slot] = static_cast<int32_t>(slot);
  const auto first_of = [&](int64_t slot) {
    return std::max(sinks, slot - capacity(column, slot) + 1);
  };
  const int64_t first = first_of(slots_ - 1);
  for (int64_t token = first; token < slots_; ++token) {
    places[token] = static_cast<int32_t>(sinks + token - first);
  }
  for (int64_t slot = slots_ - 1; slot > sinks; --slot) {
    const int64_t now = capacity(column, slot), before = capacity(column, slot - 1);
    const int64_t end = std::min(first_of(slot), slot);
    int64_t token = first_of(slot - 1);
    if (now > 0 && token < end) places[token++] = places[slot];
    for (int64_t free = now; free < before && token < end; ++free) {
      places[token++] = static_cast<int32_t>(sinks + free);
    }
  }
}

int64_t PageWindow::oldest(int64_t position) const {
  const int64_t column = position / slots_, slot = position % slots_;
  const int64_t count = capacity(column, slot);
  if (count <= slot || column == 0) return position - count + 1;
  const int64_t kept = capacity(column - 1, slots_ - 1);
  return std::max(column * slots_ - kept, position - window_.recent + 1);
}

}  // namespace tq
