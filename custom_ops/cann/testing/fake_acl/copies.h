// Copies and fills: checked when they are asked for, and again when a stream comes to them, since a
// block may have been freed between.
#pragma once

#include <cstddef>

#include "acl/acl_rt.h"

namespace fake_acl {

struct Copy {
  void* to;
  std::size_t room;  // at `to`
  const void* from;
  std::size_t bytes;
  aclrtMemcpyKind kind;

  // Refuses what leaves the room, the direction or a live block.
  aclError check(const char* caller) const;
  void run() const;
};

// What fake_acl_lengthen_next_copy asked for is added here.
Copy requested_copy(void* to, std::size_t room, const void* from, std::size_t bytes,
                    aclrtMemcpyKind kind);

}  // namespace fake_acl
