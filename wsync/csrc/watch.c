/* Watch: many descriptors, asked at once whether anything has happened to any, however many they are (arena.py). */

#include <sys/epoll.h>
#include <unistd.h>

#include "native.h"

typedef struct {
    PyObject_HEAD
    int epoll;
} Watch;

int Watch_sees(PyObject *self)
{
    struct epoll_event event;
    return epoll_wait(((Watch *)self)->epoll, &event, 1, 0) != 0;
}

static void Watch_free(Watch *self)
{
    if (self->epoll >= 0)
        close(self->epoll);
    free_object(self);
}

static PyObject *Watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_buffer descriptors;
    if (!PyArg_ParseTuple(args, "y*:Watch", &descriptors))
        return NULL;
    Watch *self = (Watch *)type->tp_alloc(type, 0);
    int failed = 1;
    if (self) {
        self->epoll = epoll_create1(EPOLL_CLOEXEC);
        failed = self->epoll < 0;
        for (Py_ssize_t i = 0; !failed && i < descriptors.len / (Py_ssize_t)sizeof(int); i++) {
            struct epoll_event event = {.events = EPOLLIN};
            failed = epoll_ctl(self->epoll, EPOLL_CTL_ADD, ((const int *)descriptors.buf)[i], &event) && errno != EEXIST;
        }
        if (failed)
            PyErr_SetFromErrno(PyExc_OSError);
    }
    PyBuffer_Release(&descriptors);
    if (failed)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *Watch_call_sees(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(Watch_sees(self));
}

static PyMethodDef Watch_methods[] = {
    {"sees", Watch_call_sees, METH_NOARGS, "Whether any of them is readable, or has gone."},
    {NULL},
};
PyDoc_STRVAR(Watch_doc, "Watch(descriptors): of an array(\"i\"), as bytes; they stay the caller's.");
static PyType_Slot Watch_slots[] = {
    SLOT(tp_doc, Watch_doc), SLOT(tp_new, Watch_new), SLOT(tp_dealloc, Watch_free), SLOT(tp_methods, Watch_methods),
    {0, NULL},
};
PyType_Spec Watch_spec = {"wsync._native.Watch", sizeof(Watch), 0, Py_TPFLAGS_DEFAULT, Watch_slots};
