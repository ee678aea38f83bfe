/* Turnstile: the lock of a process's gate, and whom to ask on the way in (gate.py). */

#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *lock, *acquire, *release; /* a threading.RLock, and its methods */
    PyObject *feeds;                    /* a tuple */
    int depth;                          /* of the thread that has the lock */
} Turnstile;

static int Turnstile_traverse(Turnstile *self, visitproc visit, void *arg)
{
    Py_VISIT(self->lock);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->feeds);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Turnstile_clear(Turnstile *self)
{
    Py_CLEAR(self->lock);
    Py_CLEAR(self->acquire);
    Py_CLEAR(self->release);
    Py_CLEAR(self->feeds);
    return 0;
}

static void Turnstile_free(Turnstile *self)
{
    PyObject_GC_UnTrack(self);
    Turnstile_clear(self);
    free_object(self);
}

static PyObject *Turnstile_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *lock;
    if (!PyArg_ParseTuple(args, "O:Turnstile", &lock))
        return NULL;
    Turnstile *self = (Turnstile *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->lock = Py_NewRef(lock);
    self->acquire = PyObject_GetAttrString(lock, "acquire");
    self->release = PyObject_GetAttrString(lock, "release");
    self->feeds = PyTuple_New(0);
    if (!self->acquire || !self->release || !self->feeds)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* Call a method of all feeds; whether any said yes, or -1 with an error. */
static int ask_all(Turnstile *self, PyObject *method)
{
    int yes = 0;
    PyObject *feeds = Py_NewRef(self->feeds);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(feeds) && yes >= 0; i++) {
        PyObject *said = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(feeds, i), method);
        int answer = said ? PyObject_IsTrue(said) : -1;
        Py_XDECREF(said);
        yes = answer < 0 ? -1 : yes | answer;
    }
    Py_DECREF(feeds);
    return yes;
}

/* Turnstile.enter. Returns -1 with an error. */
static int enter(Turnstile *self, int depth)
{
    self->depth = depth + 1;
    int again = depth == 0;
    while (again > 0)
        again = ask_all(self, names.enter);
    return again;
}

/* Turnstile.leave. An error of before stays, unless there is a new one. */
static int leave(Turnstile *self, int depth)
{
    self->depth = depth;
    if (depth)
        return 0;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    int failed = ask_all(self, names.leave) < 0;
    if (!failed) {
        PyErr_Restore(type, error, traceback);
        return 0;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return -1;
}

/* Between these no signal strikes, as it would in Python between two lines. */
static int lock_gate(Turnstile *self)
{
    PyObject *done = PyObject_CallNoArgs(self->acquire);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int unlock_gate(Turnstile *self)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *done = PyObject_CallNoArgs(self->release);
    Py_XDECREF(done);
    if (done)
        PyErr_Restore(type, error, traceback);
    return done ? 0 : -1;
}

/* Turnstile.call; without a function it is to go in and out. */
static PyObject *call(Turnstile *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
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

int go_through(PyObject *turnstile)
{
    PyObject *done = call((Turnstile *)turnstile, NULL, 0, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *Turnstile_call(Turnstile *self, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    if (!count) {
        PyErr_SetString(PyExc_TypeError, "call() takes a function");
        return NULL;
    }
    return call(self, args, count, keywords);
}

static PyObject *Turnstile_go_through(Turnstile *self, PyObject *Py_UNUSED(ignored))
{
    return call(self, NULL, 0, NULL);
}

static PyObject *Turnstile_enter(Turnstile *self, PyObject *depth)
{
    long known = PyLong_AsLong(depth);
    if (PyErr_Occurred() || enter(self, (int)known) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Turnstile_leave(Turnstile *self, PyObject *depth)
{
    long known = PyLong_AsLong(depth);
    if (PyErr_Occurred() || leave(self, (int)known))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Turnstile_get_feeds(Turnstile *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->feeds);
}

static int Turnstile_set_feeds(Turnstile *self, PyObject *feeds, void *Py_UNUSED(closure))
{
    if (!feeds || !PyTuple_CheckExact(feeds)) {
        PyErr_SetString(PyExc_TypeError, "feeds are a tuple");
        return -1;
    }
    Py_SETREF(self->feeds, Py_NewRef(feeds));
    return 0;
}

static PyMemberDef Turnstile_members[] = {
    {"lock", T_OBJECT_EX, offsetof(Turnstile, lock), READONLY, NULL},
    {"depth", T_INT, offsetof(Turnstile, depth), 0, NULL},
    {NULL},
};
static PyGetSetDef Turnstile_attributes[] = {
    {"feeds", (getter)Turnstile_get_feeds, (setter)Turnstile_set_feeds, NULL, NULL},
    {NULL},
};
PyDoc_STRVAR(Turnstile_call_doc, "call(function, ...): what it returns, called with the lock held, all feeds asked.");
PyDoc_STRVAR(Turnstile_go_through_doc, "In and out again: what there is to install is installed on the way.");
PyDoc_STRVAR(Turnstile_enter_doc, "enter(depth): inside the lock, which this thread had taken so often before.");
PyDoc_STRVAR(Turnstile_leave_doc, "leave(depth): the end of what enter(depth) began.");
static PyMethodDef Turnstile_methods[] = {
    {"call", (PyCFunction)(void (*)(void))Turnstile_call, METH_FASTCALL | METH_KEYWORDS, Turnstile_call_doc},
    {"go_through", (PyCFunction)Turnstile_go_through, METH_NOARGS, Turnstile_go_through_doc},
    {"enter", (PyCFunction)Turnstile_enter, METH_O, Turnstile_enter_doc},
    {"leave", (PyCFunction)Turnstile_leave, METH_O, Turnstile_leave_doc},
    {NULL},
};
PyDoc_STRVAR(Turnstile_doc, "Turnstile(lock): a gate's lock, how deep its holder is inside, and whom to ask.");
static PyType_Slot Turnstile_slots[] = {
    SLOT(tp_doc, Turnstile_doc),           SLOT(tp_new, Turnstile_new),         SLOT(tp_dealloc, Turnstile_free),
    SLOT(tp_traverse, Turnstile_traverse), SLOT(tp_clear, Turnstile_clear),     SLOT(tp_methods, Turnstile_methods),
    SLOT(tp_members, Turnstile_members),   SLOT(tp_getset, Turnstile_attributes), {0, NULL},
};
PyType_Spec Turnstile_spec = {"wsync._native.Turnstile", sizeof(Turnstile), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                              Turnstile_slots};
