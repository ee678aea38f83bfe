/* What arena_writer.c and arena_update.c share. */

#ifndef WSYNC_ARENA_WRITER_H
#define WSYNC_ARENA_WRITER_H

#include <unistd.h>

#include "words.h"

typedef struct {
    PyObject_HEAD
    Py_buffer words;
    Py_ssize_t workers;
    pid_t creator;
} ArenaWriter;

/* The slots that a worker is pointed to, that its forward uses, and that it holds; or NONE. */
typedef struct {
    int64_t published, used, held;
} Needed;

static inline Block *block_of(ArenaWriter *self, Py_ssize_t worker)
{
    return (Block *)self->words.buf + worker;
}

/* The loads are in this order: see WorkerSlot.take. If no worker is connected, a slot in the words is that of a worker that
 * was stopped in its mutex when it was disconnected, and stored the slot afterwards: see ArenaWriter.vacate. */
static inline Needed slots_needed(const Block *block)
{
    int64_t word = load(&block->published), used = load(&block->used_slot), held = load(&block->held_slot);
    int connected = load(&block->connection) != 0;
    return (Needed){version_in(word) ? slot_in(word) : NONE, connected ? used : NONE, connected ? held : NONE};
}

/* Return 0; -1 with NotConnected set in a forked child of the process that made the writer. */
static inline int require_creator(ArenaWriter *self)
{
    if (getpid() == self->creator)
        return 0;
    PyErr_SetString(names.not_connected, "this process is a forked child, and its parent has initialised this scheme");
    return -1;
}

/* Return the first of so many slots that no worker is pointed to, uses or holds; -1 if there is none. */
Py_ssize_t free_slot(ArenaWriter *self, Py_ssize_t slots);

PyObject *ArenaWriter_fast_update(ArenaWriter *self, PyObject *args);

#endif
