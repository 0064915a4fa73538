/* varlen_mha.h: Hopper's kernel of varlen_attention, for those that choose between kernels. */
#pragma once

#include "core/attention/params_attention.h"
#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Starts mha_attention_sm90.cu. Returns SMLA_NO_KERNEL for calls that are not its own, and says in
 * `obstacle` what of the call it cannot take; otherwise obstacle becomes NULL. */
cudaError_t smla_cuda_launch_varlen_mha(const smla_attention_params *params,
                                        const smla_cuda_device *device, const char **obstacle);

#ifdef __cplusplus
}
#endif
