// The float64 encoder for AVX2: 4 rows a vector.
#include "encode.h"
#include "float_tables.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define MOET_ISA avx2
#define MOET_LANES 4
#include "float_body.h"
#pragma GCC pop_options
#endif
