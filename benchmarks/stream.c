// The stream limit: reads pages in the order of a page table with several threads, and does nothing else.
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define THREADS_MAX 64
#define LANES 8

struct job {
  const uint64_t *pool;
  const int32_t *pages;
  size_t num_pages;
  size_t words;
  uint64_t sum;
};

static void *read_share(void *argument) {
  struct job *job = argument;
  uint64_t sums[LANES] = {0};
  for (size_t i = 0; i < job->num_pages; i++) {
    const uint64_t *page = job->pool + (size_t)job->pages[i] * job->words;
    size_t word = 0;
    for (; word + LANES <= job->words; word += LANES)
      for (size_t lane = 0; lane < LANES; lane++) sums[lane] += page[word + lane];
    for (; word < job->words; word++) sums[0] += page[word];
  }
  job->sum = 0;
  for (size_t lane = 0; lane < LANES; lane++) job->sum += sums[lane];
  return NULL;
}

// Returns the sum of the words of `pages`, modulo 2^64; each thread reads one contiguous share of the table.
uint64_t read_pages(const uint64_t *pool, const int32_t *pages, size_t num_pages, size_t words, int num_threads) {
  struct job jobs[THREADS_MAX];
  pthread_t threads[THREADS_MAX];
  int started[THREADS_MAX] = {0};
  size_t count = num_threads < 1 ? 1 : num_threads > THREADS_MAX ? THREADS_MAX : (size_t)num_threads;
  uint64_t sum = 0;
  for (size_t i = 0; i < count; i++) {
    size_t from = num_pages * i / count, to = num_pages * (i + 1) / count;
    jobs[i] = (struct job){pool, pages + from, to - from, words, 0};
    if (i + 1 < count) started[i] = pthread_create(&threads[i], NULL, read_share, &jobs[i]) == 0;
    if (!started[i]) read_share(&jobs[i]);
  }
  for (size_t i = 0; i < count; i++) {
    if (started[i]) pthread_join(threads[i], NULL);
    sum += jobs[i].sum;
  }
  return sum;
}
