/* ArenaWriter: the sender's half of the words in an arena, worker by worker (loops/arena_writer.py). */

#include "arena_writer.h"

static void ArenaWriter_free(ArenaWriter *self)
{
    if (self->words.obj)
        PyBuffer_Release(&self->words);
    free_object(self);
}

static PyObject *ArenaWriter_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *words;
    Py_ssize_t workers;
    if (!PyArg_ParseTuple(args, "On:ArenaWriter", &words, &workers))
        return NULL;
    ArenaWriter *self = (ArenaWriter *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE)) {
        Py_DECREF(self);
        return NULL;
    }
    self->workers = workers, self->creator = getpid();
    Py_ssize_t room = self->words.len - MAX_SLOTS * (Py_ssize_t)sizeof(Record);
    if (workers < 0 || room < 0 || workers > room / (Py_ssize_t)sizeof(Block)) {
        PyErr_SetString(PyExc_ValueError, "there are fewer words than workers need");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Find a worker's block; NULL with an error if there is no such worker. */
static Block *block_or_error(ArenaWriter *self, Py_ssize_t worker)
{
    if (worker >= 0 && worker < self->workers)
        return block_of(self, worker);
    PyErr_Format(PyExc_IndexError, "there is no worker %zd", worker);
    return NULL;
}

static int initialise_mutex(Block *block)
{
    pthread_mutexattr_t attributes;
    int code = pthread_mutexattr_init(&attributes);
    if (!code && !(code = pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED))
        && !(code = pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST))
        && !(code = pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK)))
        code = pthread_mutex_init(mutex_of(block), &attributes);
    return code;
}

/* The words of a worker that is not connected, but for `published`. */
static void reset_words(Block *block)
{
    store(&block->connection, 0);
    store(&block->held_slot, NONE);
    store(&block->used_slot, NONE);
    block->wants_wakeups = 1;
    block->wants_freed = 0;
}

static PyObject *ArenaWriter_initialise(ArenaWriter *self, PyObject *Py_UNUSED(ignored))
{
    for (Py_ssize_t worker = 0; worker < self->workers; worker++) {
        Block *block = block_of(self, worker);
        errno = initialise_mutex(block);
        if (errno)
            return PyErr_SetFromErrno(PyExc_OSError);
        block->published = 0;
        reset_words(block);
    }
    Py_RETURN_NONE;
}

static PyObject *ArenaWriter_accept(ArenaWriter *self, PyObject *args)
{
    Py_ssize_t worker;
    long long connection;
    if (!PyArg_ParseTuple(args, "nL:accept", &worker, &connection))
        return NULL;
    Block *block = block_or_error(self, worker);
    if (!block || require_creator(self))
        return NULL;
    store(&block->connection, connection); /* no process has this number yet: the mutex is not needed */
    Py_RETURN_NONE;
}

static PyObject *ArenaWriter_set_slot_version(ArenaWriter *self, PyObject *args)
{
    Py_ssize_t slot;
    long long version;
    if (!PyArg_ParseTuple(args, "nL:set_slot_version", &slot, &version))
        return NULL;
    if (slot < 0 || slot >= MAX_SLOTS)
        return PyErr_Format(PyExc_IndexError, "there is no slot %zd", slot);
    store(&record_of(&self->words, self->workers, slot)->version, version);
    Py_RETURN_NONE;
}

/* Lock a worker's mutex within `timeout` seconds (None: no limit). Return 0; -1 with an error, and it is not locked. */
static int lock_or_error(Block *block, PyObject *timeout)
{
    double seconds = timeout == Py_None ? -1 : PyFloat_AsDouble(timeout);
    if (PyErr_Occurred())
        return -1;
    int code = lock_within(block, seconds);
    if (code == ETIMEDOUT)
        PyErr_Format(names.sync_timeout, "the worker's process has held its mutex for %S s: is it stopped?", timeout);
    else if (code) {
        errno = code;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return code ? -1 : 0;
}

static PyObject *ArenaWriter_publish(ArenaWriter *self, PyObject *args)
{
    Py_ssize_t worker;
    long long version, slot;
    int acknowledge;
    PyObject *timeout;
    if (!PyArg_ParseTuple(args, "nLLpO:publish", &worker, &version, &slot, &acknowledge, &timeout))
        return NULL;
    Block *block = block_or_error(self, worker);
    if (!block || require_creator(self) || lock_or_error(block, timeout))
        return NULL;
    block->published = published_word(version, slot, acknowledge);
    int64_t wakeups = block->wants_wakeups;
    unlock(block);
    return PyBool_FromLong(wakeups != 0);
}

static PyObject *ArenaWriter_published(ArenaWriter *self, PyObject *worker)
{
    Py_ssize_t index = PyNumber_AsSsize_t(worker, PyExc_IndexError);
    Block *block = PyErr_Occurred() ? NULL : block_or_error(self, index);
    if (!block)
        return NULL;
    int64_t word = load(&block->published);
    return Py_BuildValue("LL", (long long)version_in(word), (long long)slot_in(word));
}

/* Add a slot to a set, unless it is NONE. */
static int add(PyObject *set, int64_t slot)
{
    if (slot == NONE)
        return 0;
    PyObject *number = PyLong_FromLongLong(slot);
    int failed = !number || PySet_Add(set, number);
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *ArenaWriter_occupied(ArenaWriter *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *sets = Py_BuildValue("NNN", PySet_New(NULL), PySet_New(NULL), PySet_New(NULL));
    for (Py_ssize_t worker = 0; sets && worker < self->workers; worker++) {
        Needed needed = slots_needed(block_of(self, worker));
        if (add(PyTuple_GET_ITEM(sets, 0), needed.published) || add(PyTuple_GET_ITEM(sets, 1), needed.used)
            || add(PyTuple_GET_ITEM(sets, 2), needed.held))
            Py_CLEAR(sets);
    }
    return sets;
}

Py_ssize_t free_slot(ArenaWriter *self, Py_ssize_t slots)
{
    for (Py_ssize_t slot = 0; slot < slots && slot < MAX_SLOTS; slot++) {
        int busy = 0;
        for (Py_ssize_t w = 0; w < self->workers && !busy; w++) {
            Needed needed = slots_needed(block_of(self, w));
            busy = needed.published == slot || needed.used == slot || needed.held == slot;
        }
        if (!busy)
            return slot;
    }
    return -1;
}

static PyObject *ArenaWriter_await_free(ArenaWriter *self, PyObject *args)
{
    Py_ssize_t worker;
    PyObject *timeout;
    if (!PyArg_ParseTuple(args, "nO:await_free", &worker, &timeout))
        return NULL;
    Block *block = block_or_error(self, worker);
    if (!block || require_creator(self) || lock_or_error(block, timeout))
        return NULL;
    int used = block->used_slot != NONE;
    block->wants_freed = used;
    unlock(block);
    return PyBool_FromLong(used);
}

static PyObject *ArenaWriter_vacate(ArenaWriter *self, PyObject *args)
{
    Py_ssize_t worker;
    PyObject *timeout;
    if (!PyArg_ParseTuple(args, "nO:vacate", &worker, &timeout))
        return NULL;
    Block *block = block_or_error(self, worker);
    if (!block || require_creator(self))
        return NULL;
    int failed = lock_or_error(block, timeout);
    if (failed && !PyErr_ExceptionMatches(names.sync_timeout))
        return NULL;
    PyErr_Clear(); /* a stopped process may hold the mutex: its words are reset all the same */
    reset_words(block);
    if (!failed)
        unlock(block);
    Py_RETURN_NONE;
}

#define SEE(signature) signature ": see wsync.loops.arena_writer."

static PyMethodDef ArenaWriter_methods[] = {
    {"initialise", (PyCFunction)ArenaWriter_initialise, METH_NOARGS, SEE("initialise()")},
    {"accept", (PyCFunction)ArenaWriter_accept, METH_VARARGS, SEE("accept(worker, connection)")},
    {"set_slot_version", (PyCFunction)ArenaWriter_set_slot_version, METH_VARARGS,
     SEE("set_slot_version(slot, version)")},
    {"publish", (PyCFunction)ArenaWriter_publish, METH_VARARGS,
     SEE("publish(worker, version, slot, acknowledge, timeout)")},
    {"published", (PyCFunction)ArenaWriter_published, METH_O, SEE("published(worker)")},
    {"occupied", (PyCFunction)ArenaWriter_occupied, METH_NOARGS, SEE("occupied()")},
    {"await_free", (PyCFunction)ArenaWriter_await_free, METH_VARARGS, SEE("await_free(worker, timeout)")},
    {"vacate", (PyCFunction)ArenaWriter_vacate, METH_VARARGS, SEE("vacate(worker, timeout)")},
    {"fast_update", (PyCFunction)ArenaWriter_fast_update, METH_VARARGS,
     SEE("fast_update(plans, nbytes, descriptors, acknowledge)")},
    {NULL},
};
PyDoc_STRVAR(ArenaWriter_doc, "ArenaWriter(words, workers): see wsync.loops.arena_writer.");
static PyType_Slot ArenaWriter_slots[] = {
    SLOT(tp_doc, ArenaWriter_doc), SLOT(tp_new, ArenaWriter_new), SLOT(tp_dealloc, ArenaWriter_free),
    SLOT(tp_methods, ArenaWriter_methods), {0, NULL},
};
PyType_Spec ArenaWriter_spec = {"wsync._loops.ArenaWriter", sizeof(ArenaWriter), 0, Py_TPFLAGS_DEFAULT,
                                ArenaWriter_slots};
