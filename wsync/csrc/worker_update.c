/* WorkerSlot's fast path: what a forward costs that finds nothing new, and a usual update. */

#include "worker_slot.h"

/* Send an answer. Where the socket has no room this waits, as long as the socket's own deadline. */
static void answer(WorkerSlot *self, const Message *message)
{
    if (send_message(self->fd, message, MSG_DONTWAIT) || errno != EAGAIN)
        return; /* a broken connection is noticed by its reader */
    Py_BEGIN_ALLOW_THREADS
    while (!send_message(self->fd, message, 0) && errno == EINTR)
        continue; /* Python's signal handler runs afterwards */
    Py_END_ALLOW_THREADS
}

/* Return the views of a slot; NULL if it has to be mapped, for the first time or again. */
static PyObject *views_of(WorkerSlot *self, Py_ssize_t slot)
{
    if (slot >= PyList_GET_SIZE(self->plans))
        return NULL;
    PackPlan *plan = (PackPlan *)PyList_GET_ITEM(self->plans, slot);
    return Py_TYPE(plan) == PackPlan_type && PackPlan_is_in_place(plan) ? plan->views : NULL;
}

/* Whether the fast path may be taken: 1, 0, or -1 with an error. */
static int is_usual(WorkerSlot *self)
{
    if (!self->installer || self->hold || PyDict_GET_SIZE(self->prepared))
        return 0;
    PyObject *waiting = PyObject_GetAttr(self->updater, names.waiting); /* threads that the updater has to wake */
    int some = waiting ? PyObject_IsTrue(waiting) : -1;
    Py_XDECREF(waiting);
    if (some)
        return some < 0 ? -1 : 0;
    PyObject *views = views_of(self, 0); /* the views of all slots are alike */
    return views ? Installer_check((Installer *)self->installer, views) : 0;
}

/* Tell the updater about an installed version. Return when it was announced, or 0; -1 with an error. */
static double report_version(WorkerSlot *self)
{
    PyObject *version = PyLong_FromLongLong(self->version), *at = PyObject_GetAttr(self->updater, names.announced_at);
    double announced_at = at ? PyFloat_AsDouble(at) : -1;
    Py_XDECREF(at);
    if (!version || (announced_at < 0 && PyErr_Occurred()) || PyObject_SetAttr(self->updater, names.version, version)
        || PyObject_SetAttr(self->updater, names.announced_at, names.zero))
        announced_at = -1;
    Py_XDECREF(version);
    return announced_at;
}

/* Install the published version. Return 1; 0 if the updater has to start over; -1 with an error. */
static int install(WorkerSlot *self, double started)
{
    int usual = is_usual(self);
    if (usual <= 0)
        return usual;
    Block *block = self->block;
    if (try_lock(block)) /* while this thread waited, others would run, and might change the model */
        return 0;
    int64_t word = owns_words(self) ? block->published : 0, slot = slot_in(word);
    PyObject *views = word ? views_of(self, (Py_ssize_t)slot) : NULL;
    if (views && record_of(&self->words, self->workers, (Py_ssize_t)slot)->extra_size)
        views = NULL; /* the updater installs extra state, or refuses it */
    if (views)
        store(&block->used_slot, self->used = slot);
    unlock(block);
    if (!views)
        return 0;
    self->busy = 1;
    if (Installer_switch((Installer *)self->installer, views))
        return -1;
    self->version = version_in(word);
    if (self->bound)
        self->bound_slot = slot;
    int freed = self->bound ? 0 : release_slot(self);
    double announced_at = freed < 0 ? -1 : report_version(self);
    if (announced_at < 0)
        return -1;
    if (freed)
        answer(self, &(Message){.kind = SLOT_FREED, .worker = self->worker});
    double wait = announced_at > 0 && announced_at < started ? started - announced_at : 0;
    if (word & 1)
        answer(self, &(Message){.kind = ACK, .worker = self->worker, .version = (uint64_t)self->version, .wait = wait,
                                .apply = now() - started});
    return !self->disconnected;
}

/* Record the model's slot as used, and return 1; 0 if there is a new version, or no connection; -1 with an error. */
static int use_current_slot(WorkerSlot *self)
{
    Block *block = self->block;
    if (lock_own(block))
        return -1;
    int current = owns_words(self) && version_in(block->published) <= tried_version(self);
    if (current)
        store(&block->used_slot, self->used = self->bound_slot);
    unlock(block);
    self->busy = !current || self->bound_slot >= 0;
    return current;
}

PyObject *WorkerSlot_poll_update(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->updater)
        Py_RETURN_FALSE;
    if (self->block && !self->torn) {
        int current = use_current_slot(self);
        if (current < 0)
            return NULL;
        if (current)
            Py_RETURN_FALSE;
        int done = install(self, now());
        if (done > 0)
            Py_RETURN_FALSE;
        if (done < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) /* from a signal handler */
            return NULL;
        PyErr_Clear(); /* the updater meets the same error, and tells the sender */
    }
    return PyObject_CallMethodNoArgs(self->updater, names.poll_update);
}

PyObject *WorkerSlot_leaving_gate(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->updater)
        Py_RETURN_NONE;
    if (!self->block || !self->installer)
        return PyObject_CallMethodNoArgs(self->updater, names.leaving_gate);
    int freed = release_slot(self);
    if (freed < 0)
        return NULL;
    if (freed)
        answer(self, &(Message){.kind = SLOT_FREED, .worker = self->worker});
    if (self->disconnected)
        return PyObject_CallMethodNoArgs(self->updater, names.leaving_gate);
    Py_RETURN_NONE;
}

PyObject *WorkerSlot_on_readable(WorkerSlot *self, PyObject *Py_UNUSED(ignored))
{
    Message message;
    if (!self->updater)
        Py_RETURN_FALSE;
    if (!self->installer || !take_message(self->fd, UPDATE, 0, &message))
        return PyObject_CallMethodNoArgs(self->updater, names.on_readable);
    PyObject *updater = Py_NewRef(self->updater), *gate_state = Py_NewRef(self->gate_state);
    PyObject *announced_at = PyFloat_FromDouble(now());
    int failed = !announced_at || PyObject_SetAttr(updater, names.announced_at, announced_at) || pass_through_gate(gate_state)
        || PyObject_SetAttr(updater, names.announced_at, names.zero); /* the acting thread may have installed it */
    Py_XDECREF(announced_at);
    Py_DECREF(updater);
    Py_DECREF(gate_state);
    if (failed)
        return NULL;
    Py_RETURN_TRUE;
}
