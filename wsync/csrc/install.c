/* Installer: how a model takes an update, as long as it is what it was (binding.py). */

#include "native.h"

struct Installer {
    PyObject_HEAD
    PyObject *tree, *tensors;  /* what it has to find, to be what it was */
    PyObject *bound, *copied;  /* tuples of (tensor, index of its view) */
    PyObject *bump;            /* tells autograd that tensors were written */
    Py_ssize_t views;          /* so many there have to be */
    Span *spans;               /* what is to be copied */
};

static int Installer_traverse(Installer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->tree);
    Py_VISIT(self->tensors);
    Py_VISIT(self->bound);
    Py_VISIT(self->copied);
    Py_VISIT(self->bump);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int Installer_clear(Installer *self)
{
    Py_CLEAR(self->tree);
    Py_CLEAR(self->tensors);
    Py_CLEAR(self->bound);
    Py_CLEAR(self->copied);
    Py_CLEAR(self->bump);
    return 0;
}

static void Installer_free(Installer *self)
{
    PyObject_GC_UnTrack(self);
    Installer_clear(self);
    PyMem_Free(self->spans);
    free_object(self);
}

/* How many views pairs need; -1 with an error if they are none. */
static Py_ssize_t count_views(PyObject *pairs)
{
    Py_ssize_t most = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs); i++) {
        PyObject *tensor;
        Py_ssize_t index;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pairs, i), "On", &tensor, &index))
            return -1;
        if (index < 0) {
            PyErr_SetString(PyExc_ValueError, "there is no such view");
            return -1;
        }
        most = index >= most ? index + 1 : most;
    }
    return most;
}

static PyObject *Installer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tree, *tensors, *bound, *copied, *bump;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O:Installer", Tree_type, &tree, &PyTuple_Type, &tensors, &PyTuple_Type, &bound,
                          &PyTuple_Type, &copied, &bump))
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
    self->bump = Py_NewRef(bump);
    self->views = first > second ? first : second;
    self->spans = PyMem_Calloc((size_t)PyTuple_GET_SIZE(copied) + 1, sizeof(Span));
    if (self->spans)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static int is_current(Installer *self)
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

static PyObject *pair_at(PyObject *pairs, Py_ssize_t i, PyObject *views, PyObject **view)
{
    PyObject *pair = PyTuple_GET_ITEM(pairs, i);
    *view = PyTuple_GET_ITEM(views, PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 1)));
    return PyTuple_GET_ITEM(pair, 0);
}

/* Returns 1 if parameters are of their views' dtypes, in the main memory; 0 if not; -1 with an error. */
static int are_alike(PyObject *bound, PyObject *views)
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

int Installer_fits(Installer *self, PyObject *views)
{
    if (!PyTuple_CheckExact(views) || PyTuple_GET_SIZE(views) < self->views)
        return 0;
    int fits = is_current(self);
    if (fits > 0)
        fits = are_alike(self->bound, views);
    for (Py_ssize_t i = 0; fits > 0 && i < PyTuple_GET_SIZE(self->copied); i++) {
        DLTensor from, to;
        PyObject *view, *tensor = pair_at(self->copied, i, views, &view);
        if (dlpack->view(view, &from))
            return -1;
        fits = is_like(tensor, &from, &to);
        if (fits)
            self->spans[i] = (Span){start_of(&to), NULL, size_of(&to)};
    }
    return fits;
}

static int take(Installer *self, PyObject *views)
{
    Py_ssize_t copied = PyTuple_GET_SIZE(self->copied);
    PyObject *view;
    for (Py_ssize_t i = 0; i < copied; i++) {
        DLTensor from;
        pair_at(self->copied, i, views, &view);
        if (dlpack->view(view, &from))
            return -1;
        self->spans[i].from = start_of(&from);
    }
    if (copy_spans(self->spans, (size_t)copied, 0))
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->bound); i++) {
        PyObject *parameter = pair_at(self->bound, i, views, &view);
        if (PyObject_SetAttr(parameter, names.data, view))
            return -1;
    }
    if (!copied)
        return 0;
    PyObject *done = PyObject_CallNoArgs(self->bump);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int Installer_take(Installer *self, PyObject *views)
{
    Py_INCREF(self); /* where much is copied other threads run */
    Py_INCREF(views);
    int failed = take(self, views);
    Py_DECREF(views);
    Py_DECREF(self);
    return failed;
}

static PyObject *Installer_install(Installer *self, PyObject *views)
{
    int done = Installer_fits(self, views);
    if (done > 0 && Installer_take(self, views))
        done = -1;
    if (done < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) /* a signal */
        return NULL;
    PyErr_Clear(); /* the slow path comes upon it again, and tells the sender */
    return PyBool_FromLong(done > 0);
}

PyDoc_STRVAR(Installer_install_doc,
             "Binding.install; False if the model is not what it was, or refuses, or a tensor is not just bytes: then the slow\n"
             "path has to do it, or say why not.");
static PyMethodDef Installer_methods[] = {
    {"install", (PyCFunction)Installer_install, METH_O, Installer_install_doc},
    {NULL},
};
PyDoc_STRVAR(Installer_doc, "Installer(tree, tensors, bound, copied, bump): how a model takes an update.");
static PyType_Slot Installer_slots[] = {
    SLOT(tp_doc, Installer_doc),           SLOT(tp_new, Installer_new),     SLOT(tp_dealloc, Installer_free),
    SLOT(tp_traverse, Installer_traverse), SLOT(tp_clear, Installer_clear), SLOT(tp_methods, Installer_methods),
    {0, NULL},
};
PyType_Spec Installer_spec = {"wsync._native.Installer", sizeof(Installer), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                              Installer_slots};
