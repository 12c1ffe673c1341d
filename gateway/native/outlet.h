/* Where the objects lie that a flush walks through. */

#ifndef RANKGATE_OUTLET_H
#define RANKGATE_OUTLET_H

#include "native.h"

typedef struct {
    PyObject_HEAD
    PyTypeObject *sequence, *encoder, *stream, *outbound;
    Py_ssize_t s_cached_tokens, finish, held_bytes, is_dirty, logprobs, packed, pending, sink;
    Py_ssize_t e_cached_tokens, chunk_end, chunk_middle, chunk_tag, completed, ids, e_stream;
    Py_ssize_t backlog, has_ended, has_headers, id, out, stream_window;
    Py_ssize_t is_paused, max_push_bytes, parts, out_window, wake;
} Outlet;

/* 1: the sequence's tokens are sent. 0: it has anything else to say, and nothing was done. -1: an exception. */
int flush_sequence(Outlet *self, PyObject *sequence, PyObject *nothing, PyObject *zero);

#endif
