/* paged_attention.cu: the instances of varlen_kernel.cuh for keys in pages. */
#include "cuda/attention/sm80/mha/varlen_kernel.cuh"

cudaError_t
smla_attend_sm80_paged(const smla_attention_params *params, const smla_attention_start *start)
{
    (void)start;
    return launch_kernel<paged_args>(*params);
}
