/* top_k_base.c: the keys of a row on any machine. */
#define SMLA_SELECT smla_select_base

#include "cpu/topk/top_k_kernel.h"
