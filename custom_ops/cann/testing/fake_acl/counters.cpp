#include "counters.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace fake_acl {
namespace {

thread_local std::string recent_error;
thread_local std::string told_error;  // keeps what aclGetRecentErrMsg returned alive

}  // namespace

void Counters::add(const std::string& name, uint64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_[name] += amount;
}

uint64_t Counters::get(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = counts_.find(name);
  return found == counts_.end() ? 0 : found->second;
}

void Counters::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_.clear();
  last_violation_.clear();
}

std::string Counters::json() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Names are those of functions, operators and kernels: nothing in them needs an escape.
  std::string text = "{";
  for (const auto& [name, count] : counts_) {
    if (text.size() > 1) text += ", ";
    text += "\"" + name + "\": " + std::to_string(count);
  }
  return text + "}";
}

void Counters::violation(const std::string& message) {
  std::fprintf(stderr, "[fake ACL] violation: %s\n", message.c_str());
  const std::lock_guard<std::mutex> lock(mutex_);
  ++counts_["violations"];
  last_violation_ = message;
}

std::string Counters::last_violation() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_violation_;
}

Counters& counters() {
  static Counters* const instance = new Counters;
  return *instance;
}

void set_recent_error(const std::string& message) { recent_error = message; }

aclError refuse(aclError error, const std::string& message) {
  counters().violation(message);
  set_recent_error(message);
  return error;
}

uint32_t environment_number(const char* name, uint32_t otherwise) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  errno = 0;
  const unsigned long long value = std::strtoull(text, &end, 10);
  if (errno != 0 || *end != '\0' || *text == '-' ||
      value > std::numeric_limits<uint32_t>::max()) {
    std::fprintf(stderr, "[fake ACL] %s='%s' is not a number from 0 to 4294967295\n", name, text);
    std::abort();
  }
  return static_cast<uint32_t>(value);
}

}  // namespace fake_acl

extern "C" const char* aclGetRecentErrMsg() {
  FAKE_ACL_COUNT_CALL();
  if (fake_acl::recent_error.empty()) return nullptr;
  fake_acl::told_error.swap(fake_acl::recent_error);
  fake_acl::recent_error.clear();
  return fake_acl::told_error.c_str();
}
