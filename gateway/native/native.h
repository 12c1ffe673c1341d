/* What the parts of this module share: slots of Python objects by their offsets, and prefetching.

   A slot (`__slots__`) of an object is a pointer at a fixed offset, which the class's member descriptor names. Whoever
   reads or writes one here has checked the object's exact type first. A slot that was never set is NULL. */

#ifndef RANKGATE_NATIVE_H
#define RANKGATE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#if PY_VERSION_HEX < 0x030C0000
#include <cpython/longintrepr.h>
#endif
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

typedef struct {
    const char *name;
    size_t field; /* where the offset is stored, in the object that needs it */
} SlotName;

/* Look up the offsets of a class's slots. -1 and an exception when it has no such slot. */
int find_slots(PyObject *cls, const SlotName *names, void *owner);

static inline PyObject *slot(PyObject *object, Py_ssize_t offset) { return *(PyObject **)((char *)object + offset); }

/* Steals the reference to `value`. What was there before may be freed, and so run code. */
static inline void set_slot(PyObject *object, Py_ssize_t offset, PyObject *value) {
    PyObject **place = (PyObject **)((char *)object + offset);
    PyObject *before = *place;
    *place = value;
    Py_XDECREF(before);
}

/* A non-negative int of at most 2^62, else -1. Never raises. */
static inline int64_t number(PyObject *object) {
    if (object == NULL || !PyLong_CheckExact(object)) {
        return -1;
    }
#if PY_VERSION_HEX < 0x030C0000
    if (Py_SIZE(object) == 0 || Py_SIZE(object) == 1) {
        return Py_SIZE(object) == 0 ? 0 : (int64_t)((PyLongObject *)object)->ob_digit[0];
    }
#else
    if (PyUnstable_Long_IsCompact((PyLongObject *)object)) {
        Py_ssize_t value = PyUnstable_Long_CompactValue((PyLongObject *)object);
        return value < 0 ? -1 : (int64_t)value;
    }
#endif
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow || value < 0 || value > (1LL << 62) ? -1 : (int64_t)value;
}

/* https://protobuf.dev/programming-guides/encoding; returns how many bytes it took. */
static inline size_t write_varint(unsigned char *to, uint64_t value) {
    size_t size = 0;
    while (value > 0x7F) {
        to[size++] = (unsigned char)(value | 0x80);
        value >>= 7;
    }
    to[size++] = (unsigned char)value;
    return size;
}

extern PyType_Spec intake_spec;
extern PyType_Spec outlet_spec;
extern PyMethodDef varint_methods[];
extern PyMethodDef vllm_methods[];

#endif
