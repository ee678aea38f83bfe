/* Board: all workers' words in an arena, and the fast path of an update to all of them (arena.py, fast_path.py). */

#include <poll.h>

#include "native.h"

typedef struct {
    PyObject_HEAD
    Py_buffer words;
    Py_ssize_t workers, block, extra; /* how many; words per worker; where the sizes of extra states begin */
    Py_ssize_t nbytes;                /* of one copy of the weights */
} Board;

static Block *block_of(Board *self, Py_ssize_t worker)
{
    return (Block *)((int64_t *)self->words.buf + worker * self->block);
}

static void Board_free(Board *self)
{
    if (self->words.obj)
        PyBuffer_Release(&self->words);
    free_object(self);
}

static PyObject *Board_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *words;
    Py_ssize_t workers, block, extra, nbytes;
    if (!PyArg_ParseTuple(args, "Onnnn:Board", &words, &workers, &block, &extra, &nbytes))
        return NULL;
    Board *self = (Board *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE)) {
        Py_DECREF(self);
        return NULL;
    }
    self->workers = workers, self->block = block, self->extra = extra, self->nbytes = nbytes;
    if (block * 8 < (Py_ssize_t)sizeof(Block) || workers * block > extra || extra * 8 > self->words.len) {
        PyErr_SetString(PyExc_ValueError, "there are fewer words than workers need");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Arena.free_slot: the first slot that nobody uses, holds, or may yet begin to use; -1 if there is none. */
static Py_ssize_t free_slot(Board *self, Py_ssize_t slots, int retains)
{
    for (Py_ssize_t slot = 0; slot < slots; slot++) {
        int busy = 0;
        for (Py_ssize_t w = 0; w < self->workers && !busy; w++) {
            Block *block = block_of(self, w);
            int64_t switched = __atomic_load_n(&block->switched, __ATOMIC_SEQ_CST);
            int64_t taken = __atomic_load_n(&block->taken, __ATOMIC_SEQ_CST); /* in this order: see Switch.enter */
            int64_t used = __atomic_load_n(&block->used, __ATOMIC_SEQ_CST);
            int64_t held = __atomic_load_n(&block->held, __ATOMIC_SEQ_CST);
            int named = switched >> 16 && (retains || taken < switched >> 16);
            busy = used == slot || held == slot || (named && (switched >> 1 & 0x7FFF) == slot);
        }
        if (!busy)
            return slot;
    }
    return -1;
}

/* Switch.publish. Returns 1 if that was done, 0 if somebody holds the mutex: is stopped right there. */
static int switch_to(Block *block, int64_t value, int *wants_call)
{
    if (!lock_soon(block))
        return 0;
    block->switched = value;
    *wants_call = (int)block->call;
    unlock(block);
    return 1;
}

/* What has been heard of one update. */
typedef struct {
    Py_ssize_t count;
    char *from;         /* a byte for each worker */
    double wait, apply; /* of the slowest worker, in seconds */
} Answers;

/* Wait until each of the first `workers` descriptors (lines; then come processes) has brought an acknowledgement: 0.
 * Also when somebody says something else, or dies, or at the deadline: the caller sees who is missing. -1: a signal. */
static int await_answers(struct pollfd *polls, nfds_t count, Py_ssize_t workers, int64_t version, int64_t deadline,
                         Answers *answers)
{
    while (answers->count < workers) {
        int64_t left = deadline < 0 ? 0 : deadline - nanoseconds();
        left = left > 0 ? left : 0;
        struct timespec pause = {left / 1000000000, left % 1000000000};
        int ready = ppoll(polls, count, deadline < 0 ? NULL : &pause, NULL);
        if (ready <= 0)
            return ready < 0 && errno == EINTR ? -1 : 0;
        for (Py_ssize_t i = 0; i < (Py_ssize_t)count && ready; i++) {
            if (!polls[i].revents)
                continue;
            ready--;
            Message message;
            if (i >= workers || !hear(polls[i].fd, ACK, (uint64_t)version, &message))
                return 0;
            if (message.wait + message.apply > answers->wait + answers->apply)
                answers->wait = message.wait, answers->apply = message.apply;
            answers->from[i] = 1;
            answers->count++;
            polls[i].fd = -1; /* what it says next is for later */
        }
    }
    return 0;
}

/* One update, on its way. */
typedef struct {
    int64_t version;
    PyObject *watch; /* of all workers; only where there is to be no acknowledgement */
    int acknowledge;
    double timeout; /* seconds; below 0 for none */
    Py_ssize_t slot;
    struct pollfd *polls; /* lines, then processes */
    double started, waited, extracted, packed, published; /* until when */
    Answers answers;
} Update;

static double least(double a, double b)
{
    return a < b ? a : b;
}

/* A SyncReport: types.py. Its phases add up, as in InFlight.report. */
static PyObject *report_of(Board *self, const Update *update, double began, double finished)
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
    PyObject *phases = PyDict_Copy(names.no_phases), *workers = PyDict_New(); /* copied: it would grow step by step */
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

/* Copy tensors into a free slot. Returns 1; 0, with nothing done, if none is free or they are not just bytes; -1 with an error. */
static int pack(Board *self, Update *update, PyObject *rooms, int retains, PyObject *source)
{
    update->started = now();
    update->slot = free_slot(self, PyList_GET_SIZE(rooms), retains);
    Room *room = update->slot < 0 ? NULL : (Room *)PyList_GET_ITEM(rooms, update->slot);
    if (!room || Py_TYPE(room) != Room_type) /* None: there is no fast path into it */
        return 0;
    update->waited = now();
    int of_module = Py_TYPE(source) == Tree_type;
    PyObject *tensors = of_module ? Tree_tensors((Tree *)source, NULL) : Py_NewRef(source);
    if (!tensors)
        return -1;
    int fits = Room_look(room, tensors);
    update->extracted = now();
    if (fits > 0 && Room_copy(room))
        fits = -1;
    if (!of_module)
        Room_forget(room);
    Py_DECREF(tensors);
    update->packed = now();
    return fits;
}

/* Point every worker to the slot, and call those who are to answer, or want to be called. A list of those who have yet
 * to be switched. */
static PyObject *publish(Board *self, Update *update)
{
    ((int64_t *)self->words.buf)[self->extra + update->slot] = 0;
    PyObject *others = PyList_New(0);
    int64_t value = update->version << 16 | update->slot << 1 | update->acknowledge;
    for (Py_ssize_t w = 0; others && w < self->workers; w++) {
        int wants_call = 0;
        if (switch_to(block_of(self, w), value, &wants_call)) {
            Message news = {.kind = NEWS, .worker = (int32_t)w, .version = (uint64_t)update->version};
            if (update->acknowledge || wants_call)
                say(update->polls[w].fd, &news, MSG_DONTWAIT);
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

/* Wait for answers, if they are wanted; else look whether anybody has died, or failed before: 1 if there is nothing
 * left to hear; 0; or -1 with an error: a signal. */
static int listen_to(Board *self, Update *update)
{
    nfds_t count = 2 * (nfds_t)self->workers;
    if (!update->acknowledge)
        return !Watch_sees(update->watch);
    int limited = update->timeout >= 0 && update->timeout < 1e9; /* thirty years are no limit */
    int64_t until = limited ? nanoseconds() + (int64_t)(update->timeout * 1e9) : -1;
    int interrupted;
    do {
        Py_BEGIN_ALLOW_THREADS
        interrupted = await_answers(update->polls, count, self->workers, update->version, until, &update->answers);
        Py_END_ALLOW_THREADS
        if (interrupted && PyErr_CheckSignals())
            return -1;
    } while (interrupted);
    return update->answers.count == self->workers;
}

/* Pack, publish and listen: what Board_update returns. */
static PyObject *deliver(Board *self, Update *update, PyObject *rooms, int retains, PyObject *source, double began)
{
    int packed = pack(self, update, rooms, retains, source);
    if (packed <= 0)
        return packed ? NULL : Py_NewRef(Py_None);
    PyObject *others = publish(self, update);
    if (!others)
        return NULL;
    int settled = PyList_GET_SIZE(others) ? 0 : listen_to(self, update);
    PyObject *report = settled < 0 ? NULL : report_of(self, update, began, now());
    if (!report || settled) {
        Py_DECREF(others);
        return report;
    }
    return Py_BuildValue("NnNy#", report, update->slot, others, update->answers.from, self->workers);
}

static PyObject *Board_update(Board *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 8 || !PyList_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "update() takes a list, bytes, and six more: see its documentation");
        return NULL;
    }
    Update update = {0};
    int retains = PyObject_IsTrue(args[2]);
    update.watch = args[3];
    update.acknowledge = update.watch == Py_None;
    if (!update.acknowledge && Py_TYPE(update.watch) != Watch_type) {
        PyErr_SetString(PyExc_TypeError, "update() takes a watch, or None");
        return NULL;
    }
    update.version = PyLong_AsLongLong(args[5]);
    update.timeout = args[6] == Py_None ? -1 : PyFloat_AsDouble(args[6]);
    double began = PyFloat_AsDouble(args[7]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t workers = self->workers;
    if (PyBytes_GET_SIZE(args[1]) != 2 * workers * (Py_ssize_t)sizeof(int)) /* somebody is not there */
        Py_RETURN_NONE;
    update.polls = PyMem_Malloc((size_t)workers * (2 * sizeof *update.polls + 1));
    if (!update.polls)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < 2 * workers; i++) {
        memcpy(&update.polls[i].fd, PyBytes_AS_STRING(args[1]) + i * (Py_ssize_t)sizeof(int), sizeof(int));
        update.polls[i].events = POLLIN, update.polls[i].revents = 0;
    }
    update.answers.from = memset(update.polls + 2 * workers, 0, (size_t)workers);
    PyObject *result = deliver(self, &update, args[0], retains, args[4], began);
    PyMem_Free(update.polls);
    return result;
}

PyDoc_STRVAR(Board_update_doc,
             "update(rooms, descriptors, retains, watch, tensors, version, timeout, began)\n\n"
             "Copy tensors (a list, or a tree's) into a free slot, point every worker to it, and wait for answers; or, with\n"
             "a watch over the descriptors, only see whether anything has happened to any worker.\n\n"
             "Returns a report. If that is not all: (report, slot, workers that have yet to be switched, and a byte for\n"
             "each worker: 1 if it has answered). None, and nothing done, if no slot is free, or the tensors are not just\n"
             "bytes that fit.");
static PyMethodDef Board_methods[] = {
    {"update", (PyCFunction)(void (*)(void))Board_update, METH_FASTCALL, Board_update_doc},
    {NULL},
};
PyDoc_STRVAR(Board_doc, "Board(words, workers, block, extra, nbytes): the words of an arena, as its sender sees them.");
static PyType_Slot Board_slots[] = {
    SLOT(tp_doc, Board_doc), SLOT(tp_new, Board_new), SLOT(tp_dealloc, Board_free), SLOT(tp_methods, Board_methods),
    {0, NULL},
};
PyType_Spec Board_spec = {"wsync._native.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, Board_slots};
