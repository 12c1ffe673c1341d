/* Reads what answers carry: gRPC messages and their tokens, or server-sent events. */
#ifndef ANSWERS_H
#define ANSWERS_H

#include "load.h"

/* Varints of the packed field 1 within field 1 of a message: the tokens of a chunk. */
static size_t count_tokens(const uint8_t *message, size_t bytes) {
  size_t at = 0, length, tokens = 0;
  for (int depth = 0; depth < 2; depth++) {
    if (at >= bytes || message[at++] != 0x0a) return 0;
    length = 0;
    for (int shift = 0; at < bytes; shift += 7) {
      length |= (size_t)(message[at] & 0x7f) << shift;
      if (message[at++] < 0x80) break;
    }
    if (length > bytes - at) return 0;
    bytes = at + length;
  }
  for (; at < bytes; at++) tokens += message[at] < 0x80;
  return tokens;
}

static void on_message(struct stream *stream, size_t tokens) {
  if (!stream->connection->slow) {
    run.messages++;
    run.tokens += tokens;
  }
  if (!tokens) return;
  if (!stream->answered) {
    stream->answered = true;
    run.first_answers++;
    if (run.warm && !run.over && !stream->connection->slow && stream->sent_at >= run.began_at)
      record(&run.ttft, now - stream->sent_at);
  } else if (run.warm && !run.over && !stream->connection->slow) {
    record(&run.gap, now - stream->last_at);
  }
  stream->last_at = now;
}

static void take_grpc(struct stream *stream, const uint8_t *data, size_t bytes) {
  if (stream->held_bytes) {
    if (stream->held_bytes + bytes > stream->held_room) {
      stream->held_room = 2 * (stream->held_bytes + bytes);
      stream->held = checked(realloc(stream->held, stream->held_room));
    }
    memcpy(stream->held + stream->held_bytes, data, bytes);
    data = stream->held;
    bytes += stream->held_bytes;
    stream->held_bytes = 0;
  }
  while (bytes >= 5) {
    size_t length = (size_t)data[1] << 24 | (size_t)data[2] << 16 | (size_t)data[3] << 8 | data[4];
    if (bytes - 5 < length) break;
    on_message(stream, count_tokens(data + 5, length));
    data += 5 + length;
    bytes -= 5 + length;
  }
  if (!bytes) return;
  if (bytes > stream->held_room) {
    uint8_t *room = checked(malloc(stream->held_room = 2 * bytes));
    memcpy(room, data, bytes);
    free(stream->held);
    stream->held = room;
  } else {
    memmove(stream->held, data, bytes);
  }
  stream->held_bytes = bytes;
}

static void take_events(struct stream *stream, const uint8_t *data, size_t bytes) {
  for (size_t at = 0; at < bytes; at++) {
    bool newline = data[at] == '\n';
    if (newline && stream->newline) {
      on_message(stream, 1);
      newline = false;
    } else if (data[at] == '\r') {
      newline = stream->newline;
    }
    stream->newline = newline;
  }
}

#endif
