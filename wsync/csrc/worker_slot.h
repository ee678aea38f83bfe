/* What worker_slot.c and worker_update.c share. */

#ifndef WSYNC_WORKER_SLOT_H
#define WSYNC_WORKER_SLOT_H

#include "words.h"

typedef struct {
    PyObject_HEAD
    long long version, bound_slot, used, failed_version; /* see the Python class */
    char hold, busy, disconnected, torn;
    Py_buffer words;
    Block *block; /* the worker's words; NULL before map_words() */
    int worker;
    long long connection; /* the number of the worker's connection */
    PyObject *updater; /* installs the updates that the fast path does not */
    PyObject *gate_state;
    PyObject *installer, *plans, *prepared; /* of the fast path, if it is installed */
    int fd, bound;
    Py_ssize_t workers; /* in the arena */
} WorkerSlot;

/* The newest version that was installed, or could not be. */
static inline long long tried_version(WorkerSlot *self)
{
    return self->version > self->failed_version ? self->version : self->failed_version;
}

/* Whether the words are still this worker's; called with the mutex locked, before a word is stored. */
static inline int owns_words(WorkerSlot *self)
{
    if (load(&self->block->connection) == self->connection)
        return 1;
    self->disconnected = 1;
    return 0;
}

/* Lock the worker's mutex. Return 0; -1 with OSError set. */
int lock_own(Block *block);

/* WorkerSlot.release: 1 if the sender waits for a message, 0 if not, -1 with an error. */
int release_slot(WorkerSlot *self);

PyObject *WorkerSlot_poll_update(WorkerSlot *self, PyObject *ignored);
PyObject *WorkerSlot_leaving_gate(WorkerSlot *self, PyObject *ignored);
PyObject *WorkerSlot_on_readable(WorkerSlot *self, PyObject *ignored);

#endif
