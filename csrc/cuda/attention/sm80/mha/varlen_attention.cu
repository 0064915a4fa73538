/* varlen_attention.cu: the instances of varlen_kernel.cuh for ragged keys. */
#include "cuda/attention/sm80/mha/varlen_kernel.cuh"

cudaError_t
smla_attend_sm80_mha(const smla_attention_params *params, const smla_attention_start *start)
{
    (void)start;
    return launch_kernel<varlen_args>(*params);
}
