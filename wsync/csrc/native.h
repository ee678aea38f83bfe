/* What the files of _native share: see module.c. */

#ifndef WSYNC_NATIVE_H
#define WSYNC_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* --- what DLPack's header says (dlpack.h, version 1), as far as it is needed --- */

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous;
    void *allocate, *to_managed, *from_managed;
    int (*view)(void *object, DLTensor *view); /* borrows; -1 with a Python error */
} DLPackExchange;

enum { DL_CPU = 1, DL_COMPLEX = 5 };

extern const DLPackExchange *dlpack;

static inline char *start_of(const DLTensor *view)
{
    return (char *)view->data + view->byte_offset;
}

static inline size_t size_of(const DLTensor *view)
{
    size_t nbytes = (view->dtype.bits * view->dtype.lanes + 7u) / 8u;
    for (int32_t d = 0; d < view->ndim; d++)
        nbytes *= (size_t)view->shape[d];
    return nbytes;
}

/* Whether a tensor is bytes in the main memory, in the order of `like`: 1, and `view` shows them; or 0. One that is to
 * be negated when it is read (a bit that DLPack does not show) looks the same. */
int is_like(PyObject *tensor, const DLTensor *like, DLTensor *view);

/* --- copying (copy.c) --- */

typedef struct {
    char *to;
    const char *from;
    size_t nbytes;
} Span;

/* Copy each span; `shared` if other processes will read it. 0; or -1 with an error. Where it takes long, other threads
 * of Python run meanwhile. */
int copy_spans(const Span *spans, size_t count, int shared);

/* --- the types --- */

typedef struct {
    DLTensor view; /* of a tensor that the room keeps */
    size_t nbytes;
    Py_ssize_t leader;  /* the first place that is the same memory: of a tied tensor; or its own index */
    PyObject *tensor;   /* that was last copied here, and known not to be negated */
    const char *source; /* where it lies; NULL where that is not known yet */
} Place;

typedef struct {
    PyObject_HEAD
    PyObject *views; /* a tuple */
    Py_ssize_t count;
    Place *places;
    Span *spans; /* what is to be copied: as many as there are places at the most */
    int shared;  /* whether other processes will read it */
} Room;

/* Whether all of a list of tensors fit: 1, and each place knows its source; 0; or -1 with an error. */
int Room_look(Room *room, PyObject *tensors);

/* Copy what that has found: see copy_spans. */
int Room_copy(Room *room);

/* Whether its views lie where they did when it was made: PyTorch moves a storage that it is to share with another process. */
int Room_stays(Room *room);

/* Keep no tensor alive, to know it again: those of a module are kept by the module, others may be copies. */
void Room_forget(Room *room);

typedef struct Tree Tree;

/* The tensors, as a list; None if anything was added, removed or replaced but tensors; NULL with an error. */
PyObject *Tree_tensors(Tree *tree, PyObject *ignored);

typedef struct Installer Installer;

/* Returns 1 if the model is what it was when the installer was made, and takes views like these; 0 if not; -1 with an
 * error. Nobody else runs meanwhile. */
int Installer_fits(Installer *installer, PyObject *views);

/* Binding.install, right after Installer_fits: 0; -1 with an error. */
int Installer_take(Installer *installer, PyObject *views);

/* Into a gate and out again: news are installed on the way. -1 with an error. */
int go_through(PyObject *turnstile);

/* Whether anything has happened to what a watch was given; an error is for who looks closer. */
int Watch_sees(PyObject *watch);

extern PyTypeObject *Room_type, *Tree_type, *Turnstile_type, *Installer_type, *Watch_type;
extern PyType_Spec Room_spec, Tree_spec, Board_spec, Turnstile_spec, Installer_spec, Seat_spec, Watch_spec;

/* --- names that Python knows as well --- */

enum { EXTRACT, PACK, TRANSFER, WAIT, APPLY, ACKNOWLEDGE, PHASES }; /* types.py */
enum { FIELDS = 5 };                                               /* of a SyncReport */

extern struct Names {
    PyObject *plain_types; /* a tuple: other classes may keep their numbers elsewhere */
    PyObject *report;      /* SyncReport */
    PyObject *phases[PHASES];
    PyObject *no_phases; /* {each of them: 0.0} */
    PyObject *get_num_threads; /* torch's */
    PyObject *is_neg, *enter, *leave, *on_readable, *data, *version, *told_at, *waiting;
    PyObject *never; /* 0.0, of told_at */
} names;

/* --- an arena's words (switch.py) --- */

/* A worker's block: the mutex, then these. */
typedef struct {
    int64_t mutex[8];
    int64_t switched, used, held, taken, call, awaited;
} Block;

static inline pthread_mutex_t *mutex_of(Block *block)
{
    return (pthread_mutex_t *)block->mutex;
}

/* Whether the mutex is locked now, given what a call that locks it has returned: also where its owner has died. */
static inline int is_ours(Block *block, int code)
{
    if (code == EOWNERDEAD)
        code = pthread_mutex_consistent(mutex_of(block));
    return !code;
}

/* Returns 1 if it is locked now; 0 if somebody holds it. */
static inline int try_lock(Block *block)
{
    return is_ours(block, pthread_mutex_trylock(mutex_of(block)));
}

/* The same, but waits some milliseconds for who was sent off its core while it holds it. */
static inline int lock_soon(Block *block)
{
    if (try_lock(block))
        return 1;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until); /* which the call goes by */
    until.tv_nsec += 10000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    return is_ours(block, pthread_mutex_timedlock(mutex_of(block), &until));
}

static inline void unlock(Block *block)
{
    pthread_mutex_unlock(mutex_of(block));
}

/* --- lines (words.py, rendezvous.py) --- */

/* A message between the ends, without payload: words.py. */
typedef struct {
    uint8_t kind, padding[3];
    int32_t worker;
    uint64_t version, length;
    double wait, apply;
} Message;

enum { NEWS = 4, ACK = 17, FREED = 20 };

/* Lines.call: an error, or want of room, is noticed by who reads the line. */
static inline int say(int fd, const Message *message, int flags)
{
    return send(fd, message, sizeof *message, flags | MSG_NOSIGNAL) == sizeof *message;
}

/* Take in what a line brings next if it is of `kind`, without payload, and (if that is not 0) about `version`: 1; 0 if
 * it is not. It is left there then. */
static inline int hear(int fd, uint8_t kind, uint64_t version, Message *message)
{
    char more[sizeof *message + 1];
    if (recv(fd, more, sizeof more, MSG_PEEK | MSG_DONTWAIT) != sizeof *message)
        return 0;
    memcpy(message, more, sizeof *message);
    if (message->kind != kind || message->length || (version && message->version != version))
        return 0;
    return recv(fd, more, sizeof more, MSG_DONTWAIT) == sizeof *message;
}

/* Seconds, and nanoseconds, on the clock of time.perf_counter. */
static inline int64_t nanoseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline double now(void)
{
    return 1e-9 * (double)nanoseconds();
}

#define SLOT(name, value) {Py_##name, (void *)(value)}

/* What every type's deallocation ends with. */
static inline void free_object(void *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#endif
