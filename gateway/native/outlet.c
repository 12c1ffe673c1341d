/* What a flush has to pass on, item by item: ordinary sequences here, all else by Python (gateway/edges/flushing.py). */

#include "outlet.h"

static const SlotName sequence_slots[] = {
    {"cached_tokens", offsetof(Outlet, s_cached_tokens)},
    {"finish", offsetof(Outlet, finish)},
    {"held_bytes", offsetof(Outlet, held_bytes)},
    {"is_dirty", offsetof(Outlet, is_dirty)},
    {"logprobs", offsetof(Outlet, logprobs)},
    {"packed", offsetof(Outlet, packed)},
    {"pending", offsetof(Outlet, pending)},
    {"sink", offsetof(Outlet, sink)},
    {NULL, 0},
};
static const SlotName encoder_slots[] = {
    {"_cached_tokens", offsetof(Outlet, e_cached_tokens)},
    {"_chunk_end", offsetof(Outlet, chunk_end)},
    {"_chunk_middle", offsetof(Outlet, chunk_middle)},
    {"_chunk_tag", offsetof(Outlet, chunk_tag)},
    {"_completed", offsetof(Outlet, completed)},
    {"_ids", offsetof(Outlet, ids)},
    {"stream", offsetof(Outlet, e_stream)},
    {NULL, 0},
};
static const SlotName stream_slots[] = {
    {"backlog", offsetof(Outlet, backlog)},
    {"has_ended", offsetof(Outlet, has_ended)},
    {"has_headers", offsetof(Outlet, has_headers)},
    {"id", offsetof(Outlet, id)},
    {"out", offsetof(Outlet, out)},
    {"send_window", offsetof(Outlet, stream_window)},
    {NULL, 0},
};
static const SlotName outbound_slots[] = {
    {"is_paused", offsetof(Outlet, is_paused)},
    {"max_push_bytes", offsetof(Outlet, max_push_bytes)},
    {"parts", offsetof(Outlet, parts)},
    {"send_window", offsetof(Outlet, out_window)},
    {"wake", offsetof(Outlet, wake)},
    {NULL, 0},
};

/* A sequence's flush walks from object to object, each cold: they are asked for ahead, one step per stage. */
enum { STAGE = 5 };

static inline void look_ahead(Outlet *self, PyObject *sequence, int stage) {
    if (!Py_IS_TYPE(sequence, self->sequence)) {
        return;
    }
    PyObject *encoder = slot(sequence, self->sink);
    if (encoder == NULL) {
        return;
    }
    if (stage == 1) {
        PREFETCH(encoder);
        PREFETCH((char *)encoder + 64);
        PREFETCH((char *)encoder + 128);
        return;
    }
    if (!Py_IS_TYPE(encoder, self->encoder)) {
        return;
    }
    PyObject *stream = slot(encoder, self->e_stream), *ids = slot(encoder, self->ids);
    if (stage == 2) {
        if (stream != NULL) {
            PREFETCH(stream);
            PREFETCH((char *)stream + self->stream_window);
        }
        PREFETCH(slot(encoder, self->chunk_tag));
        PREFETCH(slot(encoder, self->chunk_middle));
        PREFETCH(slot(encoder, self->chunk_end));
        PREFETCH(slot(encoder, self->completed));
        PREFETCH(ids);
        return;
    }
    if (stream != NULL && Py_IS_TYPE(stream, self->stream)) {
        PREFETCH(slot(stream, self->id));
        PREFETCH(slot(stream, self->stream_window));
    }
    if (ids != NULL && PyByteArray_CheckExact(ids)) {
        PREFETCH(PyByteArray_AS_STRING(ids) + PyByteArray_GET_SIZE(ids));
    }
}

static inline void look_at(Outlet *self, PyObject *items, Py_ssize_t at) {
    Py_ssize_t size = PyList_GET_SIZE(items);
    for (int stage = 3; stage > 0; stage--) {
        Py_ssize_t ahead = at + stage * STAGE;
        if (ahead >= 0 && ahead < size) {
            look_ahead(self, PyList_GET_ITEM(items, ahead), 4 - stage);
        }
    }
}

/* Tell of an exception, which was raised for this item. -1 when it is none to be told of, or telling raised another. */
static int report(PyObject *broken, PyObject *item) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1; /* KeyboardInterrupt and the like */
    }
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    PyObject *done = PyObject_CallFunctionObjArgs(broken, item, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *outlet_flush(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Outlet *self = (Outlet *)object;
    if (count != 3 || !PyList_CheckExact(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "flush(items: list, other, broken)");
        return NULL;
    }
    PyObject *items = arguments[0], *nothing = PyTuple_New(0), *zero = PyLong_FromLong(0);
    int status = nothing == NULL || zero == NULL ? -1 : 0;
    for (Py_ssize_t at = -3 * STAGE; status == 0 && at < PyList_GET_SIZE(items); at++) {
        look_at(self, items, at);
        if (at < 0) {
            continue;
        }
        PyObject *item = Py_NewRef(PyList_GET_ITEM(items, at));
        int is_done = flush_sequence(self, item, nothing, zero);
        if (is_done < 0) {
            status = report(arguments[2], item);
        } else if (!is_done) {
            PyObject *done = PyObject_CallOneArg(arguments[1], item);
            status = done == NULL ? -1 : 0;
            Py_XDECREF(done);
        }
        Py_DECREF(item);
    }
    Py_XDECREF(nothing);
    Py_XDECREF(zero);
    return status < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *outlet_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    PyTypeObject *sequence, *encoder, *stream, *outbound;
    if (!PyArg_ParseTuple(arguments, "O!O!O!O!", &PyType_Type, &sequence, &PyType_Type, &encoder, &PyType_Type, &stream,
                          &PyType_Type, &outbound)) {
        return NULL;
    }
    Outlet *self = (Outlet *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->sequence = (PyTypeObject *)Py_NewRef(sequence);
    self->encoder = (PyTypeObject *)Py_NewRef(encoder);
    self->stream = (PyTypeObject *)Py_NewRef(stream);
    self->outbound = (PyTypeObject *)Py_NewRef(outbound);
    if (find_slots((PyObject *)sequence, sequence_slots, self) < 0 ||
        find_slots((PyObject *)encoder, encoder_slots, self) < 0 ||
        find_slots((PyObject *)stream, stream_slots, self) < 0 ||
        find_slots((PyObject *)outbound, outbound_slots, self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void outlet_dealloc(PyObject *object) {
    Outlet *self = (Outlet *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->sequence);
    Py_XDECREF(self->encoder);
    Py_XDECREF(self->stream);
    Py_XDECREF(self->outbound);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef outlet_methods[] = {
    {"flush", (PyCFunction)(void (*)(void))outlet_flush, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot outlet_slots[] = {
    {Py_tp_new, outlet_new},
    {Py_tp_dealloc, outlet_dealloc},
    {Py_tp_methods, outlet_methods},
    {0, NULL},
};

PyType_Spec outlet_spec = {
    .name = "gateway.native._native.Outlet",
    .basicsize = sizeof(Outlet),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = outlet_slots,
};
