"""The CUDA target for sm_80 and later: mma.sync, ldmatrix and cp.async, one kernel a file."""
