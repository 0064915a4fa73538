/* attention_fp8_asked_sm90.cu: attention_fp8_sm90.cu for prefills whose rows may be widened. Its
 * file describes the kernel. Here it ends at once, unless the widening pass has refused the rows
 * (wide_rows.h). So the device decides between this kernel and attention_wide_sm90.cu, which ends
 * at once where this one works.
 *
 * Roles        as attention_fp8_sm90.cu. A thread that ends waits for earlier grids first, so that
 *              no later grid overtakes them.
 * Roofline     Where rows are not refused, a start of the grid without work.
 */
#include "cuda/attention/sm90/sparse_fp8/fp8_kernel.cuh"
#include "cuda/attention/table/wide_rows.h"

typedef struct asked_launch {
    fp8_launch fp8;
    const smla_wide_header *header;
} asked_launch;

template <typename Shape>
__global__ void
__launch_bounds__(FP8_THREADS, 1) attend_if_refused(const __grid_constant__ asked_launch launch)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    ptx_wait_for_grids();
    if (*(const volatile uint32_t *)&launch.header->is_refused) {
        attend_as_role(launch.fp8, launch.fp8.base, (fp8_memory<Shape> *)memory);
    }
}

/* ---- Launchers ----------------------------------------------------------------------------- */

template <typename Shape>
static cudaError_t
launch_asked(const smla_attention_params *params, const smla_attention_start *start,
             const row_span spans[2])
{
    asked_launch launch = {};
    const int64_t num_ctas = make_fp8_launch<Shape>(params, start, spans, &launch.fp8);
    launch.header = start->wide;
    return smla_launch_large<attend_if_refused<Shape>>(launch, num_ctas, FP8_THREADS,
                                                       (int)sizeof(fp8_memory<Shape>),
                                                       params->call.stream);
}

/* Widens the rows, and attends to them or to the caches, as the device decides. Where arrays are
 * not aligned, or rows span more than 64 GiB, it attends to the caches. */
template <int ROW>
static cudaError_t
launch_widened(const smla_attention_params *params, const smla_attention_start *start)
{
    row_span spans[2];
    if (!find_spans(params, spans) || !is_query_aligned(params) || !is_out_aligned(params, 16)) {
        return ROW == SMLA_ROW_FP8_V4 ? smla_attend_sm90_v4_64(params, start)
                                      : smla_attend_sm90_fp8_64(params, start);
    }
    cudaError_t code = smla_widen_rows_sm90(params, start->wide);
    if (code == cudaSuccess) {
        code = smla_attend_sm90_wide_64(params, start);
    }
    if (code != cudaSuccess) {
        return code;
    }
    return params->results.max_logits == NULL
               ? launch_asked<fp8_shape<ROW, 64, false>>(params, start, spans)
               : launch_asked<fp8_shape<ROW, 64, true>>(params, start, spans);
}

cudaError_t
smla_attend_sm90_widened_64(const smla_attention_params *params, const smla_attention_start *start)
{
    return params->keys.lists[0].kv.format->number == SMLA_ROW_FP8_DS_MLA
               ? launch_widened<SMLA_ROW_FP8_DS_MLA>(params, start)
               : launch_widened<SMLA_ROW_FP8_V4>(params, start);
}
