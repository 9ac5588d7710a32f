// The float64 encoder for AVX-512: 8 rows a vector.
#include "encode.h"
#include "float_tables.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw")
#define MOET_ISA avx512
#define MOET_LANES 8
#include "float_body.h"
#pragma GCC pop_options
#endif
