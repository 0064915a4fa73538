/* test_cuda_reads.c: which arrays csrc/cuda/host/checked.c copies to the host for the checks of the
 * CPU, and which of their bytes, on the fake runtime of runtime.h.
 */
#include "fake_cuda/backend.h"

/* Arrays of any strides are copied with their values, and no more bytes than they span. */
static void
test_read_arrays(void)
{
    enum { R = 3, W = 4 };
    static const int32_t strides[] = {1, 2, -1, -3, 0};
    const smla_stream stream = {.device_id = 0, .handle = &streams[0]};
    begin();
    cpu_status = SMLA_OK;
    for (int s = 0; s < 5; s++) {
        /* Arrays are exactly the bytes that they span, so that ASan sees a read of one more. */
        const int64_t stride = strides[s];
        const int64_t reach = stride < 0 ? -stride : stride;
        const int64_t count = (R - 1) * reach + 1;
        array *const lens = ARRAY(int32, count);
        array *const starts = ARRAY(int32, count);
        int32_t *const at_lens = (int32_t *)lens->tensor.data + (stride < 0 ? count - 1 : 0);
        int32_t *const at_starts = (int32_t *)starts->tensor.data + (stride < 0 ? count - 1 : 0);
        const int64_t row = s == 3 ? -W * 2 : W * 2;
        const int64_t table_count = (R - 1) * W * 2 + (W - 1) * (stride == 0 ? 0 : 2) + 1;
        array *const table = ARRAY(int32, table_count);
        int32_t *const at_table = (int32_t *)table->tensor.data + (row < 0 ? (R - 1) * W * 2 : 0);
        int64_t sum = 0;
        for (int i = 0; i < R; i++) {
            for (int k = 0; k < W; k++) {
                at_table[i * row + k * (stride == 0 ? 0 : 2)] = 1 + i * 5 + (stride == 0 ? 0 : k);
            }
            at_lens[i * stride] = 7 + i;
            at_starts[i * stride] = 3 + i;
        }
        for (int i = 0; i < R; i++) {
            for (int k = 0; k < W; k++) {
                sum += at_table[i * row + k * (stride == 0 ? 0 : 2)];
            }
            sum += 1000 * (int64_t)at_lens[i * stride];
            sum += 1000000 * (int64_t)at_starts[i * stride];
            sum += 1000000000 * (int64_t)at_lens[i * stride];
            sum += 7 * (int64_t)at_starts[i * stride];
        }
        const smla_gather_params params = {.call = {.stream = stream},
                                           .num_reqs = R,
                                           .num_blocks = W,
                                           .block_table = at_table,
                                           .block_table_stride_req = row,
                                           .block_table_stride_block = stride == 0 ? 0 : 2,
                                           .seq_lens = at_lens,
                                           .seq_lens_stride = stride,
                                           .workspace_starts = at_starts,
                                           .workspace_starts_stride = stride,
                                           .seq_starts = at_lens,
                                           .seq_starts_stride = stride,
                                           .gather_lens = at_starts,
                                           .gather_lens_stride = stride};
        EXPECT_OK(smla_cuda_check_gather(&params, &error));
        EXPECT_EQ(seen_sum, sum);
        EXPECT(seen_gather.block_table != params.block_table);
        EXPECT(seen_gather.seq_lens != params.seq_lens);
        EXPECT(seen_gather.workspace_starts != params.workspace_starts);
        EXPECT(seen_gather.seq_starts != params.seq_starts);
        EXPECT(seen_gather.gather_lens != params.gather_lens);
        EXPECT_EQ((int64_t)asked_bytes, 4 * count);
    }
    /* Arrays that are absent are not copied. */
    const smla_gather_params none = {.call = {.stream = stream}, .num_blocks = W};
    seen_gather.seq_starts = device_zeros;
    seen_gather.block_table = device_zeros;
    EXPECT_OK(smla_cuda_check_gather(&none, &error));
    EXPECT(seen_gather.seq_starts == NULL && seen_gather.block_table == NULL);
    static const int32_t one_id[1] = {5};
    const smla_gather_params no_columns = {.call = {.stream = stream},
                                           .num_reqs = 1,
                                           .block_table = one_id};
    forget_calls();
    EXPECT_OK(smla_cuda_check_gather(&no_columns, &error));
    EXPECT_CALLS("");
    EXPECT(seen_gather.block_table == one_id);

    const smla_convert_params no_prefills = {.call = {.stream = stream},
                                             .num_tokens = 1,
                                             .req_id_per_token = one_id,
                                             .prefill_workspace_starts = one_id,
                                             .prefill_workspace_starts_stride = 1};
    EXPECT_OK(smla_cuda_check_convert(&no_prefills, &error));
    EXPECT_CALLS("copy to host cudaStreamSynchronize "); /* only the ids are copied */

    const smla_convert_params convert = {.call = {.stream = stream},
                                         .num_tokens = 2,
                                         .num_prefills = 3,
                                         .req_id_per_token = (const int32_t[]){1, 0, 2},
                                         .req_id_stride = 2,
                                         .prefill_request_ids = (const int32_t[]){4, 5},
                                         .prefill_request_ids_stride = 1,
                                         .prefill_workspace_starts =
                                             (const int32_t[]){6, 0, 0, 7, 0, 0, 8},
                                         .prefill_workspace_starts_stride = 3};
    EXPECT_OK(smla_cuda_check_convert(&convert, &error));
    EXPECT_EQ(seen_sum, 21009003);
    EXPECT(seen_convert.req_id_per_token != convert.req_id_per_token);
    EXPECT(seen_convert.prefill_request_ids != convert.prefill_request_ids);
    EXPECT(seen_convert.prefill_workspace_starts != convert.prefill_workspace_starts);
    for (int is_wide = 0; is_wide < 2; is_wide++) {
        static const int64_t wide[] = {1, 99, INT64_C(1) << 40};
        static const int32_t narrow[] = {1, 99, 3};
        const smla_cache_write_params write = {.call = {.stream = stream},
                                               .num_tokens = 2,
                                               .slot_mapping =
                                                   is_wide ? (const void *)wide : narrow,
                                               .slot_stride = 2,
                                               .slots_are_int64 = is_wide};
        EXPECT_OK(smla_cuda_check_cache_write(&write, &error));
        EXPECT_EQ(seen_sum, is_wide ? (INT64_C(1) << 40) + 1 : 4);
        EXPECT_EQ((int)asked_bytes, is_wide ? 24 : 12);
        EXPECT(seen_write.slot_mapping != write.slot_mapping);
        const smla_rope rope = {.positions = write.slot_mapping,
                                .positions_stride = 2,
                                .positions_are_int64 = is_wide,
                                .max_pos = 7};
        const smla_call call = {.op = "op", .stream = stream};
        EXPECT_OK(smla_cuda_check_positions(&call, &rope, 2, &error));
        EXPECT_EQ(seen_sum, is_wide ? (INT64_C(1) << 40) + 1 : 4);
        EXPECT_EQ((int)asked_bytes, is_wide ? 24 : 12);
        EXPECT(seen_rope.positions != rope.positions && seen_rope.max_pos == 7);
    }
    EXPECT_EQ(num_live, 0);
}

/* The arrays of index lists, of which a checked call reads only some. */
static void
test_read_batches(void)
{
    const smla_stream stream = {.device_id = 0, .handle = &streams[0]};
    const smla_query_batch batch = {.num_reqs = 2,
                                    .query_start_loc = (const int32_t[]){1, 99, 3, 99, 5},
                                    .query_start_loc_stride = 2};
    begin();
    cpu_status = SMLA_OK;
    const smla_topk_slots_params topk = {.call = {.op = op, .stream = stream},
                                         .num_tokens = 2,
                                         .req_id_per_token = (const int32_t[]){4, 99, 3},
                                         .req_id_stride = 2,
                                         .is_valid = (const uint8_t[]){7, 255, 255, 1},
                                         .is_valid_stride = 3};
    EXPECT_OK(smla_cuda_check_global_topk(&topk, &error));
    EXPECT_EQ(seen_sum, 8007);
    EXPECT_EQ((int)asked_bytes, 4);
    EXPECT(seen_global_topk.req_id_per_token != topk.req_id_per_token);
    EXPECT(seen_global_topk.is_valid != topk.is_valid);
    smla_combine_topk_swa_params combine = {.call = {.stream = stream},
                                            .batch = batch,
                                            .gather_lens = (const int32_t[]){5, 8},
                                            .gather_lens_stride = 1};
    combine.batch.seq_lens = (const int32_t[]){6, 99, 99, 7};
    combine.batch.seq_lens_stride = 3;
    EXPECT_OK(smla_cuda_check_combine_topk_swa(&combine, &error));
    EXPECT_EQ(seen_sum, 131309);
    EXPECT_EQ((int)asked_bytes, 8);
    EXPECT(seen_combine.batch.query_start_loc != batch.query_start_loc);
    EXPECT(seen_combine.batch.seq_lens != combine.batch.seq_lens);
    EXPECT(seen_combine.gather_lens != combine.gather_lens);
    const smla_mixed_indices_params mixed = {.call = {.stream = stream},
                                             .num_tokens = 3,
                                             .num_decode_tokens = 2,
                                             .batch = batch,
                                             .req_id_per_token = (const int32_t[]){1, 2, 3},
                                             .req_id_stride = 1,
                                             .is_valid = (const uint8_t[]){1, 1},
                                             .is_valid_stride = 1};
    EXPECT_OK(smla_cuda_check_mixed_indices(&mixed, &error));
    EXPECT_EQ(seen_sum, 2006009);
    EXPECT_EQ((int)asked_bytes, 2);
    EXPECT(seen_mixed.batch.query_start_loc != batch.query_start_loc);
    EXPECT(seen_mixed.req_id_per_token != mixed.req_id_per_token);
    EXPECT(seen_mixed.is_valid != mixed.is_valid);
    EXPECT_EQ(num_live, 0);
}

int
main(void)
{
    RUN(test_read_arrays);
    RUN(test_read_batches);
    return report("test_cuda_reads");
}
