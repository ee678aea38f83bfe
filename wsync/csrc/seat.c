/* Seat: a worker's own words, and what its model is on (seat.py and receiver.py in wsync/local). */

#include "native.h"

typedef struct {
    PyObject_HEAD
    /* What the slow path knows as well. */
    long long version, slot, refused; /* that the model has; that it is bound to, or -1; that it did not take */
    char hold, busy;                  /* it may refuse the next version; a slot is in use */
    Py_buffer words;
    Py_ssize_t at;      /* where its block begins, in words */
    PyObject *receiver; /* the slow path */
    PyObject *turnstile;
    PyObject *installer, *rooms, *staged; /* if it is armed: a room of each slot; what waits for a decision */
    int fd, worker, retains;
} Seat;

static int Seat_traverse(Seat *self, visitproc visit, void *arg)
{
    Py_VISIT(self->receiver);
    Py_VISIT(self->turnstile);
    Py_VISIT(self->installer);
    Py_VISIT(self->rooms);
    Py_VISIT(self->staged);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void disarm(Seat *self)
{
    Py_CLEAR(self->installer);
    Py_CLEAR(self->rooms);
    Py_CLEAR(self->staged);
}

static int Seat_clear(Seat *self)
{
    Py_CLEAR(self->receiver);
    Py_CLEAR(self->turnstile);
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
    free_object(self);
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

static PyObject *Seat_follow(Seat *self, PyObject *args)
{
    PyObject *receiver, *turnstile;
    if (!PyArg_ParseTuple(args, "OO!:follow", &receiver, Turnstile_type, &turnstile))
        return NULL;
    Py_XSETREF(self->receiver, Py_NewRef(receiver));
    Py_XSETREF(self->turnstile, Py_NewRef(turnstile));
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
    PyObject *installer, *rooms, *staged;
    int fd, worker, retains;
    if (!PyArg_ParseTuple(args, "O!O!O!iip:arm", Installer_type, &installer, &PyList_Type, &rooms, &PyDict_Type, &staged,
                          &fd, &worker, &retains))
        return NULL;
    Py_XSETREF(self->installer, Py_NewRef(installer));
    Py_XSETREF(self->rooms, Py_NewRef(rooms));
    Py_XSETREF(self->staged, Py_NewRef(staged));
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
    if (try_lock(block))
        return;
    Py_BEGIN_ALLOW_THREADS
    is_ours(block, pthread_mutex_lock(mutex_of(block)));
    Py_END_ALLOW_THREADS
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
    while (!say(self->fd, message, 0) && errno == EINTR)
        continue; /* Python's handler runs when this is done */
    Py_END_ALLOW_THREADS
}

/* Of a slot; NULL where the slow path has to map it, for the first time or once more. */
static PyObject *views_of(Seat *self, Py_ssize_t slot)
{
    Room *room = slot < PyList_GET_SIZE(self->rooms) ? (Room *)PyList_GET_ITEM(self->rooms, slot) : NULL;
    return room && Py_TYPE(room) == Room_type && Room_stays(room) ? room->views : NULL;
}

/* What the slow path does when it installs. Returns 1; 0, with nothing done that it does not do again; -1 with an error. */
static int go_to(Seat *self, double started)
{
    if (!self->installer || self->hold || PyDict_GET_SIZE(self->staged))
        return 0;
    PyObject *waiting = PyObject_GetAttr(self->receiver, names.waiting); /* those have to be woken */
    int somebody = waiting ? PyObject_IsTrue(waiting) : -1;
    Py_XDECREF(waiting);
    if (somebody)
        return somebody < 0 ? -1 : 0;
    /* First, and not once the words say that another slot is in use: nothing would keep the one that the model is on
     * from being written, if the model then refused. The slots are all alike. */
    Installer *installer = (Installer *)self->installer;
    PyObject *views = views_of(self, 0);
    int fits = views ? Installer_fits(installer, views) : 0;
    if (fits <= 0)
        return fits;
    Block *block = own_block(self);
    if (!try_lock(block)) /* waiting for it, others would run, and change the model */
        return 0;
    int64_t value = block->switched;
    Py_ssize_t slot = (Py_ssize_t)(value >> 1 & 0x7FFF);
    views = views_of(self, slot);
    if (views) {
        __atomic_store_n(&block->used, slot, __ATOMIC_SEQ_CST); /* in this order: see Switch.enter */
        __atomic_store_n(&block->taken, value >> 16, __ATOMIC_SEQ_CST);
    }
    unlock(block);
    if (!views)
        return 0;
    if (Installer_take(installer, views))
        return -1;
    self->version = value >> 16;
    self->busy = 1;
    if (self->retains)
        self->slot = slot;
    int awaited = !self->retains && leave(self);
    PyObject *version = PyLong_FromLongLong(self->version), *told = PyObject_GetAttr(self->receiver, names.told_at);
    if (!version || !told || PyObject_SetAttr(self->receiver, names.version, version)
        || PyObject_SetAttr(self->receiver, names.told_at, names.never)) {
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
        PyErr_Clear(); /* the slow path comes upon it again, and tells the sender */
    }
    return PyObject_CallMethodNoArgs(self->receiver, names.enter);
}

static PyObject *Seat_leave(Seat *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->receiver)
        Py_RETURN_NONE;
    if (!self->words.obj || !self->installer)
        return PyObject_CallMethodNoArgs(self->receiver, names.leave);
    if (leave(self))
        answer(self, &(Message){.kind = FREED, .worker = self->worker});
    Py_RETURN_NONE;
}

static PyObject *Seat_on_readable(Seat *self, PyObject *Py_UNUSED(ignored))
{
    Message news;
    if (!self->receiver)
        Py_RETURN_FALSE;
    if (!self->installer || !hear(self->fd, NEWS, 0, &news))
        return PyObject_CallMethodNoArgs(self->receiver, names.on_readable);
    PyObject *receiver = Py_NewRef(self->receiver), *turnstile = Py_NewRef(self->turnstile);
    PyObject *told_at = PyFloat_FromDouble(now());
    int failed = !told_at || PyObject_SetAttr(receiver, names.told_at, told_at) || go_through(turnstile)
        || PyObject_SetAttr(receiver, names.told_at, names.never); /* the acting thread may have been first */
    Py_XDECREF(told_at);
    Py_DECREF(receiver);
    Py_DECREF(turnstile);
    if (failed)
        return NULL;
    Py_RETURN_TRUE;
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
PyDoc_STRVAR(Seat_follow_doc,
             "follow(receiver, turnstile): whose enter(), leave() and on_readable() are the slow path; its "
             "gate.");
PyDoc_STRVAR(Seat_take_doc, "take(words, at): the worker's block begins there.");
PyDoc_STRVAR(Seat_quit_doc, "Let everything go; enter(), leave() and on_readable() do nothing from then on.");
PyDoc_STRVAR(Seat_arm_doc,
             "arm(installer, rooms, staged, fd, worker, retains): how to take an update.");
PyDoc_STRVAR(Seat_disarm_doc, "Take the slow path with the next update.");
PyDoc_STRVAR(Seat_enter_doc, "Feed.enter (gate.py).");
PyDoc_STRVAR(Seat_leave_doc, "Feed.leave (gate.py).");
PyDoc_STRVAR(Seat_on_readable_doc, "LineHandler.on_readable (receiver_thread.py).");
static PyMethodDef Seat_methods[] = {
    {"follow", (PyCFunction)Seat_follow, METH_VARARGS, Seat_follow_doc},
    {"take", (PyCFunction)Seat_take, METH_VARARGS, Seat_take_doc},
    {"quit", (PyCFunction)Seat_quit, METH_NOARGS, Seat_quit_doc},
    {"arm", (PyCFunction)Seat_arm, METH_VARARGS, Seat_arm_doc},
    {"disarm", (PyCFunction)Seat_disarm, METH_NOARGS, Seat_disarm_doc},
    {"enter", (PyCFunction)Seat_enter, METH_NOARGS, Seat_enter_doc},
    {"leave", (PyCFunction)Seat_leave, METH_NOARGS, Seat_leave_doc},
    {"on_readable", (PyCFunction)Seat_on_readable, METH_NOARGS, Seat_on_readable_doc},
    {NULL},
};
PyDoc_STRVAR(Seat_doc, "A worker's own words, and what its model is on. Asked by the gate instead of a receiver.");
static PyType_Slot Seat_slots[] = {
    SLOT(tp_doc, Seat_doc),           SLOT(tp_new, Seat_new),         SLOT(tp_dealloc, Seat_free),
    SLOT(tp_traverse, Seat_traverse), SLOT(tp_clear, Seat_clear),     SLOT(tp_methods, Seat_methods),
    SLOT(tp_members, Seat_members),   {0, NULL},
};
PyType_Spec Seat_spec = {"wsync._native.Seat", sizeof(Seat), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Seat_slots};
