/* TensorTree: finds the tensors of a module while its tree is unchanged. */

#include "native.h"

typedef struct {
    PyObject *where, *key; /* without a key: the dictionary has to keep its size */
    PyObject *then;        /* the child module that was there, or None; NULL for a tensor */
    Py_ssize_t size;
} Spot;

struct TensorTree {
    PyObject_HEAD
    PyObject *keep; /* the arguments, which own all that is pointed to */
    Py_ssize_t places, count;
    Spot *spots; /* places, then links, then vacant places, then tables */
};

static int TensorTree_traverse(TensorTree *self, visitproc visit, void *arg)
{
    Py_VISIT(self->keep);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int TensorTree_clear(TensorTree *self)
{
    self->places = self->count = 0;
    Py_CLEAR(self->keep);
    return 0;
}

static void TensorTree_free(TensorTree *self)
{
    PyObject_GC_UnTrack(self);
    TensorTree_clear(self);
    PyMem_Free(self->spots);
    free_object(self);
}

/* Append spots, which have `then` if they do not bring their own. Return 0, or -1 with an error. */
static int append(TensorTree *self, PyObject *tuple, PyObject *then)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        Spot *spot = &self->spots[self->count++];
        spot->then = then;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "O!U|O", &PyDict_Type, &spot->where, &spot->key, &spot->then))
            return -1;
    }
    return 0;
}

static PyObject *TensorTree_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *places, *links, *vacant, *tables;
    if (!PyArg_ParseTuple(args, "O!O!O!O!:TensorTree", &PyTuple_Type, &places, &PyTuple_Type, &links, &PyTuple_Type, &vacant,
                          &PyTuple_Type, &tables))
        return NULL;
    TensorTree *self = (TensorTree *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->keep = Py_NewRef(args);
    self->places = PyTuple_GET_SIZE(places);
    Py_ssize_t most = self->places + PyTuple_GET_SIZE(links) + PyTuple_GET_SIZE(vacant) + PyTuple_GET_SIZE(tables);
    self->spots = PyMem_Calloc((size_t)most + 1, sizeof(Spot));
    if (!self->spots)
        PyErr_NoMemory();
    else if (!append(self, places, NULL) && !append(self, links, NULL) && !append(self, vacant, Py_None)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tables) && !PyErr_Occurred(); i++) {
            PyObject *table = PyTuple_GET_ITEM(tables, i);
            self->spots[self->count++] = (Spot){.where = table, .size = PyDict_Size(table)};
        }
        if (!PyErr_Occurred())
            return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

PyObject *TensorTree_tensors(TensorTree *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *tensors = PyList_New(self->places);
    for (Py_ssize_t i = 0; tensors && i < self->count; i++) {
        const Spot *spot = &self->spots[i];
        PyObject *now = spot->key ? PyDict_GetItemWithError(spot->where, spot->key) : NULL;
        int changed = !spot->key           ? PyDict_GET_SIZE(spot->where) != spot->size
                      : i < self->places ? !now || now == Py_None
                                         : now != spot->then;
        if (changed) {
            Py_DECREF(tensors);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        }
        if (i < self->places)
            PyList_SET_ITEM(tensors, i, Py_NewRef(now));
    }
    return tensors;
}

static PyMethodDef TensorTree_methods[] = {{"tensors", (PyCFunction)TensorTree_tensors, METH_NOARGS, NULL}, {NULL}};
static PyType_Slot TensorTree_slots[] = {
    SLOT(tp_new, TensorTree_new),     SLOT(tp_dealloc, TensorTree_free),    SLOT(tp_traverse, TensorTree_traverse),
    SLOT(tp_clear, TensorTree_clear), SLOT(tp_methods, TensorTree_methods), {0, NULL},
};
PyType_Spec TensorTree_spec = {"wsync._native.TensorTree", sizeof(TensorTree), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                               TensorTree_slots};
