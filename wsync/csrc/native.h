/* What the files of wsync._native share. module.c describes the module. */

#ifndef WSYNC_NATIVE_H
#define WSYNC_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* --- the part of DLPack's header (dlpack.h, version 1) that is needed --- */

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

/* Return 1 and fill `view` if a tensor is real, in main memory, and has the dtype, shape and strides of `like`; else 0.
 * DLPack does not show the negation bit: a lazily negated tensor looks the same. */
int is_like(PyObject *tensor, const DLTensor *like, DLTensor *view);

/* --- copying (copy.c) --- */

typedef struct {
    char *to;
    const char *from;
    size_t nbytes;
} Span;

/* Copy each span; `shared` if other processes will read it. The GIL is released for a large copy. */
void copy_spans(const Span *spans, size_t count, int shared);

/* --- tensors (pack_plan.c, tensor_tree.c, installer.c) --- */

typedef struct PackPlan PackPlan;
typedef struct TensorTree TensorTree;
typedef struct Installer Installer;
extern PyTypeObject *TensorTree_type, *Installer_type;

/* Borrow the views of a plan's buffer, a tuple; NULL if they lie elsewhere by now, and the slot has to be mapped anew:
 * PyTorch moves a storage that it shares with a process. */
PyObject *PackPlan_views(PackPlan *plan);

/* Return the tensors as a list; None if the tree has changed in anything but its tensors; NULL with an error. */
PyObject *TensorTree_tensors(TensorTree *tree, PyObject *ignored);

/* Return 1 if the model is what it was when the installer was made, and can take such views; 0 if not; -1 with an
 * error. No other thread runs between this and Installer_switch. */
int Installer_check(Installer *installer, PyObject *views);

/* Copy and bind, right after Installer_check: 0, or -1 with an error. */
int Installer_switch(Installer *installer, PyObject *views);

/* --- the words of an arena (sender_words.c, worker_words.c); wsync/shm/arena.py describes them --- */

typedef struct {
    /* written by the trainer */
    int64_t published, pending, wants_freed, unused[5];
    /* written by the worker, in another cache line */
    int64_t used, used_too, held, installed, wants_wakeup;
    double wait, apply;
    int64_t also_unused;
} Block;

/* The records follow the blocks. Written by the trainer while no worker reads the slot. */
typedef struct {
    int64_t version;
    int64_t header_size, has_extra, serial;
} Record;

enum { NONE = -1, SLOT_BITS = 15, MAX_SLOTS = 1024 };

static inline int64_t word_of(int64_t version, int64_t slot, int acknowledge)
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

static inline void store(int64_t *word, int64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
}

static inline int64_t load(const int64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);
}

/* Add 1 to an eventfd. It does not block, and fails only where it is not needed any more. */
static inline void ring(int eventfd)
{
    (void)!write(eventfd, &(uint64_t){1}, 8);
}

/* Map the blocks and records of an arena. Return 0, or -1 with an error. */
int map_words(PyObject *memory, Py_ssize_t capacity, Py_buffer *words, Block **blocks, Record **records);

/* --- Python objects, and helpers --- */

extern struct Names {
    PyObject *tensor, *parameter, *increment_version, *clear_autocast_cache;
    PyObject *is_neg, *is_inference, *poll_update, *leaving_gate, *data;
} names;

/* Nanoseconds on the clock of time.perf_counter. */
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

/* Call a method of a tensor that returns a bool: 1, 0, or -1 with an error. Other threads may run meanwhile. */
static inline int ask(PyObject *tensor, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, method);
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return truth;
}

#define SLOT(name, value) {Py_##name, (void *)(value)}

/* The end of every type's deallocation. */
static inline void free_object(void *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#endif
