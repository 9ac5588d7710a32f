// The trellis search for AVX2 and FMA: 8 rows a vector.
#include "trellis.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define MOET_ISA trellis_avx2
#define MOET_LANES 8
#include "trellis_body.h"
#pragma GCC pop_options
#endif
