/* top_k_clusters.h: the launchers of top_k_sm90.cu and top_k_held_sm90.cu, for top_k.cu. */
#pragma once

#include "cuda/host/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SMLA_MAX_ROW_CTAS = 8 }; /* the largest cluster that every Hopper GPU can start */

/* Runs rows on clusters of 2, 4 or 8 CTAs. */
cudaError_t smla_cuda_launch_top_k_clusters(const smla_top_k_params *params, int ctas);

enum { SMLA_HELD_KEYS = 32 << 10 }; /* what the registers of one CTA hold */

/* Runs rows of at most SMLA_HELD_KEYS per CTA on clusters of 1, 2, 4 or 8 CTAs. */
cudaError_t smla_cuda_launch_top_k_held(const smla_top_k_params *params, int ctas);

#ifdef __cplusplus
}
#endif
