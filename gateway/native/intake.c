/* Rows of a batch into the outboxes: what `append_in_python` does with ordinary rows (gateway/core/rows.py). */

#include "native.h"

typedef struct {
    PyObject_HEAD
    PyTypeObject *attempt, *sequence, *record;
    PyObject *append; /* the name */
    Py_ssize_t is_done, max_tokens, owner, tokens_out;
    Py_ssize_t completion_tokens, is_dirty, pending, kept;
    Py_ssize_t is_answer, token_ids;
    Py_ssize_t max_pending;
} Intake;

static const SlotName attempt_slots[] = {
    {"is_done", offsetof(Intake, is_done)},
    {"max_tokens", offsetof(Intake, max_tokens)},
    {"sequence", offsetof(Intake, owner)},
    {"tokens_out", offsetof(Intake, tokens_out)},
    {NULL, 0},
};
static const SlotName sequence_slots[] = {
    {"completion_tokens", offsetof(Intake, completion_tokens)},
    {"is_dirty", offsetof(Intake, is_dirty)},
    {"pending", offsetof(Intake, pending)},
    {"record", offsetof(Intake, kept)},
    {NULL, 0},
};
static const SlotName record_slots[] = {
    {"is_answer", offsetof(Intake, is_answer)},
    {"token_ids", offsetof(Intake, token_ids)},
    {NULL, 0},
};

/* The columns of a batch, each a list or a tuple; those that a batch lacks are NULL. */
typedef struct {
    PyObject *ids, *token_ids, *finish, *completion, *logprobs;
} Columns;

/* The cell, NULL in a column that is missing or was shortened meanwhile. */
static inline PyObject *cell(PyObject *column, Py_ssize_t at) {
    return column != NULL && at < PySequence_Fast_GET_SIZE(column) ? PySequence_Fast_GET_ITEM(column, at) : NULL;
}

/* Append one token to what waits. -1 with an exception. Nothing else has been changed before. */
static int append_pending(Intake *self, PyObject *sequence, PyObject *pending, PyObject *tokens) {
    PyObject *token = PyTuple_GET_ITEM(tokens, 0);
    Py_ssize_t size = Py_SIZE(pending);
    PyObject *joined;
    if (size == 0) {
        joined = Py_NewRef(tokens); /* most are taken before the next ones come: no list for them */
    } else if (PyList_CheckExact(pending)) {
        return PyList_Append(pending, token);
    } else {
        /* The collector runs finalizers, in Python 3.11 from within this: they could take what is pending. */
        int is_collecting = PyGC_Disable();
        joined = PyList_New(size + 1);
        if (is_collecting) {
            PyGC_Enable();
        }
        if (joined == NULL) {
            return -1;
        }
        for (Py_ssize_t at = 0; at < size; at++) {
            PyList_SET_ITEM(joined, at, Py_NewRef(PyTuple_GET_ITEM(pending, at)));
        }
        PyList_SET_ITEM(joined, size, Py_NewRef(token));
    }
    set_slot(sequence, self->pending, joined);
    return 0;
}

/* 1: the row was one more token of an attempt that goes on, and is appended. 0: it is any other, and nothing was done. */
static int append_row(Intake *self, PyObject *attempt, const Columns *columns, Py_ssize_t at, PyObject *dirty) {
    PyObject *tokens = cell(columns->token_ids, at), *finish = cell(columns->finish, at);
    PyObject *logprobs = cell(columns->logprobs, at), *claimed = cell(columns->completion, at);
    if (!Py_IS_TYPE(attempt, self->attempt) || tokens == NULL || !PyTuple_CheckExact(tokens) ||
        PyTuple_GET_SIZE(tokens) != 1 || finish == NULL || !PyUnicode_CheckExact(finish) ||
        PyUnicode_GET_LENGTH(finish) != 0 || (logprobs != NULL && logprobs != Py_None)) {
        return 0;
    }
    int64_t before = number(slot(attempt, self->tokens_out));
    if (before <= 0 || before >= number(slot(attempt, self->max_tokens)) || slot(attempt, self->is_done) != Py_False ||
        (claimed != NULL && claimed != Py_None && number(claimed) != before + 1)) {
        return 0;
    }
    PyObject *sequence = slot(attempt, self->owner);
    if (sequence == NULL || !Py_IS_TYPE(sequence, self->sequence)) {
        return 0;
    }
    PyObject *pending = slot(sequence, self->pending), *record = slot(sequence, self->kept);
    PyObject *is_dirty = slot(sequence, self->is_dirty);
    int64_t completion_tokens = number(slot(sequence, self->completion_tokens));
    if (pending == NULL || !(PyTuple_CheckExact(pending) || PyList_CheckExact(pending)) ||
        Py_SIZE(pending) >= self->max_pending || record == NULL || completion_tokens < 0 ||
        (is_dirty != Py_True && is_dirty != Py_False)) {
        return 0;
    }
    PyObject *kept = NULL;
    if (record != Py_None) {
        if (!Py_IS_TYPE(record, self->record) || slot(record, self->is_answer) != Py_False) {
            return 0;
        }
        kept = slot(record, self->token_ids);
        if (kept == NULL) {
            return 0;
        }
    }
    PyObject *tokens_out = PyLong_FromLongLong(before + 1), *completed = PyLong_FromLongLong(completion_tokens + 1);
    if (tokens_out == NULL || completed == NULL || append_pending(self, sequence, pending, tokens) < 0) {
        Py_XDECREF(tokens_out);
        Py_XDECREF(completed);
        return -1;
    }
    set_slot(attempt, self->tokens_out, tokens_out);
    set_slot(sequence, self->completion_tokens, completed);
    int status = 1;
    Py_INCREF(sequence); /* what is called for may be any code, and end whatever is borrowed here */
    if (kept != NULL) {
        PyObject *token = Py_NewRef(PyTuple_GET_ITEM(tokens, 0));
        Py_INCREF(kept);
        PyObject *done = PyObject_CallMethodOneArg(kept, self->append, token);
        status = done == NULL ? -1 : 1;
        Py_XDECREF(done);
        Py_DECREF(kept);
        Py_DECREF(token);
    }
    if (status == 1 && slot(sequence, self->is_dirty) == Py_False) {
        set_slot(sequence, self->is_dirty, Py_NewRef(Py_True));
        status = PyList_Append(dirty, sequence) < 0 ? -1 : 1;
    }
    Py_DECREF(sequence);
    return status;
}

/* A row walks from object to object, each cold: they are asked for ahead, one step per stage. */
enum { STAGE = 6, STAGES = 3 };

static inline void look_ahead(Intake *self, PyObject *attempt, int stage) {
    PyObject *sequence = attempt != NULL && Py_IS_TYPE(attempt, self->attempt) ? slot(attempt, self->owner) : NULL;
    if (sequence == NULL) {
        return;
    }
    if (stage == 1) {
        PREFETCH(sequence);
        PREFETCH((char *)sequence + 64);
        PREFETCH(slot(attempt, self->tokens_out));
        return;
    }
    PyObject *record = Py_IS_TYPE(sequence, self->sequence) ? slot(sequence, self->kept) : NULL;
    if (record == NULL || record == Py_None) {
        return;
    }
    if (stage == 2) {
        PREFETCH(record);
    } else if (Py_IS_TYPE(record, self->record)) {
        PREFETCH(slot(record, self->token_ids));
    }
}

static int walk(Intake *self, PyObject **attempts, Py_ssize_t rows, const Columns *columns, PyObject *dirty,
                PyObject *other, int64_t *total) {
    for (Py_ssize_t at = -STAGES * STAGE; at < rows; at++) {
        for (int stage = 1; stage <= STAGES; stage++) {
            Py_ssize_t ahead = at + (STAGES + 1 - stage) * STAGE;
            if (ahead >= 0 && ahead < rows) {
                look_ahead(self, attempts[ahead], stage);
            }
        }
        if (at < 0) {
            continue;
        }
        PyObject *attempt = attempts[at];
        int is_done = attempt == NULL ? 0 : append_row(self, attempt, columns, at, dirty);
        if (is_done < 0) {
            return -1;
        }
        if (is_done) {
            *total += 1;
            continue;
        }
        PyObject *tokens = PyObject_CallFunction(other, "nO", at, attempt == NULL ? Py_None : attempt);
        int64_t brought = number(tokens);
        Py_XDECREF(tokens);
        if (brought < 0 || brought > INT64_MAX - *total) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_TypeError, "a row brings a number of tokens");
            }
            return -1;
        }
        *total += brought;
    }
    return 0;
}

/* The attempts of all rows: each costs a look-up in memory that has gone cold, and so they overlap. */
static int find_attempts(PyObject *live, PyObject *ids, PyObject **attempts, Py_ssize_t rows) {
    for (Py_ssize_t at = 0; at < rows; at++) {
        PyObject *id = cell(ids, at);
        if (id == NULL || !PyUnicode_CheckExact(id)) {
            PyErr_SetString(PyExc_TypeError, "an id is a str");
            return -1;
        }
        attempts[at] = PyDict_GetItemWithError(live, id);
        if (attempts[at] != NULL) {
            PREFETCH(attempts[at]);
            PREFETCH((char *)attempts[at] + 64);
        } else if (PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *append_rows(Intake *self, PyObject *live, const Columns *columns, PyObject *dirty, PyObject *other) {
    Py_ssize_t rows = PySequence_Fast_GET_SIZE(columns->ids);
    PyObject *const all[] = {columns->token_ids, columns->finish, columns->completion, columns->logprobs};
    for (size_t at = 0; at < sizeof all / sizeof *all; at++) {
        if (all[at] != NULL && PySequence_Fast_GET_SIZE(all[at]) != rows) {
            PyErr_SetString(PyExc_ValueError, "a column is shorter or longer than the ids");
            return NULL;
        }
    }
    PyObject **attempts = PyMem_New(PyObject *, rows ? rows : 1);
    if (attempts == NULL) {
        return PyErr_NoMemory();
    }
    int64_t total = 0;
    int status = find_attempts(live, columns->ids, attempts, rows);
    if (status == 0) {
        for (Py_ssize_t at = 0; at < rows; at++) {
            Py_XINCREF(attempts[at]); /* what is called for other rows may end any of them */
        }
        status = walk(self, attempts, rows, columns, dirty, other, &total);
        for (Py_ssize_t at = 0; at < rows; at++) {
            Py_XDECREF(attempts[at]);
        }
    }
    PyMem_Free(attempts);
    return status < 0 ? NULL : PyLong_FromLongLong(total);
}

/* A column as a list or tuple, owned; NULL for None, or with an exception. */
static PyObject *column(PyObject *values) {
    return values == Py_None ? NULL : PySequence_Fast(values, "a column is a sequence");
}

static PyObject *intake_append(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    Intake *self = (Intake *)object;
    if (count != 8 || !PyDict_CheckExact(arguments[0]) || !PyList_CheckExact(arguments[6])) {
        PyErr_SetString(PyExc_TypeError,
                        "append(live: dict, ids, token_ids, finish, completion, logprobs, dirty: list, other)");
        return NULL;
    }
    PyObject *owned[5];
    for (int at = 0; at < 5; at++) {
        owned[at] = PyErr_Occurred() ? NULL : column(arguments[at + 1]);
    }
    PyObject *result = NULL;
    if (!PyErr_Occurred()) {
        Columns columns = {owned[0], owned[1], owned[2], owned[3], owned[4]};
        if (columns.ids == NULL || columns.token_ids == NULL || columns.finish == NULL) {
            PyErr_SetString(PyExc_TypeError, "ids, tokens and finish are no optional columns");
        } else {
            result = append_rows(self, arguments[0], &columns, arguments[6], arguments[7]);
        }
    }
    for (int at = 0; at < 5; at++) {
        Py_XDECREF(owned[at]);
    }
    return result;
}

static PyObject *intake_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(keywords)) {
    PyTypeObject *attempt, *sequence, *record;
    Py_ssize_t max_pending;
    if (!PyArg_ParseTuple(arguments, "O!O!O!n", &PyType_Type, &attempt, &PyType_Type, &sequence, &PyType_Type, &record,
                          &max_pending)) {
        return NULL;
    }
    Intake *self = (Intake *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->attempt = (PyTypeObject *)Py_NewRef(attempt);
    self->sequence = (PyTypeObject *)Py_NewRef(sequence);
    self->record = (PyTypeObject *)Py_NewRef(record);
    self->append = PyUnicode_InternFromString("append");
    self->max_pending = max_pending;
    if (self->append == NULL || find_slots((PyObject *)attempt, attempt_slots, self) < 0 ||
        find_slots((PyObject *)sequence, sequence_slots, self) < 0 ||
        find_slots((PyObject *)record, record_slots, self) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void intake_dealloc(PyObject *object) {
    Intake *self = (Intake *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->attempt);
    Py_XDECREF(self->sequence);
    Py_XDECREF(self->record);
    Py_XDECREF(self->append);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef intake_methods[] = {
    {"append", (PyCFunction)(void (*)(void))intake_append, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot intake_slots[] = {
    {Py_tp_new, intake_new},
    {Py_tp_dealloc, intake_dealloc},
    {Py_tp_methods, intake_methods},
    {0, NULL},
};

PyType_Spec intake_spec = {
    .name = "gateway.native._native.Intake",
    .basicsize = sizeof(Intake),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = intake_slots,
};
