/* The short way of a small update, compiled.
 *
 * Between two batches a trainer's caches are cold, and an interpreter that walks through a module, asks for each tensor's
 * place and stores a few words spends its time waiting for memory: ten times what the copy itself takes. So the usual case
 * stands here once more, in few cache lines: a module whose tree has not changed, whose tensors are plain, and whose
 * workers are all there.
 *
 * Nothing here decides what is right. Each function does the usual case whole, or changes nothing and says that it did
 * not; the caller then goes the long way, in Python, which knows every case, and names what is wrong.
 *
 * Tensors are looked at through DLPack's exchange table (dlpack.h, DLPackExchangeAPI, version 1), which PyTorch offers at
 * torch.Tensor.__dlpack_c_exchange_api__: no header of PyTorch's is needed, and nothing is tied to its version.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

/* --- what DLPack's header says, as far as it is needed --- */

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

static const DLPackExchange *dlpack;   /* set by use() */
static PyObject *plain_types;          /* a tuple: other classes may keep their numbers elsewhere */
static PyObject *is_neg;
static PyObject *report_type;          /* SyncReport */

enum { EXTRACT, WAIT, PACK, TRANSFER, APPLY, ACKNOWLEDGE, PHASES };
static PyObject *phase_names[PHASES];

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* --- Room: the tensors of a buffer, and what fits them --- */

typedef struct {
    DLTensor view; /* of a tensor that the room keeps */
    size_t nbytes;
    Py_ssize_t leader; /* the first place that is the same memory: of a tied tensor; or its own index */
} Place;

typedef struct {
    PyObject_HEAD
    PyObject *views; /* a tuple */
    Py_ssize_t count;
    Place *places;
    const void **sources; /* where the tensors lie that are being copied */
} Room;

static PyTypeObject *Room_type, *Tree_type;

static char *start_of(const DLTensor *view)
{
    return (char *)view->data + view->byte_offset;
}

static size_t size_of(const DLTensor *view)
{
    size_t nbytes = view->dtype.bits / 8u * view->dtype.lanes;
    for (int32_t d = 0; d < view->ndim; d++)
        nbytes *= (size_t)view->shape[d];
    return nbytes;
}

/* Whether a tensor is nothing but bytes in the main memory, in the order of `like`: 1, and `view` shows them; 0; or -1
 * with an error. */
static int is_like(PyObject *tensor, const DLTensor *like, DLTensor *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    int plain = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain_types); i++)
        plain |= PyTuple_GET_ITEM(plain_types, i) == type;
    if (!plain)
        return 0;
    if (dlpack->view(tensor, view)) { /* sparse, meta, vmapped …: the long way will see what it is */
        PyErr_Clear();
        return 0;
    }
    if (view->device.type != DL_CPU || view->ndim != like->ndim || view->dtype.code == DL_COMPLEX
        || memcmp(&view->dtype, &like->dtype, sizeof like->dtype))
        return 0;
    for (int32_t d = 0; d < view->ndim; d++)
        if (view->shape[d] != like->shape[d] || (view->shape[d] > 1 && view->strides[d] != like->strides[d]))
            return 0;
    PyObject *negative = PyObject_CallMethodNoArgs(tensor, is_neg); /* a bit that DLPack does not show */
    if (!negative)
        return -1;
    Py_DECREF(negative);
    return negative == Py_False;
}

static void Room_free(Room *self)
{
    PyMem_Free(self->places);
    PyMem_Free(self->sources);
    Py_XDECREF(self->views);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *Room_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *views;
    if (!PyArg_ParseTuple(args, "O:Room", &views))
        return NULL;
    if (!dlpack) {
        PyErr_SetString(PyExc_RuntimeError, "use() comes first");
        return NULL;
    }
    Room *self = (Room *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->views = PySequence_Tuple(views);
    if (!self->views)
        goto failed;
    Py_ssize_t count = PyTuple_GET_SIZE(self->views);
    self->places = PyMem_Calloc((size_t)count + 1, sizeof(Place));
    self->sources = PyMem_Calloc((size_t)count + 1, sizeof(void *));
    if (!self->places || !self->sources) {
        PyErr_NoMemory();
        goto failed;
    }
    self->count = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        Place *place = &self->places[i];
        if (dlpack->view(PyTuple_GET_ITEM(self->views, i), &place->view))
            goto failed;
        if (place->view.device.type != DL_CPU || place->view.dtype.code == DL_COMPLEX) {
            PyErr_SetString(PyExc_ValueError, "a room is of real tensors in the main memory");
            goto failed;
        }
        place->nbytes = size_of(&place->view);
        while (place->leader < i
               && (!place->nbytes || start_of(&self->places[place->leader].view) != start_of(&place->view)))
            place->leader++;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Whether all of a list of tensors fit: 1, and their addresses are in `sources`; 0; or -1 with an error. */
static int Room_look(Room *self, PyObject *tensors)
{
    if (!PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) != self->count)
        return 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        DLTensor view;
        int fits = is_like(PyList_GET_ITEM(tensors, i), &self->places[i].view, &view);
        if (fits <= 0)
            return fits;
        self->sources[i] = start_of(&view);
    }
    for (Py_ssize_t i = 0; i < self->count; i++) /* what is tied no more is for the long way, which compares it */
        if (self->places[i].nbytes && self->sources[i] != self->sources[self->places[i].leader])
            return 0;
    return 1;
}

static void Room_copy(Room *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        if (self->places[i].nbytes && self->places[i].leader == i)
            memcpy(start_of(&self->places[i].view), self->sources[i], self->places[i].nbytes);
}

static PyObject *Room_fill(Room *self, PyObject *tensors)
{
    int fits = Room_look(self, tensors);
    if (fits < 0)
        return NULL;
    if (fits)
        Room_copy(self);
    return PyBool_FromLong(fits);
}

PyDoc_STRVAR(Room_fill_doc, "Copy a list of tensors into the views; False, and nothing copied, if one is not just bytes like its view.");
static PyMethodDef Room_methods[] = {
    {"fill", (PyCFunction)Room_fill, METH_O, Room_fill_doc},
    {NULL},
};
PyDoc_STRVAR(Room_doc, "Room(views): the tensors of a buffer, to be filled with bytes.");
static PyType_Slot Room_slots[] = {
    {Py_tp_doc, (void *)Room_doc}, {Py_tp_new, Room_new}, {Py_tp_dealloc, Room_free}, {Py_tp_methods, Room_methods}, {0, NULL},
};
static PyType_Spec Room_spec = {"wsync._native.Room", sizeof(Room), 0, Py_TPFLAGS_DEFAULT, Room_slots};

/* --- Tree: the tensors of a module, as long as its tree is as it was --- */

typedef struct {
    PyObject *where, *key;
    PyObject *then; /* what was there; NULL for nothing, or for whatever there is */
} Spot;

typedef struct {
    PyObject *table;
    Py_ssize_t size;
} Table;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* the arguments, which own all that is pointed to but the children */
    Py_ssize_t places, links, vacant, tables;
    Spot *spots; /* places, then links, then vacant */
    Table *sizes;
} Tree;

static int Tree_traverse(Tree *self, visitproc visit, void *arg)
{
    Py_VISIT(self->keep);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Tree_clear(Tree *self)
{
    self->places = self->links = self->vacant = self->tables = 0;
    Py_CLEAR(self->keep);
    return 0;
}

static void Tree_free(Tree *self)
{
    PyObject_GC_UnTrack(self);
    Tree_clear(self);
    PyMem_Free(self->spots);
    PyMem_Free(self->sizes);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static int read_spots(PyObject *tuple, int with_child, Spot *spots)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        Spot *spot = &spots[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), with_child ? "O!UO" : "O!U", &PyDict_Type, &spot->where, &spot->key,
                              &spot->then))
            return -1;
    }
    return 0;
}

static PyObject *Tree_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *places, *links, *vacant, *tables;
    if (!PyArg_ParseTuple(args, "O!O!O!O!:Tree", &PyTuple_Type, &places, &PyTuple_Type, &links, &PyTuple_Type, &vacant,
                          &PyTuple_Type, &tables))
        return NULL;
    Tree *self = (Tree *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->keep = Py_NewRef(args);
    Py_ssize_t p = PyTuple_GET_SIZE(places), l = PyTuple_GET_SIZE(links), v = PyTuple_GET_SIZE(vacant);
    Py_ssize_t t = PyTuple_GET_SIZE(tables);
    self->spots = PyMem_Calloc((size_t)(p + l + v) + 1, sizeof(Spot));
    self->sizes = PyMem_Calloc((size_t)t + 1, sizeof(Table));
    if (!self->spots || !self->sizes) {
        PyErr_NoMemory();
        goto failed;
    }
    if (read_spots(places, 0, self->spots) || read_spots(links, 1, self->spots + p) || read_spots(vacant, 0, self->spots + p + l))
        goto failed;
    for (Py_ssize_t i = 0; i < t; i++) {
        PyObject *table = PyTuple_GET_ITEM(tables, i);
        if (!PyDict_Check(table)) {
            PyErr_SetString(PyExc_TypeError, "tables are dictionaries");
            goto failed;
        }
        self->sizes[i] = (Table){table, PyDict_GET_SIZE(table)};
    }
    self->places = p, self->links = l, self->vacant = v, self->tables = t;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* The tensors, as a list; None if anything was added, removed or replaced but tensors; NULL with an error. */
static PyObject *Tree_tensors(Tree *self, PyObject *Py_UNUSED(ignored))
{
    for (Py_ssize_t i = 0; i < self->tables; i++)
        if (PyDict_GET_SIZE(self->sizes[i].table) != self->sizes[i].size)
            Py_RETURN_NONE;
    const Spot *spot = self->spots + self->places, *vacant = spot + self->links, *end = vacant + self->vacant;
    for (; spot < end; spot++) {
        PyObject *now = PyDict_GetItemWithError(spot->where, spot->key);
        if (now != (spot < vacant ? spot->then : Py_None))
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    PyObject *tensors = PyList_New(self->places);
    for (Py_ssize_t i = 0; tensors && i < self->places; i++) {
        PyObject *tensor = PyDict_GetItemWithError(self->spots[i].where, self->spots[i].key);
        if (!tensor || tensor == Py_None) {
            Py_DECREF(tensors);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
        PyList_SET_ITEM(tensors, i, Py_NewRef(tensor));
    }
    return tensors;
}

PyDoc_STRVAR(Tree_tensors_doc, "The tensors at the places; None if the tree is not as it was.");
static PyMethodDef Tree_methods[] = {
    {"tensors", (PyCFunction)Tree_tensors, METH_NOARGS, Tree_tensors_doc},
    {NULL},
};
PyDoc_STRVAR(Tree_doc, "Tree(places, links, vacant, tables): where a module keeps its tensors, and what must not change.");
static PyType_Slot Tree_slots[] = {
    {Py_tp_doc, (void *)Tree_doc},     {Py_tp_new, Tree_new},     {Py_tp_dealloc, Tree_free}, {Py_tp_traverse, Tree_traverse},
    {Py_tp_clear, Tree_clear}, {Py_tp_methods, Tree_methods}, {0, NULL},
};
static PyType_Spec Tree_spec = {"wsync._native.Tree", sizeof(Tree), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Tree_slots};

/* --- Board: all workers' words in an arena (switch.py, arena.py) --- */

typedef struct {
    PyObject_HEAD
    Py_buffer words;
    Py_ssize_t workers, block, extra; /* how many; words per worker; where the sizes of extra states begin */
    Py_ssize_t nbytes;                /* of one copy of the weights */
} Board;

/* A worker's block: the mutex, then these. */
typedef struct {
    int64_t mutex[8];
    int64_t switched, used, held, taken, call, awaited;
} Block;

static Block *block_of(Board *self, Py_ssize_t worker)
{
    return (Block *)((int64_t *)self->words.buf + worker * self->block);
}

static void Board_free(Board *self)
{
    if (self->words.obj)
        PyBuffer_Release(&self->words);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
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

/* Arena.occupied and free_slot: the first slot that nobody uses, holds, or may yet begin to use; -1 if there is none. */
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

/* 1; 0 if it is not to be had at once. If its owner died it is ours. */
static int try_lock(pthread_mutex_t *mutex)
{
    int code = pthread_mutex_trylock(mutex);
    if (code == EOWNERDEAD)
        code = pthread_mutex_consistent(mutex);
    return !code;
}

/* Switch.publish: 1; 0 if the mutex is not to be had at once. */
static int switch_to(Block *block, int64_t value, int *wants_call)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)block->mutex;
    if (!try_lock(mutex))
        return 0;
    block->switched = value;
    *wants_call = (int)block->call;
    pthread_mutex_unlock(mutex);
    return 1;
}

/* A message between the ends, without payload: words.py. */
typedef struct {
    uint8_t kind, padding[3];
    int32_t worker;
    uint64_t version, length;
    double wait, apply;
} Message;

enum { NEWS = 4, ACK = 17, FREED = 20, MOST = 128 /* workers, on the short way */ };

/* Lines.call: an error, or want of room, is noticed by who reads the line. */
static int say(int fd, const Message *message, int flags)
{
    return send(fd, message, sizeof *message, flags | MSG_NOSIGNAL) == sizeof *message;
}

/* What one update has come to. */
typedef struct {
    Py_ssize_t answers;
    char answered[MOST];
    double wait, apply; /* of the slowest worker, in seconds */
} Answers;

/* Take in what a line brings next if it is of `kind`, without payload, and (if that is not 0) about `version`: 1; 0 if
 * it is not. It is left there then. */
static int hear(int fd, uint8_t kind, uint64_t version, Message *message)
{
    char more[sizeof *message + 1];
    if (recv(fd, more, sizeof more, MSG_PEEK | MSG_DONTWAIT) != sizeof *message)
        return 0;
    memcpy(message, more, sizeof *message);
    if (message->kind != kind || message->length || (version && message->version != version))
        return 0;
    return recv(fd, more, sizeof more, MSG_DONTWAIT) == sizeof *message;
}

static int64_t nanoseconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Wait until each of the first `workers` descriptors (lines; then come processes) has brought an acknowledgement: 0.
 * Also when somebody says something else, or dies, or at the deadline: the caller sees who is missing. -1: a signal. */
static int await_answers(struct pollfd *polls, Py_ssize_t count, Py_ssize_t workers, uint64_t version, int64_t deadline,
                         Answers *answers)
{
    Py_ssize_t missing = workers - answers->answers;
    while (missing) {
        int64_t left = deadline < 0 ? 0 : deadline - nanoseconds();
        left = left > 0 ? left : 0;
        struct timespec pause = {left / 1000000000, left % 1000000000};
        int ready = ppoll(polls, (nfds_t)count, deadline < 0 ? NULL : &pause, NULL);
        if (ready <= 0)
            return ready < 0 && errno == EINTR ? -1 : 0;
        for (Py_ssize_t i = 0; i < count && ready; i++) {
            if (!polls[i].revents)
                continue;
            ready--;
            Message message;
            if (i >= workers || !hear(polls[i].fd, ACK, version, &message))
                return 0;
            if (message.wait + message.apply > answers->wait + answers->apply)
                answers->wait = message.wait, answers->apply = message.apply;
            answers->answered[i] = 1;
            answers->answers++;
            polls[i].fd = -1 - polls[i].fd; /* poll skips it; what it says next is for later */
            missing--;
        }
    }
    return 0;
}

static Py_ssize_t polls_of(PyObject *descriptors, struct pollfd *polls)
{
    Py_ssize_t count = PyBytes_GET_SIZE(descriptors) / (Py_ssize_t)sizeof(int);
    if (count > 2 * MOST)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        memcpy(&polls[i].fd, PyBytes_AS_STRING(descriptors) + i * (Py_ssize_t)sizeof(int), sizeof(int));
        polls[i].events = POLLIN, polls[i].revents = 0;
    }
    return count;
}

/* A SyncReport: types.py. */
static PyObject *report_of(Board *self, long long version, double seconds, const double *phases)
{
    PyObject *costs = PyDict_New(), *workers = PyDict_New(), *number = PyLong_FromLongLong(version);
    int failed = !costs || !workers || !number;
    for (Py_ssize_t i = 0; i < PHASES && !failed; i++) {
        PyObject *cost = PyFloat_FromDouble(phases[i] > 0 ? phases[i] : 0);
        failed = !cost || PyDict_SetItem(costs, phase_names[i], cost);
        Py_XDECREF(cost);
    }
    for (Py_ssize_t w = 0; w < self->workers && !failed; w++) {
        PyObject *worker = PyLong_FromSsize_t(w);
        failed = !worker || PyDict_SetItem(workers, worker, number);
        Py_XDECREF(worker);
    }
    PyObject *fields = failed ? NULL : Py_BuildValue("((OndOO))", number, self->nbytes, seconds, costs, workers);
    PyObject *report = fields ? PyTuple_Type.tp_new((PyTypeObject *)report_type, fields, NULL) : NULL;
    Py_XDECREF(fields);
    Py_XDECREF(costs);
    Py_XDECREF(workers);
    Py_XDECREF(number);
    return report;
}

static PyObject *Board_update(Board *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 8 || !PyList_CheckExact(args[0]) || !PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "update(rooms, descriptors, retains, acknowledge, timeout, tensors, version, began)");
        return NULL;
    }
    int retains = PyObject_IsTrue(args[2]), acknowledge = PyObject_IsTrue(args[3]);
    double timeout = PyFloat_AsDouble(args[4]), began_at = PyFloat_AsDouble(args[7]);
    long long version = PyLong_AsLongLong(args[6]);
    if (PyErr_Occurred())
        return NULL;
    struct pollfd polls[2 * MOST];
    Py_ssize_t descriptors = polls_of(args[1], polls), workers = self->workers;
    if (descriptors != 2 * workers) /* somebody is not there */
        Py_RETURN_NONE;

    double started = now();
    Py_ssize_t slot = free_slot(self, PyList_GET_SIZE(args[0]), retains);
    if (slot < 0)
        Py_RETURN_NONE;
    Room *room = (Room *)PyList_GET_ITEM(args[0], slot);
    if (Py_TYPE(room) != Room_type) /* None: there is no short way into it */
        Py_RETURN_NONE;
    double waited = now();
    PyObject *tensors = Py_TYPE(args[5]) == Tree_type ? Tree_tensors((Tree *)args[5], NULL) : Py_NewRef(args[5]);
    if (!tensors)
        return NULL;
    int fits = Room_look(room, tensors);
    if (fits <= 0) {
        Py_DECREF(tensors);
        return fits ? NULL : Py_NewRef(Py_None);
    }
    double extracted = now();
    Room_copy(room);
    Py_DECREF(tensors);
    double packed = now();

    ((int64_t *)self->words.buf)[self->extra + slot] = 0;
    PyObject *others = PyList_New(0);
    if (!others)
        return NULL;
    for (Py_ssize_t w = 0; w < workers; w++) {
        int wants_call = 0;
        int done = switch_to(block_of(self, w), (int64_t)version << 16 | slot << 1 | acknowledge, &wants_call);
        if (done && (acknowledge || wants_call))
            say(polls[w].fd, &(Message){.kind = NEWS, .worker = (int32_t)w, .version = (uint64_t)version}, MSG_DONTWAIT);
        if (done)
            continue;
        PyObject *worker = PyLong_FromSsize_t(w);
        int failed = !worker || PyList_Append(others, worker);
        Py_XDECREF(worker);
        if (failed) {
            Py_DECREF(others);
            return NULL;
        }
    }
    double published = now();

    Answers answers = {0};
    int settled = !PyList_GET_SIZE(others);
    if (settled && acknowledge) {
        int64_t until = timeout < 0 ? -1 : nanoseconds() + (int64_t)(timeout * 1e9);
        int interrupted;
        do {
            Py_BEGIN_ALLOW_THREADS
            interrupted = await_answers(polls, descriptors, workers, (uint64_t)version, until, &answers);
            Py_END_ALLOW_THREADS
            if (interrupted && PyErr_CheckSignals()) {
                Py_DECREF(others);
                return NULL;
            }
        } while (interrupted);
        settled = answers.answers == workers;
    } else if (settled) { /* nobody answers, but somebody may have died, or failed before */
        settled = poll(polls, (nfds_t)descriptors, 0) == 0;
    }
    double finished = now();
    PyObject *report = report_of(self, version, finished - began_at, (double[]){
        extracted - waited, waited - started + answers.wait, packed - extracted, published - packed, answers.apply,
        finished - published - answers.wait - answers.apply});
    if (!report || settled) {
        Py_DECREF(others);
        return report;
    }
    return Py_BuildValue("NnNy#", report, slot, others, answers.answered, workers);
}

PyDoc_STRVAR(Board_update_doc,
             "update(rooms, descriptors, retains, acknowledge, timeout, tensors, version, began)\n\n"
             "Copy tensors (a list, or a tree's) into a free slot, point every worker to it, and wait for answers, if wanted.\n\n"
             "Returns a report. If that is not all: (report, slot, workers that have yet to be switched, and a byte for each\n"
             "worker: 1 if it has answered). None, and nothing done, if no slot is free, or the tensors are not just bytes\n"
             "that fit.");
static PyMethodDef Board_methods[] = {
    {"update", (PyCFunction)(void (*)(void))Board_update, METH_FASTCALL, Board_update_doc},
    {NULL},
};
PyDoc_STRVAR(Board_doc, "Board(words, workers, block, extra): the words of an arena, as its sender sees them.");
static PyType_Slot Board_slots[] = {
    {Py_tp_doc, (void *)Board_doc}, {Py_tp_new, Board_new}, {Py_tp_dealloc, Board_free}, {Py_tp_methods, Board_methods}, {0, NULL},
};
static PyType_Spec Board_spec = {"wsync._native.Board", sizeof(Board), 0, Py_TPFLAGS_DEFAULT, Board_slots};

/* --- Seat: a worker's own words, and what its model is on (local_receiver.py, switch.py) --- */

typedef struct {
    PyObject_HEAD
    /* What the long way knows as well. */
    long long version, slot, refused; /* that the model has; that it is bound to, or -1; that it did not take */
    char hold, busy;                  /* it may refuse the next version; a slot is in use */
    Py_buffer words;
    Py_ssize_t at;      /* where its block begins, in words */
    PyObject *receiver; /* the long way; weak: a receiver has this seat */
    /* What installs an update: armed() if there is any of it. */
    PyObject *tree, *tensors, *bound, *copied, *views, *staged, *bump;
    int fd, worker, retains;
} Seat;

static PyObject *name_enter, *name_leave, *name_data, *name_version, *name_told_at, *name_waiting, *zero;

static int Seat_traverse(Seat *self, visitproc visit, void *arg)
{
    Py_VISIT(self->receiver);
    Py_VISIT(self->tree);
    Py_VISIT(self->tensors);
    Py_VISIT(self->bound);
    Py_VISIT(self->copied);
    Py_VISIT(self->views);
    Py_VISIT(self->staged);
    Py_VISIT(self->bump);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void disarm(Seat *self)
{
    Py_CLEAR(self->tree);
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->bound);
    Py_CLEAR(self->copied);
    Py_CLEAR(self->views);
    Py_CLEAR(self->staged);
    Py_CLEAR(self->bump);
}

static int Seat_clear(Seat *self)
{
    Py_CLEAR(self->receiver);
    disarm(self);
    return 0;
}

static void stand_up(Seat *self)
{
    if (self->words.obj)
        PyBuffer_Release(&self->words);
}

static void Seat_free(Seat *self)
{
    PyObject_GC_UnTrack(self);
    Seat_clear(self);
    stand_up(self);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *Seat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ":Seat"))
        return NULL;
    Seat *self = (Seat *)type->tp_alloc(type, 0);
    if (self)
        self->slot = -1;
    return (PyObject *)self;
}

static PyObject *Seat_follow(Seat *self, PyObject *receiver)
{
    Py_XSETREF(self->receiver, Py_NewRef(receiver));
    Py_RETURN_NONE;
}

static PyObject *Seat_take(Seat *self, PyObject *args)
{
    PyObject *words;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "On:take", &words, &at))
        return NULL;
    stand_up(self);
    if (PyObject_GetBuffer(words, &self->words, PyBUF_WRITABLE))
        return NULL;
    if (at < 0 || at * 8 + (Py_ssize_t)sizeof(Block) > self->words.len) {
        stand_up(self);
        PyErr_SetString(PyExc_ValueError, "there is no such block of words");
        return NULL;
    }
    self->at = at;
    Py_RETURN_NONE;
}

static PyObject *Seat_quit(Seat *self, PyObject *Py_UNUSED(ignored))
{
    Seat_clear(self);
    stand_up(self);
    Py_RETURN_NONE;
}

static PyObject *Seat_arm(Seat *self, PyObject *args)
{
    PyObject *tree, *tensors, *bound, *copied, *views, *staged, *bump;
    int fd, worker, retains;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OO!O!iip:arm", Tree_type, &tree, &PyTuple_Type, &tensors, &PyTuple_Type, &bound,
                          &PyTuple_Type, &copied, &bump, &PyList_Type, &views, &PyDict_Type, &staged, &fd, &worker, &retains))
        return NULL;
    Py_XSETREF(self->tree, Py_NewRef(tree));
    Py_XSETREF(self->tensors, Py_NewRef(tensors));
    Py_XSETREF(self->bound, Py_NewRef(bound));
    Py_XSETREF(self->copied, Py_NewRef(copied));
    Py_XSETREF(self->views, Py_NewRef(views));
    Py_XSETREF(self->staged, Py_NewRef(staged));
    Py_XSETREF(self->bump, Py_NewRef(bump));
    self->fd = fd, self->worker = worker, self->retains = retains;
    Py_RETURN_NONE;
}

static Block *own_block(Seat *self)
{
    return (Block *)((int64_t *)self->words.buf + self->at);
}

/* The sender holds it for as long as two stores take, unless it was stopped right then. */
static void lock(Block *block)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)block->mutex;
    if (try_lock(mutex))
        return;
    Py_BEGIN_ALLOW_THREADS
    if (pthread_mutex_lock(mutex) == EOWNERDEAD)
        pthread_mutex_consistent(mutex);
    Py_END_ALLOW_THREADS
}

static void unlock(Block *block)
{
    pthread_mutex_unlock((pthread_mutex_t *)block->mutex);
}

/* Whether the model is what it was when the seat was armed: 1; 0; or -1 with an error. */
static int is_current(Seat *self)
{
    PyObject *now = Tree_tensors((Tree *)self->tree, NULL);
    if (!now)
        return -1;
    int current = now != Py_None && PyList_GET_SIZE(now) == PyTuple_GET_SIZE(self->tensors);
    for (Py_ssize_t i = 0; current && i < PyList_GET_SIZE(now); i++)
        current = PyList_GET_ITEM(now, i) == PyTuple_GET_ITEM(self->tensors, i);
    Py_DECREF(now);
    return current;
}

/* One of the pairs (tensor, index of its view) in a tuple. */
static PyObject *pair_at(PyObject *pairs, Py_ssize_t i, PyObject *views, PyObject **view)
{
    PyObject *pair = PyTuple_GET_ITEM(pairs, i);
    *view = PyTuple_GET_ITEM(views, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1)));
    return PyTuple_GET_ITEM(pair, 0);
}

/* Binding.install: 1; 0, with nothing done, if a tensor is not just bytes; -1 with an error. */
static int install(Seat *self, PyObject *views)
{
    Py_ssize_t copied = PyTuple_GET_SIZE(self->copied);
    PyObject *view;
    for (int copying = 0; copying < 2; copying++) { /* first see that all of them can be copied */
        for (Py_ssize_t i = 0; i < copied; i++) {
            DLTensor from, to;
            PyObject *tensor = pair_at(self->copied, i, views, &view);
            if (dlpack->view(view, &from))
                return -1;
            int fits = is_like(tensor, &from, &to);
            if (fits <= 0)
                return fits;
            if (copying && size_of(&to))
                memcpy(start_of(&to), start_of(&from), size_of(&to));
        }
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->bound); i++) {
        PyObject *parameter = pair_at(self->bound, i, views, &view);
        if (PyObject_SetAttr(parameter, name_data, view))
            return -1;
    }
    if (!copied)
        return 1;
    PyObject *done = PyObject_CallNoArgs(self->bump); /* autograd has to know that they were written */
    Py_XDECREF(done);
    return done ? 1 : -1;
}

/* LocalReceiver.leave: 1 if the sender waits to be told. */
static int leave(Seat *self)
{
    if (!self->busy)
        return 0;
    self->busy = 0;
    Block *block = own_block(self);
    lock(block);
    block->held = self->hold || self->refused > self->version ? self->slot : -1; /* first: see Switch.enter */
    __atomic_store_n(&block->used, -1, __ATOMIC_SEQ_CST);
    int awaited = block->awaited != 0;
    block->awaited = 0;
    unlock(block);
    return awaited;
}

/* An answer has to arrive: where there is no room this waits, as long as the socket's own deadline. */
static void answer(Seat *self, const Message *message)
{
    if (say(self->fd, message, MSG_DONTWAIT) || errno != EAGAIN)
        return;
    Py_BEGIN_ALLOW_THREADS
    say(self->fd, message, 0);
    Py_END_ALLOW_THREADS
}

/* What the long way does when it installs: 1; 0, with nothing done but what it does again; -1 with an error. */
static int go_to(Seat *self, double started)
{
    if (!self->tree || self->hold || PyDict_GET_SIZE(self->staged))
        return 0;
    PyObject *waiting = PyObject_GetAttr(self->receiver, name_waiting); /* those have to be woken */
    int somebody = waiting ? PyObject_IsTrue(waiting) : -1;
    Py_XDECREF(waiting);
    if (somebody)
        return somebody < 0 ? -1 : 0;
    int current = is_current(self);
    if (current <= 0)
        return current;
    Block *block = own_block(self);
    lock(block);
    int64_t value = block->switched;
    Py_ssize_t slot = (Py_ssize_t)(value >> 1 & 0x7FFF);
    PyObject *views = slot < PyList_GET_SIZE(self->views) ? PyList_GET_ITEM(self->views, slot) : NULL;
    if (views) {
        __atomic_store_n(&block->used, slot, __ATOMIC_SEQ_CST); /* in this order: see Switch.enter */
        __atomic_store_n(&block->taken, value >> 16, __ATOMIC_SEQ_CST);
    }
    unlock(block);
    if (!views)
        return 0;
    int done = install(self, views);
    if (done <= 0)
        return done;
    self->version = value >> 16;
    self->busy = 1;
    if (self->retains)
        self->slot = slot;
    int awaited = !self->retains && leave(self);
    PyObject *version = PyLong_FromLongLong(self->version), *told = PyObject_GetAttr(self->receiver, name_told_at);
    if (!version || !told || PyObject_SetAttr(self->receiver, name_version, version)
        || PyObject_SetAttr(self->receiver, name_told_at, zero)) {
        Py_XDECREF(version);
        Py_XDECREF(told);
        return -1;
    }
    double told_at = PyFloat_AsDouble(told), finished = now();
    Py_DECREF(version);
    Py_DECREF(told);
    Message message = {.kind = ACK, .worker = self->worker, .version = (uint64_t)self->version,
                       .wait = told_at > 0 ? started - told_at : 0, .apply = finished - started};
    if (awaited)
        answer(self, &(Message){.kind = FREED, .worker = self->worker});
    if (value & 1)
        answer(self, &message);
    return 1;
}

static PyObject *Seat_enter(Seat *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->receiver)
        Py_RETURN_FALSE;
    if (self->words.obj) {
        Block *block = own_block(self);
        long long known = self->version > self->refused ? self->version : self->refused;
        lock(block);
        int news = block->switched >> 16 > known;
        if (!news)
            __atomic_store_n(&block->used, self->slot, __ATOMIC_SEQ_CST);
        unlock(block);
        if (!news) {
            self->busy = self->slot >= 0;
            Py_RETURN_FALSE;
        }
        int done = go_to(self, now());
        if (done > 0)
            Py_RETURN_FALSE;
        if (done < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) /* a signal */
            return NULL;
        PyErr_Clear(); /* the long way comes upon it again, and tells the sender */
    }
    return PyObject_CallMethodNoArgs(self->receiver, name_enter);
}

static PyObject *Seat_leave(Seat *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->receiver)
        Py_RETURN_NONE;
    if (!self->words.obj || !self->tree)
        return PyObject_CallMethodNoArgs(self->receiver, name_leave);
    if (leave(self))
        answer(self, &(Message){.kind = FREED, .worker = self->worker});
    Py_RETURN_NONE;
}

static PyObject *Seat_disarm(Seat *self, PyObject *Py_UNUSED(ignored))
{
    disarm(self);
    Py_RETURN_NONE;
}

static PyMemberDef Seat_members[] = {
    {"version", T_LONGLONG, offsetof(Seat, version), 0, NULL}, {"slot", T_LONGLONG, offsetof(Seat, slot), 0, NULL},
    {"refused", T_LONGLONG, offsetof(Seat, refused), 0, NULL}, {"hold", T_BOOL, offsetof(Seat, hold), 0, NULL},
    {"busy", T_BOOL, offsetof(Seat, busy), 0, NULL},
    {NULL},
};
PyDoc_STRVAR(Seat_follow_doc, "follow(receiver): whose enter() and leave() are the long way.");
PyDoc_STRVAR(Seat_take_doc, "take(words, at): the worker's block begins there.");
PyDoc_STRVAR(Seat_quit_doc, "Let everything go; every enter() and leave() does nothing from then on.");
PyDoc_STRVAR(Seat_arm_doc, "arm(tree, tensors, bound, copied, bump, views, staged, fd, worker, retains): how to install an update.");
PyDoc_STRVAR(Seat_disarm_doc, "Go the long way with the next update.");
PyDoc_STRVAR(Seat_enter_doc, "Feed.enter (gate.py).");
PyDoc_STRVAR(Seat_leave_doc, "Feed.leave (gate.py).");
static PyMethodDef Seat_methods[] = {
    {"follow", (PyCFunction)Seat_follow, METH_O, Seat_follow_doc},
    {"take", (PyCFunction)Seat_take, METH_VARARGS, Seat_take_doc},
    {"quit", (PyCFunction)Seat_quit, METH_NOARGS, Seat_quit_doc},
    {"arm", (PyCFunction)Seat_arm, METH_VARARGS, Seat_arm_doc},
    {"disarm", (PyCFunction)Seat_disarm, METH_NOARGS, Seat_disarm_doc},
    {"enter", (PyCFunction)Seat_enter, METH_NOARGS, Seat_enter_doc},
    {"leave", (PyCFunction)Seat_leave, METH_NOARGS, Seat_leave_doc},
    {NULL},
};
PyDoc_STRVAR(Seat_doc, "A worker's own words, and what its model is on. Asked by the gate instead of a receiver.");
static PyType_Slot Seat_slots[] = {
    {Py_tp_doc, (void *)Seat_doc},     {Py_tp_new, Seat_new},         {Py_tp_dealloc, Seat_free}, {Py_tp_traverse, Seat_traverse},
    {Py_tp_clear, Seat_clear}, {Py_tp_methods, Seat_methods}, {Py_tp_members, Seat_members}, {0, NULL},
};
static PyType_Spec Seat_spec = {"wsync._native.Seat", sizeof(Seat), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Seat_slots};

/* LocalReceiver.events, if what the line brings is news, as it mostly is. */
static PyObject *heard_news(PyObject *Py_UNUSED(module), PyObject *descriptor)
{
    int fd = PyObject_AsFileDescriptor(descriptor);
    Message message;
    return fd < 0 ? NULL : PyBool_FromLong(hear(fd, NEWS, 0, &message));
}

/* --- the module --- */

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *types, *report, *phases;
    if (!PyArg_ParseTuple(args, "OO!O!O!:use", &capsule, &PyTuple_Type, &types, &PyType_Type, &report, &PyTuple_Type, &phases))
        return NULL;
    const DLPackExchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table)
        return NULL;
    if (table->version.major != 1 || !table->view) {
        PyErr_SetString(PyExc_ImportError, "another version of DLPack's exchange table");
        return NULL;
    }
    if (PyTuple_GET_SIZE(phases) != PHASES || !PyType_IsSubtype((PyTypeObject *)report, &PyTuple_Type)) {
        PyErr_SetString(PyExc_ImportError, "it was built for another SyncReport: build it again");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PHASES; i++)
        Py_XSETREF(phase_names[i], Py_NewRef(PyTuple_GET_ITEM(phases, i)));
    Py_XSETREF(report_type, Py_NewRef(report));
    Py_XSETREF(plain_types, Py_NewRef(types));
    dlpack = table;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc, "use(exchange table, types, report, phases): how to look at tensors, the classes that are nothing but tensors;\n"
             "the class of reports, and the names of the phases, in the order extract, wait, pack, transfer, apply, acknowledge.");
PyDoc_STRVAR(heard_news_doc, "Take a message from a line if it says that there is news, and nothing else; whether it did.");
static PyMethodDef functions[] = {
    {"heard_news", heard_news, METH_O, heard_news_doc},
    {"use", use, METH_VARARGS, use_doc},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "wsync._native", .m_doc = "The short way of a small update (native.py).", .m_size = -1,
    .m_methods = functions,
};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromSpec(spec);
    if (!type)
        return -1;
    if (kept)
        *kept = (PyTypeObject *)Py_NewRef(type);
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static int make_names(void)
{
    struct { PyObject **name; const char *text; } names[] = {
        {&name_enter, "enter"}, {&name_leave, "leave"},     {&name_data, "data"},
        {&name_version, "version"}, {&name_told_at, "told_at"}, {&name_waiting, "waiting"}, {&is_neg, "is_neg"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text)))
            return -1;
    return (zero = PyFloat_FromDouble(0)) ? 0 : -1;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (add_type(module, &Room_spec, &Room_type) || add_type(module, &Tree_spec, &Tree_type) || add_type(module, &Board_spec, NULL)
        || add_type(module, &Seat_spec, NULL) || make_names()) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
