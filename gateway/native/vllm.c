/* Decodes vLLM's output message as far as it holds ordinary rows, see gateway/wire/vllm/layout.py for the format.

   Whatever is not as ordinary as that is left to the typed decoder and to salvage: None is the answer, no error. So this
   accepts less than they do, and never anything that they would read otherwise. Strings are taken when they are ASCII. */

#include "msgpack.h"

#include <string.h>

enum {
    FINISH_REASONS = 5,
    ROW_ID = 0,
    ROW_TOKENS = 1,
    ROW_FINISH = 5,
    ROW_STOP = 6,
    ROW_EVENTS = 7,
    FIRST_SHIFTING = 9,
    LAST_SHIFTING = 14,
    MESSAGE_FIELDS = 8, /* that are known */
    FINISHED_REQUESTS = 5,
    MAX_ROWS = 16384,
    MAX_ROW_TOKENS = 16384, /* room is made before they are seen */
};

/* The columns in the making. `cached` stays NULL until a row has such a count, at `cached_position` of its row. */
typedef struct {
    PyObject *ids, *token_ids, *finish, *cached;
    PyObject *finish_reasons; /* a tuple: of a row that goes on, then by the wire's number */
    uint32_t cached_position;
} Rows;

static int read_id(Reader *reader, Rows *rows, Py_ssize_t row) {
    const unsigned char *bytes;
    size_t size;
    if (!read_ascii(reader, &bytes, &size)) {
        return 0;
    }
    PyObject *id = PyUnicode_New((Py_ssize_t)size, 0x7F);
    if (id == NULL) {
        return -1;
    }
    if (size != 0) {
        memcpy(PyUnicode_DATA(id), bytes, size);
    }
    PyList_SET_ITEM(rows->ids, row, id);
    return 1;
}

static int read_tokens(Reader *reader, Rows *rows, Py_ssize_t row) {
    uint32_t count, value;
    if (!read_array(reader, &count) || count > MAX_ROW_TOKENS) {
        return 0;
    }
    PyObject *tokens = PyTuple_New((Py_ssize_t)count);
    if (tokens == NULL) {
        return -1;
    }
    PyList_SET_ITEM(rows->token_ids, row, tokens);
    for (uint32_t at = 0; at < count; at++) {
        if (!read_uint32(reader, &value)) {
            return 0;
        }
        PyObject *token = PyLong_FromUnsignedLong(value);
        if (token == NULL) {
            return -1;
        }
        PyTuple_SET_ITEM(tokens, (Py_ssize_t)at, token);
    }
    return 1;
}

static int read_finish(Reader *reader, Rows *rows, Py_ssize_t row) {
    uint32_t reason = 0;
    if (!read_nil(reader)) {
        if (!read_uint32(reader, &reason) || reason >= FINISH_REASONS) {
            return 0;
        }
        reason++;
    }
    PyList_SET_ITEM(rows->finish, row, Py_NewRef(PyTuple_GET_ITEM(rows->finish_reasons, reason)));
    return 1;
}

static int set_cached(Rows *rows, Py_ssize_t row, uint32_t position, uint32_t value) {
    if (rows->cached == NULL) {
        Py_ssize_t count = PyList_GET_SIZE(rows->ids);
        rows->cached = PyList_New(count);
        if (rows->cached == NULL) {
            return -1;
        }
        for (Py_ssize_t at = 0; at < count; at++) {
            PyList_SET_ITEM(rows->cached, at, Py_NewRef(Py_None));
        }
        rows->cached_position = position;
    } else if (rows->cached_position != position) {
        return 0;
    }
    PyObject *tokens = PyLong_FromUnsignedLong(value);
    return tokens == NULL ? -1 : PyList_SetItem(rows->cached, row, tokens) < 0 ? -1 : 1;
}

/* A cell of the part that releases shift: of maps only a first row's count of cached tokens is read. */
static int read_shifting(Reader *reader, Rows *rows, Py_ssize_t row, uint32_t position) {
    static const char name[] = "num_cached_tokens";
    const unsigned char *key;
    size_t size;
    uint32_t count, value = 0;
    if (!read_map(reader, &count)) {
        return skip_item(reader, MAX_DEPTH);
    }
    int is_found = 0;
    for (uint32_t at = 0; at < count; at++) {
        if (!read_ascii(reader, &key, &size)) {
            return 0;
        }
        if (size != sizeof name - 1 || memcmp(key, name, size) != 0) {
            if (!skip_item(reader, MAX_DEPTH)) {
                return 0;
            }
        } else if (is_found || !read_uint32(reader, &value)) {
            return 0;
        } else {
            is_found = 1;
        }
    }
    return is_found ? set_cached(rows, row, position, value) : 0;
}

static int read_cell(Reader *reader, Rows *rows, Py_ssize_t row, uint32_t position) {
    switch (position) {
    case ROW_ID:
        return read_id(reader, rows, row);
    case ROW_TOKENS:
        return read_tokens(reader, rows, row);
    case ROW_FINISH:
        return read_finish(reader, rows, row);
    case ROW_STOP:
    case ROW_EVENTS:
        return skip_item(reader, MAX_DEPTH);
    default:
        if (position < FIRST_SHIFTING) {
            return read_nil(reader);
        }
        return position > LAST_SHIFTING ? skip_item(reader, MAX_DEPTH) : read_shifting(reader, rows, row, position);
    }
}

static int read_rows(Reader *reader, Rows *rows) {
    Py_ssize_t count = PyList_GET_SIZE(rows->ids);
    for (Py_ssize_t row = 0; row < count; row++) {
        uint32_t cells;
        if (!read_array(reader, &cells) || cells <= ROW_TOKENS) {
            return 0;
        }
        for (uint32_t position = 0; position < cells; position++) {
            int status = read_cell(reader, rows, row, position);
            if (status <= 0) {
                return status;
            }
        }
        if (cells <= ROW_FINISH) {
            PyList_SET_ITEM(rows->finish, row, Py_NewRef(PyTuple_GET_ITEM(rows->finish_reasons, 0)));
        }
    }
    return 1;
}

/* What follows the rows: where the statistics lie, and the time. What is behind says nothing that matters. */
static int read_tail(Reader *reader, uint32_t fields, const unsigned char **stats, size_t *stats_size, double *time) {
    *stats = reader->at;
    *time = 0;
    if (fields > 2 && !read_nil(reader)) {
        Reader peek = *reader;
        uint32_t count;
        if (!read_map(&peek, &count) || !skip_item(reader, MAX_DEPTH)) {
            return 0;
        }
    }
    *stats_size = (size_t)(reader->at - *stats);
    if (fields > 3 && !read_nil(reader)) {
        if (reader->at == reader->end || *reader->at != 0xCB || !take(reader, 9)) {
            return 0;
        }
        uint64_t bits = big_endian(reader->at - 8, 8);
        memcpy(time, &bits, sizeof bits);
    }
    for (uint32_t field = 4; field < fields; field++) {
        int is_nil = field < MESSAGE_FIELDS && field != FINISHED_REQUESTS;
        if (is_nil ? !read_nil(reader) : !skip_item(reader, MAX_DEPTH)) {
            return 0;
        }
    }
    return reader->at == reader->end;
}

static PyObject *decode(Reader *reader, PyObject *finish_reasons) {
    uint32_t fields, engine_index, count;
    if (!read_array(reader, &fields) || fields < 2 || !read_uint32(reader, &engine_index) ||
        !read_array(reader, &count) || count == 0 || count > MAX_ROWS) {
        return Py_NewRef(Py_None);
    }
    Rows rows = {PyList_New(count), PyList_New(count), PyList_New(count), NULL, finish_reasons, 0};
    const unsigned char *stats;
    size_t stats_size;
    double time;
    PyObject *found = NULL;
    if (rows.ids != NULL && rows.token_ids != NULL && rows.finish != NULL) {
        int status = read_rows(reader, &rows);
        if (status == 0 || (status > 0 && !read_tail(reader, fields, &stats, &stats_size, &time))) {
            found = Py_NewRef(Py_None);
        } else if (status > 0) {
            found = Py_BuildValue("IOOOOy#d", engine_index, rows.ids, rows.token_ids, rows.finish,
                                  rows.cached == NULL ? Py_None : rows.cached, (const char *)stats,
                                  (Py_ssize_t)stats_size, time);
        }
    }
    Py_XDECREF(rows.ids);
    Py_XDECREF(rows.token_ids);
    Py_XDECREF(rows.finish);
    Py_XDECREF(rows.cached);
    return found;
}

static PyObject *decode_vllm(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyBytes_CheckExact(arguments[0]) || !PyTuple_CheckExact(arguments[1]) ||
        PyTuple_GET_SIZE(arguments[1]) != FINISH_REASONS + 1) {
        PyErr_SetString(PyExc_TypeError, "decode_vllm(payload: bytes, finish_reasons: tuple of six)");
        return NULL;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(arguments[0]);
    Reader reader = {bytes, bytes + PyBytes_GET_SIZE(arguments[0])};
    return decode(&reader, arguments[1]);
}

PyMethodDef vllm_methods[] = {
    {"decode_vllm", (PyCFunction)(void (*)(void))decode_vllm, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
