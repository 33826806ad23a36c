/* How fast this machine reads memory: the floor of decode attention, which reads its cache once.
 *
 * Compiled when a benchmark starts (see bandwidth.py). Every thread reads a share of its own of
 * every piece, with a plain loop or with one that prefetches; nothing but the loads is timed.
 */
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define MOST_THREADS 256
#define AHEAD 2048 /* bytes between a prefetch and its load */

/* GCC and Clang make of it what the processor has: one, two or four registers. */
typedef uint64_t Line __attribute__((vector_size(64)));

static inline __attribute__((always_inline)) uint64_t read_bytes(const unsigned char* at,
                                                                 size_t bytes, int prefetch) {
  Line a = {0}, b = {0}, c = {0}, d = {0};
  for (size_t i = 0; i < bytes; i += 256) {
    const Line* lines = (const Line*)(at + i);
    for (int line = 0; prefetch && line < 4; ++line) __builtin_prefetch(at + i + AHEAD + 64 * line);
    a |= lines[0];
    b |= lines[1];
    c |= lines[2];
    d |= lines[3];
  }
  a |= b | c | d;
  return a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
}

typedef struct {
  const unsigned char* const* pieces;
  const size_t* bytes;
  int count;
  int prefetch;
  int threads;
  int own; /* which of the threads */
  int* arrived;
  double begin, end;
  uint64_t seen;
} Share;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void* read_share(void* argument) {
  Share* share = argument;
  __atomic_add_fetch(share->arrived, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(share->arrived, __ATOMIC_SEQ_CST) < share->threads) sched_yield();
  share->begin = now();
  for (int i = 0; i < share->count; ++i) {
    size_t bytes = share->bytes[i] / (size_t)share->threads;
    const unsigned char* at = share->pieces[i] + bytes * (size_t)share->own;
    share->seen |= share->prefetch ? read_bytes(at, bytes, 1) : read_bytes(at, bytes, 0);
  }
  share->end = now();
  return NULL;
}

/* Seconds from the first thread's start to the last one's end, -1 if a thread cannot be made. Every
 * piece is aligned to 64 bytes, its bytes are a multiple of 256 * threads.
 */
double bandwidth_read_seconds(const unsigned char* const* pieces, const size_t* bytes, int count,
                              int threads, int prefetch) {
  Share shares[MOST_THREADS];
  pthread_t handles[MOST_THREADS];
  int arrived = 0, made = 1;
  if (threads < 1 || threads > MOST_THREADS) return -1;
  for (int i = 0; i < threads; ++i) {
    Share share = {pieces, bytes, count, prefetch, threads, i, &arrived, 0, 0, 0};
    shares[i] = share;
  }
  while (made < threads && !pthread_create(&handles[made], NULL, read_share, &shares[made])) ++made;
  if (made < threads) { /* those that wait for the missing one are let go */
    __atomic_add_fetch(&arrived, threads, __ATOMIC_SEQ_CST);
  } else {
    read_share(&shares[0]);
  }
  for (int i = 1; i < made; ++i) pthread_join(handles[i], NULL);
  if (made < threads) return -1;
  double begin = shares[0].begin, end = shares[0].end;
  volatile uint64_t seen = 0; /* the loads have a use */
  for (int i = 0; i < threads; ++i) {
    seen |= shares[i].seen;
    if (shares[i].begin < begin) begin = shares[i].begin;
    if (shares[i].end > end) end = shares[i].end;
  }
  return end - begin;
}
