"""CUDA on the host: in the place of CUDA's driver and runtime, of NCCL and of cuBLAS, libraries that need no GPU.

torch's own build for CUDA runs over them unchanged, with its allocator, streams, graphs and process groups, and so does
what fastpipe has for GPUs. Streams are threads, so what a program does not order comes in any order, and what waits
really waits; memory that nobody has written is full of NaN; a stream that waits holds up all others of its queue; a
graph's branches run side by side; messages of NCCL are sent when they have been received. What torch's kernels would
compute, those of the host do, in the stream.

So it shows whether a program asks the right things of CUDA in the right order, and says nothing of speed. What a driver
makes of two processes on one device, and what NCCL does between machines, it does not know. It needs g++, a toolkit's
headers and a torch for CUDA::

    python -m tests.host_cuda python -m pytest tests/gpu

HOST_CUDA_DEVICES says how many devices there are (one); with HOST_CUDA_DAWDLES=1 queues pause at random.
"""
