"""What ``fold_weight_padding`` does to one argument or output of a GEMM: one file each."""
