/* TensorTree: finds the tensors of a module while its tree is unchanged (loops/tensor_tree.py). */

#include "loops.h"

typedef struct {
    PyObject *where, *key;
    PyObject *then; /* the child module that was there; NULL for a tensor, or for None */
} Spot;

typedef struct {
    PyObject *table;
    Py_ssize_t size;
} Table;

struct TensorTree {
    PyObject_HEAD
    PyObject *keep; /* the arguments, which own all that is pointed to */
    Py_ssize_t places, links, vacant, tables;
    Spot *spots; /* places, then links, then vacant */
    Table *sizes;
};

static int TensorTree_traverse(TensorTree *self, visitproc visit, void *arg)
{
    Py_VISIT(self->keep);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int TensorTree_clear(TensorTree *self)
{
    self->places = self->links = self->vacant = self->tables = 0;
    Py_CLEAR(self->keep);
    return 0;
}

static void TensorTree_free(TensorTree *self)
{
    PyObject_GC_UnTrack(self);
    TensorTree_clear(self);
    PyMem_Free(self->spots);
    PyMem_Free(self->sizes);
    free_object(self);
}

static int read_spots(PyObject *tuple, int with_child, Spot *spots)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        Spot *spot = &spots[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), with_child ? "O!UO" : "O!U", &PyDict_Type, &spot->where,
                              &spot->key, &spot->then))
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
    Py_ssize_t p = PyTuple_GET_SIZE(places), l = PyTuple_GET_SIZE(links), v = PyTuple_GET_SIZE(vacant);
    Py_ssize_t t = PyTuple_GET_SIZE(tables);
    self->spots = PyMem_Calloc((size_t)(p + l + v) + 1, sizeof(Spot));
    self->sizes = PyMem_Calloc((size_t)t + 1, sizeof(Table));
    if (!self->spots || !self->sizes) {
        PyErr_NoMemory();
        goto failed;
    }
    if (read_spots(places, 0, self->spots) || read_spots(links, 1, self->spots + p)
        || read_spots(vacant, 0, self->spots + p + l))
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

PyObject *TensorTree_tensors(TensorTree *self, PyObject *Py_UNUSED(ignored))
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

PyDoc_STRVAR(TensorTree_tensors_doc, "The tensors at the places; None if the tree is not as it was.");
static PyMethodDef TensorTree_methods[] = {
    {"tensors", (PyCFunction)TensorTree_tensors, METH_NOARGS, TensorTree_tensors_doc},
    {NULL},
};
PyDoc_STRVAR(TensorTree_doc, "TensorTree(places, links, vacant, tables): where a module keeps tensors, and what must not change.");
static PyType_Slot TensorTree_slots[] = {
    SLOT(tp_doc, TensorTree_doc),           SLOT(tp_new, TensorTree_new),     SLOT(tp_dealloc, TensorTree_free),
    SLOT(tp_traverse, TensorTree_traverse), SLOT(tp_clear, TensorTree_clear), SLOT(tp_methods, TensorTree_methods),
    {0, NULL},
};
PyType_Spec TensorTree_spec = {"wsync._loops.TensorTree", sizeof(TensorTree), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, TensorTree_slots};
