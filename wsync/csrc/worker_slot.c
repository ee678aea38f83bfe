/* WorkerSlot: a worker's half of the words in an arena, and its state (loops/worker_slot.py). */

#include "worker_slot.h"

static int WorkerSlot_traverse(WorkerSlot *self, visitproc visit, void *arg)
{
    Py_VISIT(self->receiver);
    Py_VISIT(self->gate_lock);
    Py_VISIT(self->installer);
    Py_VISIT(self->plans);
    Py_VISIT(self->staged);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void disable_fast_path(WorkerSlot *self)
{
    Py_CLEAR(self->installer);
    Py_CLEAR(self->plans);
    Py_CLEAR(self->staged);
}

static int WorkerSlot_clear(WorkerSlot *self)
{
    Py_CLEAR(self->receiver);
    Py_CLEAR(self->gate_lock);
    disable_fast_path(self);
    return 0;
}

static void release_words(WorkerSlot *self)
{
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
        self->slot = NONE;
    return (PyObject *)self;
}

static PyObject *WorkerSlot_set_receiver(WorkerSlot *self, PyObject *args)
{
    PyObject *receiver, *gate_lock;
    if (!PyArg_ParseTuple(args, "OO!:set_receiver", &receiver, GateLock_type, &gate_lock))
        return NULL;
    Py_XSETREF(self->receiver, Py_NewRef(receiver));
    Py_XSETREF(self->gate_lock, Py_NewRef(gate_lock));
    Py_RETURN_NONE;
}

static PyObject *WorkerSlot_map_words(WorkerSlot *self, PyObject *args)
{
    PyObject *words;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "On:map_words", &words, &at))
        return NULL;
    release_words(self);
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE))
        return NULL;
    if (!block_at(&self->words, at)) {
        release_words(self);
        return NULL;
    }
    self->at = at;
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
    PyObject *installer, *plans, *staged;
    int fd, worker, bound;
    if (!PyArg_ParseTuple(args, "O!O!O!iip:install_fast_path", Installer_type, &installer, &PyList_Type, &plans,
                          &PyDict_Type, &staged, &fd, &worker, &bound))
        return NULL;
    Py_XSETREF(self->installer, Py_NewRef(installer));
    Py_XSETREF(self->plans, Py_NewRef(plans));
    Py_XSETREF(self->staged, Py_NewRef(staged));
    self->fd = fd, self->worker = worker, self->bound = bound;
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

/* Find the own block; NULL with an error before map_words(). */
static Block *mapped_block(WorkerSlot *self)
{
    if (self->words.obj)
        return own_block(self);
    PyErr_SetString(PyExc_RuntimeError, "map_words() comes first");
    return NULL;
}

static PyObject *WorkerSlot_take(WorkerSlot *self, PyObject *hold_given)
{
    int hold = PyObject_IsTrue(hold_given);
    Block *block = hold < 0 ? NULL : mapped_block(self);
    if (!block || lock_own(block))
        return NULL;
    int64_t word = block->published, slot = self->slot;
    int newer = version_in(word) > known_version(self);
    if (newer && hold)
        store(&block->held, slot);
    if (newer)
        slot = slot_in(word);
    store(&block->used, slot); /* the order of these stores: see the Python class */
    if (newer)
        store(&block->taken, version_in(word));
    unlock(block);
    self->busy = slot >= 0;
    if (!newer)
        Py_RETURN_NONE;
    return Py_BuildValue("LLN", (long long)version_in(word), (long long)slot, PyBool_FromLong(word & 1));
}

static PyObject *WorkerSlot_release_previous(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    Block *block = mapped_block(self);
    if (!block)
        return NULL;
    store(&block->held, NONE);
    Py_RETURN_NONE;
}

int release_slot(WorkerSlot *self)
{
    if (!self->busy)
        return 0;
    Block *block = own_block(self);
    if (lock_own(block))
        return -1;
    self->busy = 0;
    int keep = self->hold || self->refused > self->version;
    store(&block->held, keep ? self->slot : NONE); /* before the next store: see the Python class */
    store(&block->used, NONE);
    int awaited = block->awaited != 0;
    block->awaited = 0;
    unlock(block);
    return awaited;
}

static PyObject *WorkerSlot_release(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    int awaited = release_slot(self);
    return awaited < 0 ? NULL : PyBool_FromLong(awaited);
}

static PyObject *WorkerSlot_set_wakeups(WorkerSlot *self, PyObject *wanted_given)
{
    int wanted = PyObject_IsTrue(wanted_given);
    Block *block = wanted < 0 ? NULL : mapped_block(self);
    if (!block || lock_own(block))
        return NULL;
    block->wakeups = wanted;
    unlock(block);
    Py_RETURN_NONE;
}

static PyMemberDef WorkerSlot_members[] = {
    {"version", T_LONGLONG, offsetof(WorkerSlot, version), 0, NULL},
    {"slot", T_LONGLONG, offsetof(WorkerSlot, slot), 0, NULL},
    {"refused", T_LONGLONG, offsetof(WorkerSlot, refused), 0, NULL},
    {"hold", T_BOOL, offsetof(WorkerSlot, hold), 0, NULL},
    {"busy", T_BOOL, offsetof(WorkerSlot, busy), 0, NULL},
    {NULL},
};

#define SEE(signature) signature ": see wsync.loops.worker_slot."

static PyMethodDef WorkerSlot_methods[] = {
    {"set_receiver", (PyCFunction)WorkerSlot_set_receiver, METH_VARARGS, SEE("set_receiver(receiver, gate_lock)")},
    {"map_words", (PyCFunction)WorkerSlot_map_words, METH_VARARGS, SEE("map_words(words, at)")},
    {"close", (PyCFunction)WorkerSlot_close, METH_NOARGS, SEE("close()")},
    {"install_fast_path", (PyCFunction)WorkerSlot_install_fast_path, METH_VARARGS,
     SEE("install_fast_path(installer, plans, staged, fd, worker, bound)")},
    {"disable_fast_path", (PyCFunction)WorkerSlot_disable_fast_path, METH_NOARGS, SEE("disable_fast_path()")},
    {"take", (PyCFunction)WorkerSlot_take, METH_O, SEE("take(hold)")},
    {"release_previous", (PyCFunction)WorkerSlot_release_previous, METH_NOARGS, SEE("release_previous()")},
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
