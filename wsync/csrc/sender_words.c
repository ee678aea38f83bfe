/* SenderWords: a trainer's words of an arena. wsync/shm/arena.py says what they mean, and why this is enough. */

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>

#include "native.h"

/* What the trainer alone knows of a block. */
typedef struct {
    int open, attention; /* read without the GIL; `attention`: a wait for this block has to end */
    int wake, process;   /* an eventfd, a pidfd; own duplicates */
} Peer;

typedef struct {
    PyObject_HEAD
    Py_buffer words;
    Block *blocks;
    Record *records;
    Peer *peers;
    Py_ssize_t capacity, top; /* the blocks from `top` on were never open */
    int signal, ended;        /* the eventfd that workers ring; an epoll of the processes */
} SenderWords;

static void close_peer(SenderWords *self, Peer *peer)
{
    __atomic_store_n(&peer->open, 0, __ATOMIC_SEQ_CST);
    epoll_ctl(self->ended, EPOLL_CTL_DEL, peer->process, NULL);
    close(peer->process);
    close(peer->wake);
}

static PyObject *SenderWords_shut(SenderWords *self, PyObject *Py_UNUSED(ignored))
{
    for (Py_ssize_t i = 0; i < self->top; i++)
        if (self->peers[i].open)
            close_peer(self, &self->peers[i]);
    if (self->signal >= 0) {
        ring(self->signal); /* a thread may wait */
        close(self->signal);
        close(self->ended);
        self->signal = self->ended = -1;
    }
    Py_RETURN_NONE;
}

static void SenderWords_free(SenderWords *self)
{
    Py_DECREF(SenderWords_shut(self, NULL));
    PyMem_Free(self->peers);
    if (self->words.obj)
        PyBuffer_Release(&self->words);
    free_object(self);
}

static PyObject *SenderWords_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *memory;
    Py_ssize_t capacity;
    int signal;
    if (!PyArg_ParseTuple(args, "Oni:SenderWords", &memory, &capacity, &signal))
        return NULL;
    SenderWords *self = (SenderWords *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->signal = self->ended = -1;
    if (!map_words(memory, capacity, &self->words, &self->blocks, &self->records)) {
        self->capacity = capacity;
        self->peers = PyMem_Calloc((size_t)capacity + 1, sizeof(Peer));
        int ended = self->peers ? epoll_create1(EPOLL_CLOEXEC) : -1;
        if (ended >= 0) {
            self->signal = signal, self->ended = ended;
            return (PyObject *)self;
        }
        PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_DECREF(self);
    return NULL;
}

/* Return the index of a block; -1 with an error if there is no such block. */
static Py_ssize_t block_index(SenderWords *self, PyObject *given)
{
    Py_ssize_t i = PyNumber_AsSsize_t(given, PyExc_IndexError);
    if (i >= 0 && i < self->capacity)
        return i;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_IndexError, "there is no block %zd", i);
    return -1;
}

static PyObject *SenderWords_open(SenderWords *self, PyObject *args)
{
    int wake, process;
    if (!PyArg_ParseTuple(args, "ii:open", &wake, &process))
        return NULL;
    Py_ssize_t i = 0;
    while (i < self->top && self->peers[i].open)
        i++;
    if (i == self->capacity)
        return PyErr_Format(PyExc_IndexError, "all %zd blocks are in use", self->capacity);
    Peer peer = {.open = 1, .wake = fcntl(wake, F_DUPFD_CLOEXEC, 3), .process = fcntl(process, F_DUPFD_CLOEXEC, 3)};
    struct epoll_event event = {.events = EPOLLIN};
    if (peer.wake < 0 || peer.process < 0 || epoll_ctl(self->ended, EPOLL_CTL_ADD, peer.process, &event)) {
        PyErr_SetFromErrno(PyExc_OSError);
        close(peer.wake);
        close(peer.process);
        return NULL;
    }
    self->blocks[i] = (Block){.used = NONE, .used_too = NONE, .held = NONE, .wants_wakeup = 1};
    self->peers[i] = peer;
    self->top = i >= self->top ? i + 1 : self->top;
    return PyLong_FromSsize_t(i);
}

static PyObject *SenderWords_close(SenderWords *self, PyObject *given)
{
    Py_ssize_t i = block_index(self, given);
    if (i < 0)
        return NULL;
    if (self->peers[i].open) {
        close_peer(self, &self->peers[i]);
        ring(self->signal); /* its slots are free */
    }
    Py_RETURN_NONE;
}

enum { NAMED = 1, USED = 2, HELD = 4 };
/* Return whether no open block needs a slot for one of these reasons. They are looked at in this order: a worker that
 * will hold a slot stores `held` before it ceases to use the slot. */
static int is_free(SenderWords *self, int64_t slot, int reasons)
{
    for (int reason = NAMED; reason <= HELD; reason <<= 1)
        for (Py_ssize_t i = 0; i < self->top && reason & reasons; i++) {
            const Block *block = &self->blocks[i];
            int64_t word = block->published, next = block->pending; /* written by this process */
            int needed = reason == NAMED  ? (word && slot_in(word) == slot) || (next && slot_in(next) == slot)
                         : reason == USED ? load(&block->used) == slot || load(&block->used_too) == slot
                                          : load(&block->held) == slot;
            if (needed && self->peers[i].open)
                return 0;
        }
    return 1;
}

/* Of the buffers of all slots, return one that is not leased (only the list refers to it), in a slot that no block needs.
 * If there is none, return how many slots are kept: leased, or named or held by a block. */
static PyObject *SenderWords_claim(SenderWords *self, PyObject *buffers)
{
    Py_ssize_t kept = 0;
    for (Py_ssize_t slot = 0; slot < PyList_GET_SIZE(buffers); slot++) {
        PyObject *buffer = PyList_GET_ITEM(buffers, slot);
        if (Py_REFCNT(buffer) == 1 && is_free(self, slot, NAMED | USED | HELD)) {
            self->records[slot] = (Record){0};
            return Py_NewRef(buffer);
        }
        kept += Py_REFCNT(buffer) > 1 || !is_free(self, slot, NAMED | HELD);
    }
    return PyLong_FromSsize_t(kept);
}

static PyObject *SenderWords_publish(SenderWords *self, PyObject *args)
{
    PyObject *blocks;
    long long version;
    Py_ssize_t slot;
    int acknowledge, pending = 0;
    if (!PyArg_ParseTuple(args, "O!Lnp|p:publish", &PyTuple_Type, &blocks, &version, &slot, &acknowledge, &pending))
        return NULL;
    if (slot < 0 || slot >= MAX_SLOTS)
        return PyErr_Format(PyExc_IndexError, "there is no slot %zd", slot);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(blocks); k++)
        if (block_index(self, PyTuple_GET_ITEM(blocks, k)) < 0)
            return NULL; /* nothing is stored yet */
    store(&self->records[slot].version, version);
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(blocks); k++) {
        Py_ssize_t i = block_index(self, PyTuple_GET_ITEM(blocks, k));
        Block *block = &self->blocks[i];
        if (!self->peers[i].open || version_in(block->published) >= version)
            continue; /* its process has gone; or it has connected in the middle of a transaction, and was given it */
        store(pending ? &block->pending : &block->published, word_of(version, slot, acknowledge));
        if (!pending && block->pending)
            store(&block->pending, 0);
        if (!pending && (acknowledge || load(&block->wants_wakeup)))
            ring(self->peers[i].wake);
    }
    struct epoll_event event;
    return PyBool_FromLong(pending || acknowledge || epoll_wait(self->ended, &event, 1, 0) <= 0);
}

enum { NOT_YET, ALL, LOOK, INTERRUPTED };
static int state_of(SenderWords *self, const Py_ssize_t *blocks, Py_ssize_t count, int64_t version)
{
    int state = ALL;
    for (Py_ssize_t k = 0; k < count; k++) {
        Peer *peer = &self->peers[blocks[k]];
        if (load(&self->blocks[blocks[k]].installed) >= version)
            continue;
        int attention = __atomic_exchange_n(&peer->attention, 0, __ATOMIC_SEQ_CST);
        if (attention || !__atomic_load_n(&peer->open, __ATOMIC_SEQ_CST))
            state = LOOK;
        else if (state == ALL)
            state = NOT_YET;
    }
    return state;
}

/* Wait, without the GIL, until blocks have a version, or for the signal; until a moment in nanoseconds, -1: no limit. */
static int await(SenderWords *self, const Py_ssize_t *blocks, Py_ssize_t count, int64_t version, int64_t until)
{
    for (;;) {
        int state = count ? state_of(self, blocks, count, version) : NOT_YET;
        if (state != NOT_YET)
            return state;
        int64_t left = until < 0 ? 0 : until - nanoseconds();
        left = left > 0 ? left : 0;
        struct timespec pause = {left / 1000000000, left % 1000000000};
        struct pollfd signal = {.fd = self->signal, .events = POLLIN};
        int ready = ppoll(&signal, 1, until < 0 ? NULL : &pause, NULL);
        if (ready <= 0)
            return ready && errno == EINTR ? INTERRUPTED : LOOK;
        /* It is set to 0 before the words are read again: what is stored later rings again. */
        (void)!read(self->signal, &(uint64_t){0}, 8);
        if (!count)
            return ALL;
    }
}

static PyObject *SenderWords_wait(SenderWords *self, PyObject *args)
{
    PyObject *given, *timeout;
    long long version;
    if (!PyArg_ParseTuple(args, "O!LO:wait", &PyTuple_Type, &given, &version, &timeout))
        return NULL;
    double seconds = timeout == Py_None ? 1e10 : PyFloat_AsDouble(timeout);
    if (PyErr_Occurred())
        return NULL;
    int64_t until = seconds > 1e9 ? -1 : nanoseconds() + (int64_t)(seconds * 1e9); /* thirty years are no limit */
    Py_ssize_t count = PyTuple_GET_SIZE(given), *blocks = PyMem_Calloc((size_t)count + 1, sizeof *blocks);
    int state = blocks ? NOT_YET : INTERRUPTED;
    if (!blocks)
        PyErr_NoMemory();
    for (Py_ssize_t k = 0; k < count && state == NOT_YET; k++)
        if ((blocks[k] = block_index(self, PyTuple_GET_ITEM(given, k))) < 0)
            state = INTERRUPTED;
    Py_INCREF(self); /* a signal handler may drop it */
    while (state == NOT_YET) {
        Py_BEGIN_ALLOW_THREADS
        state = await(self, blocks, count, version, until);
        Py_END_ALLOW_THREADS
        if (state == INTERRUPTED && !PyErr_CheckSignals())
            state = NOT_YET;
    }
    Py_DECREF(self);
    PyMem_Free(blocks);
    return state == INTERRUPTED ? NULL : PyBool_FromLong(state == ALL);
}

static PyObject *SenderWords_want_freed(SenderWords *self, PyObject *wanted)
{
    int truth = PyObject_IsTrue(wanted);
    for (Py_ssize_t i = 0; truth >= 0 && i < self->top; i++)
        store(&self->blocks[i].wants_freed, truth);
    return truth < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *SenderWords_attention(SenderWords *self, PyObject *given)
{
    Py_ssize_t i = block_index(self, given);
    if (i < 0)
        return NULL;
    __atomic_store_n(&self->peers[i].attention, 1, __ATOMIC_SEQ_CST);
    ring(self->signal);
    Py_RETURN_NONE;
}

static PyMethodDef SenderWords_methods[] = {
    {"open", (PyCFunction)SenderWords_open, METH_VARARGS, NULL},
    {"close", (PyCFunction)SenderWords_close, METH_O, NULL},
    {"shut", (PyCFunction)SenderWords_shut, METH_NOARGS, NULL},
    {"claim", (PyCFunction)SenderWords_claim, METH_O, NULL},
    {"publish", (PyCFunction)SenderWords_publish, METH_VARARGS, NULL},
    {"wait", (PyCFunction)SenderWords_wait, METH_VARARGS, NULL},
    {"want_freed", (PyCFunction)SenderWords_want_freed, METH_O, NULL},
    {"attention", (PyCFunction)SenderWords_attention, METH_O, NULL},
    {NULL},
};
static PyType_Slot SenderWords_slots[] = {
    SLOT(tp_new, SenderWords_new), SLOT(tp_dealloc, SenderWords_free), SLOT(tp_methods, SenderWords_methods), {0, NULL},
};
PyType_Spec SenderWords_spec = {"wsync._native.SenderWords", sizeof(SenderWords), 0, Py_TPFLAGS_DEFAULT,
                                SenderWords_slots};
