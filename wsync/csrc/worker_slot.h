/* What worker_slot.c and worker_update.c share. */

#ifndef WSYNC_WORKER_SLOT_H
#define WSYNC_WORKER_SLOT_H

#include "words.h"

typedef struct {
    PyObject_HEAD
    long long version, slot, refused; /* installed; bound to, or NONE; the newest that failed */
    char hold, busy;                  /* keep the slot between forwards; a slot is in use */
    Py_buffer words;
    Py_ssize_t at;      /* where the worker's block begins, in words */
    PyObject *receiver; /* takes the updates that are not usual */
    PyObject *gate_lock;
    PyObject *installer, *plans, *staged; /* of the fast path, if it is installed */
    int fd, worker, bound;
} WorkerSlot;

static inline Block *own_block(WorkerSlot *self)
{
    return (Block *)((int64_t *)self->words.buf + self->at);
}

/* The newest version that need not be installed again. */
static inline long long known_version(WorkerSlot *self)
{
    return self->version > self->refused ? self->version : self->refused;
}

/* Lock the worker's mutex. Return 0; -1 with OSError set. */
int lock_own(Block *block);

/* WorkerSlot.release: 1 if the sender waits for a message, 0 if not, -1 with an error. */
int release_slot(WorkerSlot *self);

PyObject *WorkerSlot_poll_update(WorkerSlot *self, PyObject *ignored);
PyObject *WorkerSlot_leaving_gate(WorkerSlot *self, PyObject *ignored);
PyObject *WorkerSlot_on_readable(WorkerSlot *self, PyObject *ignored);

#endif
