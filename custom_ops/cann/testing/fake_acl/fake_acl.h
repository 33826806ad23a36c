// What the fake ACL runtime offers beyond ACL itself: to the simulated kernel library, which
// launches work on its streams, and to tests, which read what happened. Plain C; test-only.
//
// The provider brings libascendcl.so into the process for itself only: dlsym(RTLD_DEFAULT, ...)
// does not see it. Either link to it, or dlopen("libascendcl.so") and ask that handle; both give
// the library that is loaded already. The same holds for aclrtGetSocName in the host bridge.
//
// README.md beside this folder has the environment variables that choose the device.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- for simulated kernels

// Runs `task(argument)` once on the thread of `stream` (an aclrtStream; null is the default
// stream), after everything enqueued there before. `task` owns `argument`. What it returns that is
// not 0 is an aclError: the next synchronisation of the stream reports it. Counted as
// "kernel.<name>". Returns an aclError, in which case `task` does not run: an unknown stream.
int fake_acl_enqueue(void* stream, const char* name, int (*task)(void* argument), void* argument);

// Where the host reads and writes what is at this device address. Null for an address that is not
// on the device. Only code that runs on a stream may use the result.
void* fake_acl_alias(const void* device_address);

// Whether all of [address, address + bytes) lies in one block from aclrtMalloc that is not freed
// yet, counting the bytes that were asked for, not those of the padding.
int fake_acl_is_live(const void* address, size_t bytes);

// Whether any byte of [address, address + bytes) is in the device's address range.
int fake_acl_is_device(const void* address, size_t bytes);

// ---- for tests

// Everything counted since the start or the last reset, as one JSON object {"name": number}:
//   "<aclFunction>"                               calls
//   "copy.host_to_device", .device_to_host, ...   copies by direction, accepted ones only
//   "bytes.host_to_device", ...                   their bytes
//   "op.<Type>"                                   single operators launched
//   "kernel.<name>"                               launches through fake_acl_enqueue
//   "violations"                                  calls and tasks that broke a rule
// Writes at most `capacity` bytes with the terminator and returns the length of the whole text.
size_t fake_acl_counts_json(char* text, size_t capacity);
uint64_t fake_acl_count(const char* name);
void fake_acl_reset_counts(void);

// Bad copies, use of freed blocks, unknown handles, ...: a correct program has none.
uint64_t fake_acl_violations(void);
// The text of the last of them, or "".
size_t fake_acl_last_violation(char* text, size_t capacity);

// Every task waits a random time below `microseconds` first; 0 switches that off. The sequence
// depends on the seed, what it does to the order of the threads does not. With the seed 0 no time is
// random: for what a caller does wrong if a task has not been done yet.
void fake_acl_set_delay(uint32_t microseconds, uint32_t seed);

// Makes the next copy of this kind (aclrtMemcpyKind) ask for `bytes` more than its caller did, in
// source and destination, as a caller with a wrong size would. Shows that such a copy is refused
// also when the real provider makes it.
void fake_acl_lengthen_next_copy(int kind, size_t bytes);

// ---- the operators of libopapi.so

// The first phase of this operator fails from now on, as for a form that CANN does not support; null
// for none. "aclnnFusedInferAttentionScoreV2 of INT4" is that operator with such keys.
void fake_acl_refuse_operator(const char* name);
// Makes a mistake in one of the following calls of operators, for tests that look whether a test would
// see it: call number `call` from now on
//   FAKE_ACL_SKIP      is not run
//   FAKE_ACL_LATE      runs behind the next call, if that reads what it writes
//   FAKE_ACL_SHIFT     has tensor `which`, inputs first, one element further on
//   FAKE_ACL_NUMBER    has number `which` of aclnnFusedInferAttentionScoreV2 larger by 1
enum { FAKE_ACL_SKIP, FAKE_ACL_LATE, FAKE_ACL_SHIFT, FAKE_ACL_NUMBER };
void fake_acl_mutate_operator(int kind, int call, int which);
// Whether there was such a call since then.
int fake_acl_was_mutated(void);
// Tensors, lists, arrays and plans that nothing has destroyed or run.
size_t fake_acl_live_objects(void);

#ifdef __cplusplus
}
#endif
