/* PackPlan: copies tensors into the views of one buffer (loops/pack_plan.py). */

#include "loops.h"

int is_like(PyObject *tensor, const DLTensor *like, DLTensor *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    int plain = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.plain_types); i++)
        plain |= PyTuple_GET_ITEM(names.plain_types, i) == type;
    if (!plain)
        return 0;
    if (dlpack->view(tensor, view)) { /* sparse, meta, vmapped … */
        PyErr_Clear();
        return 0;
    }
    if (view->device.type != DL_CPU || view->ndim != like->ndim || view->dtype.code == DL_COMPLEX
        || memcmp(&view->dtype, &like->dtype, sizeof like->dtype))
        return 0;
    for (int32_t d = 0; d < view->ndim; d++)
        if (view->shape[d] != like->shape[d] || (view->shape[d] > 1 && view->strides[d] != like->strides[d]))
            return 0;
    return view->data || !size_of(view); /* an efficient zero tensor has no memory */
}

static int PackPlan_traverse(PackPlan *self, visitproc visit, void *arg)
{
    Py_VISIT(self->views);
    for (Py_ssize_t i = 0; self->entries && i < self->count; i++)
        Py_VISIT(self->entries[i].tensor);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

void PackPlan_forget(PackPlan *self)
{
    for (Py_ssize_t i = 0; self->entries && i < self->count; i++)
        Py_CLEAR(self->entries[i].tensor);
}

static int PackPlan_clear(PackPlan *self)
{
    PackPlan_forget(self);
    return 0;
}

static void PackPlan_free(PackPlan *self)
{
    PyObject_GC_UnTrack(self);
    PackPlan_clear(self);
    PyMem_Free(self->entries);
    PyMem_Free(self->spans);
    Py_XDECREF(self->views);
    free_object(self);
}

static int by_start(const void *left, const void *right)
{
    const Entry *one = *(Entry *const *)left, *other = *(Entry *const *)right;
    uintptr_t a = (uintptr_t)start_of(&one->view), b = (uintptr_t)start_of(&other->view);
    return a != b ? (a < b ? -1 : 1) : one < other ? -1 : one > other;
}

/* Sorted by address, entries with the same memory stand side by side, the first one first. */
static int find_leaders(PackPlan *self)
{
    Entry **sorted = PyMem_Calloc((size_t)self->count + 1, sizeof *sorted);
    if (!sorted) {
        PyErr_NoMemory();
        return -1;
    }
    size_t count = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        self->entries[i].leader = i;
        if (self->entries[i].nbytes) /* empty tensors share no memory, whatever their address */
            sorted[count++] = &self->entries[i];
    }
    qsort(sorted, count, sizeof *sorted, by_start);
    for (size_t i = 1; i < count; i++)
        if (start_of(&sorted[i]->view) == start_of(&sorted[i - 1]->view))
            sorted[i]->leader = sorted[i - 1]->leader;
    PyMem_Free(sorted);
    return 0;
}

/* Read the views into entries. Return 1; 0 if one is not plain memory; -1 with an error. */
static int read_views(PackPlan *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Entry *entry = &self->entries[i];
        if (dlpack->view(PyTuple_GET_ITEM(self->views, i), &entry->view))
            return -1;
        if (entry->view.device.type != DL_CPU || entry->view.dtype.code == DL_COMPLEX)
            return 0;
        entry->nbytes = size_of(&entry->view);
    }
    return find_leaders(self) ? -1 : 1;
}

static PyObject *PackPlan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *views;
    int shared;
    if (!PyArg_ParseTuple(args, "Op:PackPlan", &views, &shared))
        return NULL;
    PackPlan *self = (PackPlan *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->views = PySequence_Tuple(views);
    if (!self->views)
        goto failed;
    self->count = PyTuple_GET_SIZE(self->views);
    self->shared = shared;
    self->entries = PyMem_Calloc((size_t)self->count + 1, sizeof(Entry));
    self->spans = PyMem_Calloc((size_t)self->count + 1, sizeof(Span));
    if (!self->entries || !self->spans) {
        PyErr_NoMemory();
        goto failed;
    }
    int plain = read_views(self);
    if (plain < 0)
        goto failed;
    if (!plain) {
        PyMem_Free(self->entries);
        self->entries = NULL;
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* Return 1 if a tensor is not lazily negated; 0 if it is; -1 with an error. Other threads may run meanwhile. */
static int is_positive(PyObject *tensor)
{
    PyObject *negative = PyObject_CallMethodNoArgs(tensor, names.is_neg);
    Py_XDECREF(negative);
    return negative ? negative == Py_False : -1;
}

/* Ask each tensor that is not the one copied last, or that has moved since, whether it is lazily negated. */
static int check_new_tensors(PackPlan *self, PyObject *tensors)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Entry *entry = &self->entries[i];
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        DLTensor view;
        if (entry->tensor == tensor)
            continue;
        if (!is_like(tensor, &entry->view, &view)) /* it may not even be a tensor */
            return 0;
        int positive = is_positive(tensor);
        if (positive <= 0)
            return positive;
        if (PyList_GET_SIZE(tensors) != self->count || PyList_GET_ITEM(tensors, i) != tensor)
            return 0; /* another thread has changed the list */
        Py_XSETREF(entry->tensor, Py_NewRef(tensor));
        entry->source = NULL;
    }
    return 1;
}

int PackPlan_check(PackPlan *self, PyObject *tensors)
{
    if (!self->entries || !PyList_CheckExact(tensors) || PyList_GET_SIZE(tensors) != self->count)
        return 0;
    for (int moved = 1; moved;) {
        DLTensor view;
        int positive = check_new_tensors(self, tensors);
        if (positive <= 0)
            return positive;
        moved = 0;
        for (Py_ssize_t i = 0; i < self->count; i++) { /* from here on no other thread runs */
            Entry *entry = &self->entries[i];
            if (!is_like(entry->tensor, &entry->view, &view))
                return 0;
            if (entry->source && entry->source != start_of(&view)) {
                Py_CLEAR(entry->tensor);
                moved = 1;
            }
            entry->source = start_of(&view);
        }
    }
    for (Py_ssize_t i = 0; i < self->count; i++) /* tensors that were tied, and are not any more, have to be compared */
        if (self->entries[i].nbytes && self->entries[i].source != self->entries[self->entries[i].leader].source)
            return 0;
    return 1;
}

int PackPlan_copy(PackPlan *self)
{
    size_t count = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Entry *entry = &self->entries[i];
        if (entry->nbytes && entry->leader == i)
            self->spans[count++] = (Span){start_of(&entry->view), entry->source, entry->nbytes};
    }
    Py_INCREF(self);
    int failed = copy_spans(self->spans, count, self->shared);
    Py_DECREF(self);
    return failed;
}

int PackPlan_is_in_place(PackPlan *self)
{
    for (Py_ssize_t i = 0; self->entries && i < self->count; i++) {
        DLTensor now;
        if (!self->entries[i].nbytes)
            continue;
        if (dlpack->view(PyTuple_GET_ITEM(self->views, i), &now)) {
            PyErr_Clear();
            return 0;
        }
        return start_of(&now) == start_of(&self->entries[i].view); /* the views are of one storage */
    }
    return 1;
}

static PyObject *PackPlan_fill(PackPlan *self, PyObject *tensors)
{
    int fits = PackPlan_check(self, tensors);
    if (fits > 0 && PackPlan_copy(self))
        fits = -1;
    PackPlan_forget(self);
    return fits < 0 ? NULL : PyBool_FromLong(fits);
}

PyDoc_STRVAR(PackPlan_fill_doc, "fill(tensors): see wsync.loops.pack_plan.");
static PyMethodDef PackPlan_methods[] = {
    {"fill", (PyCFunction)PackPlan_fill, METH_O, PackPlan_fill_doc},
    {NULL},
};
static PyMemberDef PackPlan_members[] = {
    {"views", T_OBJECT_EX, offsetof(PackPlan, views), READONLY, NULL},
    {NULL},
};
PyDoc_STRVAR(PackPlan_doc, "PackPlan(views, shared): see wsync.loops.pack_plan.");
static PyType_Slot PackPlan_slots[] = {
    SLOT(tp_doc, PackPlan_doc),           SLOT(tp_new, PackPlan_new),     SLOT(tp_dealloc, PackPlan_free),
    SLOT(tp_traverse, PackPlan_traverse), SLOT(tp_clear, PackPlan_clear), SLOT(tp_methods, PackPlan_methods),
    SLOT(tp_members, PackPlan_members),   {0, NULL},
};
PyType_Spec PackPlan_spec = {"wsync._loops.PackPlan", sizeof(PackPlan), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                             PackPlan_slots};
