/* WorkerWords: a worker's words of an arena, and what a forward costs that finds nothing new, or a usual update.
 * wsync/shm/arena.py says what the words mean, and why no slot is written while a forward uses it. */

#include "native.h"

typedef struct {
    PyObject_HEAD
    Py_buffer words;
    Block *block; /* NULL once it is closed */
    Record *records;
    int signal, wake;                       /* eventfds: the trainer's, which this end rings, and this connection's */
    char binds, hold, busy;                 /* `busy`: a slot is marked as used; the rest and these: _native.pyi */
    long long version, failed_version, bound_slot, installs, fulfilled;
    double announced_at;
    PyObject *receiver, *installer, *plans; /* `installer` is NULL while the receiver does everything */
} WorkerWords;

static int WorkerWords_traverse(WorkerWords *self, visitproc visit, void *arg)
{
    Py_VISIT(self->receiver);
    Py_VISIT(self->installer);
    Py_VISIT(self->plans);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int WorkerWords_clear(WorkerWords *self)
{
    Py_CLEAR(self->receiver);
    Py_CLEAR(self->installer);
    Py_CLEAR(self->plans);
    return 0;
}

static PyObject *WorkerWords_close(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    self->block = NULL;
    if (self->words.obj)
        PyBuffer_Release(&self->words);
    WorkerWords_clear(self);
    Py_RETURN_NONE;
}

static void WorkerWords_free(WorkerWords *self)
{
    PyObject_GC_UnTrack(self);
    Py_DECREF(WorkerWords_close(self, NULL));
    free_object(self);
}

static PyObject *WorkerWords_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *memory, *plans;
    Py_ssize_t capacity, block;
    int signal, wake, binds;
    if (!PyArg_ParseTuple(args, "OnniipO!:WorkerWords", &memory, &capacity, &block, &signal, &wake, &binds, &PyList_Type,
                          &plans))
        return NULL;
    WorkerWords *self = (WorkerWords *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->signal = signal, self->wake = wake, self->binds = (char)binds, self->bound_slot = NONE;
    self->plans = Py_NewRef(plans);
    Block *blocks;
    if (map_words(memory, capacity, &self->words, &blocks, &self->records) || block < 0 || block >= capacity) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_IndexError, "there is no block %zd", block);
        Py_DECREF(self);
        return NULL;
    }
    self->block = blocks + block;
    return (PyObject *)self;
}

static PyObject *WorkerWords_usual(WorkerWords *self, PyObject *installer)
{
    if (installer != Py_None && Py_TYPE(installer) != Installer_type)
        return PyErr_Format(PyExc_TypeError, "an Installer, or None");
    Py_XSETREF(self->installer, installer == Py_None ? NULL : Py_NewRef(installer));
    Py_RETURN_NONE;
}

/* --- the words --- */

/* Whether a word names a version that was not tried here. */
static int is_new(WorkerWords *self, int64_t word)
{
    return version_in(word) > self->version && version_in(word) > self->failed_version;
}

/* Mark as used the slot of the version that a forward has to use: the published one if it is new here, or the pending
 * one if that is wanted; else the slot that the model has. Return the word of a new version; 0 if there is none. */
static int64_t mark_used(WorkerWords *self, int with_pending)
{
    Block *block = self->block;
    for (;;) {
        int64_t word = load(&block->published), pending = with_pending ? load(&block->pending) : 0;
        const int64_t *source = version_in(pending) > version_in(word) ? &block->pending : &block->published;
        word = source == &block->pending ? pending : word;
        int64_t slot = is_new(self, word) ? slot_in(word) : self->bound_slot;
        self->busy = slot != NONE;
        store(&block->used, slot);
        if (load(source) == word) /* so the trainer reads `used` after this store, before it writes the slot */
            return is_new(self, word) ? word : 0;
    }
}

static void release(WorkerWords *self)
{
    if (self->hold)
        store(&self->block->held, self->bound_slot); /* before the next store: is_free in sender_words.c */
    if (!self->busy)
        return;
    self->busy = 0;
    store(&self->block->used, NONE);
    if (load(&self->block->wants_freed))
        ring(self->signal);
}

/* Record that the version of a word is installed. */
static void record_installed(WorkerWords *self, int64_t word, double wait, double apply)
{
    self->version = version_in(word);
    self->announced_at = 0;
    if (self->binds)
        self->bound_slot = slot_in(word);
    else
        release(self); /* its bytes are copied out */
    self->block->wait = wait, self->block->apply = apply;
    store(&self->block->installed, self->version);
    if (word & 1)
        ring(self->signal);
}

static PyObject *WorkerWords_take(WorkerWords *self, PyObject *with_pending)
{
    int truth = PyObject_IsTrue(with_pending);
    if (truth < 0)
        return NULL;
    int64_t word = self->block ? mark_used(self, truth) : 0;
    if (!word)
        Py_RETURN_NONE;
    return Py_BuildValue("LLO", (long long)version_in(word), (long long)slot_in(word), word & 1 ? Py_True : Py_False);
}

static PyObject *WorkerWords_release(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    if (self->block)
        release(self);
    Py_RETURN_NONE;
}

static PyObject *WorkerWords_answer(WorkerWords *self, PyObject *args)
{
    long long version, slot;
    int acknowledge;
    double wait, apply;
    if (!PyArg_ParseTuple(args, "LLpdd:answer", &version, &slot, &acknowledge, &wait, &apply))
        return NULL;
    if (self->block)
        record_installed(self, word_of(version, slot, acknowledge), wait, apply);
    Py_RETURN_NONE;
}

static PyObject *WorkerWords_set_wakeups(WorkerWords *self, PyObject *wanted)
{
    int truth = PyObject_IsTrue(wanted);
    if (truth >= 0 && self->block)
        store(&self->block->wants_wakeup, truth);
    return truth < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *WorkerWords_woken(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    if (self->block) {
        silence(self->wake); /* before the words are read: what is published later rings again */
        if (!self->announced_at && (is_new(self, load(&self->block->published)) || is_new(self, load(&self->block->pending))))
            self->announced_at = now();
    }
    Py_RETURN_NONE;
}

static PyObject *WorkerWords_published(WorkerWords *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->block ? version_in(load(&self->block->published)) : 0);
}

/* --- the gate's hook --- */

/* Return the views of a slot; NULL if it has to be mapped, for the first time or again. */
static PyObject *views_of(WorkerWords *self, int64_t slot)
{
    return slot < PyList_GET_SIZE(self->plans) ? PackPlan_views((PackPlan *)PyList_GET_ITEM(self->plans, slot)) : NULL;
}

/* Install what is published, if anything is new. Return 1; 0 if the receiver has to do it; -1 with an error. */
static int install(WorkerWords *self, PyObject *installer)
{
    if (load(&self->block->pending))
        return 0;
    if (!is_new(self, load(&self->block->published)) && !mark_used(self, 0))
        return 1;
    double started = now();
    PyObject *views = views_of(self, 0); /* the views of all slots are alike */
    int fits = views ? Installer_check((Installer *)installer, views) : 0;
    if (fits <= 0 || !self->block) /* a finalizer may have closed it */
        return fits < 0 ? -1 : 0;
    int64_t word = mark_used(self, 0), slot = slot_in(word);
    const Record *record = self->records + slot;
    views = word ? views_of(self, slot) : NULL;
    if (!views || record->has_extra || (record->serial && record->serial != self->fulfilled))
        return 0;
    if (Installer_switch((Installer *)installer, views))
        return -1;
    if (self->block) { /* not closed during a large copy */
        double wait = self->announced_at > 0 && self->announced_at < started ? started - self->announced_at : 0;
        record_installed(self, word, wait, now() - started);
        self->installs++;
    }
    return 1;
}

static PyObject *WorkerWords_poll_update(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *installer = self->block ? Py_XNewRef(self->installer) : NULL; /* another thread may take it away */
    int done = installer ? install(self, installer) : 0;
    Py_XDECREF(installer);
    if (done < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) /* from a signal handler */
        return NULL;
    if (done > 0 || !self->receiver)
        Py_RETURN_FALSE;
    PyErr_Clear(); /* the receiver meets the same error, and tells the trainer */
    return PyObject_CallMethodNoArgs(self->receiver, names.poll_update);
}

static PyObject *WorkerWords_leaving_gate(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    if (self->receiver && !(self->installer && self->block))
        return PyObject_CallMethodNoArgs(self->receiver, names.leaving_gate);
    return WorkerWords_release(self, NULL);
}

static PyMemberDef WorkerWords_members[] = {
    {"version", T_LONGLONG, offsetof(WorkerWords, version), 0, NULL},
    {"failed_version", T_LONGLONG, offsetof(WorkerWords, failed_version), 0, NULL},
    {"bound_slot", T_LONGLONG, offsetof(WorkerWords, bound_slot), 0, NULL},
    {"hold", T_BOOL, offsetof(WorkerWords, hold), 0, NULL},
    {"installs", T_LONGLONG, offsetof(WorkerWords, installs), READONLY, NULL},
    {"fulfilled", T_LONGLONG, offsetof(WorkerWords, fulfilled), 0, NULL},
    {"announced_at", T_DOUBLE, offsetof(WorkerWords, announced_at), READONLY, NULL},
    {"receiver", T_OBJECT, offsetof(WorkerWords, receiver), 0, NULL},
    {NULL},
};
static PyGetSetDef WorkerWords_attributes[] = {
    {"published", (getter)WorkerWords_published, NULL, NULL, NULL},
    {NULL},
};
static PyMethodDef WorkerWords_methods[] = {
    {"usual", (PyCFunction)WorkerWords_usual, METH_O, NULL},
    {"take", (PyCFunction)WorkerWords_take, METH_O, NULL},
    {"release", (PyCFunction)WorkerWords_release, METH_NOARGS, NULL},
    {"answer", (PyCFunction)WorkerWords_answer, METH_VARARGS, NULL},
    {"set_wakeups", (PyCFunction)WorkerWords_set_wakeups, METH_O, NULL},
    {"woken", (PyCFunction)WorkerWords_woken, METH_NOARGS, NULL},
    {"close", (PyCFunction)WorkerWords_close, METH_NOARGS, NULL},
    {"poll_update", (PyCFunction)WorkerWords_poll_update, METH_NOARGS, NULL},
    {"leaving_gate", (PyCFunction)WorkerWords_leaving_gate, METH_NOARGS, NULL},
    {NULL},
};
static PyType_Slot WorkerWords_slots[] = {
    SLOT(tp_new, WorkerWords_new),           SLOT(tp_dealloc, WorkerWords_free), SLOT(tp_traverse, WorkerWords_traverse),
    SLOT(tp_clear, WorkerWords_clear),       SLOT(tp_members, WorkerWords_members),
    SLOT(tp_getset, WorkerWords_attributes), SLOT(tp_methods, WorkerWords_methods), {0, NULL},
};
PyType_Spec WorkerWords_spec = {"wsync._native.WorkerWords", sizeof(WorkerWords), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, WorkerWords_slots};
