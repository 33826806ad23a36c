// Runs launches, core after core, and keeps what went wrong: hazards of the cores (core.h), global
// memory that two cores touch, and the synchronisation statements that ran. Tests ask by tq_sim_*.
//
// Cores run one after the other and instructions in program order. What that hides is what the
// checks are for; a race that they do not know of would not be seen.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "core.h"
#include "device.h"
#include "launch_queue.h"

namespace shim {
namespace {

struct Access {
  const uint8_t* first;
  const uint8_t* last;
  uint32_t core;
};

struct Launch {
  std::vector<Access> reads, writes;
};

struct Record {
  uint64_t hazards = 0;
  std::vector<std::string> messages;
  uint32_t ub_bytes = 0;
  uint64_t vector_instructions = 0;
  uint32_t cores_used = 0;
  bool counts_launches = false;
  std::vector<std::string> launches;  // as JSON, while they are counted
};

Record& record() {
  static Record all;
  return all;
}

constexpr size_t kKeptMessages = 20;
constexpr uint32_t kMaxCores = 64;
constexpr int kHazardError = 507015;  // ACL_ERROR_RT_AICORE_EXCEPTION

// One launch at a time, whatever the streams: what it finds is its own. Tests that ask wait, too.
std::mutex& simulation() {
  static std::mutex one;
  return one;
}

Core* current = nullptr;
Launch* launched = nullptr;

// What one core writes no other may write, and nobody reads: launches do not order their cores.
void check_cores(Launch& launch) {
  auto& writes = launch.writes;
  // How far around a write no other core may write.
  const auto begin = [](const Access& write) {
    const auto first = reinterpret_cast<uintptr_t>(write.first);
    return kStoresLines ? first / kBlock * kBlock : first;
  };
  const auto end = [](const Access& write) {
    const auto last = reinterpret_cast<uintptr_t>(write.last);
    return kStoresLines ? (last + kBlock - 1) / kBlock * kBlock : last;
  };
  std::sort(writes.begin(), writes.end(),
            [](const Access& a, const Access& b) { return a.first < b.first; });
  const Access* widest = nullptr;
  for (const Access& write : writes) {
    if (widest != nullptr && begin(write) < end(*widest) && write.core != widest->core) {
      report("cores " + std::to_string(widest->core) + " and " + std::to_string(write.core) +
             (write.first < widest->last ? " write the same global memory"
                                         : " write one 32-byte line"));
    }
    if (widest == nullptr || write.last > widest->last) widest = &write;
  }
  std::vector<const uint8_t*> reach;  // how far the writes up to each one go
  for (const Access& write : writes) {
    reach.push_back(reach.empty() ? write.last : std::max(reach.back(), write.last));
  }
  for (const Access& read : launch.reads) {
    const auto behind =
        std::lower_bound(writes.begin(), writes.end(), read.last,
                         [](const Access& write, const uint8_t* end) { return write.first < end; });
    for (auto i = behind - writes.begin(); i > 0 && reach[i - 1] > read.first; --i) {
      if (writes[i - 1].last <= read.first || writes[i - 1].core == read.core) continue;
      report("core " + std::to_string(read.core) + " reads global memory that another one writes");
      break;
    }
  }
}

struct Job {
  std::string name;
  uint32_t cores;
  std::function<void()> kernel;
};

int run(void* argument) {
  const std::unique_ptr<Job> job(static_cast<Job*>(argument));
  const std::lock_guard<std::mutex> lock(simulation());
  const uint64_t before = record().hazards;
  Launch launch;
  launched = &launch;
  std::string counted;
  for (uint32_t i = 0; i < job->cores; ++i) {
    Core one(i, job->cores);
    current = &one;
    job->kernel();
    one.finish();
    record().ub_bytes = std::max(record().ub_bytes, one.allocated());
    record().vector_instructions += one.issued(PIPE_V);
    if (record().counts_launches) counted += (i > 0 ? ", " : "") + one.counts().json();
  }
  current = nullptr;
  if (record().counts_launches) {
    record().launches.push_back("{\"kernel\": \"" + job->name + "\", \"cores\": [" + counted +
                                "]}");
  }
  std::set<uint32_t> writers;
  for (const Access& write : launch.writes) writers.insert(write.core);
  record().cores_used = std::max(record().cores_used, static_cast<uint32_t>(writers.size()));
  check_cores(launch);
  launched = nullptr;
  return record().hazards == before ? 0 : kHazardError;
}

}  // namespace

Core& core() { return *current; }

uint32_t launch(uint32_t cores, void* stream, const char* name, std::function<void()> kernel) {
  if (cores == 0 || cores > kMaxCores) return 107000;  // ACL_ERROR_RT_PARAM_INVALID
  return static_cast<uint32_t>(enqueue(stream, name, run, new Job{name, cores, std::move(kernel)}));
}

std::map<Site, SiteState>& sites() {
  static std::map<Site, SiteState> all;
  return all;
}

bool runs(const char* kind, const char* file, int line) {
  // The texts are literals: their addresses tell sites apart much sooner than their contents.
  static std::map<std::tuple<const char*, const char*, int>, SiteState*> known;
  SiteState*& site = known[{kind, file, line}];
  if (site == nullptr) {
    const std::string path = file;
    site = &sites()[{path.substr(path.rfind('/') + 1), line, kind}];
  }
  ++site->executed;
  return !site->skipped;
}

void report(const std::string& message) {
  ++record().hazards;
  if (record().messages.size() < kKeptMessages) record().messages.push_back(message);
}

uint8_t* Core::global(const void* address, uint64_t bytes, bool is_write, const char* what) {
  uint8_t* const place = bytes > 0 ? device_bytes(address, bytes) : nullptr;
  if (place == nullptr) {
    fail(std::string(what) + " of " + std::to_string(bytes) +
         " bytes of global memory outside of every live block");
    return nullptr;
  }
  const auto first = reinterpret_cast<uintptr_t>(address);
  is_write ? stored(first, bytes, what) : loaded(first, bytes, what);
  auto& accesses = is_write ? launched->writes : launched->reads;
  accesses.push_back(
      {static_cast<const uint8_t*>(address), static_cast<const uint8_t*>(address) + bytes, index_});
  return place;
}

}  // namespace shim

using namespace shim;

extern "C" {

int tq_sim_arch(void) { return __NPU_ARCH__; }

uint64_t tq_sim_hazards(void) {
  const std::lock_guard<std::mutex> lock(simulation());
  return record().hazards;
}

void tq_sim_reset(void) {
  const std::lock_guard<std::mutex> lock(simulation());
  record().hazards = record().vector_instructions = record().cores_used = 0;
  record().messages.clear();
}

// From now on launches are counted (counts.h), or not; forgets those that were.
void tq_sim_count(int is_on) {
  const std::lock_guard<std::mutex> lock(simulation());
  record().counts_launches = is_on != 0;
  record().launches.clear();
}

// What was seen, as JSON: of all launches so far the most bytes of UB that a kernel allocated and how
// often synchronisation statements ran (sites); since the last reset the first messages, the vector
// instructions of all cores, and the most cores that wrote global memory in one launch; and the
// launches that were counted. No text in it needs an escape. Writes at most `capacity` bytes with the
// terminator and returns the length of the whole text.
size_t tq_sim_report(char* text, size_t capacity) {
  const std::lock_guard<std::mutex> lock(simulation());
  const Record& seen = record();
  std::string messages, executed, launches;
  const auto add = [](std::string& list, const std::string& entry) {
    list += (list.empty() ? "" : ", ") + entry;
  };
  for (const std::string& message : seen.messages) add(messages, "\"" + message + "\"");
  for (const auto& [site, state] : sites()) {
    add(executed, "[\"" + site.file + "\", " + std::to_string(site.line) + ", \"" + site.kind +
                      "\", " + std::to_string(state.executed) + "]");
  }
  for (const std::string& launch : seen.launches) add(launches, launch);
  const std::string all = "{\"ub_bytes\": " + std::to_string(seen.ub_bytes) +
                          ", \"vector_instructions\": " + std::to_string(seen.vector_instructions) +
                          ", \"cores_used\": " + std::to_string(seen.cores_used) +
                          ", \"messages\": [" + messages + "], \"sites\": [" + executed +
                          "], \"launches\": [" + launches + "]}";
  if (capacity > 0) std::snprintf(text, capacity, "%s", all.c_str());
  return all.size();
}

// Makes the kernels run as if the statement was not there.
void tq_sim_skip(const char* file, int line, const char* kind, int skipped) {
  const std::lock_guard<std::mutex> lock(simulation());
  sites()[{file, line, kind}].skipped = skipped != 0;
}

}  // extern "C"
