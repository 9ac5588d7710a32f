"""Native experts to 2-bit rows. docs/quantization.md is the definition, `reference` its plain float64 form."""
