/* The rows' way through the gateway, compiled: see gateway/native/__init__.py. */

#include "native.h"

int find_slots(PyObject *cls, const SlotName *names, void *owner) {
    for (; names->name != NULL; names++) {
        PyObject *descriptor = PyObject_GetAttrString(cls, names->name);
        if (descriptor == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        int is_slot = 0;
        if (descriptor != NULL && Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) {
            const PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
            is_slot = member->type == T_OBJECT_EX && member->flags == 0 &&
                      PyType_IsSubtype((PyTypeObject *)cls, PyDescr_TYPE(descriptor));
            *(Py_ssize_t *)((char *)owner + names->field) = member->offset;
        }
        if (!is_slot) {
            PyErr_Format(PyExc_TypeError, "%R has no slot %s", cls, names->name);
        }
        Py_XDECREF(descriptor);
        if (!is_slot) {
            return -1;
        }
    }
    return 0;
}

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int status = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return status;
}

static int execute(PyObject *module) {
    if (add_type(module, &intake_spec) < 0 || add_type(module, &outlet_spec) < 0) {
        return -1;
    }
    if (PyModule_AddFunctions(module, varint_methods) < 0) {
        return -1;
    }
    return PyModule_AddFunctions(module, vllm_methods);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "gateway.native._native",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void);

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
