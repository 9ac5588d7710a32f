"""Native experts to 2-bit rows. docs/quantization.md is the definition, `reference` its plain float64 form."""

from moet.quantize.encode import encode_row
from moet.quantize.report import BIAS_LIMIT, MatrixReport, RowReport, check_bias

__all__ = ["BIAS_LIMIT", "MatrixReport", "RowReport", "check_bias", "encode_row"]
