/* What load.c counts and keeps: options, connections, streams, quantiles, the tokens of a message. */
#ifndef LOAD_H
#define LOAD_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <netinet/tcp.h>
#include <nghttp2/nghttp2.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

enum { ID_BYTES = 12, BUCKETS = 4096, OUT_BYTES = 1 << 17, SLOW_WINDOW = 64, SLOW_BYTES = 16 };
static const double BUCKET_RATIO = 1.005, SLOW_TICK_S = 0.05, CANCEL_S = 0.1, PATIENCE_S = 5.0, RETRY_S = 0.25, GIVE_UP_S = 60.0;

struct connection {
  nghttp2_session *session;
  int fd;
  bool slow, wants_out;
  size_t waiting;
  uint8_t out[OUT_BYTES];
};

struct stream {
  struct connection *connection;
  double starts_at, sent_at, last_at;
  int32_t id;
  size_t sent;
  uint64_t number;
  bool answered, failed, open;
  size_t unread;
  uint8_t *held; /* a message that has come in part */
  size_t held_bytes, held_room;
  bool newline;
};

struct histogram {
  uint64_t counts[BUCKETS], total;
};

static struct {
  const char *port, *path;
  int conns, streams, slow;
  double ramp_s, warm_s, measure_s;
  bool hold, sse;
} options = {.conns = 1, .streams = 1, .ramp_s = 0.1, .warm_s = 0.5, .measure_s = 1.0};

static struct {
  bool warm, over, closed, retrying;
  uint64_t requests, errors, refused, messages, tokens, first_answers;
  double began_at, ended_at;
  struct histogram ttft, gap;
  char error[200];
} run;

static uint8_t *body;
static size_t body_bytes, marker = SIZE_MAX, prefix_bytes;
static uint64_t next_number;
static double now;

static double clock_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void fail(const char *what) {
  fprintf(stderr, "load: %s: %s\n", what, errno ? strerror(errno) : "failed");
  exit(1);
}

static void *checked(void *memory) {
  if (!memory) fail("memory");
  return memory;
}

static void record(struct histogram *into, double seconds) {
  double microseconds = seconds * 1e6;
  int bucket = microseconds <= 1.0 ? 0 : (int)(log(microseconds) / log(BUCKET_RATIO));
  into->counts[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
  into->total++;
}

static double quantile_ms(const struct histogram *of, double share) {
  uint64_t wanted = (uint64_t)(share * (double)of->total), seen = 0;
  for (int bucket = 0; bucket < BUCKETS; bucket++)
    if ((seen += of->counts[bucket]) > wanted) return pow(BUCKET_RATIO, bucket + 0.5) / 1e3;
  return 0.0;
}

#endif
