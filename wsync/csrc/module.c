/* wsync._native: the inner loops of an update.
 *
 * Between two batches a trainer's caches are cold, and an interpreter that walks through a module, asks where each
 * tensor lies and stores a few words spends its time waiting for memory: ten times what the copy itself takes.
 *
 *     pack_plan.c      copies tensors into a buffer      tensor_tree.c    finds a module's tensors
 *     sender_words.c   a trainer's words of an arena     installer.c      switches a model to an update
 *     worker_words.c   a worker's words of an arena      copy.c           copies bytes
 *
 * Tensors are read through DLPack's exchange table (dlpack.h, DLPackExchangeAPI, version 1), which PyTorch offers at
 * torch.Tensor.__dlpack_c_exchange_api__: no header of PyTorch is needed, and the build is tied to no version of it.
 * _native.pyi documents the classes for Python.
 */

#include "native.h"

#define REVISION 100 /* of the interface; wsync/native.py names the one that it expects */

const DLPackExchange *dlpack;
PyTypeObject *PackPlan_type, *TensorTree_type, *Installer_type;
struct Names names;

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *types, *increment, *autocast;
    if (!PyArg_ParseTuple(args, "OO!OO:configure", &capsule, &PyTuple_Type, &types, &increment, &autocast))
        return NULL;
    const DLPackExchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table)
        return NULL;
    if (table->version.major != 1 || !table->view) {
        PyErr_SetString(PyExc_ImportError, "another version of DLPack's exchange table");
        return NULL;
    }
    Py_XSETREF(names.plain_types, Py_NewRef(types));
    Py_XSETREF(names.increment_version, Py_NewRef(increment));
    Py_XSETREF(names.clear_autocast_cache, Py_NewRef(autocast));
    dlpack = table;
    Py_RETURN_NONE;
}

int map_words(PyObject *memory, Py_ssize_t capacity, Py_buffer *words, Block **blocks, Record **records)
{
    if (PyObject_GetBuffer(memory, words, PyBUF_WRITABLE))
        return -1;
    Py_ssize_t room = words->len - MAX_SLOTS * (Py_ssize_t)sizeof(Record);
    if (capacity < 0 || room < 0 || capacity > room / (Py_ssize_t)sizeof(Block)) {
        PyBuffer_Release(words);
        PyErr_SetString(PyExc_ValueError, "there is too little memory for the words");
        return -1;
    }
    *blocks = words->buf;
    *records = (Record *)(*blocks + capacity);
    return 0;
}

static PyMethodDef functions[] = {{"configure", configure, METH_VARARGS, NULL}, {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "wsync._native",
    .m_doc = "The inner loops of an update.",
    .m_size = -1,
    .m_methods = functions,
};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    PyObject *type = PyType_FromSpec(spec);
    if (!type)
        return -1;
    if (kept)
        *kept = (PyTypeObject *)Py_NewRef(type);
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static int make_names(void)
{
    struct { PyObject **name; const char *text; } all[] = {
        {&names.is_neg, "is_neg"},           {&names.is_inference, "is_inference"}, {&names.data, "data"},
        {&names.poll_update, "poll_update"}, {&names.leaving_gate, "leaving_gate"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!(*all[i].name = PyUnicode_InternFromString(all[i].text)))
            return -1;
    return 0;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (add_type(module, &PackPlan_spec, &PackPlan_type) || add_type(module, &TensorTree_spec, &TensorTree_type)
        || add_type(module, &Installer_spec, &Installer_type) || add_type(module, &SenderWords_spec, NULL)
        || add_type(module, &WorkerWords_spec, NULL) || make_names()
        || PyModule_AddIntConstant(module, "REVISION", REVISION)
        || PyModule_AddIntConstant(module, "BLOCK_SIZE", sizeof(Block))
        || PyModule_AddIntConstant(module, "RECORDS_SIZE", MAX_SLOTS * sizeof(Record))
        || PyModule_AddIntConstant(module, "MAX_SLOTS", MAX_SLOTS)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
