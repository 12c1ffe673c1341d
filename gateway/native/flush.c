/* One sequence's tokens, from its outbox to a frame of its stream: what `SequenceEncoder.flush` and `Stream.push` do
   (gateway/edges/grpc_engine/encode.py, gateway/h2/protocol/streams.py). */

#include "outlet.h"

#include <string.h>

enum {
    MAX_VARINT_BYTES = 5,
    MAX_TOKENS = 128,       /* more are packed already */
    MAX_CHUNK_BYTES = 2048, /* longer ones go by Python */
    FRAME_HEAD_BYTES = 9,   /* RFC 9113 4.1 */
    PREFIX_BYTES = 5,       /* gRPC: a flag and the length */
};

/* A message in the making. */
typedef struct {
    unsigned char bytes[FRAME_HEAD_BYTES + PREFIX_BYTES + MAX_CHUNK_BYTES];
    size_t size;
} Frame;

static void write_big_endian(unsigned char *to, uint32_t value, int size) {
    for (int at = size - 1; at >= 0; at--) {
        to[at] = (unsigned char)value;
        value >>= 8;
    }
}

static void put(Frame *frame, const void *bytes, size_t size) {
    memcpy(frame->bytes + frame->size, bytes, size);
    frame->size += size;
}

static int is_bytes(PyObject *object) { return object != NULL && PyBytes_CheckExact(object); }

static int is_bool(PyObject *object) { return object == Py_False || object == Py_True; }

/* All that one flush needs of its objects, looked at and found ordinary. References are borrowed. */
typedef struct {
    PyObject *encoder, *stream, *out, *ids, *parts;
    int64_t completed, stream_window, out_window, max_push_bytes;
    Py_ssize_t count;
    size_t token_size;
    unsigned char tokens[MAX_TOKENS * MAX_VARINT_BYTES];
} Flush;

/* Whether the sequence has some more tokens and nothing else to say, to an encoder with a stream. */
static int read_outbox(Outlet *self, PyObject *sequence, Flush *flush) {
    PyObject *encoder = slot(sequence, self->sink), *pending = slot(sequence, self->pending);
    PyObject *finish = slot(sequence, self->finish);
    if (encoder == NULL || !Py_IS_TYPE(encoder, self->encoder) || pending == NULL ||
        !(PyTuple_CheckExact(pending) || PyList_CheckExact(pending)) || Py_SIZE(pending) < 1 ||
        Py_SIZE(pending) > MAX_TOKENS || finish == NULL || !PyUnicode_CheckExact(finish) ||
        PyUnicode_GET_LENGTH(finish) != 0 || slot(sequence, self->logprobs) != Py_None ||
        slot(sequence, self->packed) != Py_None || number(slot(sequence, self->held_bytes)) < 0 ||
        !is_bool(slot(sequence, self->is_dirty))) {
        return 0;
    }
    int64_t cached_tokens = number(slot(sequence, self->s_cached_tokens));
    flush->completed = number(slot(encoder, self->completed));
    flush->ids = slot(encoder, self->ids);
    flush->stream = slot(encoder, self->e_stream);
    if (cached_tokens < 0 || cached_tokens != number(slot(encoder, self->e_cached_tokens)) || flush->completed < 0 ||
        flush->completed >= INT32_MAX - MAX_TOKENS || flush->ids == NULL ||
        !(flush->ids == Py_None || PyByteArray_CheckExact(flush->ids)) || flush->stream == NULL ||
        !Py_IS_TYPE(flush->stream, self->stream)) {
        return 0;
    }
    flush->encoder = encoder;
    flush->count = Py_SIZE(pending);
    flush->token_size = 0;
    for (Py_ssize_t at = 0; at < flush->count; at++) {
        int64_t token = number(PySequence_Fast_GET_ITEM(pending, at));
        if (token < 0 || token > UINT32_MAX) {
            return 0;
        }
        flush->token_size += write_varint(flush->tokens + flush->token_size, (uint32_t)token);
    }
    return 1;
}

/* Whether the stream takes a message at once, as far as that does not depend on its size. */
static int read_stream(Outlet *self, Flush *flush) {
    PyObject *stream = flush->stream, *out = slot(stream, self->out), *backlog = slot(stream, self->backlog);
    PyObject *id = slot(stream, self->id);
    if (out == NULL || !Py_IS_TYPE(out, self->outbound) || !is_bytes(id) || PyBytes_GET_SIZE(id) != 4 ||
        backlog == NULL || !(PyBytes_CheckExact(backlog) || PyByteArray_CheckExact(backlog)) || Py_SIZE(backlog) != 0 ||
        slot(stream, self->has_headers) != Py_True || slot(stream, self->has_ended) != Py_False ||
        slot(out, self->is_paused) != Py_False || slot(out, self->wake) == NULL) {
        return 0;
    }
    flush->out = out;
    flush->parts = slot(out, self->parts);
    flush->stream_window = number(slot(stream, self->stream_window));
    flush->out_window = number(slot(out, self->out_window));
    flush->max_push_bytes = number(slot(out, self->max_push_bytes));
    return flush->parts != NULL && PyList_CheckExact(flush->parts);
}

/* The DATA frame with the chunk. 0 when it is too long for here. */
static int write_frame(Outlet *self, const Flush *flush, Frame *frame) {
    PyObject *tag = slot(flush->encoder, self->chunk_tag), *middle = slot(flush->encoder, self->chunk_middle);
    PyObject *end = slot(flush->encoder, self->chunk_end), *id = slot(flush->stream, self->id);
    if (!is_bytes(tag) || !is_bytes(middle) || !is_bytes(end)) {
        return 0;
    }
    size_t tag_size = (size_t)PyBytes_GET_SIZE(tag), middle_size = (size_t)PyBytes_GET_SIZE(middle);
    size_t end_size = (size_t)PyBytes_GET_SIZE(end);
    if (tag_size > MAX_CHUNK_BYTES || middle_size > MAX_CHUNK_BYTES || end_size > MAX_CHUNK_BYTES ||
        tag_size + middle_size + end_size + flush->token_size + 3 * MAX_VARINT_BYTES + 1 > MAX_CHUNK_BYTES) {
        return 0;
    }
    unsigned char ids_bytes[MAX_VARINT_BYTES], count_bytes[MAX_VARINT_BYTES], size_bytes[MAX_VARINT_BYTES];
    size_t ids_size = write_varint(ids_bytes, (uint32_t)flush->token_size);
    size_t count_size = write_varint(count_bytes, (uint32_t)(flush->completed + flush->count));
    size_t body_size = 1 + ids_size + flush->token_size + middle_size + count_size + end_size;
    size_t size_size = write_varint(size_bytes, (uint32_t)body_size);
    uint32_t size = (uint32_t)(tag_size + size_size + body_size);

    write_big_endian(frame->bytes, size + PREFIX_BYTES, 3);
    frame->bytes[3] = frame->bytes[4] = 0; /* DATA, no flags */
    frame->size = 5;
    put(frame, PyBytes_AS_STRING(id), 4);
    frame->bytes[FRAME_HEAD_BYTES] = 0; /* not compressed */
    write_big_endian(frame->bytes + FRAME_HEAD_BYTES + 1, size, 4);
    frame->size = FRAME_HEAD_BYTES + PREFIX_BYTES;
    put(frame, PyBytes_AS_STRING(tag), tag_size);
    put(frame, size_bytes, size_size);
    put(frame, "\x0A", 1); /* field 1, packed ids */
    put(frame, ids_bytes, ids_size);
    put(frame, flush->tokens, flush->token_size);
    put(frame, PyBytes_AS_STRING(middle), middle_size);
    put(frame, count_bytes, count_size);
    put(frame, PyBytes_AS_STRING(end), end_size);
    return 1;
}

static int remember(PyObject *ids, const unsigned char *bytes, size_t size) {
    if (ids == Py_None) {
        return 0;
    }
    Py_ssize_t before = PyByteArray_GET_SIZE(ids);
    if (PyByteArray_Resize(ids, before + (Py_ssize_t)size) < 0) {
        return -1;
    }
    memcpy(PyByteArray_AS_STRING(ids) + before, bytes, size);
    return 0;
}

/* Hand the frame to the connection, which learns of it when nothing else waits there. */
static int send(Outlet *self, const Flush *flush, PyObject *part) {
    PyObject *parts = flush->parts;
    if (PyList_GET_SIZE(parts) != 0) {
        return PyList_Append(parts, part);
    }
    PyObject *wake = Py_NewRef(slot(flush->out, self->wake)); /* it may set another one */
    Py_INCREF(parts);
    PyObject *done = PyObject_CallNoArgs(wake);
    int status = done == NULL ? -1 : PyList_Append(parts, part);
    Py_XDECREF(done);
    Py_DECREF(parts);
    Py_DECREF(wake);
    return status;
}

int flush_sequence(Outlet *self, PyObject *sequence, PyObject *nothing, PyObject *zero) {
    Flush flush;
    Frame frame;
    if (!Py_IS_TYPE(sequence, self->sequence) || !read_outbox(self, sequence, &flush) || !read_stream(self, &flush) ||
        !write_frame(self, &flush, &frame)) {
        return 0;
    }
    int64_t length = (int64_t)frame.size - FRAME_HEAD_BYTES;
    if (length - PREFIX_BYTES > flush.max_push_bytes || length > flush.stream_window || length > flush.out_window) {
        return 0;
    }
    PyObject *part = PyBytes_FromStringAndSize((const char *)frame.bytes, (Py_ssize_t)frame.size);
    PyObject *completed = PyLong_FromLongLong(flush.completed + flush.count);
    PyObject *stream_window = PyLong_FromLongLong(flush.stream_window - length);
    PyObject *out_window = PyLong_FromLongLong(flush.out_window - length);
    int status = -1;
    if (part != NULL && completed != NULL && stream_window != NULL && out_window != NULL &&
        remember(flush.ids, flush.tokens, flush.token_size) == 0) {
        /* No object that is freed by these has anything but numbers and bytes, so no code runs between them. */
        set_slot(sequence, self->is_dirty, Py_NewRef(Py_False));
        set_slot(sequence, self->held_bytes, Py_NewRef(zero));
        set_slot(sequence, self->pending, Py_NewRef(nothing));
        set_slot(flush.encoder, self->completed, Py_NewRef(completed));
        set_slot(flush.stream, self->stream_window, Py_NewRef(stream_window));
        set_slot(flush.out, self->out_window, Py_NewRef(out_window));
        status = send(self, &flush, part) < 0 ? -1 : 1;
    }
    Py_XDECREF(part);
    Py_XDECREF(completed);
    Py_XDECREF(stream_window);
    Py_XDECREF(out_window);
    return status;
}
