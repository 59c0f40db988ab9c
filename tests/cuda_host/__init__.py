"""Runs the CUDA sources of `kernels/` on the host, with real block and thread semantics.

`host.HostModule` compiles a source with g++ and launches its kernels; `memory` gives buffers with guard pages;
`fake_cupy` puts both behind the few CuPy calls that moeflow makes, so that the launch code is executed as well.
"""
