/* The fast path of an update, compiled.
 *
 * Between two batches a trainer's caches are cold, and an interpreter that walks through a module, asks where each
 * tensor lies and stores a few words spends its time waiting for memory: ten times what the copy itself takes. So the
 * usual case stands here once more, in few cache lines: a module whose tree has not changed, whose tensors are plain,
 * and whose workers are all there.
 *
 *     room.c   a buffer's tensors        tree.c   a module's tensors
 *     board.c  the trainer's update      seat.c   the worker's, and what a forward costs that finds nothing new
 *     gate.c   the way into a forward    install.c  how a model takes an update
 *     copy.c   bytes, by the best way to who     watch.c    whether anything has happened to any worker
 *              will read them
 *
 * Nothing here decides what is right. Each function does the usual case whole, or changes nothing and says that it did
 * not; the caller then takes the slow path, in Python, which knows every case, and names what is wrong.
 *
 * Tensors are looked at through DLPack's exchange table (dlpack.h, DLPackExchangeAPI, version 1), which PyTorch offers
 * at torch.Tensor.__dlpack_c_exchange_api__: no header of PyTorch's is needed, and nothing is tied to its version.
 */

#include "native.h"

#define REVISION 9 /* of what Python calls here: native.py names the one that it knows */

const DLPackExchange *dlpack;
PyTypeObject *Room_type, *Tree_type, *Turnstile_type, *Installer_type, *Watch_type;
struct Names names;

static PyObject *use(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *types, *report, *phases, *get_num_threads;
    if (!PyArg_ParseTuple(args, "OO!O!O!O:use", &capsule, &PyTuple_Type, &types, &PyType_Type, &report, &PyTuple_Type,
                          &phases, &get_num_threads))
        return NULL;
    const DLPackExchange *table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!table)
        return NULL;
    if (table->version.major != 1 || !table->view) {
        PyErr_SetString(PyExc_ImportError, "another version of DLPack's exchange table");
        return NULL;
    }
    if (PyTuple_GET_SIZE(phases) != PHASES || !PyType_IsSubtype((PyTypeObject *)report, &PyTuple_Type)) {
        PyErr_SetString(PyExc_ImportError, "it was built for another SyncReport: build it again");
        return NULL;
    }
    PyObject *no_phases = PyDict_New();
    for (Py_ssize_t i = 0; i < PHASES; i++) {
        Py_XSETREF(names.phases[i], Py_NewRef(PyTuple_GET_ITEM(phases, i)));
        if (!no_phases || PyDict_SetItem(no_phases, names.phases[i], names.never)) {
            Py_XDECREF(no_phases);
            return NULL;
        }
    }
    Py_XSETREF(names.no_phases, no_phases);
    Py_XSETREF(names.report, Py_NewRef(report));
    Py_XSETREF(names.plain_types, Py_NewRef(types));
    Py_XSETREF(names.get_num_threads, Py_NewRef(get_num_threads));
    dlpack = table;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(use_doc,
             "use(exchange table, types, report, phases, get_num_threads): how to look at tensors, the classes that are\n"
             "nothing else; the class of reports, and the names of extract, wait, pack, transfer, apply and acknowledge;\n"
             "and how many threads PyTorch takes.");
static PyMethodDef functions[] = {
    {"use", use, METH_VARARGS, use_doc},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "wsync._native",
    .m_doc = "The fast path of an update (native.py).",
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
        {&names.is_neg, "is_neg"},   {&names.enter, "enter"},     {&names.leave, "leave"},     {&names.data, "data"},
        {&names.version, "version"}, {&names.told_at, "told_at"}, {&names.waiting, "waiting"},
        {&names.on_readable, "on_readable"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!(*all[i].name = PyUnicode_InternFromString(all[i].text)))
            return -1;
    return (names.never = PyFloat_FromDouble(0)) ? 0 : -1;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (add_type(module, &Room_spec, &Room_type) || add_type(module, &Tree_spec, &Tree_type)
        || add_type(module, &Turnstile_spec, &Turnstile_type) || add_type(module, &Installer_spec, &Installer_type)
        || add_type(module, &Board_spec, NULL) || add_type(module, &Seat_spec, NULL)
        || add_type(module, &Watch_spec, &Watch_type) || make_names()
        || PyModule_AddIntConstant(module, "REVISION", REVISION)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
