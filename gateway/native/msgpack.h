/* A reader of msgpack. Every function returns 0 when there is something else; the message is then left to Python. */

#ifndef RANKGATE_MSGPACK_H
#define RANKGATE_MSGPACK_H

#include "native.h"

typedef struct {
    const unsigned char *at, *end;
} Reader;

enum { MAX_DEPTH = 8 };

static inline int take(Reader *reader, size_t size) {
    if ((size_t)(reader->end - reader->at) < size) {
        return 0;
    }
    reader->at += size;
    return 1;
}

static inline int read_nil(Reader *reader) {
    if (reader->at == reader->end || *reader->at != 0xC0) {
        return 0;
    }
    reader->at++;
    return 1;
}

uint64_t big_endian(const unsigned char *from, size_t size);
int read_uint32(Reader *reader, uint32_t *value);
int read_array(Reader *reader, uint32_t *count);
int read_map(Reader *reader, uint32_t *count);
int read_ascii(Reader *reader, const unsigned char **bytes, size_t *size);
int skip_item(Reader *reader, int depth);

#endif
