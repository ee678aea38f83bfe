/* Declarations that the files of wsync._loops share. See module.c. */

#ifndef WSYNC_LOOPS_H
#define WSYNC_LOOPS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>
#include <time.h>

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

/* Copy each span; `shared` if other processes will read it. Return 0, or -1 with an error. The GIL is released for a
 * large copy. */
int copy_spans(const Span *spans, size_t count, int shared);

/* --- types --- */

typedef struct {
    DLTensor view; /* of a tensor that the plan keeps alive */
    size_t nbytes;
    Py_ssize_t leader;  /* the first entry with the same memory (a tied tensor), or its own index */
    PyObject *tensor;   /* copied here last, and known not to be negated */
    const char *source; /* its address; NULL if not known yet */
} Entry;

typedef struct {
    PyObject_HEAD
    PyObject *views; /* a tuple */
    Py_ssize_t count;
    Entry *entries; /* NULL if a view is complex or not in main memory: then no copy fits */
    Span *spans;    /* at most one per entry */
    int shared;     /* whether other processes read the views */
} PackPlan;

/* Return 1 if all of a list of tensors fit, each entry's source then being known; 0 if not; -1 with an error. */
int PackPlan_check(PackPlan *plan, PyObject *tensors);

/* Copy what PackPlan_check has accepted: see copy_spans. */
int PackPlan_copy(PackPlan *plan);

/* Whether the views lie where they did when the plan was made: PyTorch moves a storage that it shares with a process. */
int PackPlan_is_in_place(PackPlan *plan);

/* Drop the references to tensors that were copied last; a module's own tensors may be kept, others may be copies. */
void PackPlan_forget(PackPlan *plan);

typedef struct TensorTree TensorTree;

/* Return the tensors as a list; None if the tree has changed in anything but its tensors; NULL with an error. */
PyObject *TensorTree_tensors(TensorTree *tree, PyObject *ignored);

typedef struct Installer Installer;

/* Return 1 if the model is what it was when the installer was made, and can take such views; 0 if not; -1 with an
 * error. No other thread runs meanwhile, unless a tensor has to be copied by PyTorch. */
int Installer_check(Installer *installer, PyObject *views);

/* Copy and bind, right after Installer_check: 0, or -1 with an error. */
int Installer_switch(Installer *installer, PyObject *views);

/* Enter and leave a GateState, which installs updates on the way. Return -1 with an error. */
int pass_through_gate(PyObject *gate_state);

extern PyTypeObject *PackPlan_type, *TensorTree_type, *GateState_type, *Installer_type, *ArenaUpdate_type;
extern PyType_Spec PackPlan_spec, TensorTree_spec, ArenaWriter_spec, ArenaUpdate_spec, GateState_spec, Installer_spec,
    WorkerSlot_spec;

/* --- Python objects that every file may use --- */

enum { EXTRACT, PACK, TRANSFER, WAIT, APPLY, ACKNOWLEDGE, PHASES }; /* types.PHASES */
enum { FIELDS = 5 };                                               /* of a types.SyncReport */

extern struct Names {
    PyObject *plain_types; /* a tuple: a subclass of Tensor may keep its numbers elsewhere */
    PyObject *report;      /* SyncReport */
    PyObject *phases[PHASES];
    PyObject *no_phases; /* {phase: 0.0} */
    PyObject *get_num_threads, *increment_version, *clear_autocast_cache; /* PyTorch's */
    PyObject *copy_into_model;                                            /* tensors.copy_into_model */
    PyObject *not_connected, *sync_timeout;                               /* errors */
    PyObject *is_neg, *is_conj, *is_inference, *poll_update, *leaving_gate, *on_readable, *data, *version;
    PyObject *announced_at, *waiting;
    PyObject *zero; /* 0.0 */
} names;

/* Nanoseconds, and seconds, on the clock of time.perf_counter. */
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

/* The end of every type's deallocation. */
static inline void free_object(void *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#endif
