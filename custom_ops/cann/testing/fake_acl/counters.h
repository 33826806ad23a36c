// What happened: calls, copies, operators, and violations of the rules with the last one's text.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "acl/acl_base.h"

namespace fake_acl {

class Counters {
 public:
  void add(const std::string& name, uint64_t amount = 1);
  uint64_t get(const std::string& name) const;
  void reset();
  std::string json() const;

  // A rule was broken: counts, keeps the text and prints it.
  void violation(const std::string& message);
  std::string last_violation() const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, uint64_t> counts_;
  std::string last_violation_;
};

// Never destroyed: threads of other libraries may still call while the process ends.
Counters& counters();

// What aclGetRecentErrMsg tells this thread, once.
void set_recent_error(const std::string& message);

// A violation that the call itself reports.
aclError refuse(aclError error, const std::string& message);

// An environment variable as a number from 0 to 2^32 - 1; `otherwise` if it is not set.
uint32_t environment_number(const char* name, uint32_t otherwise);

}  // namespace fake_acl

// First statement of every ACL function.
#define FAKE_ACL_COUNT_CALL() ::fake_acl::counters().add(__func__)
