/* builder_type.c: the metadata builder as a Python object, and the forward pass of its step.
 *
 * The object keeps alive what the core refers to: the workspace as long as the object lives, and a
 * step's block table until the next build. The next build's copy to the device comes after all
 * forwards of the step. Arrays that the object hands out view its persistent buffers and keep it
 * alive. On a device they carry the build's event. sparse_mla/backend/ is its public interface.
 */
#include "python/call/unlocked.h"
#include "python/step_object.h"

typedef struct smla_py_builder {
    PyObject_HEAD smla_builder *core;
    atomic_flag is_busy;
    int64_t generation;        /* counts successful builds */
    int64_t num_actual_tokens; /* tokens of the last build */
    DLDevice device;
    smla_py_array workspace;      /* absent = the core has its own */
    smla_py_array block_table[2]; /* one for this step, one for the next */
    int current;
} smla_py_builder;

/* ---- Create -------------------------------------------------------------------------------- */

static int
parse_config(const char *op, PyObject *args, smla_builder_config *config)
{
    static const smla_path paths[] = {SMLA_PATH_MIXED, SMLA_PATH_SEPARATE, SMLA_PATH_BF16,
                                      SMLA_PATH_DIRECT, SMLA_PATH_AUTO};
    const struct {
        const char *name;
        int64_t *value;
    } sizes[] = {
        {"num_heads", &config->num_heads},
        {"block_size", &config->block_size},
        {"topk_tokens", &config->topk_tokens},
        {"max_num_seqs", &config->max_num_seqs},
        {"max_num_batched_tokens", &config->max_num_batched_tokens},
        {"max_model_len", &config->max_model_len},
        {"decode_threshold", &config->decode_threshold},
        {"min_heads_for_bf16_prefill", &config->min_heads_for_bf16_prefill},
        {"prefill_workspace_tokens", &config->prefill_workspace_tokens},
    };
    enum { NUM_SIZES = sizeof sizes / sizeof sizes[0], NUM_ARGS = NUM_SIZES + 4 };
    if (smla_py_check_count(op, PyTuple_Size(args), NUM_ARGS) < 0) {
        return -1;
    }
    for (int i = 0; i < NUM_SIZES; i++) {
        if (smla_py_parse_int(op, sizes[i].name, PyTuple_GetItem(args, i), sizes[i].value) < 0) {
            return -1;
        }
    }
    if (smla_py_parse_kv_format(op, "kv_cache_dtype", PyTuple_GetItem(args, NUM_SIZES),
                                &config->kv_format) < 0 ||
        smla_py_parse_path(op, PyTuple_GetItem(args, NUM_SIZES + 1), paths,
                           "\"mixed\", \"separate\", \"bf16\" or \"direct\"", &config->path) < 0) {
        return -1;
    }
    return smla_py_parse_device(op, "device", PyTuple_GetItem(args, NUM_SIZES + 2),
                                &config->device);
}

static PyObject *
builder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char op[] = "MetadataBuilder";
    smla_builder_config config = {.struct_size = sizeof config};
    if (kwargs != NULL && PyDict_Size(kwargs) > 0) {
        PyErr_Format(PyExc_TypeError, "%s: takes positional arguments only", op);
        return NULL;
    }
    if (parse_config(op, args, &config) < 0) {
        return NULL;
    }
    smla_py_builder *builder = (smla_py_builder *)PyType_GenericAlloc(type, 0);
    if (builder == NULL) {
        return NULL;
    }
    atomic_flag_clear(&builder->is_busy);
    builder->device = config.device;
    smla_error error;
    smla_status status = SMLA_OK;
    PyObject *workspace = PyTuple_GetItem(args, PyTuple_Size(args) - 1);
    int result =
        smla_py_take_workspace(PyType_GetModuleState(type), op, workspace, &builder->workspace);
    if (result == 0) {
        config.workspace = smla_py_view(&builder->workspace);
        Py_BEGIN_ALLOW_THREADS
        status = smla_builder_create(&config, &builder->core, &error);
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
    smla_py_builder *builder = (smla_py_builder *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS /* this may wait for the device, and device callbacks for the GIL */
    smla_builder_destroy(builder->core);
    Py_END_ALLOW_THREADS
    smla_py_release_array(&builder->workspace);
    smla_py_release_array(&builder->block_table[0]);
    smla_py_release_array(&builder->block_table[1]);
    PyObject_Free(self);
    Py_DECREF((PyObject *)type);
}

/* ---- Build --------------------------------------------------------------------------------- */

/* The first `count` entries of a persistent int32 buffer. */
static PyObject *
view_buffer(smla_py_builder *builder, PyObject *event, const int32_t *data, int64_t count)
{
    const DLDataType int32 = {kDLInt, 32, 1};
    return smla_py_view_buffer((PyObject *)builder, builder->device, event, int32, data, 1, &count,
                               1);
}

static PyObject *
list_chunks(const smla_metadata *m)
{
    PyObject *list = PyList_New((Py_ssize_t)m->num_chunks);
    for (int64_t i = 0; list != NULL && i < m->num_chunks; i++) {
        const smla_prefill_chunk *chunk = &m->chunks[i];
        PyObject *item = Py_BuildValue("(LLLLL)", (long long)chunk->req_start,
                                       (long long)chunk->req_end, (long long)chunk->token_start,
                                       (long long)chunk->token_end, (long long)chunk->tot_seqlen);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) { /* steals */
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
describe_step(smla_py_builder *builder, PyObject *event, const smla_metadata *m)
{
    return Py_BuildValue(
        "{s:L,s:s,s:L,s:L,s:L,s:L,s:L,s:L,s:N,s:N,s:N,s:N,s:N}", "generation",
        (long long)builder->generation, "path", smla_path_name(m->path), "num_decodes",
        (long long)m->split.num_decodes, "num_prefills", (long long)m->split.num_prefills,
        "num_decode_tokens", (long long)m->split.num_decode_tokens, "num_prefill_tokens",
        (long long)m->split.num_prefill_tokens, "decode_query_len", (long long)m->decode_query_len,
        "decode_num_splits", (long long)m->decode_num_splits, "req_id_per_token",
        view_buffer(builder, event, m->req_id_per_token, m->num_actual_tokens), "prefill_seq_lens",
        view_buffer(builder, event, m->prefill_seq_lens, m->split.num_prefills),
        "prefill_request_ids",
        view_buffer(builder, event, m->prefill_request_ids, m->num_actual_tokens),
        "prefill_workspace_starts",
        view_buffer(builder, event, m->prefill_workspace_starts, m->split.num_prefills), "chunks",
        list_chunks(m));
}

/* Builds a step from host arrays that are read already: acquires its block table, calls the core,
 * and releases the former step's block table. */
static PyObject *
build_step(smla_py_builder *builder, const char *op, smla_build_args *a, smla_py_stream *stream,
           PyObject *block_table)
{
    const smla_py_state *state = smla_py_type_state((PyObject *)builder);
    smla_py_array *next = &builder->block_table[1 - builder->current];
    if (smla_py_acquire(state, op, "block_table", SMLA_PY_RETAINED, block_table, next) < 0) {
        return NULL;
    }
    if (smla_py_resolve_stream_of(state, op, next, 1, stream) < 0) {
        smla_py_release_array(next);
        return NULL;
    }
    a->stream = stream->at.handle;
    const smla_metadata *metadata = NULL;
    smla_error error;
    smla_status status;
    a->block_table = smla_py_view(next);
    Py_BEGIN_ALLOW_THREADS
    status = smla_builder_build(builder->core, a, &metadata, &error);
    Py_END_ALLOW_THREADS
    if (status != SMLA_OK) { /* the core keeps the former step */
        smla_py_release_array(next);
        return smla_py_raise(&error);
    }
    PyObject *event = NULL;
    smla_py_array *former = &builder->block_table[builder->current];
    const int replaced = smla_py_replace_step(state, op, former, next, 1, stream, &event);
    builder->current = 1 - builder->current;
    builder->generation++;
    builder->num_actual_tokens = metadata->num_actual_tokens;
    PyObject *step = replaced < 0 ? NULL : describe_step(builder, event, metadata);
    Py_XDECREF(event);
    return step;
}

PyDoc_STRVAR(builder_build_doc,
             "build($self, query_start_loc_cpu, seq_lens_cpu, block_table, num_reqs, "
             "num_actual_tokens, /)\n--\n\n"
             "Plan a step; see sparse_mla.MetadataBuilder.build. A dict of what was planned.");

static PyObject *
builder_build(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    static const char op[] = "MetadataBuilder.build";
    smla_py_builder *builder = (smla_py_builder *)self;
    smla_py_batch batch;
    if (smla_py_check_count(op, num_args, 5) < 0 ||
        smla_py_enter_builder(&builder->is_busy, op) < 0) {
        return NULL;
    }
    PyObject *step = NULL;
    if (smla_py_read_batch(smla_py_type_state(self), op, args, args + 3, &batch) == 0) {
        smla_build_args a = {
            .struct_size = sizeof a,
            .query_start_loc_cpu = batch.query_start_loc,
            .seq_lens_cpu = batch.seq_lens,
            .num_reqs = batch.num_reqs,
            .num_actual_tokens = batch.num_actual_tokens,
        };
        smla_py_stream stream = {.is_given = false};
        step = build_step(builder, op, &a, &stream, args[2]);
    }
    smla_py_free_batch(&batch);
    smla_py_leave_builder(&builder->is_busy);
    return step;
}

/* ---- Forward ------------------------------------------------------------------------------- */

enum { FWD_Q, FWD_Q_PE, FWD_KV_CACHE, FWD_TOPK, FWD_SINK, FWD_OUT, FWD_LSE };

static PyObject *
run_forward(smla_py_call *call, smla_forward_args *a)
{
    static const int results[] = {FWD_OUT, FWD_LSE};
    smla_error error;
    smla_status status;
    smla_py_unlocked unlocked;
    a->q = smla_py_view(&call->arrays[FWD_Q]);
    a->q_pe = smla_py_view(&call->arrays[FWD_Q_PE]);
    a->kv_cache = smla_py_view(&call->arrays[FWD_KV_CACHE]);
    a->topk_indices = smla_py_view(&call->arrays[FWD_TOPK]);
    a->attn_sink = smla_py_view(&call->arrays[FWD_SINK]);
    a->out = smla_py_view(&call->arrays[FWD_OUT]);
    a->lse = smla_py_view(&call->arrays[FWD_LSE]);
    smla_py_unlock(&unlocked);
    status = smla_forward(a, &error);
    if (smla_py_lock(&unlocked) < 0) {
        return NULL;
    }
    return smla_py_finish(call, status, &error, results, SMLA_PY_COUNT(results));
}

PyDoc_STRVAR(builder_forward_doc,
             "forward($self, q, kv_cache, topk_indices, attn_sink, out, lse, softmax_scale, "
             "generation, stream, /)\n--\n\n"
             "One layer of the step; see sparse_mla.SparseMLA.forward.");

static PyObject *
builder_forward(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    static const struct {
        const char *name;
        smla_py_role role;
    } arrays[] = {{"kv_cache", SMLA_PY_INPUT},
                  {"topk_indices", SMLA_PY_INPUT},
                  {"attn_sink", SMLA_PY_OPTIONAL},
                  {"out", SMLA_PY_OUTPUT},
                  {"lse", SMLA_PY_OUTPUT}};
    static const char op[] = "forward";
    smla_py_builder *builder = (smla_py_builder *)self;
    smla_forward_args a = {.struct_size = sizeof a, .builder = builder->core};
    int64_t generation = 0;
    smla_py_call call;
    smla_py_open(&call, smla_py_type_state(self), op);
    if (smla_py_check_count(op, num_args, 9) < 0 ||
        smla_py_parse_float(op, "softmax_scale", args[6], &a.softmax_scale) < 0 ||
        smla_py_parse_int(op, "generation", args[7], &generation) < 0 ||
        smla_py_take_stream(&call, args[8]) < 0 ||
        smla_py_enter_builder(&builder->is_busy, op) < 0) {
        return NULL;
    }
    PyObject *results = NULL;
    if (smla_py_check_generation(op, builder->generation, generation) == 0) {
        int status = smla_py_add_query(&call, args[0]);
        for (int i = 0; status == 0 && i < SMLA_PY_COUNT(arrays); i++) {
            status = smla_py_add(&call, arrays[i].name, arrays[i].role, args[1 + i]);
        }
        if (status == 0 && smla_py_resolve_stream(&call, &a.stream) == 0 &&
            smla_py_allocate_rows(&call, FWD_Q, FWD_OUT, builder->num_actual_tokens) == 0) {
            results = run_forward(&call, &a);
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
    return PyLong_FromLongLong(smla_builder_workspace_bytes(((smla_py_builder *)self)->core));
}

static PyMethodDef builder_methods[] = {
    {"build", (PyCFunction)(void (*)(void))builder_build, METH_FASTCALL, builder_build_doc},
    {"forward", (PyCFunction)(void (*)(void))builder_forward, METH_FASTCALL, builder_forward_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef builder_getset[] = {
    {"workspace_bytes", get_workspace_bytes, NULL,
     "Bytes of the prefill workspace; 0 where the path needs none.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(builder_doc,
             "Builder(num_heads, block_size, topk_tokens, max_num_seqs, max_num_batched_tokens, "
             "max_model_len, decode_threshold, min_heads_for_bf16_prefill, "
             "prefill_workspace_tokens, kv_cache_dtype, path, device, workspace, /)\n--\n\n"
             "The compiled part of sparse_mla.MetadataBuilder.");

static PyType_Slot builder_slots[] = {
    {Py_tp_doc, (void *)builder_doc}, {Py_tp_new, builder_new},
    {Py_tp_dealloc, builder_dealloc}, {Py_tp_methods, builder_methods},
    {Py_tp_getset, builder_getset},   {0, NULL},
};

PyType_Spec smla_py_builder_spec = {
    .name = "sparse_mla._C.Builder",
    .basicsize = sizeof(smla_py_builder),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = builder_slots,
};
