/* Installer: switches a model to an update, while the model is what it was. */

#include "native.h"

typedef struct {
    PyObject *tensor; /* of the model; owned by the tuples that were given */
    Py_ssize_t view;  /* the index of its view */
} Pair;

struct Installer {
    PyObject_HEAD
    PyObject *tree, *tensors; /* what the tree has to find */
    PyObject *keep;           /* the arguments */
    PyObject *written;        /* a list of the copied tensors with a version counter that autograd reads */
    Pair *pairs;              /* those that are bound, then those that are copied */
    Py_ssize_t bound, count;
    Py_ssize_t views; /* the smallest number of views that will do */
    int plain;        /* whether no copied tensor is lazily negated */
    Span *spans;      /* of the copied tensors */
};

static int Installer_traverse(Installer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->keep);
    Py_VISIT(self->written);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Installer_clear(Installer *self)
{
    self->count = self->bound = 0;
    self->tree = self->tensors = NULL;
    Py_CLEAR(self->keep);
    Py_CLEAR(self->written);
    return 0;
}

static void Installer_free(Installer *self)
{
    PyObject_GC_UnTrack(self);
    Installer_clear(self);
    PyMem_Free(self->pairs);
    PyMem_Free(self->spans);
    free_object(self);
}

/* Append pairs. Return 0, or -1 with an error. */
static int append(Installer *self, PyObject *pairs)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        Pair *pair = &self->pairs[self->count];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "On", &pair->tensor, &pair->view))
            return -1;
        if (pair->view < 0) {
            PyErr_SetString(PyExc_ValueError, "the index of a view is not negative");
            return -1;
        }
        self->views = pair->view >= self->views ? pair->view + 1 : self->views;
        self->count++;
    }
    return 0;
}

static int ask_copied(Installer *self)
{
    self->plain = 1;
    for (Py_ssize_t i = self->bound; i < self->count; i++) {
        PyObject *tensor = self->pairs[i].tensor;
        int negative = ask(tensor, names.is_neg), inference = negative < 0 ? -1 : ask(tensor, names.is_inference);
        if (inference < 0 || (!inference && PyList_Append(self->written, tensor)))
            return -1;
        self->plain &= !negative; /* a complex tensor, which may be conjugated, is not like its view */
    }
    return 0;
}

static PyObject *Installer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tree, *tensors, *bound, *copied;
    if (!PyArg_ParseTuple(args, "O!O!O!O!:Installer", TensorTree_type, &tree, &PyTuple_Type, &tensors, &PyTuple_Type,
                          &bound, &PyTuple_Type, &copied))
        return NULL;
    Installer *self = (Installer *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->keep = Py_NewRef(args);
    self->tree = tree, self->tensors = tensors;
    self->written = PyList_New(0);
    self->pairs = PyMem_Calloc((size_t)(PyTuple_GET_SIZE(bound) + PyTuple_GET_SIZE(copied)) + 1, sizeof(Pair));
    self->spans = PyMem_Calloc((size_t)PyTuple_GET_SIZE(copied) + 1, sizeof(Span));
    if (!self->pairs || !self->spans)
        PyErr_NoMemory();
    else if (self->written && !append(self, bound)) {
        self->bound = self->count;
        if (!append(self, copied) && !ask_copied(self))
            return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static int is_unchanged(Installer *self)
{
    PyObject *now = TensorTree_tensors((TensorTree *)self->tree, NULL);
    if (!now)
        return -1;
    int unchanged = now != Py_None && PyList_GET_SIZE(now) == PyTuple_GET_SIZE(self->tensors);
    for (Py_ssize_t i = 0; unchanged && i < PyList_GET_SIZE(now); i++)
        unchanged = PyList_GET_ITEM(now, i) == PyTuple_GET_ITEM(self->tensors, i);
    Py_DECREF(now);
    return unchanged;
}

int Installer_check(Installer *self, PyObject *views)
{
    int fits = PyTuple_GET_SIZE(views) >= self->views && self->plain ? is_unchanged(self) : 0;
    for (Py_ssize_t i = 0; fits > 0 && i < self->count; i++) {
        const Pair *pair = &self->pairs[i];
        DLTensor from, to;
        if (dlpack->view(PyTuple_GET_ITEM(views, pair->view), &from))
            return -1;
        if (i >= self->bound) {
            fits = from.device.type == DL_CPU && is_like(pair->tensor, &from, &to);
            if (fits)
                self->spans[i - self->bound] = (Span){start_of(&to), NULL, size_of(&to)};
        } else if (dlpack->view(pair->tensor, &to))
            return -1;
        else /* it may be on a GPU by now, or have another dtype */
            fits = to.device.type == DL_CPU && !memcmp(&from.dtype, &to.dtype, sizeof to.dtype);
    }
    return fits;
}

/* Copy the views of a slot, which fill their memory without a gap, as bytes. */
static int copy(Installer *self, PyObject *views)
{
    for (Py_ssize_t i = self->bound; i < self->count; i++) {
        DLTensor from;
        if (dlpack->view(PyTuple_GET_ITEM(views, self->pairs[i].view), &from))
            return -1;
        self->spans[i - self->bound].from = start_of(&from);
    }
    copy_spans(self->spans, (size_t)(self->count - self->bound), 0);
    PyObject *done = PyObject_CallOneArg(names.increment_version, self->written);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int Installer_switch(Installer *self, PyObject *views)
{
    Py_INCREF(self); /* other threads may run during a large copy */
    Py_INCREF(views);
    int failed = self->count > self->bound && copy(self, views);
    for (Py_ssize_t i = 0; !failed && i < self->bound; i++)
        failed = PyObject_SetAttr(self->pairs[i].tensor, names.data, PyTuple_GET_ITEM(views, self->pairs[i].view));
    PyObject *done = failed ? NULL : PyObject_CallNoArgs(names.clear_autocast_cache);
    Py_XDECREF(done);
    Py_DECREF(views);
    Py_DECREF(self);
    return done ? 0 : -1;
}

static PyType_Slot Installer_slots[] = {
    SLOT(tp_new, Installer_new),     SLOT(tp_dealloc, Installer_free), SLOT(tp_traverse, Installer_traverse),
    SLOT(tp_clear, Installer_clear), {0, NULL},
};
PyType_Spec Installer_spec = {"wsync._native.Installer", sizeof(Installer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                              Installer_slots};
