// header.cpp: sparse_mla.h in C++17. Compiling it is the test:
//   c++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -Ibuild/include tests/c/header.cpp
#include <sparse_mla.h>

#include <type_traits>

static_assert(std::is_trivial<smla_sparse_attention_args>::value, "args are plain structs");
static_assert(sizeof(smla_error) == 512, "an error fits a stack");

int
main()
{
    smla_merge_attn_states_args args = {};
    args.struct_size = sizeof args;
    smla_error error;
    return smla_merge_attn_states(&args, &error) == SMLA_ERROR_VALUE ? 0 : 1;
}
