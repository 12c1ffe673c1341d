/* Reads msgpack as far as ordinary messages have it: https://github.com/msgpack/msgpack/blob/master/spec.md */

#include "msgpack.h"

uint64_t big_endian(const unsigned char *from, size_t size) {
    uint64_t value = 0;
    for (size_t at = 0; at < size; at++) {
        value = value << 8 | from[at];
    }
    return value;
}

/* A non-negative number of at most 32 bits, in any of its unsigned forms. */
int read_uint32(Reader *reader, uint32_t *value) {
    if (reader->at == reader->end) {
        return 0;
    }
    unsigned char lead = *reader->at;
    if (lead <= 0x7F) {
        *value = lead;
        reader->at++;
        return 1;
    }
    if (lead < 0xCC || lead > 0xCE) {
        return 0;
    }
    size_t size = (size_t)1 << (lead - 0xCC);
    if (!take(reader, 1 + size)) {
        return 0;
    }
    *value = (uint32_t)big_endian(reader->at - size, size);
    return 1;
}

/* The head of an array (`fix` 0x90, `wide` 0xDC) or of a map (0x80, 0xDE): every element takes a byte at least. Nothing
   was read where it isn't one. */
static int read_head(Reader *reader, unsigned char fix, unsigned char wide, uint32_t *count) {
    Reader ahead = *reader;
    if (!take(&ahead, 1)) {
        return 0;
    }
    unsigned char lead = ahead.at[-1];
    if (lead >= fix && lead <= fix + 0x0F) {
        *count = lead & 0x0F;
    } else if (lead == wide || lead == wide + 1) {
        size_t size = lead == wide ? 2 : 4;
        if (!take(&ahead, size)) {
            return 0;
        }
        *count = (uint32_t)big_endian(ahead.at - size, size);
    } else {
        return 0;
    }
    if (*count > (size_t)(ahead.end - ahead.at)) {
        return 0;
    }
    *reader = ahead;
    return 1;
}

int read_array(Reader *reader, uint32_t *count) { return read_head(reader, 0x90, 0xDC, count); }

int read_map(Reader *reader, uint32_t *count) { return read_head(reader, 0x80, 0xDE, count); }

static int is_ascii(const unsigned char *bytes, size_t size) {
    unsigned char seen = 0;
    for (size_t at = 0; at < size; at++) {
        seen |= bytes[at];
    }
    return seen <= 0x7F;
}

/* Nothing was read where it isn't one. */
int read_ascii(Reader *reader, const unsigned char **bytes, size_t *size) {
    if (reader->at == reader->end) {
        return 0;
    }
    Reader ahead = *reader;
    unsigned char lead = *reader->at;
    size_t head;
    if (lead >= 0xA0 && lead <= 0xBF) {
        head = 0;
        *size = lead & 0x1F;
    } else if (lead >= 0xD9 && lead <= 0xDB) {
        head = (size_t)1 << (lead - 0xD9);
        if ((size_t)(reader->end - reader->at) < 1 + head) {
            return 0;
        }
        *size = (size_t)big_endian(reader->at + 1, head);
    } else {
        return 0;
    }
    if (!take(&ahead, 1 + head) || !take(&ahead, *size)) {
        return 0;
    }
    *bytes = ahead.at - *size;
    if (!is_ascii(*bytes, *size)) {
        return 0;
    }
    *reader = ahead;
    return 1;
}

/* Step over an item of any ordinary type: no extensions, no bytes, ASCII only, not deep. */
int skip_item(Reader *reader, int depth) {
    const unsigned char *bytes;
    size_t size;
    uint32_t count;
    if (reader->at == reader->end || depth == 0) {
        return 0;
    }
    unsigned char lead = *reader->at;
    if (lead <= 0x7F || lead >= 0xE0 || lead == 0xC0 || lead == 0xC2 || lead == 0xC3) {
        return take(reader, 1);
    }
    if (lead == 0xCA || lead == 0xCB) {
        return take(reader, lead == 0xCA ? 5 : 9);
    }
    if (lead >= 0xCC && lead <= 0xD3) {
        return take(reader, 1 + ((size_t)1 << (lead & 3)));
    }
    if (read_ascii(reader, &bytes, &size)) {
        return 1;
    }
    int is_map = read_map(reader, &count);
    if (!is_map && !read_array(reader, &count)) {
        return 0;
    }
    for (uint32_t at = 0; at < count; at++) {
        if ((is_map && !read_ascii(reader, &bytes, &size)) || !skip_item(reader, depth - 1)) {
            return 0;
        }
    }
    return 1;
}
