// A test runner of our own: TEST(name) { CHECK(...); }
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace tq::test {

struct Case {
  const char* name;
  void (*body)();
};

std::vector<Case>& cases();
extern long checks;
extern long failures;

struct Registration {
  Registration(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

inline void check(bool holds, const char* expression, const char* file, int line,
                  const std::string& detail) {
  ++checks;
  if (holds) return;
  ++failures;
  std::printf("%s:%d: %s does not hold: %s\n", file, line, expression, detail.c_str());
}

}  // namespace tq::test

#define TEST(name)                                                        \
  static void name();                                                     \
  static const ::tq::test::Registration registration_##name(#name, name); \
  static void name()
#define CHECK(expression, detail) \
  ::tq::test::check((expression), #expression, __FILE__, __LINE__, (detail))
