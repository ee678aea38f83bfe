/* PeerWatch: one system call tells whether any of many descriptors has an event (loops/peer_watch.py). */

#include <sys/epoll.h>
#include <unistd.h>

#include "loops.h"

typedef struct {
    PyObject_HEAD
    int epoll;
} PeerWatch;

int PeerWatch_has_events(PyObject *self)
{
    struct epoll_event event;
    return epoll_wait(((PeerWatch *)self)->epoll, &event, 1, 0) != 0;
}

static void PeerWatch_free(PeerWatch *self)
{
    if (self->epoll >= 0)
        close(self->epoll);
    free_object(self);
}

static PyObject *PeerWatch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_buffer descriptors;
    if (!PyArg_ParseTuple(args, "y*:PeerWatch", &descriptors))
        return NULL;
    PeerWatch *self = (PeerWatch *)type->tp_alloc(type, 0);
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

static PyObject *PeerWatch_call_has_events(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(PeerWatch_has_events(self));
}

static PyMethodDef PeerWatch_methods[] = {
    {"has_events", PeerWatch_call_has_events, METH_NOARGS, "has_events(): see wsync.loops.peer_watch."},
    {NULL},
};
PyDoc_STRVAR(PeerWatch_doc, "PeerWatch(descriptors): see wsync.loops.peer_watch.");
static PyType_Slot PeerWatch_slots[] = {
    SLOT(tp_doc, PeerWatch_doc), SLOT(tp_new, PeerWatch_new), SLOT(tp_dealloc, PeerWatch_free), SLOT(tp_methods, PeerWatch_methods),
    {0, NULL},
};
PyType_Spec PeerWatch_spec = {"wsync._loops.PeerWatch", sizeof(PeerWatch), 0, Py_TPFLAGS_DEFAULT, PeerWatch_slots};
