/* v4_builder_type.c: DeepSeek V4's metadata builder as a Python object, and the attention of a
 * layer of its step.
 *
 * The object holds the workspace as long as it lives, and slot_mapping and the block tables of a
 * step until the next build. sparse_mla/v4/ is its public interface.
 */
#include "python/call/unlocked.h"
#include "python/step_object.h"
#include "step/v4_builder.h"

/* The arrays that a step holds. */
enum {
    STEP_BLOCK_TABLE,
    STEP_SLOT_MAPPING,
    STEP_COMPRESSED,
    STEP_STATES = STEP_COMPRESSED + SMLA_MAX_STEP_GROUPS,
    NUM_STEP_ARRAYS = STEP_STATES + SMLA_MAX_STEP_GROUPS,
};

typedef struct smla_py_v4_builder {
    PyObject_HEAD smla_v4_builder *core;
    atomic_flag is_busy;
    int64_t generation; /* counts successful builds */
    DLDevice device;
    smla_py_array workspace;                /* absent = the core has its own */
    smla_py_array step[2][NUM_STEP_ARRAYS]; /* those of this step and of the next */
    int current;
} smla_py_v4_builder;

static const DLDataType int32 = {kDLInt, 32, 1};
static const DLDataType boolean = {kDLBool, 8, 1};

/* ---- Create -------------------------------------------------------------------------------- */

/* Reads a tuple with a number per ratio. */
static int
parse_numbers(const char *op, const char *name, PyObject *object,
              int64_t numbers[SMLA_V4_MAX_RATIOS], int64_t *count)
{
    if (!PyTuple_Check(object) || PyTuple_Size(object) > SMLA_V4_MAX_RATIOS) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be a tuple of at most %d numbers, got %R", op,
                     name, SMLA_V4_MAX_RATIOS, object);
        return -1;
    }
    *count = PyTuple_Size(object);
    for (int i = 0; i < *count; i++) {
        if (smla_py_parse_int(op, name, PyTuple_GetItem(object, i), &numbers[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
parse_ratios(const char *op, PyObject *ratios, PyObject *state_block_sizes, smla_v4_config *config)
{
    int64_t num_sizes = 0;
    if (parse_numbers(op, "compress_ratios", ratios, config->ratios, &config->num_ratios) < 0 ||
        parse_numbers(op, "state_block_sizes", state_block_sizes, config->state_block_sizes,
                      &num_sizes) < 0) {
        return -1;
    }
    if (num_sizes != config->num_ratios) {
        PyErr_Format(PyExc_ValueError,
                     "%s: `state_block_sizes` must have an entry per compress ratio (%lld), got "
                     "%lld",
                     op, (long long)config->num_ratios, (long long)num_sizes);
        return -1;
    }
    return 0;
}

/* Reads the tuple (softmax_scale, q_scale, kv_scale). Each of them as an argument of its own would
 * make 20, and CPython 3.11 keeps freed tuples of 20 items without ever using them again. */
static int
parse_scales(const char *op, PyObject *object, smla_v4_config *config)
{
    const struct {
        const char *name;
        double *value;
    } scales[] = {
        {"softmax_scale", &config->softmax_scale},
        {"q_scale", &config->q_scale},
        {"kv_scale", &config->kv_scale},
    };
    if (!PyTuple_Check(object) || PyTuple_Size(object) != SMLA_PY_COUNT(scales)) {
        PyErr_Format(PyExc_ValueError, "%s: `scales` must be a tuple of %d numbers, got %R", op,
                     SMLA_PY_COUNT(scales), object);
        return -1;
    }
    for (int i = 0; i < SMLA_PY_COUNT(scales); i++) {
        PyObject *const number = PyTuple_GetItem(object, i);
        if (smla_py_parse_float(op, scales[i].name, number, scales[i].value) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
parse_config(const char *op, PyObject *args, smla_v4_config *config)
{
    static const smla_path paths[] = {SMLA_PATH_SEPARATE, SMLA_PATH_DIRECT, SMLA_PATH_AUTO};
    const struct {
        const char *name;
        int64_t *value;
    } sizes[] = {
        {"num_heads", &config->num_heads},
        {"window", &config->window},
        {"topk_tokens", &config->topk_tokens},
        {"block_size", &config->block_size},
        {"swa_block_size", &config->swa_block_size},
        {"max_num_seqs", &config->max_num_seqs},
        {"max_num_batched_tokens", &config->max_num_batched_tokens},
        {"max_model_len", &config->max_model_len},
        {"decode_threshold", &config->decode_threshold},
        {"prefill_chunk_size", &config->prefill_chunk_size},
    };
    enum {
        NUM_SIZES = sizeof sizes / sizeof sizes[0],
        REST = NUM_SIZES + 1,
        NUM_ARGS = REST + 7,
    };
    if (smla_py_check_count(op, PyTuple_Size(args), NUM_ARGS) < 0) {
        return -1;
    }
    for (int i = 0; i < NUM_SIZES; i++) {
        if (smla_py_parse_int(op, sizes[i].name, PyTuple_GetItem(args, i), sizes[i].value) < 0) {
            return -1;
        }
    }
    if (parse_scales(op, PyTuple_GetItem(args, NUM_SIZES), config) < 0 ||
        parse_ratios(op, PyTuple_GetItem(args, REST), PyTuple_GetItem(args, REST + 1), config) <
            0 ||
        smla_py_parse_kv_format(op, "kv_cache_dtype", PyTuple_GetItem(args, REST + 2),
                                &config->kv_format) < 0 ||
        smla_py_parse_kv_format(op, "compressed_kv_cache_dtype", PyTuple_GetItem(args, REST + 3),
                                &config->compressed_kv_format) < 0 ||
        smla_py_parse_path(op, PyTuple_GetItem(args, REST + 4), paths, "\"direct\" or \"separate\"",
                           &config->path) < 0) {
        return -1;
    }
    return smla_py_parse_device(op, "device", PyTuple_GetItem(args, REST + 5), &config->device);
}

static PyObject *
builder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char op[] = "MetadataBuilder";
    smla_v4_config config = {.num_ratios = 0};
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_Format(PyExc_TypeError, "%s: takes positional arguments only", op);
        return NULL;
    }
    if (parse_config(op, args, &config) < 0) {
        return NULL;
    }
    smla_py_v4_builder *builder = (smla_py_v4_builder *)PyType_GenericAlloc(type, 0);
    if (builder == NULL) {
        return NULL;
    }
    atomic_flag_clear(&builder->is_busy);
    builder->device = config.device;
    PyObject *const workspace = PyTuple_GetItem(args, PyTuple_Size(args) - 1);
    int result =
        smla_py_take_workspace(PyType_GetModuleState(type), op, workspace, &builder->workspace);
    if (result == 0) {
        smla_error error;
        smla_status status;
        config.workspace = smla_py_view(&builder->workspace);
        Py_BEGIN_ALLOW_THREADS
        status = smla_v4_builder_create(&config, &builder->core, &error);
        Py_END_ALLOW_THREADS
        result = smla_py_check(status, &error);
    }
    if (result < 0) {
        Py_CLEAR(builder);
    }
    return (PyObject *)builder;
}

static void
builder_dealloc(PyObject *self)
{
    smla_py_v4_builder *builder = (smla_py_v4_builder *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS /* this may wait for the device, and device callbacks for the GIL */
    smla_v4_builder_destroy(builder->core);
    Py_END_ALLOW_THREADS
    smla_py_release_array(&builder->workspace);
    for (int i = 0; i < NUM_STEP_ARRAYS; i++) {
        smla_py_release_array(&builder->step[0][i]);
        smla_py_release_array(&builder->step[1][i]);
    }
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- Build --------------------------------------------------------------------------------- */

static PyObject *
view_vector(smla_py_v4_builder *builder, PyObject *event, const int32_t *data, int64_t count)
{
    return smla_py_view_buffer((PyObject *)builder, builder->device, event, int32, data, 1, &count,
                               1);
}

/* Rows [start, start + count) of a list. */
static PyObject *
view_lists(smla_py_v4_builder *builder, PyObject *event, const int32_t *data, int64_t start,
           int64_t count, int64_t columns, int64_t stride)
{
    const int64_t shape[2] = {count, columns};
    return smla_py_view_buffer((PyObject *)builder, builder->device, event, int32,
                               data == NULL ? NULL : data + start * stride, 2, shape, stride);
}

static PyObject *
describe_group(smla_py_v4_builder *builder, PyObject *event, int i)
{
    const smla_v4_builder *const core = builder->core;
    const smla_v4_metadata *const m = &core->metadata;
    const smla_v4_group *const g = &core->lists.groups[i];
    if (!m->has_group[i]) {
        return Py_NewRef(Py_None);
    }
    const int32_t *const indices = core->columns[i] == 0 ? NULL : g->indices;
    return Py_BuildValue(
        "{s:N,s:N,s:N,s:N,s:N,s:N}", "slot_mapping",
        view_vector(builder, event, g->slot_mapping, m->num_actual_tokens), "state_slot_mapping",
        view_vector(builder, event, m->has_state[i] ? g->state_slot_mapping : NULL,
                    m->num_actual_tokens),
        "context_lens", view_vector(builder, event, g->context_lens, m->num_actual_tokens),
        "decode_lens",
        view_vector(builder, event, indices == NULL ? NULL : g->lens, m->split.num_decode_tokens),
        "decode_indices",
        view_lists(builder, event, indices, 0, m->split.num_decode_tokens, m->widths[i],
                   core->columns[i]),
        "prefill_indices",
        view_lists(builder, event, indices, m->split.num_decode_tokens, m->split.num_prefill_tokens,
                   m->widths[i], core->columns[i]));
}

static PyObject *
list_groups(smla_py_v4_builder *builder, PyObject *event)
{
    const int num_groups = smla_v4_num_groups(&builder->core->config);
    PyObject *list = PyList_New(num_groups);
    for (int i = 0; list != NULL && i < num_groups; i++) {
        PyObject *item = describe_group(builder, event, i);
        if (item == NULL || PyList_SetItem(list, i, item) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
list_chunks(const smla_v4_builder *core)
{
    PyObject *list = PyList_New((Py_ssize_t)core->metadata.num_chunks);
    for (int64_t i = 0; list != NULL && i < core->metadata.num_chunks; i++) {
        const smla_v4_chunk *const chunk = &core->chunks[i];
        PyObject *item =
            Py_BuildValue("(LLLL)", (long long)chunk->req_start, (long long)chunk->req_end,
                          (long long)chunk->token_start, (long long)chunk->token_end);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
describe_step(smla_py_v4_builder *builder, PyObject *event)
{
    const smla_v4_builder *const core = builder->core;
    const smla_v4_metadata *const m = &core->metadata;
    const int64_t num_tokens = m->num_actual_tokens;
    const int64_t first = m->split.num_decodes;
    return Py_BuildValue(
        "{s:L,s:s,s:L,s:L,s:L,s:L,s:L,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N,s:N}", "generation",
        (long long)builder->generation, "path", smla_path_name((smla_path)core->config.path),
        "num_decodes", (long long)m->split.num_decodes, "num_prefills",
        (long long)m->split.num_prefills, "num_decode_tokens",
        (long long)m->split.num_decode_tokens, "num_prefill_tokens",
        (long long)m->split.num_prefill_tokens, "decode_query_len", (long long)m->decode_query_len,
        "req_id_per_token", view_vector(builder, event, core->step.req_id_per_token, num_tokens),
        "positions", view_vector(builder, event, core->step.positions, num_tokens), "is_valid",
        smla_py_view_buffer((PyObject *)builder, builder->device, event, boolean,
                            core->lists.is_valid, 1, &num_tokens, 1),
        "swa_indices",
        view_lists(builder, event, core->lists.swa_indices, 0, num_tokens, core->config.window,
                   core->config.window),
        "swa_lens", view_vector(builder, event, core->lists.swa_lens, num_tokens), "seq_lens",
        view_vector(builder, event, core->step.seq_lens + first, m->split.num_prefills),
        "gather_lens",
        view_vector(builder, event, core->step.gather_lens + first, m->split.num_prefills),
        "chunks", list_chunks(core), "groups", list_groups(builder, event));
}

/* Reads a tuple with a block table or None per group. */
static int
acquire_tables(const smla_py_state *state, const char *op, const smla_v4_config *config,
               const char *const names[2], PyObject *object, smla_py_array *arrays)
{
    const int num_ratios = (int)config->num_ratios;
    if (!PyTuple_Check(object) || PyTuple_Size(object) != num_ratios + 1) {
        PyErr_Format(PyExc_ValueError, "%s: `%s` must be a tuple of %d tables, got %R", op,
                     names[0], num_ratios + 1, object);
        return -1;
    }
    for (int i = 0; i <= num_ratios; i++) {
        PyObject *const table = PyTuple_GetItem(object, i);
        smla_py_array *const array = &arrays[i < num_ratios ? i : SMLA_V4_MAX_RATIOS];
        if (table != Py_None && smla_py_acquire(state, op, names[i == num_ratios], SMLA_PY_RETAINED,
                                                table, array) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
acquire_step(const smla_py_state *state, const char *op, const smla_v4_config *config,
             PyObject *const *args, smla_py_array *next)
{
    static const char *const compressed[2] = {"compressed", "index"};
    static const char *const states[2] = {"states", "index_states"};
    for (int i = 0; i < NUM_STEP_ARRAYS; i++) {
        next[i] = (smla_py_array){.object = NULL};
    }
    if (smla_py_acquire(state, op, "block_table", SMLA_PY_RETAINED, args[0],
                        &next[STEP_BLOCK_TABLE]) < 0 ||
        smla_py_acquire(state, op, "slot_mapping", SMLA_PY_RETAINED, args[1],
                        &next[STEP_SLOT_MAPPING]) < 0 ||
        acquire_tables(state, op, config, compressed, args[2], &next[STEP_COMPRESSED]) < 0) {
        return -1;
    }
    return acquire_tables(state, op, config, states, args[3], &next[STEP_STATES]);
}

static void
release_step(smla_py_array *arrays)
{
    for (int i = 0; i < NUM_STEP_ARRAYS; i++) {
        smla_py_release_array(&arrays[i]);
    }
}

/* Builds a step from host arrays that are read already. `arrays` are block_table, slot_mapping and
 * the two tuples of tables. */
static PyObject *
build_step(smla_py_v4_builder *builder, const char *op, smla_v4_build_args *a,
           PyObject *const *arrays)
{
    const smla_py_state *state = smla_py_type_state((PyObject *)builder);
    smla_py_array *const former = builder->step[builder->current];
    smla_py_array *const next = builder->step[1 - builder->current];
    smla_py_stream stream = {.is_given = false};
    if (acquire_step(state, op, &builder->core->config, arrays, next) < 0 ||
        smla_py_resolve_stream_of(state, op, next, NUM_STEP_ARRAYS, &stream) < 0) {
        release_step(next);
        return NULL;
    }
    a->stream = stream.at.handle;
    a->block_table = smla_py_view(&next[STEP_BLOCK_TABLE]);
    a->slot_mapping = smla_py_view(&next[STEP_SLOT_MAPPING]);
    for (int i = 0; i < SMLA_MAX_STEP_GROUPS; i++) {
        a->compressed_tables[i] = smla_py_view(&next[STEP_COMPRESSED + i]);
        a->state_tables[i] = smla_py_view(&next[STEP_STATES + i]);
    }
    smla_error error;
    smla_status status;
    Py_BEGIN_ALLOW_THREADS
    status = smla_v4_builder_build(builder->core, a, &error);
    Py_END_ALLOW_THREADS
    if (status != SMLA_OK) { /* the core keeps the former step */
        release_step(next);
        return smla_py_raise(&error);
    }
    PyObject *event = NULL;
    const int replaced =
        smla_py_replace_step(state, op, former, next, NUM_STEP_ARRAYS, &stream, &event);
    builder->current = 1 - builder->current;
    builder->generation++;
    PyObject *step = replaced < 0 ? NULL : describe_step(builder, event);
    Py_XDECREF(event);
    return step;
}

PyDoc_STRVAR(builder_build_doc,
             "build($self, query_start_loc_cpu, seq_lens_cpu, block_table, slot_mapping, "
             "compressed, states, num_reqs, num_actual_tokens, max_seq_len, /)\n--\n\n"
             "Plan a step; see sparse_mla.v4.MetadataBuilder.build. A dict of what was planned.");

static PyObject *
builder_build(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "MetadataBuilder.build";
    smla_py_v4_builder *builder = (smla_py_v4_builder *)self;
    smla_v4_build_args a = {.stream = NULL};
    smla_py_batch batch;
    if (smla_py_check_count(op, num_args, 9) < 0 ||
        smla_py_enter_builder(&builder->is_busy, op) < 0) {
        return NULL;
    }
    PyObject *step = NULL;
    if (smla_py_read_batch(smla_py_type_state(self), op, args, args + 6, &batch) == 0 &&
        smla_py_parse_int(op, "max_seq_len", args[8], &a.max_seq_len) == 0) {
        a.batch = (smla_batch){
            .query_start_loc = batch.query_start_loc,
            .seq_lens = batch.seq_lens,
            .num_reqs = batch.num_reqs,
            .num_actual_tokens = batch.num_actual_tokens,
        };
        step = build_step(builder, op, &a, args + 2);
    }
    smla_py_free_batch(&batch);
    smla_py_leave_builder(&builder->is_busy);
    return step;
}

/* ---- Attend -------------------------------------------------------------------------------- */

enum { AT_Q, AT_SWA, AT_COMPRESSED, AT_TOPK, AT_SINK, AT_OUT, AT_LSE };

static PyObject *
run_attend(smla_py_call *call, smla_v4_attend_args *a)
{
    static const int results[] = {AT_OUT, AT_LSE};
    smla_error error;
    smla_status status;
    smla_py_unlocked unlocked;
    a->q = smla_py_view(&call->arrays[AT_Q]);
    a->swa_cache = smla_py_view(&call->arrays[AT_SWA]);
    a->compressed = smla_py_view(&call->arrays[AT_COMPRESSED]);
    a->topk_indices = smla_py_view(&call->arrays[AT_TOPK]);
    a->attn_sink = smla_py_view(&call->arrays[AT_SINK]);
    a->out = smla_py_view(&call->arrays[AT_OUT]);
    a->lse = smla_py_view(&call->arrays[AT_LSE]);
    smla_py_unlock(&unlocked);
    status = smla_v4_attend(a, &error);
    if (smla_py_lock(&unlocked) < 0) {
        return NULL;
    }
    return smla_py_finish(call, status, &error, results, SMLA_PY_COUNT(results));
}

PyDoc_STRVAR(builder_attend_doc,
             "attend($self, q, swa, compressed, topk_indices, attn_sink, out, lse, "
             "compress_ratio, generation, stream, /)\n--\n\n"
             "One layer of the step; see sparse_mla.v4.SparseMLA.attend.");

static PyObject *
builder_attend(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    static const struct {
        const char *name;
        smla_py_role role;
    } arrays[] = {{"q", SMLA_PY_INPUT},
                  {"caches.swa", SMLA_PY_INPUT},
                  {"caches.compressed", SMLA_PY_OPTIONAL},
                  {"topk_indices", SMLA_PY_OPTIONAL},
                  {"attn_sink", SMLA_PY_OPTIONAL},
                  {"out", SMLA_PY_OUTPUT},
                  {"lse", SMLA_PY_OUTPUT}};
    static const char op[] = "attend";
    smla_py_v4_builder *builder = (smla_py_v4_builder *)self;
    smla_v4_attend_args a = {.builder = builder->core};
    int64_t generation = 0;
    smla_py_call call;
    smla_py_open(&call, smla_py_type_state(self), op);
    if (smla_py_check_count(op, num_args, 10) < 0 ||
        smla_py_parse_int(op, "compress_ratio", args[7], &a.ratio) < 0 ||
        smla_py_parse_int(op, "generation", args[8], &generation) < 0 ||
        smla_py_take_stream(&call, args[9]) < 0 ||
        smla_py_enter_builder(&builder->is_busy, op) < 0) {
        return NULL;
    }
    PyObject *results = NULL;
    if (smla_py_check_generation(op, builder->generation, generation) == 0) {
        int status = 0;
        for (int i = 0; status == 0 && i < SMLA_PY_COUNT(arrays); i++) {
            status = smla_py_add(&call, arrays[i].name, arrays[i].role, args[i]);
        }
        if (status == 0 && smla_py_resolve_stream(&call, &a.stream) == 0 &&
            smla_py_allocate_rows(&call, AT_Q, AT_OUT, builder->core->metadata.num_actual_tokens) ==
                0) {
            results = run_attend(&call, &a);
        }
    }
    smla_py_close(&call);
    smla_py_leave_builder(&builder->is_busy);
    return results;
}

/* ---- Type ---------------------------------------------------------------------------------- */

static PyObject *
get_workspace_bytes(PyObject *self, void *Py_UNUSED(closure))
{
    const smla_v4_builder *const core = ((smla_py_v4_builder *)self)->core;
    const int64_t row_bytes = SMLA_V4_HEAD_DIM * (int64_t)sizeof(uint16_t);
    return PyLong_FromLongLong(smla_v4_workspace_size(&core->config) * row_bytes);
}

static PyMethodDef builder_methods[] = {
    {"build", (PyCFunction)(void (*)(void))builder_build, METH_FASTCALL, builder_build_doc},
    {"attend", (PyCFunction)(void (*)(void))builder_attend, METH_FASTCALL, builder_attend_doc},
    {"warm_up", (PyCFunction)(void (*)(void))smla_py_v4_warm_up, METH_FASTCALL | METH_CLASS,
     "warm_up($type, q, out, lse, num_heads, stream, /)\n--\n\n"
     "The results of a layer without a step: zeros."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef builder_getset[] = {
    {"workspace_bytes", get_workspace_bytes, NULL,
     "Bytes of the prefill workspace; 0 on path \"direct\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(builder_doc,
             "V4Builder(num_heads, window, topk_tokens, block_size, swa_block_size, max_num_seqs, "
             "max_num_batched_tokens, max_model_len, decode_threshold, prefill_chunk_size, "
             "scales, compress_ratios, state_block_sizes, "
             "kv_cache_dtype, compressed_kv_cache_dtype, path, device, workspace, /)\n--\n\n"
             "The compiled part of sparse_mla.v4.MetadataBuilder.");

static PyType_Slot builder_slots[] = {
    {Py_tp_doc, (void *)builder_doc}, {Py_tp_new, builder_new},
    {Py_tp_dealloc, builder_dealloc}, {Py_tp_methods, builder_methods},
    {Py_tp_getset, builder_getset},   {0, NULL},
};

PyType_Spec smla_py_v4_builder_spec = {
    .name = "sparse_mla._C.V4Builder",
    .basicsize = sizeof(smla_py_v4_builder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = builder_slots,
};
