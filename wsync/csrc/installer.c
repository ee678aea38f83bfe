/* Installer: switches a model to an update, while the model is what it was (loops/installer.py). */

#include "loops.h"

struct Installer {
    PyObject_HEAD
    PyObject *tree, *tensors; /* what the tree has to find */
    PyObject *bound, *copied; /* tuples of (tensor, index of its view) */
    PyObject *written;        /* a list of the copied tensors with a version counter that autograd reads */
    Py_ssize_t views;         /* the smallest number of views that will do */
    int plain;                /* whether no copied tensor is lazily negated or conjugated */
    Span *spans;              /* of the copied tensors */
};

static int Installer_traverse(Installer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->tree);
    Py_VISIT(self->tensors);
    Py_VISIT(self->bound);
    Py_VISIT(self->copied);
    Py_VISIT(self->written);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Installer_clear(Installer *self)
{
    Py_CLEAR(self->tree);
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->bound);
    Py_CLEAR(self->copied);
    Py_CLEAR(self->written);
    return 0;
}

static void Installer_free(Installer *self)
{
    PyObject_GC_UnTrack(self);
    Installer_clear(self);
    PyMem_Free(self->spans);
    free_object(self);
}

/* Return how many views the pairs need; -1 with an error if they are not pairs. */
static Py_ssize_t count_views(PyObject *pairs)
{
    Py_ssize_t most = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *tensor;
        Py_ssize_t index;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "On", &tensor, &index))
            return -1;
        if (index < 0) {
            PyErr_SetString(PyExc_ValueError, "the index of a view is not negative");
            return -1;
        }
        most = index >= most ? index + 1 : most;
    }
    return most;
}

/* Call a method that returns a bool: 1, 0, or -1 with an error. */
static int ask(PyObject *tensor, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(tensor, method);
    int truth = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return truth;
}

static int read_copied(Installer *self)
{
    self->plain = 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->copied); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(PyTuple_GET_ITEM(self->copied, i), 0);
        int negative = ask(tensor, names.is_neg), conjugate = negative < 0 ? -1 : ask(tensor, names.is_conj);
        int inference = conjugate < 0 ? -1 : ask(tensor, names.is_inference);
        if (inference < 0 || (!inference && PyList_Append(self->written, tensor)))
            return -1;
        self->plain &= !negative && !conjugate;
    }
    return 0;
}

static PyObject *Installer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tree, *tensors, *bound, *copied;
    if (!PyArg_ParseTuple(args, "O!O!O!O!:Installer", TensorTree_type, &tree, &PyTuple_Type, &tensors, &PyTuple_Type,
                          &bound, &PyTuple_Type, &copied))
        return NULL;
    Py_ssize_t first = count_views(bound), second = first < 0 ? -1 : count_views(copied);
    if (second < 0)
        return NULL;
    Installer *self = (Installer *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->tree = Py_NewRef(tree);
    self->tensors = Py_NewRef(tensors);
    self->bound = Py_NewRef(bound);
    self->copied = Py_NewRef(copied);
    self->written = PyList_New(0);
    self->views = first > second ? first : second;
    self->spans = PyMem_Calloc((size_t)PyTuple_GET_SIZE(copied) + 1, sizeof(Span));
    if (!self->spans)
        PyErr_NoMemory();
    if (!self->spans || !self->written || read_copied(self))
        Py_CLEAR(self);
    return (PyObject *)self;
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

static PyObject *pair_at(PyObject *pairs, Py_ssize_t i, PyObject *views, PyObject **view)
{
    PyObject *pair = PyTuple_GET_ITEM(pairs, i);
    *view = PyTuple_GET_ITEM(views, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1)));
    return PyTuple_GET_ITEM(pair, 0);
}

/* Return 1 if the bound parameters are in main memory and have their views' dtypes; 0 if not; -1 with an error. */
static int can_be_bound(PyObject *bound, PyObject *views)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(bound); i++) {
        DLTensor from, to;
        PyObject *view, *parameter = pair_at(bound, i, views, &view);
        if (dlpack->view(view, &from) || dlpack->view(parameter, &to))
            return -1;
        if (to.device.type != DL_CPU || memcmp(&from.dtype, &to.dtype, sizeof to.dtype))
            return 0;
    }
    return 1;
}

/* Find the copied tensors' memory. Return 1; 0 if one of them is not plain bytes; -1 with an error. */
static int find_spans(Installer *self, PyObject *views)
{
    int plain = self->plain;
    for (Py_ssize_t i = 0; plain && i < PyTuple_GET_SIZE(self->copied); i++) {
        DLTensor from, to;
        PyObject *view, *tensor = pair_at(self->copied, i, views, &view);
        if (dlpack->view(view, &from))
            return -1;
        plain = from.device.type == DL_CPU && is_like(tensor, &from, &to);
        if (plain)
            self->spans[i] = (Span){start_of(&to), NULL, size_of(&to)};
    }
    return plain;
}

static int has_views(Installer *self, PyObject *views)
{
    return PyTuple_CheckExact(views) && PyTuple_GET_SIZE(views) >= self->views;
}

int Installer_check(Installer *self, PyObject *views)
{
    int fits = has_views(self, views) ? is_unchanged(self) : 0;
    if (fits > 0)
        fits = can_be_bound(self->bound, views);
    return fits > 0 ? find_spans(self, views) : fits;
}

static int called(PyObject *result)
{
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int copy_by_torch(Installer *self, PyObject *views)
{
    Py_ssize_t count = PyTuple_GET_SIZE(self->copied);
    PyObject *to = PyList_New(count), *from = PyList_New(count);
    for (Py_ssize_t i = 0; to && from && i < count; i++) {
        PyObject *view, *tensor = pair_at(self->copied, i, views, &view);
        PyList_SET_ITEM(to, i, Py_NewRef(tensor));
        PyList_SET_ITEM(from, i, Py_NewRef(view));
    }
    int failed = !to || !from || called(PyObject_CallFunctionObjArgs(names.copy_into_model, to, from, NULL));
    Py_XDECREF(to);
    Py_XDECREF(from);
    return failed ? -1 : 0;
}

/* Copy the views of an arena, which fill their memory without a gap, as bytes: right after find_spans. */
static int copy_by_bytes(Installer *self, PyObject *views)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->copied); i++) {
        DLTensor from;
        PyObject *view;
        pair_at(self->copied, i, views, &view);
        if (dlpack->view(view, &from))
            return -1;
        self->spans[i].from = start_of(&from);
    }
    if (copy_spans(self->spans, (size_t)PyTuple_GET_SIZE(self->copied), 0))
        return -1;
    return PyList_GET_SIZE(self->written) ? called(PyObject_CallOneArg(names.increment_version, self->written)) : 0;
}

static int copy_and_bind(Installer *self, PyObject *views, int (*copy)(Installer *, PyObject *))
{
    if (PyTuple_GET_SIZE(self->copied) && copy(self, views))
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->bound); i++) {
        PyObject *view, *parameter = pair_at(self->bound, i, views, &view);
        if (PyObject_SetAttr(parameter, names.data, view))
            return -1;
    }
    return called(PyObject_CallNoArgs(names.clear_autocast_cache));
}

int Installer_switch(Installer *self, PyObject *views)
{
    Py_INCREF(self); /* other threads may run during a large copy */
    Py_INCREF(views);
    int failed = copy_and_bind(self, views, copy_by_bytes);
    Py_DECREF(views);
    Py_DECREF(self);
    return failed;
}

static PyObject *Installer_apply(Installer *self, PyObject *given)
{
    PyObject *views = PySequence_Tuple(given);
    if (views && !has_views(self, views)) {
        PyErr_SetString(PyExc_ValueError, "fewer views than the model has tensors");
        Py_CLEAR(views);
    }
    int failed = !views || copy_and_bind(self, views, copy_by_torch);
    Py_XDECREF(views);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef Installer_methods[] = {
    {"apply", (PyCFunction)Installer_apply, METH_O, "apply(views): see wsync.loops.installer."},
    {NULL},
};
PyDoc_STRVAR(Installer_doc, "Installer(tree, tensors, bound, copied): see wsync.loops.installer.");
static PyType_Slot Installer_slots[] = {
    SLOT(tp_doc, Installer_doc),           SLOT(tp_new, Installer_new),     SLOT(tp_dealloc, Installer_free),
    SLOT(tp_traverse, Installer_traverse), SLOT(tp_clear, Installer_clear), SLOT(tp_methods, Installer_methods),
    {0, NULL},
};
PyType_Spec Installer_spec = {"wsync._loops.Installer", sizeof(Installer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                              Installer_slots};
