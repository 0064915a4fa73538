/* fuzz_check.c: libFuzzer for all code that checks arguments: the checker of every operator, args
 * structs of any size, the splitters, the metadata builder.
 *
 * The input's bytes become a good call with any number of faults. Data pointers are arbitrary
 * numbers, which the checkers must not follow; only arrays whose values a checker reads (READ) keep
 * their memory. For any input a checker returns a status of the enum, and an error's text begins
 * with the operator's name. `make fuzz` runs this file with libFuzzer, test_fuzz_check.c without.
 */
#include "core/args.h"
#include "core/params_all.h"
#include "ops/check.h"

#include "fuzz_input.h"
#include "numbers.h"

/* ---- Operators ----------------------------------------------------------------------------- */

static smla_status
check_operator(int number, const any_args *a, const smla_backend **backend, smla_error *e)
{
    switch (number) {
#define CHECK(name, args_type, params_type, family)                          \
    case OP_##name: {                                                        \
        params_type params;                                                  \
        return smla_check_##name((const args_type *)a, &params, backend, e); \
    }
        SMLA_OPERATORS(CHECK)
#define CHECK_ATTENTION(name, args_type) CHECK(name, args_type, smla_attention_params, attention)
        SMLA_ATTENTIONS(CHECK_ATTENTION)
        SMLA_PROJECTIONS(CHECK)
#undef CHECK_ATTENTION
#undef CHECK
    default: abort();
    }
}

typedef struct fuzzed {
    DLTensor tensor;
    int64_t shape[MAX_NDIM];
    int64_t strides[MAX_NDIM];
} fuzzed;

static void
copy_tensor(fuzzed *f, const DLTensor *good)
{
    f->tensor = *good;
    for (int i = 0; i < MAX_NDIM; i++) {
        f->shape[i] = i < good->ndim ? good->shape[i] : 1;
        f->strides[i] = i < good->ndim ? good->strides[i] : 1;
    }
    f->tensor.shape = f->shape;
    f->tensor.strides = f->strides;
}

static void
add_fault(reader *r, fuzzed *f, const fuzzed *other)
{
    const uint8_t kind = read_byte(r);
    const int dim = kind / 16 % MAX_NDIM;
    DLTensor *const t = &f->tensor;
    switch (kind % 16) {
    case 0:
    case 1: f->shape[dim] = read_number(r); break;
    case 2:
    case 3: f->strides[dim] = read_number(r); break;
    case 4: t->ndim = (int32_t)read_number(r); break;
    case 5: t->strides = NULL; break;
    case 6: t->data = dim % 2 == 0 ? NULL : (void *)(uintptr_t)read_bits(r); break;
    case 7: t->byte_offset = (uint64_t)read_number(r); break;
    case 8: /* near another array, or on it */
        t->data = (void *)((uintptr_t)other->tensor.data + (uintptr_t)read_number(r));
        break;
    case 9:
        t->dtype = (DLDataType){.code = read_byte(r), .bits = read_byte(r), .lanes = read_byte(r)};
        break;
    case 10: { /* a type that some argument takes */
        static const DLDataType types[] = {{kDLBfloat, 16, 1}, {kDLFloat, 16, 1},
                                           {kDLFloat, 32, 1},  {kDLInt, 32, 1},
                                           {kDLInt, 64, 1},    {kDLUInt, 8, 1},
                                           {kDLInt, 8, 1},     {kDLFloat8_e4m3fn, 8, 1}};
        t->dtype = types[dim];
        break;
    }
    case 11:
        t->device.device_id = (int32_t)read_number(r);
        memcpy(&t->device.device_type, &(int32_t){read_byte(r) % 18}, sizeof(int32_t));
        break;
    case 12: t->shape = dim == 0 ? NULL : t->shape; break;
    case 13: /* the other array's layout */
        memcpy(f->shape, other->shape, sizeof f->shape);
        memcpy(f->strides, other->strides, sizeof f->strides);
        t->ndim = other->tensor.ndim;
        break;
    case 14: /* one more dimension, such as the head axis of a cache */
        t->ndim += t->ndim < MAX_NDIM ? 1 : 0;
        break;
    default: /* swap two dimensions */
        t->ndim = t->ndim < 2 ? 2 : t->ndim;
        const int64_t size = f->shape[0];
        const int64_t stride = f->strides[0];
        f->shape[0] = f->shape[1];
        f->strides[0] = f->strides[1];
        f->shape[1] = size;
        f->strides[1] = stride;
    }
}

/* Takes back what a fault has done to the place and the extent of an array. */
static void
keep_memory(fuzzed *f, const fuzzed *before)
{
    memcpy(f->shape, before->shape, sizeof f->shape);
    memcpy(f->strides, before->strides, sizeof f->strides);
    f->tensor.data = before->tensor.data;
    f->tensor.byte_offset = before->tensor.byte_offset;
}

/* Whether a check reads an array's values on the CPU. */
static bool
is_read_by_check(int number, size_t offset)
{
    static const struct {
        int number;
        size_t offset;
    } reads[] = {{OP_reshape_and_cache, AT_FIELD(reshape, k_scale.tensor)},
                 {OP_reshape_and_cache, AT_FIELD(reshape, v_scale.tensor)},
                 {OP_mla_attention, AT_FIELD(mla, cache_seqlens)},
                 {OP_mla_attention, AT_FIELD(mla, cu_seqlens_q)},
                 {OP_varlen_attention, AT_FIELD(varlen, cu_seqlens_q)},
                 {OP_varlen_attention, AT_FIELD(varlen, cu_seqlens_k)},
                 {OP_paged_attention, AT_FIELD(paged, cache_seqlens)},
                 {OP_paged_attention, AT_FIELD(paged, cu_seqlens_q)},
                 {OP_paged_attention, AT_FIELD(paged, cache_leftpad)}};
    for (size_t i = 0; i < sizeof reads / sizeof reads[0]; i++) {
        if (reads[i].number == number && reads[i].offset == offset) {
            return true;
        }
    }
    return false;
}

static void
set_scalar(reader *r, int most, void *field)
{
    if (most == DOUBLE) {
        const double x = read_byte(r) % 2 == 0 ? (double)read_count(r, 3) : read_double(r);
        memcpy(field, &x, sizeof x);
    } else {
        const int32_t n = (int32_t)(most == ANY ? read_number(r) : read_count(r, most));
        memcpy(field, &n, sizeof n);
    }
}

/* Leaves out an array of the good call, or gives it in the place of another. */
static void
move_arrays(reader *r, int number, any_args *a)
{
    const bool is_moved = read_count(r, 4) == 0;
    if (number == OP_mla_attention && is_moved) {
        a->mla.slot_table = a->mla.block_table;
        a->mla.block_table = NULL;
    } else if (number == OP_varlen_attention && is_moved) {
        a->varlen.q_pe = NULL;
    } else if (number == OP_paged_attention) {
        a->paged.qv = read_count(r, 4) == 0 ? NULL : a->paged.qv;
        if (is_moved) {
            a->paged.slot_table = a->paged.block_table;
            a->paged.block_table = NULL;
        }
    } else if (number == OP_indexer_logits && is_moved) {
        a->logits.block_table = a->logits.starts;
    } else if (number == OP_lightning_indexer) {
        const uint64_t bits = read_bits(r);
        memcpy(&a->lightning.dtype, &bits, sizeof a->lightning.dtype);
        a->lightning.block_table = is_moved ? a->lightning.starts : NULL;
    }
}

/* Sets fields that are not arrays. Most stay as they are. */
static void
set_fields(reader *r, int number, any_args *a)
{
    for (int i = 0; i < NUM_SIZES; i++) {
        if (sizes[i].number == number && read_byte(r) % 4 == 0) {
            const int64_t n = read_number(r);
            memcpy((uint8_t *)a + sizes[i].offset, &n, sizeof n);
        }
    }
    for (int i = 0; i < NUM_SCALARS; i++) {
        if (scalars[i].number == number && read_byte(r) % 4 == 0) {
            set_scalar(r, scalars[i].most, (uint8_t *)a + scalars[i].offset);
        }
    }
}

static void
fuzz_operator(reader *r)
{
    static any_args goods[NUM_OPERATORS]; /* made once, and never freed */
    const int number = read_byte(r) % NUM_OPERATORS;
    const operator_case *const op = &operators[number];
    if (goods[number].struct_size == 0) {
        goods[number] = op->make();
    }
    any_args args = goods[number];
    fuzzed tensors[MAX_SLOTS];
    size_t offsets[MAX_SLOTS];
    const int count = find_arrays(&args, op->args_bytes, offsets);
    for (int i = 0; i < count; i++) {
        const DLTensor **at = array_at(&args, offsets[i]);
        copy_tensor(&tensors[i], *at);
        *at = &tensors[i].tensor;
    }
    const uint8_t flags = read_byte(r);
    for (int i = flags % 8; i > 0 && count > 0; i--) {
        const int which = read_byte(r) % count;
        const fuzzed before = tensors[which];
        add_fault(r, &tensors[which], &tensors[read_byte(r) % count]);
        if (is_read_by_check(number, offsets[which])) {
            keep_memory(&tensors[which], &before);
        }
        if (read_byte(r) % 32 == 0) {
            *array_at(&args, offsets[which]) = NULL;
        }
    }
    if (flags & 64) {
        set_fields(r, number, &args);
        move_arrays(r, number, &args);
    }
    const smla_backend *backend = NULL;
    smla_error e = {.status = SMLA_OK};
    memset(e.text, 0x55, sizeof e.text);
    const smla_status status = check_operator(number, &args, &backend, flags & 128 ? NULL : &e);
    if (!(flags & 128)) {
        require_sound(title_of(op), status, &e);
    }
    require(status != SMLA_OK || backend != NULL, "no backend", op->name);
}

/* ---- The rest ------------------------------------------------------------------------------ */

/* An args struct of any size, in memory of that size. */
static void
fuzz_struct_size(reader *r)
{
    any_args known;
    const size_t size = (size_t)read_byte(r) * 2;
    const size_t claimed = read_byte(r) < 250 ? size : (size_t)read_number(r);
    if (claimed > size && claimed <= 4096) {
        return; /* a wrong size that the library cannot notice */
    }
    uint8_t *bytes = calloc(1, size + sizeof claimed);
    if (bytes == NULL) {
        return;
    }
    for (size_t i = sizeof claimed; i < size && r->size > 0; i++) {
        bytes[i] = read_byte(r);
    }
    memcpy(bytes, &claimed, sizeof claimed);
    smla_error e = {.status = SMLA_OK};
    require_sound("an_op",
                  smla_read_args("an_op", &known, sizeof known, bytes, &e) == SMLA_OK ? SMLA_OK
                                                                                      : e.status,
                  &e);
    free(bytes);
}

static void
fuzz_workspace_size(reader *r)
{
    const smla_attention_workspace_args args = {
        .struct_size = sizeof args,
        .num_tokens = read_number(r),
        .num_heads = read_count(r, 130),
        .topk = read_number(r),
        .extra_topk = read_number(r),
        .num_splits = (int32_t)read_count(r, 66),
        .head_dim_v = read_count(r, 514),
        .device = {.device_type = (DLDeviceType)(1 + read_byte(r) / 250)}};
    int64_t bytes = 0;
    smla_error e;
    const smla_status status = smla_attention_workspace_size(&args, &bytes, &e);
    require_sound("attention_workspace_size", status, &e);
    require(status != SMLA_OK || bytes >= 0, "a negative workspace", "");
}

static void
fuzz_splits(reader *r)
{
    int32_t starts[MAX_REQS + 1];
    int32_t lens[MAX_REQS];
    int64_t ends[MAX_REQS];
    const int64_t num_reqs = read_byte(r) % (MAX_REQS + 1);
    read_starts(r, starts, num_reqs);
    const int64_t tokens = read_count(r, 60);
    smla_batch_split s;
    smla_error e;
    smla_status status = smla_split_decodes_and_prefills(starts, num_reqs, tokens, read_count(r, 5),
                                                         read_byte(r) & 1, &s, &e);
    require_sound("split_decodes_and_prefills", status, &e);
    if (status == SMLA_OK) {
        require(s.num_decodes + s.num_prefills == num_reqs, "requests lost", "");
        require(s.num_decode_tokens + s.num_prefill_tokens == tokens, "tokens lost", "");
        require(s.num_decode_tokens >= 0 && s.num_prefill_tokens >= 0, "negative tokens", "");
    }
    for (int64_t i = 0; i < num_reqs; i++) {
        lens[i] = (int32_t)read_count(r, 50);
    }
    int64_t count = 0;
    status = smla_reorder_batch(lens, num_reqs, read_count(r, 5), ends, &count, &s, &e);
    require_sound("reorder_batch", status, &e);
    require(status != SMLA_OK || 2 * count <= num_reqs, "too many swaps", "");
    const int64_t room = read_count(r, 200);
    status = smla_split_prefill_chunks(lens, num_reqs, room, ends, &count, &e);
    require_sound("split_prefill_chunks", status, &e);
    for (int64_t chunk = 0, req = 0; status == SMLA_OK && chunk < count; chunk++) {
        require(ends[chunk] > req && ends[chunk] <= num_reqs, "an empty chunk", "");
        int64_t used = 0;
        for (; req < ends[chunk]; req++) {
            used += lens[req];
        }
        require(used <= room, "a chunk that does not fit", "");
    }
}

static void
fuzz_builder(reader *r)
{
    fuzzed table;
    int64_t table_shape[] = {MAX_REQS, 9};
    int64_t table_strides[] = {9, 1};
    static int32_t table_data[MAX_REQS * 9];
    const DLTensor good = {.data = table_data,
                           .device = cpu,
                           .ndim = 2,
                           .dtype = int32,
                           .shape = table_shape,
                           .strides = table_strides};
    copy_tensor(&table, &good);
    const smla_builder_config config = {.struct_size = sizeof config,
                                        .num_heads = read_config_count(r, 128),
                                        .block_size = read_config_count(r, 32),
                                        .topk_tokens = read_config_count(r, 64),
                                        .max_num_seqs = read_config_count(r, MAX_REQS),
                                        .max_num_batched_tokens = read_config_count(r, 64),
                                        .max_model_len = read_config_count(r, 256),
                                        .decode_threshold = read_count(r, 6),
                                        .min_heads_for_bf16_prefill = read_count(r, 64),
                                        .prefill_workspace_tokens = read_config_count(r, 600),
                                        .kv_format = (int32_t)read_count(r, 3),
                                        .path = (int32_t)read_count(r, 5),
                                        .device = {.device_type =
                                                       (DLDeviceType)(1 + read_byte(r) / 250)}};
    smla_builder *builder = NULL;
    smla_error e;
    smla_status status = smla_builder_create(&config, &builder, &e);
    require_sound("MetadataBuilder", status, &e);
    if (status != SMLA_OK) {
        return;
    }
    for (int step = read_byte(r) % 3; step >= 0; step--) {
        int32_t starts[MAX_REQS + 1];
        int32_t lens[MAX_REQS];
        const int64_t num_reqs = read_byte(r) % (MAX_REQS + 1);
        read_starts(r, starts, num_reqs);
        for (int64_t i = 0; i < num_reqs; i++) {
            lens[i] = (int32_t)read_count(r, 250);
        }
        if (read_byte(r) % 4 == 0) {
            add_fault(r, &table, &table);
        }
        const smla_build_args args = {.struct_size = sizeof args,
                                      .query_start_loc_cpu = starts,
                                      .seq_lens_cpu = lens,
                                      .block_table = &table.tensor,
                                      .num_reqs = num_reqs,
                                      .num_actual_tokens = read_byte(r) < 200 ? starts[num_reqs]
                                                                              : read_count(r, 70)};
        const smla_metadata *m = NULL;
        status = smla_builder_build(builder, &args, &m, &e);
        /* Errors of the splitters begin with the names of the splitters. */
        require_sound(status == SMLA_OK || strncmp(e.text, "split_", 6) != 0
                          ? "MetadataBuilder.build"
                          : "split_",
                      status, &e);
        for (int64_t i = 0; status == SMLA_OK && i < m->num_chunks; i++) {
            require(m->chunks[i].tot_seqlen <= config.prefill_workspace_tokens ||
                        config.prefill_workspace_tokens == 0,
                    "a chunk that does not fit", "");
        }
    }
    smla_builder_destroy(builder);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    reader r = {.data = data, .size = size};
    switch (read_byte(&r) % 16) {
    case 0: fuzz_struct_size(&r); break;
    case 1: fuzz_workspace_size(&r); break;
    case 2:
    case 3: fuzz_splits(&r); break;
    case 4:
    case 5: fuzz_builder(&r); break;
    default: fuzz_operator(&r);
    }
    return 0;
}
