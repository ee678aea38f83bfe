/* WorkerSlot: a worker's half of the words in an arena, and its state (loops/worker_slot.py). */

#include "worker_slot.h"

static int WorkerSlot_traverse(WorkerSlot *self, visitproc visit, void *arg)
{
    Py_VISIT(self->updater);
    Py_VISIT(self->gate_state);
    Py_VISIT(self->installer);
    Py_VISIT(self->plans);
    Py_VISIT(self->prepared);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void disable_fast_path(WorkerSlot *self)
{
    Py_CLEAR(self->installer);
    Py_CLEAR(self->plans);
    Py_CLEAR(self->prepared);
}

static int WorkerSlot_clear(WorkerSlot *self)
{
    Py_CLEAR(self->updater);
    Py_CLEAR(self->gate_state);
    disable_fast_path(self);
    return 0;
}

static void release_words(WorkerSlot *self)
{
    self->block = NULL;
    if (self->words.obj)
        PyBuffer_Release(&self->words);
}

static void WorkerSlot_free(WorkerSlot *self)
{
    PyObject_GC_UnTrack(self);
    WorkerSlot_clear(self);
    release_words(self);
    free_object(self);
}

static PyObject *WorkerSlot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ":WorkerSlot"))
        return NULL;
    WorkerSlot *self = (WorkerSlot *)type->tp_alloc(type, 0);
    if (self)
        self->bound_slot = self->used = NONE;
    return (PyObject *)self;
}

static PyObject *WorkerSlot_set_updater(WorkerSlot *self, PyObject *args)
{
    PyObject *updater, *gate_state;
    if (!PyArg_ParseTuple(args, "OO!:set_updater", &updater, GateState_type, &gate_state))
        return NULL;
    Py_XSETREF(self->updater, Py_NewRef(updater));
    Py_XSETREF(self->gate_state, Py_NewRef(gate_state));
    Py_RETURN_NONE;
}

static PyObject *WorkerSlot_map_words(WorkerSlot *self, PyObject *args)
{
    PyObject *words;
    int worker;
    long long connection;
    if (!PyArg_ParseTuple(args, "OiL:map_words", &words, &worker, &connection))
        return NULL;
    release_words(self);
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE))
        return NULL;
    self->worker = worker, self->connection = connection;
    self->block = block_in(&self->words, worker);
    if (!self->block) {
        release_words(self);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *WorkerSlot_close(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    WorkerSlot_clear(self);
    release_words(self);
    Py_RETURN_NONE;
}

static PyObject *WorkerSlot_install_fast_path(WorkerSlot *self, PyObject *args)
{
    PyObject *installer, *plans, *prepared;
    int fd, bound;
    Py_ssize_t workers;
    if (!PyArg_ParseTuple(args, "O!O!O!ipn:install_fast_path", Installer_type, &installer, &PyList_Type, &plans,
                          &PyDict_Type, &prepared, &fd, &bound, &workers))
        return NULL;
    Py_XSETREF(self->installer, Py_NewRef(installer));
    Py_XSETREF(self->plans, Py_NewRef(plans));
    Py_XSETREF(self->prepared, Py_NewRef(prepared));
    self->fd = fd, self->bound = bound, self->workers = workers;
    Py_RETURN_NONE;
}

static PyObject *WorkerSlot_disable_fast_path(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    disable_fast_path(self);
    Py_RETURN_NONE;
}

int lock_own(Block *block)
{
    errno = lock_within(block, -1);
    if (!errno)
        return 0;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

/* Lock the mapped block. Return it; NULL with an error, before map_words() too. */
static Block *lock_mapped(WorkerSlot *self)
{
    if (!self->block)
        PyErr_SetString(PyExc_RuntimeError, "map_words() comes first");
    return self->block && !lock_own(self->block) ? self->block : NULL;
}

static PyObject *WorkerSlot_take(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    Block *block = lock_mapped(self);
    if (!block)
        return NULL;
    int64_t word = 0, slot = self->bound_slot;
    int newer = 0;
    if (owns_words(self)) {
        word = block->published;
        newer = version_in(word) > tried_version(self);
        if (newer && self->hold)
            store(&block->held_slot, slot); /* before the next store: see the Python class */
        if (newer)
            slot = slot_in(word);
        store(&block->used_slot, self->used = slot);
    }
    unlock(block);
    self->busy = slot >= 0;
    if (!newer)
        Py_RETURN_NONE;
    return Py_BuildValue("LLN", (long long)version_in(word), (long long)slot, PyBool_FromLong(word & 1));
}

int release_slot(WorkerSlot *self)
{
    if (!self->busy && !self->hold) /* a slot that is held may have been lost: see the Python class */
        return 0;
    Block *block = lock_mapped(self);
    if (!block)
        return -1;
    self->busy = 0;
    int wanted = 0;
    if (owns_words(self)) {
        store(&block->held_slot, self->hold ? self->bound_slot : NONE); /* before the next store: see the Python class */
        store(&block->used_slot, self->used = NONE);
        wanted = block->wants_freed != 0;
        block->wants_freed = 0;
    }
    unlock(block);
    return wanted;
}

static PyObject *WorkerSlot_release(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    int wanted = release_slot(self);
    return wanted < 0 ? NULL : PyBool_FromLong(wanted);
}

static PyObject *WorkerSlot_set_wakeups(WorkerSlot *self, PyObject *wanted_given)
{
    int wanted = PyObject_IsTrue(wanted_given);
    Block *block = wanted < 0 ? NULL : lock_mapped(self);
    if (!block)
        return NULL;
    if (owns_words(self))
        block->wants_wakeups = wanted;
    unlock(block);
    Py_RETURN_NONE;
}

static PyMemberDef WorkerSlot_members[] = {
    {"version", T_LONGLONG, offsetof(WorkerSlot, version), 0, NULL},
    {"bound_slot", T_LONGLONG, offsetof(WorkerSlot, bound_slot), 0, NULL},
    {"used", T_LONGLONG, offsetof(WorkerSlot, used), 0, NULL},
    {"failed_version", T_LONGLONG, offsetof(WorkerSlot, failed_version), 0, NULL},
    {"hold", T_BOOL, offsetof(WorkerSlot, hold), 0, NULL},
    {"busy", T_BOOL, offsetof(WorkerSlot, busy), 0, NULL},
    {"disconnected", T_BOOL, offsetof(WorkerSlot, disconnected), 0, NULL},
    {"torn", T_BOOL, offsetof(WorkerSlot, torn), 0, NULL},
    {NULL},
};

#define SEE(signature) signature ": see wsync.loops.worker_slot."

static PyMethodDef WorkerSlot_methods[] = {
    {"set_updater", (PyCFunction)WorkerSlot_set_updater, METH_VARARGS, SEE("set_updater(updater, gate_state)")},
    {"map_words", (PyCFunction)WorkerSlot_map_words, METH_VARARGS, SEE("map_words(words, worker, connection)")},
    {"close", (PyCFunction)WorkerSlot_close, METH_NOARGS, SEE("close()")},
    {"install_fast_path", (PyCFunction)WorkerSlot_install_fast_path, METH_VARARGS,
     SEE("install_fast_path(installer, plans, prepared, fd, bound, num_workers)")},
    {"disable_fast_path", (PyCFunction)WorkerSlot_disable_fast_path, METH_NOARGS, SEE("disable_fast_path()")},
    {"take", (PyCFunction)WorkerSlot_take, METH_NOARGS, SEE("take()")},
    {"release", (PyCFunction)WorkerSlot_release, METH_NOARGS, SEE("release()")},
    {"set_wakeups", (PyCFunction)WorkerSlot_set_wakeups, METH_O, SEE("set_wakeups(wanted)")},
    {"poll_update", (PyCFunction)WorkerSlot_poll_update, METH_NOARGS, SEE("poll_update()")},
    {"leaving_gate", (PyCFunction)WorkerSlot_leaving_gate, METH_NOARGS, SEE("leaving_gate()")},
    {"on_readable", (PyCFunction)WorkerSlot_on_readable, METH_NOARGS, SEE("on_readable()")},
    {NULL},
};
PyDoc_STRVAR(WorkerSlot_doc, "WorkerSlot(): see wsync.loops.worker_slot.");
static PyType_Slot WorkerSlot_slots[] = {
    SLOT(tp_doc, WorkerSlot_doc),           SLOT(tp_new, WorkerSlot_new),     SLOT(tp_dealloc, WorkerSlot_free),
    SLOT(tp_traverse, WorkerSlot_traverse), SLOT(tp_clear, WorkerSlot_clear), SLOT(tp_methods, WorkerSlot_methods),
    SLOT(tp_members, WorkerSlot_members),   {0, NULL},
};
PyType_Spec WorkerSlot_spec = {"wsync._loops.WorkerSlot", sizeof(WorkerSlot), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, WorkerSlot_slots};
