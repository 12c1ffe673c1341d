/* Closed-loop load over HTTP/2: streams that send the same request again as soon as its answer has ended.
 *
 * load PORT PATH BODY_FILE [--conns N] [--streams N] [--slow N] [--ramp-s S] [--warm-s S] [--measure-s S] [--hold] [--sse]
 *
 * BODY_FILE is the request message; twelve '#' in it become an id of its own for each request. gRPC framing and its
 * status unless --sse, which sends the body as JSON and counts server-sent events. The first request of each stream
 * leaves within --ramp-s, so that paced answers are not in step. Writes WARM and DONE to standard error at both ends of
 * the measured time (--hold: WARM when every stream has had its first message), then cancels what is open and prints one
 * JSON object. --slow adds connections whose one stream reads 320 bytes a second; they are not counted.
 */
#include "answers.h"
#include "load.h"

static ssize_t read_body(nghttp2_session *session, int32_t id, uint8_t *into, size_t room, uint32_t *flags,
                         nghttp2_data_source *source, void *user) {
  struct stream *stream = source->ptr;
  (void)session, (void)id, (void)user;
  size_t bytes = body_bytes - stream->sent < room ? body_bytes - stream->sent : room;
  memcpy(into, body + stream->sent, bytes);
  if (marker != SIZE_MAX) {
    char text[ID_BYTES + 1];
    snprintf(text, sizeof text, "%04x%08llx", (unsigned)getpid() & 0xffff, (unsigned long long)stream->number);
    for (size_t at = 0; at < ID_BYTES; at++)
      if (marker + at >= stream->sent && marker + at < stream->sent + bytes)
        into[marker + at - stream->sent] = (uint8_t)text[at];
  }
  stream->sent += bytes;
  if (stream->sent == body_bytes) *flags |= NGHTTP2_DATA_FLAG_EOF;
  return (ssize_t)bytes;
}

#define HEADER(name, value)                                                                             \
  {(uint8_t *)(name), (uint8_t *)(value), strlen(name), strlen(value), NGHTTP2_NV_FLAG_NONE}

static void start(struct stream *stream) {
  char authority[32];
  snprintf(authority, sizeof authority, "127.0.0.1:%s", options.port);
  const nghttp2_nv headers[] = {
      HEADER(":method", "POST"),
      HEADER(":scheme", "http"),
      HEADER(":authority", authority),
      HEADER(":path", options.path),
      HEADER("content-type", options.sse ? "application/json" : "application/grpc"),
      HEADER("user-agent", "bench-load/1"),
      HEADER("te", "trailers"),
  };
  nghttp2_data_provider provider = {.source = {.ptr = stream}, .read_callback = read_body};
  stream->sent = stream->held_bytes = stream->unread = 0;
  stream->answered = stream->newline = false;
  stream->failed = !options.sse; /* until its status comes */
  stream->open = true;
  stream->number = next_number++;
  stream->sent_at = stream->last_at = clock_s();
  stream->id = nghttp2_submit_request(stream->connection->session, NULL, headers, options.sse ? 6 : 7, &provider, stream);
  if (stream->id < 0) fail("submit");
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name, size_t name_bytes,
                     const uint8_t *value, size_t value_bytes, uint8_t flags, void *user) {
  (void)flags, (void)user;
  struct stream *stream = nghttp2_session_get_stream_user_data(session, frame->hd.stream_id);
  if (!stream) return 0;
  if (name_bytes == 11 && !memcmp(name, "grpc-status", 11)) stream->failed = value_bytes != 1 || *value != '0';
  if (name_bytes == 7 && !memcmp(name, ":status", 7) && memcmp(value, "200", 3)) {
    stream->failed = true;
    if (!*run.error) snprintf(run.error, sizeof run.error, "status %.*s", (int)value_bytes, value);
  }
  if (name_bytes == 12 && !memcmp(name, "grpc-message", 12) && value_bytes && !*run.error)
    snprintf(run.error, sizeof run.error, "%.*s", (int)value_bytes, value);
  return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t id, const uint8_t *data, size_t bytes, void *user) {
  struct connection *connection = user;
  struct stream *stream = nghttp2_session_get_stream_user_data(session, id);
  (void)flags;
  if (connection->slow) nghttp2_session_consume_connection(session, bytes);
  if (!stream) return 0;
  if (connection->slow) stream->unread += bytes;
  if (options.sse)
    take_events(stream, data, bytes);
  else
    take_grpc(stream, data, bytes);
  return 0;
}

static int on_close(nghttp2_session *session, int32_t id, uint32_t code, void *user) {
  struct stream *stream = nghttp2_session_get_stream_user_data(session, id);
  (void)user;
  if (!stream) return 0;
  stream->open = false;
  if (run.over) return 0;
  if (!stream->connection->slow) run.requests++;
  if (code || stream->failed || !stream->answered) {
    run.errors++;
    if (!*run.error) snprintf(run.error, sizeof run.error, "reset %u", code);
    run.retrying = true;
    stream->starts_at = now + RETRY_S;
    return 0;
  }
  start(stream);
  return 0;
}

/* A connection is no more. After the measured time that is the server's right: it has been told to cancel everything. */
static void lost(const char *what) {
  if (!run.over) fail(what);
  run.closed = true;
}

static void flush(struct connection *connection, int poller) {
  for (;;) {
    while (connection->waiting < OUT_BYTES / 2) {
      const uint8_t *bytes;
      ssize_t count = nghttp2_session_mem_send(connection->session, &bytes);
      if (count < 0) fail("send");
      if (!count) break;
      memcpy(connection->out + connection->waiting, bytes, (size_t)count);
      connection->waiting += (size_t)count;
    }
    if (!connection->waiting) break;
    ssize_t written = write(connection->fd, connection->out, connection->waiting);
    if (written < 0 && errno == EAGAIN) break;
    if (written <= 0) return lost("write");
    connection->waiting -= (size_t)written;
    memmove(connection->out, connection->out + written, connection->waiting);
  }
  if (connection->wants_out != (connection->waiting > 0)) {
    connection->wants_out = connection->waiting > 0;
    struct epoll_event event = {.events = EPOLLIN | (connection->wants_out ? EPOLLOUT : 0), .data.ptr = connection};
    if (epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event)) fail("epoll");
  }
}

static void receive(struct connection *connection) {
  static uint8_t block[1 << 16];
  for (;;) {
    ssize_t bytes = read(connection->fd, block, sizeof block);
    if (bytes < 0 && errno == EAGAIN) return;
    errno = 0;
    if (bytes <= 0) return lost("the server closed a connection");
    now = clock_s();
    if (nghttp2_session_mem_recv(connection->session, block, (size_t)bytes) < 0) return lost("receive");
    if ((size_t)bytes < sizeof block) return;
  }
}

static void open_connection(struct connection *connection, bool slow, int poller) {
  struct sockaddr_in address = {
      .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(options.port)), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  int one = 1;
  connection->slow = slow;
  connection->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (connection->fd < 0 || connect(connection->fd, (void *)&address, sizeof address)) fail("connect");
  setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  fcntl(connection->fd, F_SETFL, O_NONBLOCK);
  nghttp2_session_callbacks *callbacks;
  nghttp2_option *option;
  nghttp2_session_callbacks_new(&callbacks);
  nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
  nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
  nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_close);
  nghttp2_option_new(&option);
  nghttp2_option_set_no_auto_window_update(option, slow);
  nghttp2_option_set_peer_max_concurrent_streams(option, 1 << 16);
  if (nghttp2_session_client_new2(&connection->session, callbacks, connection, option)) fail("session");
  nghttp2_session_callbacks_del(callbacks);
  nghttp2_option_del(option);
  const nghttp2_settings_entry settings[] = {
      {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, slow ? SLOW_WINDOW : 1 << 20}, {NGHTTP2_SETTINGS_ENABLE_PUSH, 0}};
  nghttp2_submit_settings(connection->session, NGHTTP2_FLAG_NONE, settings, 2);
  nghttp2_session_set_local_window_size(connection->session, NGHTTP2_FLAG_NONE, 0, 1 << 24);
  struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
  if (epoll_ctl(poller, EPOLL_CTL_ADD, connection->fd, &event)) fail("epoll");
}

static void read_file(const char *name) {
  FILE *file = fopen(name, "rb");
  if (!file) fail(name);
  body = checked(calloc(1, 1 << 20));
  prefix_bytes = options.sse ? 0 : 5;
  size_t bytes = fread(body + prefix_bytes, 1, (1 << 20) - prefix_bytes, file);
  fclose(file);
  if (!options.sse)
    for (int at = 0; at < 4; at++) body[1 + at] = (uint8_t)(bytes >> (24 - 8 * at));
  body_bytes = bytes + prefix_bytes;
  for (size_t at = 0; at + ID_BYTES <= body_bytes && marker == SIZE_MAX; at++)
    if (!memcmp(body + at, "############", ID_BYTES)) marker = at;
}

static void mark(bool is_start) {
  fputs(is_start ? "WARM\n" : "DONE\n", stderr);
  if (!is_start) {
    run.over = true;
    run.ended_at = clock_s();
    return;
  }
  run.warm = true;
  run.refused = run.errors;
  run.requests = run.errors = run.messages = run.tokens = 0;
  run.began_at = clock_s();
}

static void report(void) {
  for (char *at = run.error; *at; at++)
    if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ' || (unsigned char)*at > '~') *at = '\'';
  printf("{\"requests\": %llu, \"errors\": %llu, \"refused\": %llu, \"messages\": %llu, \"tokens\": %llu, \"elapsed_s\": %.6f, "
         "\"ttft_p50_ms\": %.4f, \"ttft_p99_ms\": %.4f, \"gap_p50_ms\": %.4f, \"gap_p99_ms\": %.4f, \"error\": \"%s\"}\n",
         (unsigned long long)run.requests, (unsigned long long)run.errors, (unsigned long long)run.refused, (unsigned long long)run.messages,
         (unsigned long long)run.tokens, run.ended_at - run.began_at, quantile_ms(&run.ttft, 0.5),
         quantile_ms(&run.ttft, 0.99), quantile_ms(&run.gap, 0.5), quantile_ms(&run.gap, 0.99), run.error);
}

static void parse(int count, char **values) {
  enum { CONNS = 1, STREAMS, SLOW, RAMP, WARM, MEASURE, HOLD, SSE };
  const struct option known[] = {
      {"conns", 1, 0, CONNS}, {"streams", 1, 0, STREAMS},     {"slow", 1, 0, SLOW}, {"ramp-s", 1, 0, RAMP},
      {"warm-s", 1, 0, WARM}, {"measure-s", 1, 0, MEASURE}, {"hold", 0, 0, HOLD}, {"sse", 0, 0, SSE}, {0}};
  for (int which; (which = getopt_long(count, values, "", known, NULL)) != -1;) switch (which) {
      case CONNS: options.conns = atoi(optarg); break;
      case STREAMS: options.streams = atoi(optarg); break;
      case SLOW: options.slow = atoi(optarg); break;
      case RAMP: options.ramp_s = atof(optarg); break;
      case WARM: options.warm_s = atof(optarg); break;
      case MEASURE: options.measure_s = atof(optarg); break;
      case HOLD: options.hold = true; break;
      case SSE: options.sse = true; break;
      default: exit(2);
    }
  if (count - optind != 3) fail("usage: load PORT PATH BODY_FILE [options]");
  options.port = values[optind];
  options.path = values[optind + 1];
  read_file(values[optind + 2]);
}

int main(int count, char **values) {
  parse(count, values);
  int connections = options.conns + options.slow, fast = options.conns * options.streams, poller = epoll_create1(0);
  int streams = fast + options.slow, started = 0;
  struct connection *all = checked(calloc((size_t)connections, sizeof *all));
  struct stream *each = checked(calloc((size_t)streams, sizeof *each));
  for (int at = 0; at < connections; at++) open_connection(&all[at], at >= options.conns, poller);
  double opened_at = now = clock_s(), slow_at = opened_at, warm_at = options.warm_s;
  for (int at = 0; at < streams; at++) {
    each[at].connection = &all[at < fast ? at % options.conns : options.conns + at - fast];
    each[at].starts_at = opened_at + options.ramp_s * at / streams;
  }
  while (now - opened_at < GIVE_UP_S && !run.closed && !(run.over && now > run.ended_at + CANCEL_S)) {
    struct epoll_event events[64];
    bool busy = started < streams || run.retrying;
    int ready = epoll_wait(poller, events, 64, busy || options.slow ? 1 : 5);
    for (int at = 0; at < ready; at++) receive(events[at].data.ptr);
    now = clock_s();
    if (busy && !run.over)
      for (int at = run.retrying ? 0 : started; at < streams && each[at].starts_at <= now; at++) {
        if (!each[at].open) start(&each[at]);
        started = started > at + 1 ? started : at + 1;
      }
    if (now - slow_at >= SLOW_TICK_S) {
      slow_at = now;
      for (int at = fast; at < streams; at++) {
        size_t bytes = each[at].unread < SLOW_BYTES ? each[at].unread : SLOW_BYTES;
        if (each[at].open && bytes) nghttp2_session_consume_stream(each[at].connection->session, each[at].id, bytes);
        each[at].unread -= bytes;
      }
    }
    bool may_warm = options.hold ? run.first_answers >= (uint64_t)streams : now - opened_at >= warm_at && run.first_answers;
    if (!run.warm && may_warm) mark(true);
    bool may_end = options.hold || run.messages || now - run.began_at >= options.measure_s + PATIENCE_S;
    if (run.warm && !run.over && now - run.began_at >= options.measure_s && may_end) {
      mark(false);
      for (int at = 0; at < streams; at++)
        if (each[at].open)
          nghttp2_submit_rst_stream(each[at].connection->session, 0, each[at].id, NGHTTP2_CANCEL);
    }
    for (int at = 0; at < connections; at++)
      if (nghttp2_session_want_write(all[at].session) || all[at].waiting) flush(&all[at], poller);
  }
  errno = 0;
  if (!run.over) fail(*run.error ? run.error : "not done in time");
  report();
  return 0;
}
