/* ArenaUpdate: a usual update of all workers in one call. ArenaWriter.fast_update makes it (loops/arena_writer.py).
 *
 * It copies tensors into a free slot, points all workers to it, and waits for their answers. */

#include <math.h>
#include <poll.h>
#include <sys/epoll.h>

#include "arena_writer.h"

static const double MUTEX_TIMEOUT = 0.01; /* seconds; if a worker was stopped while it has its mutex, the caller handles it */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    ArenaWriter *writer;
    PyObject *plans;       /* a list: of the slots that are mapped here */
    PyObject *descriptors; /* bytes: the numbers of each worker's connection, then of each worker's process */
    Py_ssize_t nbytes;     /* of one copy of the weights */
    int watch;             /* an epoll of these, to notice deaths and errors; -1 where acknowledgements are awaited */
} ArenaUpdate;

static const int *descriptors_of(ArenaUpdate *self)
{
    return (const int *)PyBytes_AS_STRING(self->descriptors);
}

/* One update in progress. */
typedef struct {
    int64_t version;
    double timeout; /* seconds; below 0 for none */
    Py_ssize_t slot;
    double began, started, waited, extracted, packed, published; /* when each phase ended */
    Py_ssize_t answers;                                          /* the number of acknowledgements */
    char *answered;                                              /* a byte for each worker */
    struct pollfd *polls;                                        /* of the descriptors of the ArenaUpdate */
    double wait, apply;                                          /* of the slowest worker, in seconds */
} Update;

/* Wait for the acknowledgements of all workers. Return 0 then, and also at another message, a death or the deadline: the
 * answers tell. Return -1 for a signal. */
static int await_answers(Py_ssize_t workers, int64_t deadline, Update *update)
{
    while (update->answers < workers) {
        int64_t left = deadline < 0 ? 0 : deadline - nanoseconds();
        left = left > 0 ? left : 0;
        struct timespec pause = {left / 1000000000, left % 1000000000};
        int ready = ppoll(update->polls, 2 * (nfds_t)workers, deadline < 0 ? NULL : &pause, NULL);
        if (ready <= 0)
            return ready < 0 && errno == EINTR ? -1 : 0;
        for (Py_ssize_t i = 0; i < 2 * workers; i++) {
            if (!update->polls[i].revents)
                continue;
            Message message;
            if (i >= workers || !take_message(update->polls[i].fd, ACK, (uint64_t)update->version, &message))
                return 0;
            if (message.wait + message.apply > update->wait + update->apply)
                update->wait = message.wait, update->apply = message.apply;
            update->answered[i] = 1, update->answers++;
            update->polls[i].fd = -1; /* ignored from now on */
        }
    }
    return 0;
}

/* Make a types.SyncReport; its phases add up to its seconds. */
static PyObject *report_of(ArenaUpdate *self, const Update *update)
{
    double finished = now(), left = finished - update->packed;
    double apply = fmin(update->apply, left);
    double wait = fmin(update->wait, left - apply);
    double transfer = fmin(update->published - update->packed, left - apply - wait);
    const double costs[PHASES] = {
        [EXTRACT] = update->started - update->began + update->extracted - update->waited,
        [PACK] = update->packed - update->extracted,
        [TRANSFER] = transfer,
        [WAIT] = update->waited - update->started + wait,
        [APPLY] = apply,
        [ACKNOWLEDGE] = left - apply - wait - transfer,
    };
    PyTypeObject *type = (PyTypeObject *)names.report;
    PyObject *phases = PyDict_Copy(names.no_phases), *workers = PyDict_New(); /* a copy does not grow step by step */
    PyObject *version = PyLong_FromLongLong(update->version), *report = type->tp_alloc(type, FIELDS);
    int failed = !phases || !workers || !version || !report;
    for (Py_ssize_t i = 0; i < PHASES && !failed; i++) {
        PyObject *cost = PyFloat_FromDouble(costs[i] > 0 ? costs[i] : 0);
        failed = !cost || PyDict_SetItem(phases, names.phases[i], cost);
        Py_XDECREF(cost);
    }
    for (Py_ssize_t w = 0; w < self->writer->workers && !failed; w++) {
        PyObject *worker = PyLong_FromSsize_t(w);
        failed = !worker || PyDict_SetItem(workers, worker, version);
        Py_XDECREF(worker);
    }
    PyObject *nbytes = PyLong_FromSsize_t(self->nbytes), *seconds = PyFloat_FromDouble(finished - update->began);
    PyObject *fields[FIELDS] = {version, nbytes, seconds, phases, workers}; /* owned by the report, if there is one */
    for (Py_ssize_t i = 0; i < FIELDS; i++) {
        failed |= !fields[i];
        if (report)
            PyTuple_SET_ITEM(report, i, fields[i]);
        else
            Py_XDECREF(fields[i]);
    }
    if (failed)
        Py_CLEAR(report);
    return report;
}

/* Copy tensors into a free slot. Return 1; 0 with nothing done, if no slot is free or a tensor does not fit; -1 with an
 * error. */
static int pack(ArenaUpdate *self, Update *update, PyObject *source)
{
    update->started = now();
    update->slot = free_slot(self->writer, PyList_GET_SIZE(self->plans));
    PackPlan *plan = update->slot < 0 ? NULL : (PackPlan *)PyList_GET_ITEM(self->plans, update->slot);
    if (!plan || Py_TYPE(plan) != PackPlan_type)
        return 0;
    store(&record_of(&self->writer->words, self->writer->workers, update->slot)->version, 0); /* before the slot is written */
    update->waited = now();
    int of_module = Py_TYPE(source) == TensorTree_type;
    PyObject *tensors = of_module ? TensorTree_tensors((TensorTree *)source, NULL) : Py_NewRef(source);
    if (!tensors)
        return -1;
    Py_INCREF(plan);
    int fits = PackPlan_check(plan, tensors);
    update->extracted = now();
    if (fits > 0 && PackPlan_copy(plan))
        fits = -1;
    if (!of_module)
        PackPlan_forget(plan);
    Py_DECREF(plan);
    Py_DECREF(tensors);
    update->packed = now();
    return fits;
}

/* Point every worker to the slot, and wake those that are to acknowledge it or want to be woken. Return a list of the
 * workers with a mutex that was not free in time. */
static PyObject *publish(ArenaUpdate *self, Update *update)
{
    ArenaWriter *writer = self->writer;
    Record *record = record_of(&writer->words, writer->workers, update->slot);
    record->extra_size = 0;
    store(&record->version, update->version);
    PyObject *others = PyList_New(0);
    int acknowledge = self->watch < 0;
    int64_t word = published_word(update->version, update->slot, acknowledge);
    for (Py_ssize_t w = 0; others && w < writer->workers; w++) {
        Block *block = block_of(writer, w);
        if (!lock_within(block, MUTEX_TIMEOUT)) {
            block->published = word;
            int wake = acknowledge || block->wants_wakeups;
            unlock(block);
            Message message = {.kind = UPDATE, .worker = (int32_t)w, .version = (uint64_t)update->version};
            if (wake) /* a failure is noticed by the reader of the connection */
                send_message(descriptors_of(self)[w], &message, MSG_DONTWAIT);
            continue;
        }
        PyObject *worker = PyLong_FromSsize_t(w);
        if (!worker || PyList_Append(others, worker))
            Py_CLEAR(others);
        Py_XDECREF(worker);
    }
    update->published = now();
    return others;
}

/* Wait for acknowledgements; or, without them, look whether any worker has died or reported an error. Return 1 if
 * nothing is left to be done, 0 if something is, -1 with an error (from a signal handler). */
static int await_peers(ArenaUpdate *self, Update *update)
{
    struct epoll_event event;
    if (self->watch >= 0)
        return epoll_wait(self->watch, &event, 1, 0) == 0;
    Py_ssize_t workers = self->writer->workers;
    int limited = update->timeout >= 0 && update->timeout < 1e9; /* thirty years are no limit */
    int64_t until = limited ? nanoseconds() + (int64_t)(update->timeout * 1e9) : -1;
    int interrupted;
    for (Py_ssize_t i = 0; i < 2 * workers; i++)
        update->polls[i] = (struct pollfd){.fd = descriptors_of(self)[i], .events = POLLIN};
    do {
        Py_BEGIN_ALLOW_THREADS
        interrupted = await_answers(workers, until, update);
        Py_END_ALLOW_THREADS
        if (interrupted && PyErr_CheckSignals())
            return -1;
    } while (interrupted);
    return update->answers == workers;
}

/* Pack, publish and wait: the result of the call. */
static PyObject *deliver(ArenaUpdate *self, Update *update, PyObject *source)
{
    int packed = pack(self, update, source);
    if (packed <= 0)
        return packed ? NULL : Py_NewRef(Py_None);
    PyObject *others = publish(self, update);
    if (!others)
        return NULL;
    int settled = PyList_GET_SIZE(others) ? 0 : await_peers(self, update);
    PyObject *report = settled < 0 ? NULL : report_of(self, update);
    if (!report || settled) {
        Py_DECREF(others);
        return report;
    }
    return Py_BuildValue("NnNy#", report, update->slot, others, update->answered, self->writer->workers);
}

static PyObject *call(ArenaUpdate *self, PyObject *const *args, size_t flags, PyObject *keywords)
{
    if (PyVectorcall_NARGS(flags) != 4 || keywords) {
        PyErr_SetString(PyExc_TypeError, "an update takes four arguments");
        return NULL;
    }
    Update update = {.version = PyLong_AsLongLong(args[1]), .began = PyFloat_AsDouble(args[3])};
    update.timeout = args[2] == Py_None ? -1 : PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || require_creator(self->writer))
        return NULL;
    size_t workers = (size_t)self->writer->workers;
    update.polls = PyMem_Malloc(2 * workers * sizeof *update.polls + workers);
    if (!update.polls)
        return PyErr_NoMemory();
    update.answered = memset(update.polls + 2 * workers, 0, workers);
    Py_INCREF(self); /* a signal handler may drop it */
    PyObject *result = deliver(self, &update, args[0]);
    Py_DECREF(self);
    PyMem_Free(update.polls);
    return result;
}

/* Watch all descriptors; one may occur twice. Return 0; -1 if one of them is closed, or no descriptor is left. */
static int watch_peers(ArenaUpdate *self)
{
    int failed = (self->watch = epoll_create1(EPOLL_CLOEXEC)) < 0;
    for (Py_ssize_t i = 0; !failed && i < 2 * self->writer->workers; i++) {
        struct epoll_event event = {.events = EPOLLIN};
        failed = epoll_ctl(self->watch, EPOLL_CTL_ADD, descriptors_of(self)[i], &event) && errno != EEXIST;
    }
    return failed ? -1 : 0;
}

PyObject *ArenaWriter_fast_update(ArenaWriter *writer, PyObject *args)
{
    PyObject *plans, *descriptors;
    Py_ssize_t nbytes;
    int acknowledge;
    if (!PyArg_ParseTuple(args, "O!nSp:fast_update", &PyList_Type, &plans, &nbytes, &descriptors, &acknowledge))
        return NULL;
    if (PyBytes_GET_SIZE(descriptors) != 2 * writer->workers * (Py_ssize_t)sizeof(int)) /* a worker is missing */
        Py_RETURN_NONE;
    ArenaUpdate *self = (ArenaUpdate *)ArenaUpdate_type->tp_alloc(ArenaUpdate_type, 0);
    if (!self)
        return NULL;
    self->call = (vectorcallfunc)call;
    self->writer = (ArenaWriter *)Py_NewRef(writer);
    self->plans = Py_NewRef(plans), self->descriptors = Py_NewRef(descriptors);
    self->nbytes = nbytes, self->watch = -1;
    if (acknowledge || !watch_peers(self))
        return (PyObject *)self;
    Py_DECREF(self);
    Py_RETURN_NONE;
}

static int ArenaUpdate_traverse(ArenaUpdate *self, visitproc visit, void *arg)
{
    Py_VISIT(self->plans);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void ArenaUpdate_free(ArenaUpdate *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->writer);
    Py_XDECREF(self->plans);
    Py_XDECREF(self->descriptors);
    if (self->watch >= 0)
        close(self->watch);
    free_object(self);
}

static PyMemberDef ArenaUpdate_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ArenaUpdate, call), READONLY, NULL},
    {NULL},
};
PyDoc_STRVAR(ArenaUpdate_doc, "ArenaUpdate(tensors, version, timeout, began): see wsync.fast_path.FastUpdate.");
static PyType_Slot ArenaUpdate_slots[] = {
    SLOT(tp_doc, ArenaUpdate_doc),   SLOT(tp_call, PyVectorcall_Call),      SLOT(tp_dealloc, ArenaUpdate_free),
    SLOT(tp_traverse, ArenaUpdate_traverse), SLOT(tp_members, ArenaUpdate_members), {0, NULL},
};
PyType_Spec ArenaUpdate_spec = {"wsync._loops.ArenaUpdate", sizeof(ArenaUpdate), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
                                    | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                ArenaUpdate_slots};
