/* GateLock: the lock of a process's gate, and the hooks that it calls (loops/gate_lock.py). */

#include "loops.h"

typedef struct {
    PyObject_HEAD
    PyObject *lock, *acquire, *release; /* a threading.RLock, and its methods */
    PyObject *hooks;                    /* a tuple */
    int depth;                          /* of the thread that has the lock */
} GateLock;

static int GateLock_traverse(GateLock *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lock);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->hooks);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int GateLock_clear(GateLock *self)
{
    Py_CLEAR(self->lock);
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->hooks);
    return 0;
}

static void GateLock_free(GateLock *self)
{
    PyObject_GC_UnTrack(self);
    GateLock_clear(self);
    free_object(self);
}

static PyObject *GateLock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *lock;
    if (!PyArg_ParseTuple(args, "O:GateLock", &lock))
        return NULL;
    GateLock *self = (GateLock *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->lock = Py_NewRef(lock);
    self->acquire = PyObject_GetAttrString(lock, "acquire");
    self->release = PyObject_GetAttrString(lock, "release");
    self->hooks = PyTuple_New(0);
    if (!self->acquire || !self->release || !self->hooks)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Call poll_update() of the hooks. Return whether any returned a true value, or -1 with an error. */
static int poll_hooks(GateLock *self)
{
    int yes = 0;
    PyObject *hooks = Py_NewRef(self->hooks);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks) && yes >= 0; i++) {
        PyObject *result = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(hooks, i), names.poll_update);
        int answer = result ? PyObject_IsTrue(result) : -1;
        Py_XDECREF(result);
        yes = answer < 0 ? -1 : yes | answer;
    }
    Py_DECREF(hooks);
    return yes;
}

/* GateLock.enter. Returns -1 with an error. */
static int enter(GateLock *self, int depth)
{
    self->depth = depth + 1;
    int again = depth == 0;
    while (again > 0)
        again = poll_hooks(self);
    return again;
}

/* GateLock.leave: calls all hooks. The current exception stays set, unless a hook raises: then the last such is. */
static int leave(GateLock *self, int depth)
{
    self->depth = depth;
    if (depth)
        return 0;
    PyObject *type, *error, *traceback, *hooks = Py_NewRef(self->hooks);
    int failed = 0;
    PyErr_Fetch(&type, &error, &traceback);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks); i++) {
        PyObject *result = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(hooks, i), names.leaving_gate);
        Py_XDECREF(result);
        if (result)
            continue;
        failed = 1;
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        PyErr_Fetch(&type, &error, &traceback);
    }
    Py_DECREF(hooks);
    PyErr_Restore(type, error, traceback);
    return failed ? -1 : 0;
}

/* Python runs no signal handler between locking and entering, as it might between two lines of Python. */
static int lock_gate(GateLock *self)
{
    PyObject *done = PyObject_CallNoArgs(self->acquire);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int unlock_gate(GateLock *self)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *done = PyObject_CallNoArgs(self->release);
    Py_XDECREF(done);
    if (done)
        PyErr_Restore(type, error, traceback);
    return done ? 0 : -1;
}

/* GateLock.call; without a function, GateLock.pass_through. */
static PyObject *call(GateLock *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    if (lock_gate(self))
        return NULL;
    int depth = self->depth;
    PyObject *result = NULL;
    if (enter(self, depth) == 0)
        result = count ? PyObject_Vectorcall(args[0], args + 1, (size_t)count - 1, keywords) : Py_NewRef(Py_None);
    int left = leave(self, depth);
    if (unlock_gate(self) || left)
        Py_CLEAR(result);
    return result;
}

int pass_through_gate(PyObject *gate_lock)
{
    PyObject *done = call((GateLock *)gate_lock, NULL, 0, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *GateLock_call(GateLock *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    if (!count) {
        PyErr_SetString(PyExc_TypeError, "call() takes a function");
        return NULL;
    }
    return call(self, args, count, keywords);
}

static PyObject *GateLock_pass_through(GateLock *self, PyObject *Py_UNUSED(ignored))
{
    return call(self, NULL, 0, NULL);
}

static PyObject *GateLock_enter(GateLock *self, PyObject *depth)
{
    long known = PyLong_AsLong(depth);
    if (PyErr_Occurred() || enter(self, (int)known) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *GateLock_leave(GateLock *self, PyObject *depth)
{
    long known = PyLong_AsLong(depth);
    if (PyErr_Occurred() || leave(self, (int)known))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *GateLock_get_hooks(GateLock *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->hooks);
}

static int GateLock_set_hooks(GateLock *self, PyObject *hooks, void *Py_UNUSED(closure))
{
    if (!hooks || !PyTuple_CheckExact(hooks)) {
        PyErr_SetString(PyExc_TypeError, "hooks must be a tuple");
        return -1;
    }
    Py_SETREF(self->hooks, Py_NewRef(hooks));
    return 0;
}

static PyMemberDef GateLock_members[] = {
    {"lock", T_OBJECT_EX, offsetof(GateLock, lock), READONLY, NULL},
    {"depth", T_INT, offsetof(GateLock, depth), 0, NULL},
    {NULL},
};
static PyGetSetDef GateLock_attributes[] = {
    {"hooks", (getter)GateLock_get_hooks, (setter)GateLock_set_hooks, NULL, NULL},
    {NULL},
};
PyDoc_STRVAR(GateLock_call_doc, "call(function, ...): see wsync.loops.gate_lock.");
PyDoc_STRVAR(GateLock_pass_through_doc, "pass_through(): see wsync.loops.gate_lock.");
PyDoc_STRVAR(GateLock_enter_doc, "enter(depth): see wsync.loops.gate_lock.");
PyDoc_STRVAR(GateLock_leave_doc, "leave(depth): see wsync.loops.gate_lock.");
static PyMethodDef GateLock_methods[] = {
    {"call", (PyCFunction)(void (*)(void))GateLock_call, METH_FASTCALL | METH_KEYWORDS, GateLock_call_doc},
    {"pass_through", (PyCFunction)GateLock_pass_through, METH_NOARGS, GateLock_pass_through_doc},
    {"enter", (PyCFunction)GateLock_enter, METH_O, GateLock_enter_doc},
    {"leave", (PyCFunction)GateLock_leave, METH_O, GateLock_leave_doc},
    {NULL},
};
PyDoc_STRVAR(GateLock_doc, "GateLock(lock): see wsync.loops.gate_lock.");
static PyType_Slot GateLock_slots[] = {
    SLOT(tp_doc, GateLock_doc),           SLOT(tp_new, GateLock_new),         SLOT(tp_dealloc, GateLock_free),
    SLOT(tp_traverse, GateLock_traverse), SLOT(tp_clear, GateLock_clear),     SLOT(tp_methods, GateLock_methods),
    SLOT(tp_members, GateLock_members),   SLOT(tp_getset, GateLock_attributes), {0, NULL},
};
PyType_Spec GateLock_spec = {"wsync._loops.GateLock", sizeof(GateLock), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                              GateLock_slots};
