/* Packed varints, see gateway/edges/varint.py. */

#include "native.h"

#include <string.h>

enum { MAX_BYTES = 9 }; /* of a number of at most 2^62 */

/* Of an array of 32-bit numbers, as it lies. */
static PyObject *pack_buffer(const Py_buffer *view) {
    Py_ssize_t count = view->len / 4;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, 5 * count);
    if (packed == NULL) {
        return NULL;
    }
    unsigned char *to = (unsigned char *)PyBytes_AS_STRING(packed);
    size_t size = 0;
    for (Py_ssize_t at = 0; at < count; at++) {
        uint32_t value;
        memcpy(&value, (const char *)view->buf + 4 * at, sizeof value);
        size += write_varint(to + size, value);
    }
    _PyBytes_Resize(&packed, (Py_ssize_t)size);
    return packed;
}

static PyObject *pack_sequence(PyObject *values) {
    PyObject *items = PySequence_Fast(values, "numbers to pack are iterable");
    if (items == NULL) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, MAX_BYTES * count);
    if (packed != NULL) {
        unsigned char *to = (unsigned char *)PyBytes_AS_STRING(packed);
        size_t size = 0;
        for (Py_ssize_t at = 0; at < count; at++) {
            int64_t value = number(PySequence_Fast_GET_ITEM(items, at));
            if (value < 0) {
                PyErr_SetString(PyExc_ValueError, "a varint is of an int from 0 to 2^62");
                Py_CLEAR(packed);
                break;
            }
            size += write_varint(to + size, (uint64_t)value);
        }
        if (packed != NULL) {
            _PyBytes_Resize(&packed, (Py_ssize_t)size);
        }
    }
    Py_DECREF(items);
    return packed;
}

static PyObject *pack_varints(PyObject *Py_UNUSED(module), PyObject *values) {
    if (PyList_CheckExact(values) || PyTuple_CheckExact(values) || !PyObject_CheckBuffer(values)) {
        return pack_sequence(values);
    }
    Py_buffer view;
    if (PyObject_GetBuffer(values, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return pack_sequence(values); /* not in one piece */
    }
    int is_array = view.ndim == 1 && view.itemsize == 4 && view.format != NULL && strcmp(view.format, "I") == 0;
    PyObject *packed = is_array ? pack_buffer(&view) : pack_sequence(values);
    PyBuffer_Release(&view);
    return packed;
}

PyMethodDef varint_methods[] = {
    {"pack_varints", pack_varints, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
