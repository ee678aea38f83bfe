/* PackPlan: copies tensors into the views of one buffer. */

#include "native.h"

typedef struct {
    DLTensor view; /* of a tensor that the plan keeps alive */
    size_t nbytes;
    Py_ssize_t leader;  /* the first entry with the same memory (a tied tensor), or its own index */
    PyObject *tensor;   /* copied here last, and known not to be negated */
    const char *source; /* its address */
} Entry;

struct PackPlan {
    PyObject_HEAD
    PyObject *views; /* a tuple */
    Py_ssize_t count;
    Entry *entries;
    Span *spans; /* at most one per entry */
    int plain;   /* whether all views are in main memory, and none is complex; otherwise no copy fits */
    int shared;  /* whether other processes read the views */
};

int is_like(PyObject *tensor, const DLTensor *like, DLTensor *view)
{
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != names.tensor && type != names.parameter) /* a subclass may keep its numbers elsewhere */
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

/* Drop the references to the tensors that were copied last. */
static void forget(PackPlan *self)
{
    for (Py_ssize_t i = 0; self->entries && i < self->count; i++)
        Py_CLEAR(self->entries[i].tensor);
}

static void PackPlan_free(PackPlan *self)
{
    forget(self);
    PyMem_Free(self->entries);
    PyMem_Free(self->spans);
    Py_XDECREF(self->views);
    free_object(self);
}

/* Read the views into entries. Return 0, or -1 with an error. */
static int read_views(PackPlan *self)
{
    self->plain = 1;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Entry *entry = &self->entries[i];
        if (dlpack->view(PyTuple_GET_ITEM(self->views, i), &entry->view))
            return -1;
        self->plain &= entry->view.device.type == DL_CPU && entry->view.dtype.code != DL_COMPLEX;
        entry->nbytes = size_of(&entry->view);
        entry->leader = i;
        for (Py_ssize_t j = 0; entry->nbytes && j < i; j++) /* empty tensors share no memory, whatever their address */
            if (self->entries[j].nbytes && start_of(&self->entries[j].view) == start_of(&entry->view)) {
                entry->leader = j;
                break;
            }
    }
    return 0;
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
    self->shared = shared;
    self->views = PySequence_Tuple(views);
    if (self->views) {
        self->count = PyTuple_GET_SIZE(self->views);
        self->entries = PyMem_Calloc((size_t)self->count + 1, sizeof(Entry));
        self->spans = PyMem_Calloc((size_t)self->count + 1, sizeof(Span));
        if (!self->entries || !self->spans)
            PyErr_NoMemory();
        else if (!read_views(self))
            return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

/* Return 1 if all tensors fit, none is lazily negated, and those that were tied are (the others would have to be
 * compared); 0 if not; -1 with an error. A tensor is asked once, while it stays where it is. As other threads may run
 * meanwhile, all are looked at again after that. */
static int know_tensors(PackPlan *self, PyObject *tensors)
{
    for (int asked = 1; asked;) {
        asked = 0;
        for (Py_ssize_t i = 0; i < self->count; i++) {
            Entry *entry = &self->entries[i];
            DLTensor view;
            if (PyList_GET_SIZE(tensors) != self->count)
                return 0; /* another thread has changed the list */
            PyObject *tensor = PyList_GET_ITEM(tensors, i);
            if (!is_like(tensor, &entry->view, &view)) /* it may not even be a tensor */
                return 0;
            if (entry->tensor != tensor || entry->source != start_of(&view)) {
                Py_XSETREF(entry->tensor, Py_NewRef(tensor));
                entry->source = start_of(&view);
                int negative = ask(entry->tensor, names.is_neg);
                if (negative) {
                    Py_CLEAR(entry->tensor);
                    return negative < 0 ? -1 : 0;
                }
                asked = 1;
            }
            if (entry->nbytes && entry->source != self->entries[entry->leader].source)
                return 0;
        }
    }
    return 1;
}

static void copy(PackPlan *self)
{
    size_t count = 0;
    for (Py_ssize_t i = 0; i < self->count; i++) {
        Entry *entry = &self->entries[i];
        if (entry->nbytes && entry->leader == i)
            self->spans[count++] = (Span){start_of(&entry->view), entry->source, entry->nbytes};
    }
    copy_spans(self->spans, count, self->shared);
}

/* Copy tensors, a list or a TensorTree, into the views: True; False if they are not plain bytes that fit; None if the
 * tree's module has changed. Those of a tree are kept, and known the next time. */
static PyObject *PackPlan_fill(PackPlan *self, PyObject *given)
{
    int tree = Py_IS_TYPE(given, TensorTree_type), fits = 0;
    PyObject *tensors = tree ? TensorTree_tensors((TensorTree *)given, NULL) : Py_NewRef(given);
    if (!tensors || tensors == Py_None)
        return tensors;
    if (self->plain && PyList_CheckExact(tensors) && PyList_GET_SIZE(tensors) == self->count) {
        fits = know_tensors(self, tensors);
        if (fits > 0)
            copy(self); /* since they were looked at, no other thread has run; one may, if the copy is large */
        if (!tree)
            forget(self);
    }
    Py_DECREF(tensors);
    return fits < 0 ? NULL : PyBool_FromLong(fits);
}

PyObject *PackPlan_views(PackPlan *self)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        DLTensor now;
        if (!self->entries[i].nbytes)
            continue;
        if (!dlpack->view(PyTuple_GET_ITEM(self->views, i), &now) && start_of(&now) == start_of(&self->entries[i].view))
            break; /* the views are of one storage */
        PyErr_Clear();
        return NULL;
    }
    return self->views;
}

static PyObject *PackPlan_in_place(PackPlan *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(PackPlan_views(self) != NULL);
}

static PyMethodDef PackPlan_methods[] = {{"fill", (PyCFunction)PackPlan_fill, METH_O, NULL}, {NULL}};
static PyGetSetDef PackPlan_attributes[] = {{"in_place", (getter)PackPlan_in_place, NULL, NULL, NULL}, {NULL}};
static PyType_Slot PackPlan_slots[] = {
    SLOT(tp_new, PackPlan_new),         SLOT(tp_dealloc, PackPlan_free),
    SLOT(tp_methods, PackPlan_methods), SLOT(tp_getset, PackPlan_attributes), {0, NULL},
};
PyType_Spec PackPlan_spec = {"wsync._native.PackPlan", sizeof(PackPlan), 0, Py_TPFLAGS_DEFAULT, PackPlan_slots};
