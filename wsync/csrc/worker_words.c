/* WorkerWords: a worker's words of an arena, and what a forward costs that finds nothing new, or a usual update.
 * wsync/shm/arena.py says what the words mean, and why no slot is written while a forward uses it. */

#include "native.h"

typedef struct {
    PyObject_HEAD
    Py_buffer words;
    Block *block; /* NULL once it is closed */
    Record *records;
    int signal;                             /* the trainer's eventfd, which this end rings */
    char binds, hold;                       /* these, and the rest: see _native.pyi */
    long long version, failed_version, bound_slot, used, fulfilled;
    double announced_at, used_at;
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
    int signal, binds;
    if (!PyArg_ParseTuple(args, "OnnipO!:WorkerWords", &memory, &capacity, &block, &signal, &binds, &PyList_Type, &plans))
        return NULL;
    WorkerWords *self = (WorkerWords *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->signal = signal, self->binds = (char)binds, self->bound_slot = NONE;
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

static PyObject *WorkerWords_usual(WorkerWords *self, PyObject *given)
{
    Py_XSETREF(self->installer, Py_TYPE(given) == Installer_type ? Py_NewRef(given) : NULL);
    Py_RETURN_NONE;
}

/* --- the words --- */

/* Whether a word names a version that was not tried here. */
static int is_new(WorkerWords *self, int64_t word)
{
    return version_in(word) > self->version && version_in(word) > self->failed_version;
}

/* Mark as used the slot of the published version if that is new here, else the slot that the model has; and the slot of
 * the pending version, if that is wanted and newer. Return which of the two are new: their words, or 0. */
static void mark_used(WorkerWords *self, int64_t *published, int64_t *pending)
{
    Block *block = self->block;
    for (;;) {
        int64_t word = load(&block->published), next = pending ? load(&block->pending) : 0;
        int64_t slot = is_new(self, word) ? slot_in(word) : self->bound_slot;
        int64_t other = is_new(self, next) && next > word ? slot_in(next) : NONE;
        store(&block->used, slot);
        if (block->used_too != other)
            store(&block->used_too, other);
        /* If the words are the same, the trainer reads what is stored here before it writes the slots. */
        if (load(&block->published) != word || (pending && load(&block->pending) != next))
            continue;
        *published = is_new(self, word) ? word : 0;
        if (pending)
            *pending = other != NONE ? next : 0;
        return;
    }
}

static void release(WorkerWords *self)
{
    Block *block = self->block;
    if (self->hold)
        store(&block->held, self->bound_slot); /* before the next stores: is_free in sender_words.c */
    if (block->used == NONE && block->used_too == NONE)
        return;
    store(&block->used, NONE);
    if (block->used_too != NONE)
        store(&block->used_too, NONE);
    if (load(&block->wants_freed))
        ring(self->signal);
}

/* Tell the trainer that a version is installed. */
static void answer(WorkerWords *self, int64_t version, int acknowledge, double wait, double apply)
{
    if (version <= load(&self->block->installed))
        return;
    self->block->wait = wait, self->block->apply = apply;
    store(&self->block->installed, version);
    if (acknowledge)
        ring(self->signal);
}

static PyObject *WorkerWords_take(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    int64_t word = 0, next = 0;
    if (self->block)
        mark_used(self, &word, &next);
    return Py_BuildValue("(LLi)(LLi)", (long long)version_in(word), (long long)slot_in(word), (int)(word & 1),
                         (long long)version_in(next), (long long)slot_in(next), (int)(next & 1));
}

static PyObject *WorkerWords_release(WorkerWords *self, PyObject *Py_UNUSED(ignored))
{
    if (self->block)
        release(self);
    Py_RETURN_NONE;
}

static PyObject *WorkerWords_answer(WorkerWords *self, PyObject *args)
{
    long long version;
    int acknowledge;
    double wait, apply;
    if (!PyArg_ParseTuple(args, "Lpdd:answer", &version, &acknowledge, &wait, &apply))
        return NULL;
    if (self->block)
        answer(self, version, acknowledge, wait, apply);
    Py_RETURN_NONE;
}

static PyObject *WorkerWords_set_wakeups(WorkerWords *self, PyObject *wanted)
{
    int truth = PyObject_IsTrue(wanted);
    if (truth >= 0 && self->block)
        store(&self->block->wants_wakeup, truth);
    return truth < 0 ? NULL : Py_NewRef(Py_None);
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
    int64_t word;
    if (load(&self->block->pending))
        return 0;
    if (!is_new(self, load(&self->block->published))) {
        mark_used(self, &word, NULL);
        if (!word)
            return 1;
    }
    double started = now();
    PyObject *views = views_of(self, 0); /* all slots' are alike */
    int fits = views ? Installer_check((Installer *)installer, views) : 0;
    if (fits <= 0 || !self->block) /* a finalizer may have closed it */
        return fits < 0 ? -1 : 0;
    mark_used(self, &word, NULL);
    const Record *record = self->records + slot_in(word);
    views = word ? views_of(self, slot_in(word)) : NULL;
    if (!views || record->has_extra || (record->serial && record->serial != self->fulfilled))
        return 0;
    if (Installer_switch((Installer *)installer, views))
        return -1;
    if (self->block) { /* not closed during a large copy */
        double wait = self->announced_at > 0 && self->announced_at < started ? started - self->announced_at : 0;
        self->version = version_in(word), self->announced_at = 0;
        if (self->binds)
            self->bound_slot = slot_in(word);
        else
            release(self); /* its bytes are copied out */
        answer(self, self->version, word & 1, wait, now() - started);
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

static PyObject *WorkerWords_leaving_gate(WorkerWords *self, PyObject *forward)
{
    if (forward == Py_True && self->used != self->version)
        self->used = self->version, self->used_at = now();
    if (self->receiver && !(self->installer && self->block))
        return PyObject_CallMethodOneArg(self->receiver, names.leaving_gate, forward);
    if (self->block)
        release(self), answer(self, self->version, 1, 0, 0); /* if a signal has ended the call that had to answer */
    Py_RETURN_NONE;
}

static PyMemberDef WorkerWords_members[] = {
    {"version", T_LONGLONG, offsetof(WorkerWords, version), 0, NULL},
    {"failed_version", T_LONGLONG, offsetof(WorkerWords, failed_version), 0, NULL},
    {"bound_slot", T_LONGLONG, offsetof(WorkerWords, bound_slot), 0, NULL},
    {"hold", T_BOOL, offsetof(WorkerWords, hold), 0, NULL},
    {"fulfilled", T_LONGLONG, offsetof(WorkerWords, fulfilled), 0, NULL},
    {"announced_at", T_DOUBLE, offsetof(WorkerWords, announced_at), 0, NULL},
    {"used", T_LONGLONG, offsetof(WorkerWords, used), READONLY, NULL},
    {"used_at", T_DOUBLE, offsetof(WorkerWords, used_at), READONLY, NULL},
    {"receiver", T_OBJECT, offsetof(WorkerWords, receiver), 0, NULL},
    {NULL},
};
static PyMethodDef WorkerWords_methods[] = {
    {"usual", (PyCFunction)WorkerWords_usual, METH_O, NULL},
    {"take", (PyCFunction)WorkerWords_take, METH_NOARGS, NULL},
    {"release", (PyCFunction)WorkerWords_release, METH_NOARGS, NULL},
    {"answer", (PyCFunction)WorkerWords_answer, METH_VARARGS, NULL},
    {"set_wakeups", (PyCFunction)WorkerWords_set_wakeups, METH_O, NULL},
    {"close", (PyCFunction)WorkerWords_close, METH_NOARGS, NULL},
    {"poll_update", (PyCFunction)WorkerWords_poll_update, METH_NOARGS, NULL},
    {"leaving_gate", (PyCFunction)WorkerWords_leaving_gate, METH_O, NULL},
    {NULL},
};
static PyType_Slot WorkerWords_slots[] = {
    SLOT(tp_new, WorkerWords_new),           SLOT(tp_dealloc, WorkerWords_free), SLOT(tp_traverse, WorkerWords_traverse),
    SLOT(tp_clear, WorkerWords_clear), SLOT(tp_members, WorkerWords_members), SLOT(tp_methods, WorkerWords_methods), {0, NULL},
};
PyType_Spec WorkerWords_spec = {"wsync._native.WorkerWords", sizeof(WorkerWords), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, WorkerWords_slots};
