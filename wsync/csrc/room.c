/* Room: the tensors of a buffer, and what fits them (packing.py). */

#include "native.h"

int is_like(PyObject *tensor, const DLTensor *like, DLTensor *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    int plain = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.plain_types); i++)
        plain |= PyTuple_GET_ITEM(names.plain_types, i) == type;
    if (!plain)
        return 0;
    if (dlpack->view(tensor, view)) { /* sparse, meta, vmapped …: the slow path will see what it is */
        PyErr_Clear();
        return 0;
    }
    if (view->device.type != DL_CPU || view->ndim != like->ndim || view->dtype.code == DL_COMPLEX
        || memcmp(&view->dtype, &like->dtype, sizeof like->dtype))
        return 0;
    for (int32_t d = 0; d < view->ndim; d++)
        if (view->shape[d] != like->shape[d] || (view->shape[d] > 1 && view->strides[d] != like->strides[d]))
            return 0;
    return view->data || !size_of(view); /* zeros that take no memory: the slow path knows them */
}

static int Room_traverse(Room *self, visitproc visit, void *arg)
{
    Py_VISIT(self->views);
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_VISIT(self->places[i].tensor);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

void Room_forget(Room *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_CLEAR(self->places[i].tensor);
}

static int Room_clear(Room *self)
{
    Room_forget(self);
    return 0;
}

static void Room_free(Room *self)
{
    PyObject_GC_UnTrack(self);
    Room_clear(self);
    PyMem_Free(self->places);
    PyMem_Free(self->spans);
    Py_XDECREF(self->views);
    free_object(self);
}

static int by_start(const void *left, const void *right)
{
    const Place *one = *(Place *const *)left, *other = *(Place *const *)right;
    uintptr_t a = (uintptr_t)start_of(&one->view), b = (uintptr_t)start_of(&other->view);
    return a != b ? (a < b ? -1 : 1) : one < other ? -1 : one > other;
}

/* Sorted by where they begin, places that are the same memory stand side by side, the first one first. */
static int find_leaders(Room *self)
{
    Place **sorted = PyMem_Calloc((size_t)self->count + 1, sizeof *sorted);
    if (!sorted) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        self->places[i].leader = i;
        if (self->places[i].nbytes) /* an empty one is nobody's memory */
            sorted[count++] = &self->places[i];
    }
    qsort(sorted, count, sizeof *sorted, by_start);
    for (size_t i = 1; i < count; i++)
        if (start_of(&sorted[i]->view) == start_of(&sorted[i - 1]->view))
            sorted[i]->leader = sorted[i - 1]->leader;
    PyMem_Free(sorted);
    return 0;
}

static PyObject *Room_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *views;
    int shared;
    if (!PyArg_ParseTuple(args, "Op:Room", &views, &shared))
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
    self->shared = shared;
    self->places = PyMem_Calloc((size_t)count + 1, sizeof(Place));
    self->spans = PyMem_Calloc((size_t)count + 1, sizeof(Span));
    if (!self->places || !self->spans) {
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
    }
    if (find_leaders(self))
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Returns 1 if a tensor is not negated when it is read; 0 if it is; -1 with an error. Other threads may run meanwhile. */
static int is_positive(PyObject *tensor)
{
    PyObject *negative = PyObject_CallMethodNoArgs(tensor, names.is_neg);
    Py_XDECREF(negative);
    return negative ? negative == Py_False : -1;
}

/* Ask of each tensor that is not the one last copied, or lies elsewhere. */
static int ask(Room *self, PyObject *tensors)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Place *place = &self->places[i];
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        DLTensor view;
        if (place->tensor == tensor)
            continue;
        if (!is_like(tensor, &place->view, &view)) /* it may be no tensor at all */
            return 0;
        int positive = is_positive(tensor);
        if (positive <= 0)
            return positive;
        if (PyList_GET_SIZE(tensors) != self->count || PyList_GET_ITEM(tensors, i) != tensor)
            return 0; /* somebody has changed the list */
        Py_XSETREF(place->tensor, Py_NewRef(tensor));
        place->source = NULL;
    }
    return 1;
}

int Room_look(Room *self, PyObject *tensors)
{
    if (!PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) != self->count)
        return 0;
    for (int moved = 1; moved;) {
        DLTensor view;
        int positive = ask(self, tensors);
        if (positive <= 0)
            return positive;
        moved = 0;
        for (Py_ssize_t i = 0; i < self->count; i++) { /* from here on nobody else runs */
            Place *place = &self->places[i];
            if (!is_like(place->tensor, &place->view, &view))
                return 0;
            if (place->source && place->source != start_of(&view)) {
                Py_CLEAR(place->tensor);
                moved = 1;
            }
            place->source = start_of(&view);
        }
    }
    for (Py_ssize_t i = 0; i < self->count; i++) /* what is tied no more is for the slow path, which compares it */
        if (self->places[i].nbytes && self->places[i].source != self->places[self->places[i].leader].source)
            return 0;
    return 1;
}

int Room_copy(Room *self)
{
    size_t count = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Place *place = &self->places[i];
        if (place->nbytes && place->leader == i)
            self->spans[count++] = (Span){start_of(&place->view), place->source, place->nbytes};
    }
    Py_INCREF(self);
    int failed = copy_spans(self->spans, count, self->shared);
    Py_DECREF(self);
    return failed;
}

int Room_stays(Room *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        DLTensor now;
        if (!self->places[i].nbytes)
            continue;
        if (dlpack->view(PyTuple_GET_ITEM(self->views, i), &now)) {
            PyErr_Clear();
            return 0;
        }
        return start_of(&now) == start_of(&self->places[i].view); /* they are of one storage */
    }
    return 1;
}

static PyObject *Room_fill(Room *self, PyObject *tensors)
{
    int fits = Room_look(self, tensors);
    if (fits > 0 && Room_copy(self))
        fits = -1;
    Room_forget(self);
    return fits < 0 ? NULL : PyBool_FromLong(fits);
}

PyDoc_STRVAR(Room_fill_doc,
             "Copy a list of tensors into the views; False, with nothing copied, if one is not bytes like its view.");
static PyMethodDef Room_methods[] = {
    {"fill", (PyCFunction)Room_fill, METH_O, Room_fill_doc},
    {NULL},
};
PyDoc_STRVAR(Room_doc, "Room(views, shared): the tensors of a buffer, to be filled with bytes; shared if other processes read them.");
static PyType_Slot Room_slots[] = {
    SLOT(tp_doc, Room_doc), SLOT(tp_new, Room_new), SLOT(tp_dealloc, Room_free), SLOT(tp_methods, Room_methods),
    SLOT(tp_traverse, Room_traverse), SLOT(tp_clear, Room_clear), {0, NULL},
};
PyType_Spec Room_spec = {"wsync._native.Room", sizeof(Room), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Room_slots};
