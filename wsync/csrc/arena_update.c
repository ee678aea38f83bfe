/* ArenaWriter.update: a usual update of all workers in one call (loops/arena_writer.py). */

#include <poll.h>

#include "arena_writer.h"

static const double MUTEX_TIMEOUT = 0.01; /* seconds: see the Python class */

/* Return the first slot that no worker is pointed to, uses or holds; -1 if there is none. */
static Py_ssize_t free_slot(ArenaWriter *self, Py_ssize_t slots)
{
    for (Py_ssize_t slot = 0; slot < slots && slot < MAX_SLOTS; slot++) {
        int busy = 0;
        for (Py_ssize_t w = 0; w < self->workers && !busy; w++) {
            Needed needed = slots_needed(block_of(self, w));
            busy = needed.published == slot || needed.used == slot || needed.held == slot;
        }
        if (!busy)
            return slot;
    }
    return -1;
}

/* The acknowledgements of one update. */
typedef struct {
    Py_ssize_t count;
    char *from;         /* a byte for each worker */
    double wait, apply; /* of the slowest worker, in seconds */
} Answers;

/* Wait until a connection has something to read: 1. Return 0 when its process has ended, or at the deadline; -1 for a
 * signal. */
static int await_message(int connection, int process, int64_t deadline)
{
    struct pollfd polls[2] = {{.fd = connection, .events = POLLIN}, {.fd = process, .events = POLLIN}};
    int64_t left = deadline < 0 ? 0 : deadline - nanoseconds();
    left = left > 0 ? left : 0;
    struct timespec pause = {left / 1000000000, left % 1000000000};
    int ready = ppoll(polls, 2, deadline < 0 ? NULL : &pause, NULL);
    return ready < 0 ? (errno == EINTR ? -1 : 0) : polls[0].revents != 0;
}

/* Wait for the acknowledgements of all workers. Return 0 then, and also at another message, a death or the deadline: the
 * answers tell. Return -1 for a signal.
 *
 * The worker that was woken last mostly answers last: waiting for it first, this thread is woken once for all of them. */
static int await_answers(const int *descriptors, Py_ssize_t workers, int64_t version, int64_t deadline,
                         Answers *answers)
{
    while (answers->count < workers) {
        Py_ssize_t worker = workers - answers->count - 1;
        int ready = await_message(descriptors[worker], descriptors[workers + worker], deadline);
        Message message;
        if (ready <= 0 || !take_message(descriptors[worker], ACK, (uint64_t)version, &message))
            return ready < 0 ? -1 : 0;
        if (message.wait + message.apply > answers->wait + answers->apply)
            answers->wait = message.wait, answers->apply = message.apply;
        answers->from[worker] = 1;
        answers->count++;
    }
    return 0;
}

/* One update in progress. */
typedef struct {
    int64_t version;
    PyObject *watch; /* of all workers; only where there is to be no acknowledgement */
    int acknowledge;
    double timeout; /* seconds; below 0 for none */
    Py_ssize_t slot;
    const int *descriptors; /* of connections, then of processes */
    double started, waited, extracted, packed, published; /* when each phase ended */
    Answers answers;
} Update;

static double least(double a, double b)
{
    return a < b ? a : b;
}

/* Make a types.SyncReport; its phases add up to its seconds. */
static PyObject *report_of(ArenaWriter *self, const Update *update, double began, double finished)
{
    double left = finished - update->packed;
    double apply = least(update->answers.apply, left);
    double wait = least(update->answers.wait, left - apply);
    double transfer = least(update->published - update->packed, left - apply - wait);
    const double costs[PHASES] = {
        [EXTRACT] = update->started - began + update->extracted - update->waited,
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
    for (Py_ssize_t w = 0; w < self->workers && !failed; w++) {
        PyObject *worker = PyLong_FromSsize_t(w);
        failed = !worker || PyDict_SetItem(workers, worker, version);
        Py_XDECREF(worker);
    }
    PyObject *nbytes = PyLong_FromSsize_t(self->nbytes), *seconds = PyFloat_FromDouble(finished - began);
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
static int pack(ArenaWriter *self, Update *update, PyObject *plans, PyObject *source)
{
    update->started = now();
    update->slot = free_slot(self, PyList_GET_SIZE(plans));
    PackPlan *plan = update->slot < 0 ? NULL : (PackPlan *)PyList_GET_ITEM(plans, update->slot);
    if (!plan || Py_TYPE(plan) != PackPlan_type)
        return 0;
    store(&record_of(&self->words, self->workers, update->slot)->version, 0); /* before the slot is written */
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
static PyObject *publish(ArenaWriter *self, Update *update)
{
    Record *record = record_of(&self->words, self->workers, update->slot);
    record->extra_size = 0;
    store(&record->version, update->version);
    PyObject *others = PyList_New(0);
    int64_t word = published_word(update->version, update->slot, update->acknowledge);
    for (Py_ssize_t w = 0; others && w < self->workers; w++) {
        Block *block = block_of(self, w);
        if (!lock_within(block, MUTEX_TIMEOUT)) {
            block->published = word;
            int wake = update->acknowledge || block->wants_wakeups;
            unlock(block);
            Message message = {.kind = UPDATE, .worker = (int32_t)w, .version = (uint64_t)update->version};
            if (wake) /* a failure is noticed by the reader of the connection */
                send_message(update->descriptors[w], &message, MSG_DONTWAIT);
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
static int await_peers(ArenaWriter *self, Update *update)
{
    if (!update->acknowledge)
        return !PeerWatch_has_events(update->watch);
    int limited = update->timeout >= 0 && update->timeout < 1e9; /* thirty years are no limit */
    int64_t until = limited ? nanoseconds() + (int64_t)(update->timeout * 1e9) : -1;
    int interrupted;
    do {
        Py_BEGIN_ALLOW_THREADS
        interrupted = await_answers(update->descriptors, self->workers, update->version, until, &update->answers);
        Py_END_ALLOW_THREADS
        if (interrupted && PyErr_CheckSignals())
            return -1;
    } while (interrupted);
    return update->answers.count == self->workers;
}

/* Pack, publish and wait: the result of ArenaWriter_update. */
static PyObject *deliver(ArenaWriter *self, Update *update, PyObject *plans, PyObject *source, double began)
{
    int packed = pack(self, update, plans, source);
    if (packed <= 0)
        return packed ? NULL : Py_NewRef(Py_None);
    PyObject *others = publish(self, update);
    if (!others)
        return NULL;
    int settled = PyList_GET_SIZE(others) ? 0 : await_peers(self, update);
    PyObject *report = settled < 0 ? NULL : report_of(self, update, began, now());
    if (!report || settled) {
        Py_DECREF(others);
        return report;
    }
    return Py_BuildValue("NnNy#", report, update->slot, others, update->answers.from, self->workers);
}

PyObject *ArenaWriter_update(ArenaWriter *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 7 || !PyList_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "update() takes a list, bytes and five more arguments");
        return NULL;
    }
    Update update = {.watch = args[2], .acknowledge = args[2] == Py_None};
    if (!update.acknowledge && Py_TYPE(update.watch) != PeerWatch_type) {
        PyErr_SetString(PyExc_TypeError, "update() takes a PeerWatch, or None");
        return NULL;
    }
    update.version = PyLong_AsLongLong(args[4]);
    update.timeout = args[5] == Py_None ? -1 : PyFloat_AsDouble(args[5]);
    double began = PyFloat_AsDouble(args[6]);
    if (PyErr_Occurred() || require_creator(self))
        return NULL;
    Py_ssize_t workers = self->workers;
    if (PyBytes_GET_SIZE(args[1]) != 2 * workers * (Py_ssize_t)sizeof(int)) /* a worker is missing */
        Py_RETURN_NONE;
    int *descriptors = PyMem_Calloc((size_t)workers + 1, 2 * sizeof(int) + 1);
    if (!descriptors)
        return PyErr_NoMemory();
    update.descriptors = memcpy(descriptors, PyBytes_AS_STRING(args[1]), (size_t)PyBytes_GET_SIZE(args[1]));
    update.answers.from = (char *)(descriptors + 2 * workers);
    PyObject *result = deliver(self, &update, args[0], args[3], began);
    PyMem_Free(descriptors);
    return result;
}
