/* wsync._loops: the inner loops of an update, compiled.
 *
 * Between two batches a trainer's caches are cold, and an interpreter that walks through a module, asks where each
 * tensor lies and stores a few words spends its time waiting for memory: ten times what the copy itself takes.
 *
 * Each class here stands in for the class of the same name in the package wsync.loops, and follows the argument that is
 * written there: same constructor, same methods, same tests. wsync/loops/__init__.py chooses once, at import.
 *
 *     pack_plan.c      copies tensors into a buffer      tensor_tree.c    finds a module's tensors
 *     arena_writer.c   the sender's words                arena_update.c   a usual update of all workers
 *     worker_slot.c    a worker's words                  worker_update.c  a usual update in a worker
 *     gate_state.c      the gate around forwards          installer.c      switches a model to an update
 *     copy.c           copies bytes
 *
 * Tensors are read through DLPack's exchange table (dlpack.h, DLPackExchangeAPI, version 1), which PyTorch offers at
 * torch.Tensor.__dlpack_c_exchange_api__: no header of PyTorch is needed, and the build is tied to no version of it.
 */

#include "loops.h"

#define REVISION 18 /* of the interface; wsync/loops/__init__.py names the one that it expects */

const DLPackExchange *dlpack;
PyTypeObject *PackPlan_type, *TensorTree_type, *GateState_type, *Installer_type, *ArenaUpdate_type;
struct Names names;

static int set_phases(PyObject *phases)
{
    PyObject *no_phases = PyDict_New();
    for (Py_ssize_t i = 0; i < PHASES; i++) {
        Py_XSETREF(names.phases[i], Py_NewRef(PyTuple_GET_ITEM(phases, i)));
        if (!no_phases || PyDict_SetItem(no_phases, names.phases[i], names.zero)) {
            Py_XDECREF(no_phases);
            return -1;
        }
    }
    Py_XSETREF(names.no_phases, no_phases);
    return 0;
}

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *types, *report, *phases, *threads, *increment, *autocast, *copy, *not_connected, *timeout;
    if (!PyArg_ParseTuple(args, "OO!O!O!OOOOOO:configure", &capsule, &PyTuple_Type, &types, &PyType_Type, &report,
                          &PyTuple_Type, &phases, &threads, &increment, &autocast, &copy, &not_connected, &timeout))
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
    if (set_phases(phases))
        return NULL;
    Py_XSETREF(names.report, Py_NewRef(report));
    Py_XSETREF(names.plain_types, Py_NewRef(types));
    Py_XSETREF(names.get_num_threads, Py_NewRef(threads));
    Py_XSETREF(names.increment_version, Py_NewRef(increment));
    Py_XSETREF(names.clear_autocast_cache, Py_NewRef(autocast));
    Py_XSETREF(names.copy_into_model, Py_NewRef(copy));
    Py_XSETREF(names.not_connected, Py_NewRef(not_connected));
    Py_XSETREF(names.sync_timeout, Py_NewRef(timeout));
    dlpack = table;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(configure_doc,
             "configure(exchange_table, plain_types, report, phases, get_num_threads, increment_version,\n"
             "clear_autocast_cache, copy_into_model, not_connected, sync_timeout): called once, before any other use.");
static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS, configure_doc},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "wsync._loops",
    .m_doc = "The inner loops of an update, compiled: see wsync.loops.",
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
        {&names.is_neg, "is_neg"},           {&names.is_conj, "is_conj"},
        {&names.is_inference, "is_inference"}, {&names.poll_update, "poll_update"},
        {&names.leaving_gate, "leaving_gate"}, {&names.on_readable, "on_readable"},
        {&names.data, "data"},               {&names.version, "version"},
        {&names.announced_at, "announced_at"}, {&names.waiting, "waiting"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!(*all[i].name = PyUnicode_InternFromString(all[i].text)))
            return -1;
    return (names.zero = PyFloat_FromDouble(0)) ? 0 : -1;
}

PyMODINIT_FUNC PyInit__loops(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (add_type(module, &PackPlan_spec, &PackPlan_type) || add_type(module, &TensorTree_spec, &TensorTree_type)
        || add_type(module, &GateState_spec, &GateState_type) || add_type(module, &Installer_spec, &Installer_type)
        || add_type(module, &ArenaWriter_spec, NULL) || add_type(module, &WorkerSlot_spec, NULL)
        || add_type(module, &ArenaUpdate_spec, &ArenaUpdate_type) || make_names()
        || PyModule_AddIntConstant(module, "REVISION", REVISION)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
