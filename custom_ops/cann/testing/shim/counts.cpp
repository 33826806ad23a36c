// Counts as JSON, for tests.
#include "counts.h"

namespace shim {
namespace {

std::string field(const char* name, uint64_t value) {
  return "\"" + std::string(name) + "\": " + std::to_string(value);
}

std::string moved(const char* name, const Counts::Moved& queue) {
  return "\"" + std::string(name) + "\": {" + field("transfers", queue.transfers) + ", " +
         field("pieces", queue.pieces) + ", " + field("bytes", queue.bytes) + "}";
}

}  // namespace

std::string Counts::json() const {
  std::string text = "{\"vector\": [";
  for (const auto& [kind, counted] : vector) {
    const auto& [what, from, to] = kind;
    if (text.back() == '}') text += ", ";
    // Names are those of instructions: nothing in them needs an escape.
    text += "{\"name\": \"" + std::string(what) + "\", " + field("from_bytes", from) + ", " +
            field("to_bytes", to) + ", " + field("instructions", counted.instructions) + ", " +
            field("repeats", counted.repeats) + "}";
  }
  text += "], " + moved("moved_in", in) + ", " + moved("moved_out", out);
  text += ", " + field("barriers", barriers) + ", " + field("flags_waited", flags_waited);
  text += ", " + field("scalar_reads", scalar_reads) + ", ";
  text += field("scalar_writes", scalar_writes) + ", " + field("scalar_loads", scalar_loads);
  return text + "}";
}

}  // namespace shim
