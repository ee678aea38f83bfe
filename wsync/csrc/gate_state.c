/* GateState: the lock of a process's gate, and the hooks that it calls (loops/gate_state.py). */

#include "loops.h"

typedef struct {
    PyObject_HEAD
    PyObject *lock, *acquire, *release; /* a threading.RLock, and its methods */
    PyObject *hooks;                    /* a tuple */
    PyObject *subject;                  /* the model that was called from outside, or None */
    int depth;                          /* of the thread that has the lock */
} GateState;

static int GateState_traverse(GateState *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lock);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->hooks);
    Py_VISIT(self->subject);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int GateState_clear(GateState *self)
{
    Py_CLEAR(self->lock);
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->hooks);
    Py_CLEAR(self->subject);
    return 0;
}

static void GateState_free(GateState *self)
{
    PyObject_GC_UnTrack(self);
    GateState_clear(self);
    free_object(self);
}

static PyObject *GateState_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *lock;
    if (!PyArg_ParseTuple(args, "O:GateState", &lock))
        return NULL;
    GateState *self = (GateState *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->lock = Py_NewRef(lock);
    self->acquire = PyObject_GetAttrString(lock, "acquire");
    self->release = PyObject_GetAttrString(lock, "release");
    self->hooks = PyTuple_New(0);
    self->subject = Py_NewRef(Py_None);
    if (!self->acquire || !self->release || !self->hooks)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Call poll_update() of the hooks. Return whether any returned a true value, or -1 with an error. */
static int poll_hooks(GateState *self)
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

/* GateState.enter. Returns -1 with an error. */
static int enter(GateState *self, int depth)
{
    self->depth = depth + 1;
    int again = depth == 0;
    while (again > 0)
        again = poll_hooks(self);
    return again;
}

/* GateState.leave: calls all hooks. The current exception stays set, unless a hook raises: then the last such is. */
static int leave(GateState *self, int depth)
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
static int lock_gate(GateState *self)
{
    PyObject *done = PyObject_CallNoArgs(self->acquire);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int unlock_gate(GateState *self)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *done = PyObject_CallNoArgs(self->release);
    Py_XDECREF(done);
    if (done)
        PyErr_Restore(type, error, traceback);
    return done ? 0 : -1;
}

/* GateState.call; with a `subject`, GateState.call_model; without a function, pass_through_gate. */
static PyObject *call(GateState *self, PyObject *subject, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    if (lock_gate(self))
        return NULL;
    int depth = self->depth;
    PyObject *result = NULL;
    if (depth == 0)
        Py_XSETREF(self->subject, Py_NewRef(subject));
    if (enter(self, depth) == 0)
        result = count ? PyObject_Vectorcall(args[0], args + 1, (size_t)count - 1, keywords) : Py_NewRef(Py_None);
    int left = leave(self, depth);
    if (depth == 0)
        Py_XSETREF(self->subject, Py_NewRef(Py_None));
    if (unlock_gate(self) || left)
        Py_CLEAR(result);
    return result;
}

int pass_through_gate(PyObject *gate_state)
{
    PyObject *done = call((GateState *)gate_state, Py_None, NULL, 0, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *GateState_call(GateState *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    if (!count) {
        PyErr_SetString(PyExc_TypeError, "call() takes a function");
        return NULL;
    }
    return call(self, Py_None, args, count, keywords);
}

static PyObject *GateState_call_model(GateState *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "call_model() takes a function and a model");
        return NULL;
    }
    return call(self, args[1], args, count, keywords);
}

static PyObject *GateState_enter(GateState *self, PyObject *depth)
{
    long known = PyLong_AsLong(depth);
    if (PyErr_Occurred() || enter(self, (int)known) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *GateState_leave(GateState *self, PyObject *depth)
{
    long known = PyLong_AsLong(depth);
    if (PyErr_Occurred() || leave(self, (int)known))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *GateState_get_hooks(GateState *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->hooks);
}

static int GateState_set_hooks(GateState *self, PyObject *hooks, void *Py_UNUSED(closure))
{
    if (!hooks || !PyTuple_CheckExact(hooks)) {
        PyErr_SetString(PyExc_TypeError, "hooks must be a tuple");
        return -1;
    }
    Py_SETREF(self->hooks, Py_NewRef(hooks));
    return 0;
}

static PyMemberDef GateState_members[] = {
    {"lock", T_OBJECT_EX, offsetof(GateState, lock), READONLY, NULL},
    {"depth", T_INT, offsetof(GateState, depth), 0, NULL},
    {"subject", T_OBJECT_EX, offsetof(GateState, subject), 0, NULL},
    {NULL},
};
static PyGetSetDef GateState_attributes[] = {
    {"hooks", (getter)GateState_get_hooks, (setter)GateState_set_hooks, NULL, NULL},
    {NULL},
};
PyDoc_STRVAR(GateState_call_doc, "call(function, ...): see wsync.loops.gate_state.");
PyDoc_STRVAR(GateState_call_model_doc, "call_model(function, model, ...): see wsync.loops.gate_state.");
PyDoc_STRVAR(GateState_enter_doc, "enter(depth): see wsync.loops.gate_state.");
PyDoc_STRVAR(GateState_leave_doc, "leave(depth): see wsync.loops.gate_state.");
static PyMethodDef GateState_methods[] = {
    {"call", (PyCFunction)(void (*)(void))GateState_call, METH_FASTCALL | METH_KEYWORDS, GateState_call_doc},
    {"call_model", (PyCFunction)(void (*)(void))GateState_call_model, METH_FASTCALL | METH_KEYWORDS,
     GateState_call_model_doc},
    {"enter", (PyCFunction)GateState_enter, METH_O, GateState_enter_doc},
    {"leave", (PyCFunction)GateState_leave, METH_O, GateState_leave_doc},
    {NULL},
};
PyDoc_STRVAR(GateState_doc, "GateState(lock): see wsync.loops.gate_state.");
static PyType_Slot GateState_slots[] = {
    SLOT(tp_doc, GateState_doc),           SLOT(tp_new, GateState_new),         SLOT(tp_dealloc, GateState_free),
    SLOT(tp_traverse, GateState_traverse), SLOT(tp_clear, GateState_clear),     SLOT(tp_methods, GateState_methods),
    SLOT(tp_members, GateState_members),   SLOT(tp_getset, GateState_attributes), {0, NULL},
};
PyType_Spec GateState_spec = {"wsync._loops.GateState", sizeof(GateState), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                              GateState_slots};
