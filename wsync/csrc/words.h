/* A worker's words in an arena, and the messages about them: loops/words.py and control/messages.py. */

#ifndef WSYNC_WORDS_H
#define WSYNC_WORDS_H

#include <errno.h>
#include <pthread.h>
#include <sys/socket.h>

#include "loops.h"

/* A worker's block: a robust, process-shared mutex, then the words that words.py describes. */
typedef struct {
    int64_t mutex[8];
    int64_t published, used_slot, held_slot, connection, wants_wakeups, wants_freed, unused[2];
} Block;

/* A slot's record. The records follow the blocks of all workers. */
typedef struct {
    int64_t extra_size;
    uint64_t checksum;
    int64_t version;
} Record;

enum { NONE = -1, SLOT_BITS = 15, MAX_SLOTS = 1024 };

static inline Record *record_of(const Py_buffer *words, Py_ssize_t workers, Py_ssize_t slot)
{
    return (Record *)((Block *)words->buf + workers) + slot;
}

static inline int64_t published_word(int64_t version, int64_t slot, int acknowledge)
{
    return version << (SLOT_BITS + 1) | slot << 1 | acknowledge;
}

static inline int64_t version_in(int64_t word)
{
    return word >> (SLOT_BITS + 1);
}

static inline int64_t slot_in(int64_t word)
{
    return word >> 1 & ((1 << SLOT_BITS) - 1);
}

static inline pthread_mutex_t *mutex_of(Block *block)
{
    return (pthread_mutex_t *)block->mutex;
}

/* Return `code` of a call that locks the mutex; 0 also where its owner has died, after which it is locked as well. */
static inline int locked(Block *block, int code)
{
    return code == EOWNERDEAD ? pthread_mutex_consistent(mutex_of(block)) : code;
}

static inline int try_lock(Block *block)
{
    return locked(block, pthread_mutex_trylock(mutex_of(block)));
}

/* Lock the mutex until a moment on the monotonic clock, in nanoseconds; -1 for no limit. Return an error number. */
static inline int lock_until(Block *block, int64_t until)
{
    struct timespec moment = {until / 1000000000, until % 1000000000};
    return locked(block, until < 0 ? pthread_mutex_lock(mutex_of(block))
                                   : pthread_mutex_clocklock(mutex_of(block), CLOCK_MONOTONIC, &moment));
}

/* Lock the mutex, without the GIL if it takes longer: its owner holds it for a few stores, unless it was stopped then.
 * Return an error number. */
static inline int lock_within(Block *block, double seconds)
{
    int code = try_lock(block);
    if (code != EBUSY)
        return code;
    int64_t until = seconds < 0 || seconds > 1e9 ? -1 : nanoseconds() + (int64_t)(seconds * 1e9);
    Py_BEGIN_ALLOW_THREADS
    code = lock_until(block, until);
    Py_END_ALLOW_THREADS
    return code;
}

static inline void unlock(Block *block)
{
    pthread_mutex_unlock(mutex_of(block));
}

static inline void store(int64_t *word, int64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static inline int64_t load(const int64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* A worker's block, or NULL with an error. */
static inline Block *block_in(const Py_buffer *words, Py_ssize_t worker)
{
    if (worker >= 0 && worker < words->len / (Py_ssize_t)sizeof(Block))
        return (Block *)words->buf + worker;
    PyErr_SetString(PyExc_ValueError, "there is no such block of words");
    return NULL;
}

/* --- messages --- */

/* A message's header. */
typedef struct {
    uint8_t kind, padding[3];
    int32_t worker;
    uint64_t version, length;
    double wait, apply;
} Message;

enum { UPDATE = 4, ACK = 17, SLOT_FREED = 20 }; /* of control.messages.Kind */

/* Send a message without payload. Return 1, or 0 with errno set. A stream that took a part of it is shut down, because
 * what follows would not be understood; its reader notices that. */
static inline int send_message(int fd, const Message *message, int flags)
{
    ssize_t sent = send(fd, message, sizeof *message, flags | MSG_NOSIGNAL);
    if (sent >= 0 && sent != (ssize_t)sizeof *message) {
        shutdown(fd, SHUT_RDWR);
        errno = EPIPE;
    }
    return sent == (ssize_t)sizeof *message;
}

/* Take the next message off a socket if all of it is there, it is of `kind`, without payload, and about `version` (if
 * that is not 0). Return 1; or 0, and it stays in the socket. */
static inline int take_message(int fd, uint8_t kind, uint64_t version, Message *message)
{
    if (recv(fd, message, sizeof *message, MSG_PEEK | MSG_DONTWAIT) != (ssize_t)sizeof *message)
        return 0;
    if (message->kind != kind || message->length || (version && message->version != version))
        return 0;
    return recv(fd, message, sizeof *message, MSG_DONTWAIT) == (ssize_t)sizeof *message;
}

#endif
