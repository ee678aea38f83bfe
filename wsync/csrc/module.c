/* wsync._native: the inner loops of an update. _native.pyi documents the classes.
 *
 * Between two batches a trainer's caches are cold, and an interpreter that walks through a module, asks where each
 * tensor lies and stores a few words spends its time waiting for memory: ten times what the copy itself takes.
 * Tensors are read through DLPack's exchange table (dlpack.h, DLPackExchangeAPI, version 1), which PyTorch offers at
 * torch.Tensor.__dlpack_c_exchange_api__: no header of PyTorch is needed, and the build is tied to no version of it.
 */

#include "native.h"

#define REVISION 105 /* of the interface; wsync/native.py names the one that it expects */

const DLPackExchange *dlpack;
PyTypeObject *TensorTree_type, *Installer_type;
struct Names names;

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    Py_INCREF(args); /* for ever: it owns what `names` has */
    if (!PyArg_ParseTuple(args, "OOOOO:configure", &capsule, &names.tensor, &names.parameter, &names.increment_version,
                          &names.clear_autocast_cache))
        return NULL;
    dlpack = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (dlpack && (dlpack->version.major != 1 || !dlpack->view))
        PyErr_SetString(PyExc_ImportError, "another version of DLPack's exchange table");
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
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

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "wsync._native", .m_size = -1,
                                        .m_methods = functions};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept)
{
    *kept = (PyTypeObject *)PyType_FromSpec(spec); /* for ever */
    return *kept ? PyModule_AddType(module, *kept) : -1;
}

static int fill(PyObject *module)
{
    extern PyType_Spec PackPlan_spec, TensorTree_spec, Installer_spec, SenderWords_spec, WorkerWords_spec;
    PyTypeObject *ignored;
    names.is_neg = PyUnicode_InternFromString("is_neg");
    names.is_inference = PyUnicode_InternFromString("is_inference");
    names.poll_update = PyUnicode_InternFromString("poll_update");
    names.leaving_gate = PyUnicode_InternFromString("leaving_gate");
    names.data = PyUnicode_InternFromString("data");
    if (!names.is_neg || !names.is_inference || !names.poll_update || !names.leaving_gate || !names.data)
        return -1;
    return add_type(module, &PackPlan_spec, &ignored) || add_type(module, &TensorTree_spec, &TensorTree_type)
           || add_type(module, &Installer_spec, &Installer_type) || add_type(module, &SenderWords_spec, &ignored)
           || add_type(module, &WorkerWords_spec, &ignored) || PyModule_AddIntConstant(module, "REVISION", REVISION)
           || PyModule_AddIntConstant(module, "BLOCK_SIZE", sizeof(Block))
           || PyModule_AddIntConstant(module, "RECORDS_SIZE", MAX_SLOTS * sizeof(Record))
           || PyModule_AddIntConstant(module, "MAX_SLOTS", MAX_SLOTS);
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module && fill(module))
        Py_CLEAR(module);
    return module;
}
