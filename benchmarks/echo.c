// The floor of a round trip: N bytes out and N bytes back over a unix socket, by blocking calls and nothing else.
//
//   echo serve PATH   answers every connection, one at a time, until killed; prints "ready"
//   echo drive PATH   for each line "SIZE CALLS" on stdin prints CALLS durations in nanoseconds on one line
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define SIZE_MAX_BYTES ((uint64_t)1 << 30)

static void fail(const char *what) {
  perror(what);
  exit(1);
}

// Returns 0 at the end of the stream.
static int read_all(int fd, void *buffer, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t got = read(fd, (char *)buffer + done, size - done);
    if (got < 0) fail("read");
    if (got == 0) return 0;
    done += (size_t)got;
  }
  return 1;
}

static void write_all(int fd, const void *buffer, size_t size) {
  for (size_t done = 0; done < size;) {
    ssize_t put = write(fd, (const char *)buffer + done, size - done);
    if (put < 0) fail("write");
    done += (size_t)put;
  }
}

static char *grow(char *buffer, uint64_t size) {
  if (size > SIZE_MAX_BYTES) exit(2);
  buffer = realloc(buffer, size + 1);
  if (!buffer) fail("realloc");
  memset(buffer, 7, size);
  return buffer;
}

static struct sockaddr_un address_of(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) exit(2);
  strcpy(address.sun_path, path);
  return address;
}

static void serve(const char *path) {
  struct sockaddr_un address = address_of(path);
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1)) fail(path);
  puts("ready");
  fflush(stdout);
  char *buffer = NULL;
  uint64_t capacity = 0, size;
  for (;;) {
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) fail("accept");
    while (read_all(fd, &size, sizeof size)) {
      if (size > capacity) buffer = grow(buffer, capacity = size);
      if (!read_all(fd, buffer, size)) break;
      write_all(fd, buffer, size);
    }
    close(fd);
  }
}

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

static void drive(const char *path) {
  struct sockaddr_un address = address_of(path);
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) fail(path);
  char *out = NULL, *in = NULL;
  uint64_t capacity = 0, size;
  long calls;
  while (scanf("%lu %ld", &size, &calls) == 2) {
    if (size > capacity) {
      capacity = size;
      out = grow(out, capacity);
      in = grow(in, capacity);
    }
    for (long i = 0; i < calls; i++) {
      int64_t start = now_ns();
      write_all(fd, &size, sizeof size);
      write_all(fd, out, size);
      if (!read_all(fd, in, size)) exit(3);
      printf("%s%ld", i ? " " : "", (long)(now_ns() - start));
    }
    putchar('\n');
    fflush(stdout);
  }
}

int main(int count, char **words) {
  if (count == 3 && !strcmp(words[1], "serve")) serve(words[2]);
  if (count == 3 && !strcmp(words[1], "drive")) {
    drive(words[2]);
    return 0;
  }
  return 2;
}
